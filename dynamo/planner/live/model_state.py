"""One model in the live loop: its services and pools, its policy, its changes in flight."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic
from dynamo.planner.connector import DRAINING, READY, STARTING, ScaledService
from dynamo.planner.live.decisions import DecisionRecord
from dynamo.planner.policies.base import Policy, ScalingDecision
from dynamo.planner.policies.load import LoadFallback
from dynamo.runtime.process.threads import in_daemon_thread
from dynamo.serve.graph.facts import DECODE, PREFILL

Pools = Mapping[str, Pool]
"""The pools of a model, by name."""
_Applied: TypeAlias = tuple[ScalingDecision, tuple[str, ...]]
"""A decision that was carried out, and the pools in which that failed."""
_PULLS = 100_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_DOUBLINGS = 10  # more would overflow in the end, and change nothing
_NUMBER = re.compile(r"\d+")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Actions that the planner has begun in a service.

    ``unseen`` workers are being added and not listed by the connector yet, ``removing`` ones are
    being removed, listed as draining or not.
    """

    unseen: int = 0
    removing: int = 0


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """The services that serve ``name``; ``prefill`` is None in aggregated serving."""

    name: str
    decode: ScaledService
    prefill: ScaledService | None = None

    @property
    def services(self) -> tuple[ScaledService, ...]:
        """The services, decode first."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    def service(self, pool: str) -> ScaledService | None:
        """Return the service of ``pool``."""
        return self.prefill if pool == PREFILL else self.decode

    def ready(self) -> frozenset[str]:
        """Return the workers that serve, by name."""
        return frozenset(
            w.name for service in self.services for w in service.workers if w.state == READY
        )


def models_of(services: Iterable[ScaledService], only: str | None) -> dict[str, ScaledModel]:
    """Return the models, ``only`` this one if given; those with a higher priority first.

    One service of a pool is scaled: the one with the highest priority, then the first by name.
    Prefill workers without a ``min`` of their own follow decode workers to zero.
    """
    pools: dict[str, dict[str, ScaledService]] = {}
    for service in sorted(services, key=lambda candidate: (-candidate.priority, candidate.name)):
        if only is None or service.model == only:
            pools.setdefault(service.model, {}).setdefault(service.pool, service)
    return {
        name: ScaledModel(name, by_pool[DECODE], _beside(by_pool[DECODE], by_pool.get(PREFILL)))
        for name, by_pool in pools.items()
        if DECODE in by_pool
    }


def _beside(decode: ScaledService, prefill: ScaledService | None) -> ScaledService | None:
    if prefill is None or prefill.minimum is not None or decode.minimum != 0:
        return prefill
    return replace(prefill, minimum=0)


def left_out(services: Iterable[ScaledService], models: Iterable[ScaledModel]) -> list[str]:
    """Return a sentence for each service of these models that :func:`models_of` left out."""
    scaled = {(model.name, s.pool): s.name for model in models for s in model.services}
    return [
        f"service {service.name} is not scaled: of the {service.pool} workers of model "
        f"{service.model}, only {name} is. Join both services, or give the one to be "
        "scaled a higher priority"
        for service in services
        if (name := scaled.get((service.model, service.pool))) not in (None, service.name)
    ]


def pool_of(service: ScaledService, minimum: int, in_flight: InFlight) -> Pool:
    """Return the pool of ``service``; actions ``in_flight`` count as if they were visible.

    It keeps ``minimum`` workers unless the graph says otherwise.
    """
    counts: Mapping[str, int] = {
        state: sum(worker.state == state for worker in service.workers)
        for state in (READY, STARTING, DRAINING)
    }
    # Removals that the connector does not list as draining yet are still listed as ready.
    leaving = max(0, in_flight.removing - counts[DRAINING])
    from_ready = min(leaving, counts[READY])
    return Pool(
        ready=counts[READY] - from_ready,
        starting=counts[STARTING] + in_flight.unseen,
        draining=counts[DRAINING] + from_ready,
        asleep=sum(worker.wakeable for worker in service.workers),
        gpus_per_worker=service.gpus_per_worker,
        minimum=minimum if service.minimum is None else service.minimum,
        maximum=service.maximum,
    )


class ModelState:
    """``model`` as the connector lists it now, and the ``pulls`` since the last decision.

    ``wanted`` has the workers of the pools that the last decision of its policy enlarges once other
    models have given up GPUs. Before ``retry_s`` nothing is started: the last change has failed.
    ``reported`` has why changes of pools wait, as it was logged last.

    A policy with a ``fallback`` needs the traffic. While a frontend's metrics are missing, the
    fallback decides instead: the traffic would look as if it had ended.
    """

    def __init__(
        self, model: ScaledModel, policy: Policy, fallback: LoadFallback | None = None
    ) -> None:
        self.model = model
        self.policy = policy
        self._fallback = fallback
        self.pulls: deque[Pull] = deque(maxlen=_PULLS)
        self.pending: list[DecisionRecord] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.wanted: dict[str, int] = {}
        self.reported: Mapping[str, str] = {}
        self.retry_s = -math.inf
        self._failures = 0
        self.is_new = True
        self.begins = True
        self.due_s = math.inf
        self._ready = frozenset[str]()
        self._deciding = asyncio.Lock()
        self._rehearsing = asyncio.Lock()
        self._applied: list[_Applied] = []

    @property
    def is_busy(self) -> bool:
        """Whether workers are being added or removed."""
        return bool(self.tasks)

    @property
    def is_paused(self) -> bool:
        """Whether pulls and decisions wait for a change."""
        return self.policy.blocking and self.is_busy

    def begin(self, now_s: float) -> None:
        """Begin an interval."""
        self.is_new = self.begins = False
        self.due_s = now_s + self.policy.interval_s
        self.pulls.clear()
        self._ready = self.model.ready()

    def apply(self, task: asyncio.Task[None]) -> None:
        """Count ``task`` as a change; after that of a blocking policy, an interval begins."""
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def changed(self, failed: bool, adds: bool, now_s: float) -> None:
        """Count the outcome of a change: each failure in a row doubles the pause behind it.

        Only a worker that has started ends a row: a removal says nothing about the next start.
        """
        if failed:
            self._failures += 1
            pause_s = _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, _DOUBLINGS)
            self.retry_s = now_s + min(_LONGEST_PAUSE_S, pause_s)
        elif adds:
            self._failures, self.retry_s = 0, -math.inf

    def report_postponed(self, postponed: Mapping[str, str]) -> None:
        """Log why changes of pools wait, once for each reason whatever numbers it names."""
        reasons = {pool: _NUMBER.sub("", reason) for pool, reason in postponed.items()}
        for pool, reason in postponed.items():
            if self.reported.get(pool) != reasons[pool]:
                log.info("model %s: %s workers are not changed: %s", self.model.name, pool, reason)
        self.reported = reasons

    def observation(
        self, now_s: float, pools: Pools, traffic: Traffic, max_gpus: float
    ) -> Observation:
        """Return what the policy sees at the end of the interval."""
        return Observation(
            now_s=now_s,
            interval_s=self.policy.interval_s,
            decode=pools[DECODE],
            prefill=pools.get(PREFILL),
            traffic=traffic,
            pulls=tuple(self.pulls),
            max_gpus=max_gpus,
            changed=self.model.ready() != self._ready,
        )

    async def decide(self, seen: Observation) -> ScalingDecision:
        """Return what the policy decides.

        It decides in a thread: a forecast takes up to a second.
        """
        async with self._deciding:
            applied, self._applied = self._applied, []
            return await in_daemon_thread(self._ask, self.policy, self._fallback, applied, seen)

    async def rehearse(self, seen: Observation) -> ScalingDecision:
        """Return what the policy would decide, without effect on it."""
        async with self._rehearsing:  # one thread, should the policy never answer
            async with self._deciding:
                policy, fallback = copy.deepcopy((self.policy, self._fallback))
                applied = list(self._applied)
            return await in_daemon_thread(self._ask, policy, fallback, applied, seen)

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Count ``decision`` as carried out, except in the pools ``failed``.

        The policy gets it with its next decision: it may be deciding now.
        """
        self._applied.append((decision, tuple(failed)))

    @staticmethod
    def _ask(
        policy: Policy,
        fallback: LoadFallback | None,
        applied: Sequence[_Applied],
        seen: Observation,
    ) -> ScalingDecision:
        for decision, failed in applied:
            # In the thread of the decision: two threads never call a policy at once.
            policy.applied(decision, failed)
        if fallback is not None and not seen.traffic.known:
            return fallback.decide(seen)
        if fallback is not None:
            fallback.known()
        return policy.decide(seen)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self.policy.blocking:
            self.begins = True
