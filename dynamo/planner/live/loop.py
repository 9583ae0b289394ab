"""The live loop: pulls metrics, asks policies, changes workers, and reports to observers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynamo.config.planner import PlannerSettings
from dynamo.errors import DynamoError
from dynamo.operations.steps.limits import ActionLimits
from dynamo.planner.capacity.observation import Observation, Pull
from dynamo.planner.capacity.season import SeasonStore
from dynamo.planner.connector import Connector, ScaledService
from dynamo.planner.live.actions import WorkerAction, WorkerActions
from dynamo.planner.live.decisions import DecisionRecord, PoolChange
from dynamo.planner.live.gpu_sharing import GpuSharing, cold_decision, is_cold, is_on_demand
from dynamo.planner.live.model_state import ModelState, Pools, ScaledModel, left_out, models_of
from dynamo.planner.live.sources import LiveSources
from dynamo.planner.policies.base import Policy, ScalingDecision, TargetedPolicy
from dynamo.planner.policies.guarded import GuardedScalingPolicy
from dynamo.planner.policies.load import LoadFallback
from dynamo.runtime.process.tasks import Tasks

_EARLY = 0.5  # of a pulling interval: a decision is made at the pull that is nearest to its time
log = logging.getLogger(__name__)


class LoopObserver:
    """Receives what the loop sees and does; a subclass has the methods that it needs."""

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """The workers were counted: with every pull, and also while they change."""

    def waits(self, model: str, reason: str) -> None:
        """Requests of a model without a worker wait for the ``reason``, or "": none do."""

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        """Metrics were pulled."""

    def decided(self, record: DecisionRecord, seen: Observation, decision: ScalingDecision) -> None:
        """A policy decided."""

    def finished(self, record: DecisionRecord) -> None:
        """The changes of a decision are carried out, or there were none."""

    def acted(self, action: WorkerAction) -> None:
        """A worker was added or removed, or could not be."""

    def forgotten(self, model: str) -> None:
        """The graph no longer has the model."""


@dataclass(slots=True)
class _Outcome:
    """Why changes of a decision were not tried, and why others ``failed``, by pool."""

    postponed: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class ScalingLoop:
    """Runs one policy per model until :meth:`stop`.

    A blocking policy's model is left alone while its workers change. ``make_policy(prefill)``
    makes the policy of a model that appears. ``clock`` is that of ``sources``.
    """

    def __init__(
        self,
        connector: Connector,
        sources: LiveSources,
        settings: PlannerSettings,
        make_policy: Callable[[bool], Policy],
        observers: Sequence[LoopObserver] = (),
        clock: Callable[[], float] = time.monotonic,
        sharing: GpuSharing | None = None,
        seasons: SeasonStore | None = None,
    ) -> None:
        self._connector = connector
        self._sources = sources
        self._settings = settings
        self._make_policy = make_policy
        self._observers = tuple(observers)
        self._clock = clock
        self._sharing = sharing
        self._seasons = seasons
        self._woken = asyncio.Event()
        self._actions = WorkerActions(
            connector,
            ActionLimits.of_planner(settings),
            settings.least_workers,
            self._acted,
        )
        self._models: dict[str, ModelState] = {}
        self._tasks = Tasks("planner")
        self._stopped = asyncio.Event()
        self._problem = ""
        self._paused = False
        self._repairing = False
        self._minima: Mapping[str, int | None] = {}
        self._listed: Mapping[str, ScaledService] = {}

    async def run(self) -> None:
        """Pull and decide until :meth:`stop`."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not self._stopped.is_set():
            self._woken.clear()  # before: what happens during a tick causes another one
            await self._tick()
            now_s = loop.time()
            if now_s >= due_s:  # not after a wake-up: the next pull is when it was
                # Pulls that took too long are left out, not made up for.
                due_s = max(due_s + self._settings.metric_pulling_interval_s, now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._woken.wait()

    def wake(self) -> None:
        """Look at the models now: requests wait for a first worker."""
        self._woken.set()

    @property
    def services(self) -> Mapping[str, ScaledService]:
        """The services by name, as they were listed last, with the minima of an operator."""
        return {
            name: replace(service, minimum=self._minima.get(name, service.minimum))
            for name, service in self._listed.items()
        }

    @property
    def paused(self) -> bool:
        """Whether the loop only observes."""
        return self._paused

    def pause(self) -> None:
        """Observe only, until :meth:`resume`; changes in flight go on. Idempotent."""
        if not self._paused:
            log.info("paused: no worker is added or removed until the planner is resumed")
        self._paused = True

    def resume(self) -> None:
        """End the pause: each model begins an interval. Idempotent."""
        if self._paused:
            log.info("resumed")
            self._begin_intervals()
        self._paused = False
        self.wake()

    @contextlib.contextmanager
    def repairing(self) -> Iterator[None]:
        """Change nothing for the block, but announce the models: a repair may take a minute."""
        self._repairing = True
        try:
            yield
        finally:
            self._repairing = False
            self._begin_intervals()
            self.wake()

    def configure(self, settings: PlannerSettings) -> None:
        """Go on with the budgets and targets of ``settings``; what was learned stays."""
        self._settings = settings
        self._actions.configure(ActionLimits.of_planner(settings), settings.least_workers)
        for state in self._models.values():
            if isinstance(state.policy, TargetedPolicy):
                state.policy.aim(settings.ttft_ms, settings.itl_ms)

    def set_minima(self, minima: Mapping[str, int | None]) -> None:
        """Let services keep these workers instead of what the graph says."""
        self._minima = minima

    def models(self) -> list[str]:
        """Return the names of the models that are scaled."""
        return list(self._models)

    def on_demand(self) -> list[str]:
        """Return those of them whose workers start with the first request."""
        return [
            state.model.name
            for state in self._models.values()
            if is_on_demand(self._pools(state.model))
        ]

    async def stop(self, timeout_s: float) -> None:
        """Decide nothing more: cancel starts, and let removals finish.

        Removals that last longer than ``timeout_s`` are cancelled. Starts are taken back in a
        cluster; on one machine a worker starts on, and the next planner keeps it.
        """
        self._stopped.set()
        self._woken.set()
        self._actions.cancel_adds()
        running = [task for state in self._models.values() for task in state.tasks]
        if running:
            log.info("finishing %d changes, at most %g s", len(running), timeout_s)
            await asyncio.wait(running, timeout=timeout_s)
        await self._tasks.close()

    def abort(self) -> None:
        """Cancel all changes in flight; their rest is done at the next start."""
        for state in self._models.values():
            for task in state.tasks:
                task.cancel()

    async def explain(self) -> list[tuple[ModelState, DecisionRecord]]:
        """Return each model, and what its policy would decide now."""
        await self._sources.read_frontends()
        models = []
        for state in list(self._models.values()):
            seen = self._observe(state, ends=False)
            pools = self._pools(state.model)
            if self._sharing is not None and is_cold(pools):
                decision = cold_decision(pools, self._sharing.waits_for(state.model, pools))
            else:
                decision = await state.rehearse(seen)
            models.append((state, self._record(state, decision, seen)))
        return models

    async def _tick(self) -> None:
        if not await self._refresh():
            return
        self._sources.follow(state.model for state in self._models.values())
        for state in self._models.values():
            self._counted(state.model)
        active = [state for state in self._models.values() if not state.is_paused]
        if any(state.is_new for state in active):
            await self._sources.read_frontends()
        for state in active:
            self._pull(state)
        if self._sharing is not None:
            # First: a blocking policy is not asked while the sharing changes its workers.
            await self._share(self._sharing)
            active = [state for state in active if not state.is_paused]
        if self._paused or self._repairing:
            return
        soon_s = self._clock() + _EARLY * self._settings.metric_pulling_interval_s
        due = [state for state in active if state.due_s <= soon_s and not self._is_cold(state)]
        if due:
            await self._sources.read_frontends()
        for state in due:
            # A model may have lost its last worker to another one during the reads.
            if not self._stopped.is_set() and not self._is_cold(state):
                await self._decide(state)

    async def _share(self, sharing: GpuSharing) -> None:
        """Carry out what the sharing of GPUs changes, beside the policies."""
        states = self._models.values()
        await sharing.update(
            {state.model.name: (state, self._pools(state.model)) for state in states},
            self._actions.starting,
        )
        for state in states:
            reason = sharing.waits_for(state.model, self._pools(state.model))
            for observer in self._observers:
                observer.waits(state.model.name, reason)
        if self._stopped.is_set() or self._paused or self._repairing:
            return
        for state in self._models.values():
            decision = sharing.decision(state)
            if decision.pools and not state.is_busy and not state.is_new:
                seen = self._observe(state, ends=False)
                state.wanted = {}
                self._execute(state, decision, seen, self._record(state, decision, seen, "sharing"))
            for change in decision.pools if state.is_busy else ():
                service = state.model.service(change.pool)
                if service is not None and not change.wanted:
                    self._actions.give_up(service.name, change.rule)

    def _begin_intervals(self) -> None:
        for state in self._models.values():
            state.is_new = state.begins = True

    def _is_cold(self, state: ModelState) -> bool:
        return self._sharing is not None and is_cold(self._pools(state.model))

    def _pull(self, state: ModelState) -> None:
        name, now_s = state.model.name, self._clock()
        if state.is_new:
            self._sources.traffic(name, now_s, ends=True)
        if state.begins:
            state.begin(now_s)
        pull = self._sources.pull(state.model, now_s)
        state.pulls.append(pull)
        for observer in self._observers:
            observer.pulled(name, pull, self._pools(state.model))

    async def _refresh(self) -> bool:
        """Ask the connector for the services; return whether they are known."""
        services = await self._services()
        if services is not None:
            models = models_of(services.values(), self._settings.served_model_name)
            if models.keys() - self._models.keys():
                for problem in left_out(services.values(), models.values()):
                    log.warning("%s", problem)
            self._update_models(models)
        return services is not None

    async def _services(self) -> Mapping[str, ScaledService] | None:
        try:
            services = await self._connector.services()
        except DynamoError as error:
            if error.message != self._problem:  # once per outage
                log.warning("the services are unknown: %s; nothing is changed", error.message)
            self._problem = error.message
            return None
        self._problem = ""
        self._listed = services
        return self.services

    def _update_models(self, models: Mapping[str, ScaledModel]) -> None:
        for name in self._models.keys() - models.keys():
            if not self._models[name].is_busy:
                log.info("model %s has no services any more", name)
                del self._models[name]
                for observer in self._observers:
                    observer.forgotten(name)
        for name, model in models.items():
            state = self._models.get(name)
            if state is None or (state.model.prefill is None) != (model.prefill is None):
                policy = GuardedScalingPolicy.make(
                    self._make_policy, model.prefill is not None, self._settings
                )
                log.info(
                    "model %s: policy %s decides every %g s on %s",
                    *(name, policy.name, policy.interval_s),
                    " and ".join(service.name for service in model.services),
                )
                self._models[name] = ModelState(model, policy, self._fallback())
            else:
                state.model = model

    def _fallback(self) -> LoadFallback | None:
        """Return what decides while the traffic is unknown, for the modes that need it."""
        if self._settings.mode == "load":
            return None
        # As long as the traffic of a silent frontend is waited for, see LiveSources.
        return LoadFallback(self._settings, 2 * self._settings.adjustment_interval_s)

    def _counted(self, model: ScaledModel) -> None:
        for observer in self._observers:
            observer.counted(model.name, self._clock(), self._pools(model))

    def _acted(self, action: WorkerAction) -> None:
        if self._sharing is not None:
            self._sharing.acted(action)
        for observer in self._observers:
            observer.acted(action)

    def _pools(self, model: ScaledModel) -> Pools:
        return {service.pool: self._actions.pool(service) for service in model.services}

    def _observe(self, state: ModelState, *, ends: bool) -> Observation:
        now_s = self._clock()
        others = [
            service
            for other in self._models.values()
            if other is not state
            for service in other.model.services
        ]
        pools = self._pools(state.model)
        # Without sharing a model may have what the others leave, their changes in flight included.
        max_gpus = self._settings.max_gpu_budget - self._actions.gpus(others)
        if self._sharing is not None:
            pools = self._sharing.seen(pools)
            max_gpus = self._sharing.max_gpus(state.model.name)
        name = state.model.name
        traffic = self._sources.traffic(name, now_s, ends=ends)
        seen = state.observation(now_s, pools, traffic, max_gpus)
        if self._seasons is None:
            return seen
        if ends:
            self._seasons.add(name, traffic)
        return replace(seen, usual=self._seasons.usual(name))

    async def _decide(self, state: ModelState) -> None:
        seen = self._observe(state, ends=True)
        try:
            decision = await state.decide(seen)
            record = self._record(state, decision, seen)
        except Exception:  # a mistake here must not stop the planner
            log.exception("model %s: no decision; nothing is changed", state.model.name)
            state.begin(seen.now_s)
            return
        state.begin(seen.now_s)
        if self._stopped.is_set() or self._paused:  # in the meantime
            state.applied(decision, [pool.pool for pool in decision.pools])
            return
        state.wanted = {}
        self._execute(state, decision, seen, record)

    def _execute(
        self,
        state: ModelState,
        decision: ScalingDecision,
        seen: Observation,
        record: DecisionRecord,
    ) -> None:
        """Log and report a decision; begin its changes."""
        if self._settings.no_operation:
            record = record.observed()
        # A change that still waits is decided again in each interval, but logged once.
        waits = bool(state.reported) and all(
            self._postponement(state, change) for change in record.pools if change.delta
        )
        log.log(logging.DEBUG if waits else logging.INFO, "%s", record.text())
        for observer in self._observers:
            observer.decided(record, seen, decision)
        if record.changes and not self._settings.no_operation:
            state.apply(self._tasks.spawn(self._apply(state, decision, record), name="scale"))
        else:
            state.reported = {}
            state.applied(decision, [pool.pool for pool in decision.pools if record.changes])
            for observer in self._observers:
                observer.finished(record)

    def _record(
        self, state: ModelState, decision: ScalingDecision, seen: Observation, mode: str = ""
    ) -> DecisionRecord:
        name, mode = state.model.name, mode or state.policy.name
        return DecisionRecord.of(decision, seen, at_s=time.time(), model=name, mode=mode)

    async def _apply(
        self, state: ModelState, decision: ScalingDecision, record: DecisionRecord
    ) -> None:
        state.pending.append(record)
        started_s = self._clock()
        outcome = _Outcome()
        try:
            await self._carry_out(state, record, outcome)
            await self._refresh()
        finally:
            state.report_postponed(outcome.postponed)
            errors = {**outcome.postponed, **outcome.failed}
            state.pending.remove(record)
            state.applied(decision, errors.keys())
            # A change that was only postponed neither ends a row of failures nor begins one.
            if outcome.failed or not outcome.postponed:
                adds = any(pool.delta > 0 for pool in record.pools)
                state.changed(bool(outcome.failed), adds, self._clock())
            after = {name: pool.workers for name, pool in self._pools(state.model).items()}
            for observer in self._observers:
                observer.finished(record.finished(after, self._clock() - started_s, errors))
            if self._sharing is not None:
                self.wake()  # another model may wait for the GPUs that are free now

    async def _carry_out(
        self, state: ModelState, record: DecisionRecord, outcome: _Outcome
    ) -> None:
        """Start all changes at once; with a blocking policy after its removals, which free GPUs."""
        changes = list(record.pools)
        if state.policy.blocking:
            for change in changes:
                if change.delta < 0:
                    await self._change(state, change, outcome)
            changes = [change for change in changes if change.delta > 0]
        async with asyncio.TaskGroup() as group:
            for change in changes:
                group.create_task(self._change(state, change, outcome))

    async def _change(self, state: ModelState, change: PoolChange, outcome: _Outcome) -> None:
        service, delta = state.model.service(change.pool), change.delta
        if service is None or not delta:
            return
        problem = self._postponement(state, change)
        if not problem and self._waits_for_gpus(service, delta):
            problem = "it waits for GPUs of other models"
            # Only this: what it adds now must not be added again when it is lost, by a person
            # or because it cannot start.
            state.wanted[change.pool] = change.wanted
        if problem:
            outcome.postponed[change.pool] = problem
        elif problem := await self._actions.begin(service, delta):
            gave_up = self._actions.gave_up(service.name)
            (outcome.postponed if gave_up else outcome.failed)[change.pool] = problem

    def _postponement(self, state: ModelState, change: PoolChange) -> str:
        """Return why a change cannot begin now, whatever GPUs are free, else ""."""
        service = state.model.service(change.pool)
        if service is None:
            return ""
        problem = service.held or self._actions.conflict(service.name, change.delta)
        pause_s = state.retry_s - self._clock()
        if not problem and change.delta > 0 and pause_s > 0:
            return f"the last change has failed; the next one may begin in {pause_s:.0f} s"
        return problem

    def _waits_for_gpus(self, service: ScaledService, delta: int) -> bool:
        """Whether other models are to give up GPUs first; the sharing adds the workers then."""
        if self._sharing is None or delta < 0:
            return False
        in_use = self._actions.gpus(
            other for state in self._models.values() for other in state.model.services
        )
        needed = delta * self._actions.pool(service).gpus_per_worker
        return not self._sharing.has_room(service, delta, in_use, needed)
