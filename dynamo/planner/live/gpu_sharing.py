"""GPU sharing and scale to zero in the live loop: demand at frontends, and the changes that follow.

The records for frontends are under the planner's lease: they end with the deployment, and a
restarted planner writes them again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from dynamo.config.planner import PlannerSettings
from dynamo.errors import DynamoError, as_argument
from dynamo.observability.logs import counted
from dynamo.operations.steps.limits import ActionLimits
from dynamo.planner.capacity.observation import Pool
from dynamo.planner.connector import DRAINING, READY, STARTING, ScaledService
from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.model_state import ModelState, Pools, ScaledModel
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.planner.sharing import (
    GpuRoom,
    SharedModel,
    SharedService,
    Sharing,
    SharingLimits,
    share,
)
from dynamo.protocols import codec
from dynamo.protocols.control import ON_DEMAND, OnDemandModel
from dynamo.protocols.engine import HTTP_INPUT
from dynamo.protocols.kv import ON_DEMAND_STATE, OnDemandState
from dynamo.runtime import DistributedRuntime
from dynamo.serve.graph.facts import DECODE

_PATIENCE = 4
"""Minimum residencies after which a waiting model comes before those of higher priority."""
_COMPONENT = "planner"
_STALE_S = 3.5  # frontends report every second
_FRONTENDS = 64
_decode = codec.decoder(OnDemandState).decode
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StateReport:
    at_s: float
    state: OnDemandState


class OnDemandRegistry:
    """Announces the models of this planner; collects the reports of the frontends.

    ``on_waiting`` is called when the first request of a model waits, and when a model becomes idle
    while others wait. ``clock`` is the planner's.
    """

    def __init__(self, runtime: DistributedRuntime, clock: Callable[[], float]) -> None:
        self.on_waiting: Callable[[], object] | None = None
        self._runtime = runtime
        self._clock = clock
        self._announced: dict[str, OnDemandModel] = {}
        self._reports: dict[int, dict[str, _StateReport]] = {}

    async def start(self) -> None:
        """Receive the reports of present and future frontends."""
        namespace = self._runtime.settings.namespace
        await self._runtime.start()
        self._runtime.subscribe(
            namespace, _COMPONENT, ON_DEMAND_STATE, self._on_report, None, self._on_frontend
        )

    def demand(self, model: str) -> ModelDemand:
        """Return the requests of ``model`` in all frontends that report."""
        since_s = self._clock() - _STALE_S
        states = [
            reports[model].state
            for reports in self._reports.values()
            if model in reports and reports[model].at_s > since_s
        ]
        if not states:
            return ModelDemand()
        return ModelDemand(
            waiting=sum(state.waiting for state in states),
            oldest_s=max(state.oldest_s for state in states),
            idle_s=min(state.idle_s for state in states),
        )

    async def announce(self, records: Mapping[str, OnDemandModel]) -> None:
        """Write ``records``, by the names of their services, and delete all others."""
        for service in self._announced.keys() - records.keys():
            await self._runtime.discovery.delete(self._key(service))
            del self._announced[service]
        for service, record in records.items():
            if self._announced.get(service) == record:
                continue
            try:
                lease = await self._runtime.granted()
                value = msgspec.json.encode(record)
                await self._runtime.discovery.put(self._key(service), value, lease.id)
            except DynamoError as error:
                log.warning("%s: its requests cannot wait for a worker: %s", service, error)
                continue
            if service not in self._announced:
                log.info("model %s has workers on demand (service %s)", record.model, service)
            self._announced[service] = record

    def _key(self, service: str) -> str:
        settings = self._runtime.settings
        return f"{ON_DEMAND}{settings.namespace}/{service}/{self._runtime.instance_id:x}"

    def _on_report(self, publisher: int, sequence: int, payload: bytes) -> None:
        try:
            state = _decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid report of frontend %x: %s", publisher, error)
            return
        reports = self._reports.get(publisher)
        if reports is None:  # sent before its frontend left, or one frontend too many
            return
        if state.model not in {record.model for record in self._announced.values()}:
            reports.pop(state.model, None)
            return
        before = reports.get(state.model)
        reports[state.model] = _StateReport(self._clock(), state)
        first = state.waiting and (before is None or not before.state.waiting)
        # A model that has become idle may make room for another whose requests wait.
        idle = before is not None and state.idle_s and not before.state.idle_s
        if self.on_waiting is not None and (first or (idle and self._any_waits())):
            self.on_waiting()

    def _any_waits(self) -> bool:
        return any(
            report.state.waiting
            for reports in self._reports.values()
            for report in reports.values()
        )

    def _on_frontend(self, publisher: int, added: bool) -> None:
        if not added:
            self._reports.pop(publisher, None)
        elif len(self._reports) < _FRONTENDS:
            self._reports.setdefault(publisher, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """The requests of a model in all frontends, as the frontends report them.

    ``waiting`` have no worker, the oldest for ``oldest_s``. There were no requests for ``idle_s``;
    None if no frontend reports.
    """

    waiting: int = 0
    oldest_s: float = 0.0
    idle_s: float | None = None


def is_on_demand(pools: Mapping[str, Pool]) -> bool:
    """Whether the planner may remove the last worker that answers: prefill workers serve nothing
    without it."""
    return pools[DECODE].minimum == 0


def is_cold(pools: Mapping[str, Pool]) -> bool:
    """Whether the model has no worker, and gets its first one when requests wait."""
    return is_on_demand(pools) and not pools[DECODE].workers


def cold_decision(pools: Mapping[str, Pool], waits_for: str) -> ScalingDecision:
    """Return what happens to a cold model now: nothing, its policy is not asked.

    ``waits_for`` says why requests wait without a worker, if some do.
    """
    rule = waits_for or "no worker and no requests; the first request starts one"
    return ScalingDecision(
        pools=tuple(PoolDecision(pool=name, wanted=0, rule=rule) for name in pools)
    )


def shared_model(
    model: ScaledModel,
    pools: Mapping[str, Pool],
    demand: ModelDemand,
    serving_s: float,
    wanted: Mapping[str, int],
) -> SharedModel:
    """Return ``model`` as :func:`~dynamo.planner.sharing.share` sees it.

    ``wanted`` has the workers that its policy wants, by pool.
    """
    services = [
        _shared(service, pools[service.pool], wanted.get(service.pool))
        for service in model.services
    ]
    return SharedModel(
        name=model.name,
        services=services,
        priority=model.decode.priority,
        waiting=demand.waiting,
        oldest_s=demand.oldest_s,
        idle_s=demand.idle_s,
        serving_s=serving_s,
        idle_timeout_s=model.decode.idle_timeout_s,
        groups=model.decode.groups,
    )


def _shared(service: ScaledService, pool: Pool, wanted: int | None) -> SharedService:
    # Reversed: the newest worker is the next to be removed.
    serving = [worker.name for worker in service.workers if worker.state in (READY, STARTING)][::-1]
    leaving = [worker.name for worker in service.workers if worker.state == DRAINING]
    soon = max(0, pool.draining - len(leaving))  # removals that have just begun
    return SharedService(
        name=service.name,
        gpus_per_worker=pool.gpus_per_worker,
        ready=pool.ready,
        starting=pool.starting,
        draining=pool.draining,
        minimum=pool.minimum,
        wanted=wanted,
        assigned=service.assigned,
        serving=serving[soon:],
        leaving=[*leaving, *serving[:soon]],
        unplaced=max(0, pool.workers - len(serving[soon:])),
    )


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """The GPUs that all models together may hold, and what fits on them, where it is known."""

    gpus: float
    room: GpuRoom | None = None


@dataclass(slots=True)
class _Load:
    """The ``seconds`` that the last load took, and the Unix time ``since`` one is in progress."""

    seconds: float | None = None
    since: float | None = None


class GpuSharing:
    """Decides once per tick. ``capacity`` reads what there is now."""

    def __init__(
        self,
        settings: PlannerSettings,
        namespace: str,
        source: OnDemandRegistry,
        capacity: Callable[[], GpuCapacity],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._limits = ActionLimits.of_planner(settings)
        self._namespace = namespace
        self._source = source
        self._capacity = capacity
        self._clock = clock
        self._serving_since_s: dict[str, float] = {}
        self._newest: dict[str, tuple[frozenset[str], float]] = {}
        self._loads: dict[str, _Load] = {}
        self._plan = Sharing()
        self._reasons: dict[str, str] = {}

    def configure(self, settings: PlannerSettings) -> None:
        """Keep within the budget of ``settings`` from now on."""
        self._settings = settings
        self._limits = ActionLimits.of_planner(settings)

    def acted(self, action: WorkerAction) -> None:
        """Learn how long the last load of a model took."""
        if action.adds and not action.problem and action.pool == DECODE:
            self._load(action.model).seconds = action.seconds

    async def update(
        self,
        models: Mapping[str, tuple[ModelState, Pools]],
        adding: Callable[[str], int],
    ) -> None:
        """Announce the models on demand, and decide for all ``models``.

        ``adding`` returns how many workers of a service the planner is starting.
        """
        await self._source.announce(
            {
                state.model.decode.name: self._record(state.model, pools)
                for name, (state, pools) in models.items()
                if is_on_demand(pools) and not self._settings.no_operation
            }
        )
        now_s = self._clock()
        shared = [
            replace(
                shared_model(
                    state.model,
                    pools,
                    self._source.demand(name),
                    self._serving_s(name, pools[DECODE].ready, now_s),
                    state.wanted,
                ),
                newest_s=self._newest_s(state.model, now_s),
                abandoned=self._is_abandoned(state.model, pools, adding),
                pauses=now_s < state.retry_s or bool(state.model.decode.stopped),
                load_s=self._load(name).seconds,
            )
            for name, (state, pools) in models.items()
        ]
        capacity = self._capacity()  # once for all models: it reads the statefile
        self._plan = share(shared, self._sharing_limits(capacity))
        begun = {change.model for change in self._plan.changes}
        self._reasons = {
            model.name: self._reason(model, shared, capacity.gpus)
            for model in shared
            if model.is_cold and model.name not in begun
        }

    def decision(self, state: ModelState) -> ScalingDecision:
        """Return what to change in the services of a model now."""
        pools = {service.name: service.pool for service in state.model.services}
        return ScalingDecision(
            pools=tuple(
                PoolDecision(pool=pools[change.service], wanted=change.workers, rule=change.rule)
                for change in self._plan.changes
                if change.model == state.model.name
            )
        )

    def waits_for(self, model: ScaledModel, pools: Pools) -> str:
        """Return why requests of ``model`` wait while nothing is started for it, else ""."""
        if not is_cold(pools):
            return ""
        if model.decode.stopped:
            remedy = f"dynamo load {as_argument(model.name)}"
            return f"{model.decode.stopped} was stopped by a command; start it again with: {remedy}"
        waiting = self._source.demand(model.name).waiting
        reason = self._reasons.get(model.name)
        if not waiting or not reason:
            return ""
        wait = counted(waiting, "request waits", "requests wait")
        return f"{wait} for a first worker, {reason}"

    def _reason(self, model: SharedModel, others: Sequence[SharedModel], gpus: float) -> str:
        """Return what the first worker of a cold model waits for."""
        served = [other.name for other in others if model.excludes(other) and other.decode.held]
        if served:
            names = ", ".join(served)
            return f"and models of its group take turns: {names} is served until its turn is over"
        in_use = sum(service.held for other in others for service in other.services)
        bound = f"--max-gpu-budget ({self._limits.max_gpus:g})"
        if self._limits.fits(in_use, model.decode.gpus_per_worker) or gpus < self._limits.max_gpus:
            bound = "the GPUs there are" + (f" ({gpus:g})" if gpus != math.inf else "")
        return (
            f"which needs {counted(model.decode.gpus_per_worker, 'GPU')}, and other models hold "
            f"what {bound} leaves; unload one of them, or see dynamo planner set --help"
        )

    def max_gpus(self, model: str) -> float:
        """Return the GPUs that the policy of ``model`` may give it."""
        return self._plan.limits.get(model, 0.0)

    def has_room(self, service: ScaledService, delta: int, held: float, needed: float) -> bool:
        """Whether ``delta`` more workers of ``service`` fit now.

        They need ``needed`` GPUs of the budget, of which all models hold ``held``.
        """
        capacity = self._capacity()
        if not self._limits.fits(held, needed, capacity.gpus):
            return False
        room = capacity.room
        return room is None or not service.assigned or room.count(service.assigned, (), ()) >= delta

    def seen(self, pools: Pools) -> dict[str, Pool]:
        """Return ``pools`` as the policy sees them: on demand, it keeps the last worker."""
        if not is_on_demand(pools):
            return dict(pools)
        return {name: replace(pool, minimum=max(1, pool.minimum)) for name, pool in pools.items()}

    def _load(self, model: str) -> _Load:
        return self._loads.setdefault(model, _Load())

    def _record(self, model: ScaledModel, pools: Pools) -> OnDemandModel:
        """Return what frontends are told of ``model``: also since when its first worker starts."""
        load, pool = self._load(model.name), pools[DECODE]
        if pool.ready or not pool.starting:
            load.since = None
        elif load.since is None:
            load.since = round(time.time(), 1)
        seconds = None if load.seconds is None else max(0.1, round(load.seconds, 1))
        return OnDemandModel(
            self._namespace,
            model.name,
            model_input=HTTP_INPUT if model.decode.relayed else "Tokens",
            load_s=seconds,
            loading_since=load.since,
            waits_for=self.waits_for(model, pools),
            stopped=is_cold(pools) and bool(model.decode.stopped),
        )

    def _serving_s(self, model: str, ready: int, now_s: float) -> float:
        """Return how long ``model`` has had a worker that serves, 0 without one."""
        if not ready:
            self._serving_since_s.pop(model, None)
            return 0.0
        return now_s - self._serving_since_s.setdefault(model, now_s)

    def _newest_s(self, model: ScaledModel, now_s: float) -> float:
        """Return for how long no worker of ``model`` has begun to serve, and no operator has
        loaded it."""
        ready = frozenset(
            worker.name
            for service in model.services
            for worker in service.workers
            if worker.state == READY
        )
        before, since_s = self._newest.get(model.name, (frozenset(), now_s))
        # A new worker begins the time again, one that has exited does not.
        if not ready <= before:
            since_s = now_s
        self._newest[model.name] = ready, since_s
        asked_s = time.time() - max(service.asked_at for service in model.services)
        return min(now_s - since_s, max(0.0, asked_s))

    def _is_abandoned(self, model: ScaledModel, pools: Pools, adding: Callable[[str], int]) -> bool:
        """Whether nothing waits for the load of a model any more that the planner has begun."""
        demand, load = self._source.demand(model.name), self._load(model.name)
        if demand.waiting or demand.idle_s is None or load.since is None:
            return False
        counts = [(pools[service.pool], adding(service.name)) for service in model.services]
        if any(pool.ready or pool.draining or pool.starting != own for pool, own in counts):
            return False
        # An operator who loads it now waits for it, too.
        return all(service.asked_at < load.since for service in model.services)

    def _sharing_limits(self, capacity: GpuCapacity) -> SharingLimits:
        settings = self._settings
        return SharingLimits(
            gpus=min(self._limits.max_gpus, capacity.gpus),
            room=capacity.room,
            idle_timeout_s=settings.idle_timeout_s,
            residency_s=settings.min_residency_s,
            patience_s=_PATIENCE * settings.min_residency_s,
        )
