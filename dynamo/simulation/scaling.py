"""The planner of a replay: metric pulls, decisions and their execution, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo.planner.connector import DRAINING, READY, STARTING
from dynamo.planner.observation import Observation, Pull
from dynamo.planner.policies.base import DECODE, PREFILL, Policy, ScalingDecision
from dynamo.simulation.cluster import ReplayCluster
from dynamo.simulation.request import TrafficCounters
from dynamo.simulation.service_model import VirtualClock

_ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class _Changes:
    """The changes of one decision: pools still to be changed, workers that start or drain."""

    decision: ScalingDecision
    pools: deque[tuple[str, int]]
    outstanding: int = 0
    failed: set[str] = field(default_factory=set)


class ReplayPlanner:
    """Runs one policy as the live loop does.

    ``actions`` counts pools changed by decisions, ``workers_changed`` the workers added and
    removed, ``reversals`` the changes of a pool in the other direction than its last one.
    """

    def __init__(self, clock: VirtualClock, cluster: ReplayCluster, policy: Policy) -> None:
        self.actions = self.workers_changed = self.reversals = 0
        self._clock, self._cluster, self._policy = clock, cluster, policy
        self._directions: dict[str, int] = {}
        self._pulls: list[Pull] = []
        self._before, self._before_s = TrafficCounters(), 0.0
        self._due_s = 0.0
        self._ready: frozenset[tuple[str, int]] = frozenset()
        clock.at(0.0, self._begin)

    def _begin(self) -> None:
        """Begin an interval: the first pull is now, the decision at its end."""
        self._pulls = []
        self._ready = self._ready_workers()
        self._due_s = self._clock.now_s + self._policy.interval_s
        self._clock.at(self._due_s, self._decide)
        self._pull(self._due_s)

    def _pull(self, end_s: float) -> None:
        self._pulls.append(self._cluster.pull())
        due_s = self._clock.now_s + self._cluster.setup.pull_s
        if due_s < end_s - _ROUNDING:
            self._clock.at(due_s, self._pull, end_s)

    def _decide(self) -> None:
        decision = self._policy.decide(self._observe())
        # The traffic of the time in which a blocking policy waits belongs to its next interval.
        self._before, self._before_s = self._cluster.counters.copy(), self._clock.now_s
        pools = self._cluster.pools
        wanted = [
            (made.pool, made.wanted - pools[made.pool].view().workers) for made in decision.pools
        ]
        changes = _Changes(decision, deque(change for change in wanted if change[1]))
        if not self._policy.blocking:
            self._begin()
        self._advance(changes)

    def _observe(self) -> Observation:
        cluster, now_s = self._cluster, self._clock.now_s
        prefill = cluster.pools.get(PREFILL)
        return Observation(
            now_s=now_s,
            interval_s=self._policy.interval_s,
            decode=cluster.pools[DECODE].view(),
            prefill=prefill.view() if prefill else None,
            traffic=cluster.counters.since(self._before, now_s - self._before_s),
            pulls=tuple(self._pulls),
            max_gpus=cluster.setup.max_gpus,
            changed=self._ready_workers() != self._ready,
        )

    def _advance(self, changes: _Changes) -> None:
        """Change the next pool once the changes before it are complete, or all at once if the
        policy does not block."""
        while changes.pools and not (self._policy.blocking and changes.outstanding):
            self._change(changes, *changes.pools.popleft())
        if changes.outstanding or changes.pools:
            return
        self._policy.applied(changes.decision, changes.failed)
        if self._policy.blocking:
            self._begin()

    def _change(self, changes: _Changes, name: str, delta: int) -> None:
        pool = self._cluster.pools[name]
        # A pool changes in one direction at a time.
        if pool.count(DRAINING if delta > 0 else STARTING):
            changes.failed.add(name)
            return
        step = pool.add if delta > 0 else pool.remove
        begun = 0
        for _ in range(abs(delta)):
            if not step(self._completion(changes)):
                changes.failed.add(name)
                break
            begun += 1
        changes.outstanding += begun
        if begun:
            self._count(name, begun if delta > 0 else -begun)

    def _completion(self, changes: _Changes) -> Callable[[], None]:
        """Return what a worker calls once its change is complete, never before it is begun."""

        def complete() -> None:
            changes.outstanding -= 1
            if not changes.outstanding:
                self._advance(changes)

        return complete

    def _count(self, pool: str, change: int) -> None:
        direction = 1 if change > 0 else -1
        self.actions += 1
        self.workers_changed += abs(change)
        self.reversals += self._directions.get(pool, direction) != direction
        self._directions[pool] = direction

    def _ready_workers(self) -> frozenset[tuple[str, int]]:
        return frozenset(
            (name, worker.number)
            for name, pool in self._cluster.pools.items()
            for worker in pool.workers
            if worker.state == READY
        )
