"""The planner of a replay: metric pulls, decisions and their execution, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.planner.connector import READY
from dynamo.planner.observation import Observation, Pull
from dynamo.planner.policies.base import DECODE, PREFILL, Policy, ScalingDecision
from dynamo.planner.replay.clock import VirtualClock
from dynamo.planner.replay.cluster import ReplayCluster
from dynamo.planner.replay.counters import TrafficCounters

__all__ = ["ReplayPlanner"]

_ROUNDING = 1e-9


class ReplayPlanner:
    """Runs one policy as the live loop does.

    ``actions`` counts pools changed by decisions, ``workers_changed`` the workers added and
    removed, ``reversals`` the changes of a pool in the other direction than its last one.
    """

    def __init__(self, clock: VirtualClock, cluster: ReplayCluster, policy: Policy) -> None:
        self.actions = self.workers_changed = self.reversals = 0
        self._clock, self._cluster, self._policy = clock, cluster, policy
        self._interval = 0
        self._outstanding = 0
        self._directions: dict[str, int] = {}
        self._pulls: list[Pull] = []
        self._before = TrafficCounters()
        self._began_s = 0.0
        self._ready: frozenset[tuple[str, int]] = frozenset()
        clock.at(0.0, self._begin)

    def _begin(self) -> None:
        """Begin an interval: the first pull is now, the decision at its end."""
        self._interval += 1
        self._pulls = []
        self._before = self._cluster.counters.copy()
        self._began_s = self._clock.now_s
        self._ready = self._ready_workers()
        self._clock.at(self._began_s + self._policy.interval_s, self._decide, self._interval)
        self._pull(self._interval)

    def _resume(self, interval: int) -> None:
        if interval == self._interval and not self._outstanding:
            self._begin()

    def _pull(self, interval: int) -> None:
        if interval != self._interval:
            return
        self._pulls.append(self._cluster.pull())
        due_s = self._clock.now_s + self._cluster.setup.pull_s
        if due_s < self._began_s + self._policy.interval_s - _ROUNDING:
            self._clock.at(due_s, self._pull, interval)

    def _decide(self, interval: int) -> None:
        decision = self._policy.decide(self._observe())
        failed = self._execute(decision)
        self._policy.applied(decision, failed)
        if not (self._policy.blocking and self._outstanding):
            self._begin()

    def _observe(self) -> Observation:
        cluster, duration_s = self._cluster, self._clock.now_s - self._began_s
        prefill = cluster.pools.get(PREFILL)
        return Observation(
            now_s=self._clock.now_s,
            interval_s=self._policy.interval_s,
            decode=cluster.pools[DECODE].view(),
            prefill=prefill.view() if prefill else None,
            traffic=cluster.counters.since(self._before, duration_s),
            pulls=tuple(self._pulls),
            max_gpus=cluster.setup.max_gpus,
            changed=self._ready_workers() != self._ready,
        )

    def _execute(self, decision: ScalingDecision) -> set[str]:
        """Start the changes; return the pools for which the box has not enough GPUs."""
        failed = set()
        for made in decision.pools:
            pool = self._cluster.pools[made.pool]
            change = made.wanted - pool.wanted
            if not change:
                continue
            if change > 0 and not self._within_budget(made.pool, made.wanted, decision):
                failed.add(made.pool)
                continue
            self._count(made.pool, change)
            step = pool.add if change > 0 else pool.remove
            for _ in range(abs(change)):
                self._outstanding += 1
                step(self._done())
        return failed

    def _within_budget(self, name: str, wanted: int, decision: ScalingDecision) -> bool:
        pools = self._cluster.pools
        after = {made.pool: made.wanted for made in decision.pools}
        workers = {pool: after.get(pool, pools[pool].wanted) for pool in pools} | {name: wanted}
        gpus = sum(count * pools[pool].gpus_per_worker for pool, count in workers.items())
        return gpus <= self._cluster.setup.max_gpus + _ROUNDING

    def _count(self, pool: str, change: int) -> None:
        direction = 1 if change > 0 else -1
        self.actions += 1
        self.workers_changed += abs(change)
        self.reversals += self._directions.get(pool, direction) != direction
        self._directions[pool] = direction

    def _done(self) -> Callable[[], None]:
        """Return what a worker calls, once, when its change is complete."""

        def complete() -> None:
            self._outstanding -= 1
            if self._policy.blocking and not self._outstanding:
                self._clock.at(self._clock.now_s, self._resume, self._interval)

        return complete

    def _ready_workers(self) -> frozenset[tuple[str, int]]:
        return frozenset(
            (name, worker.number)
            for name, pool in self._cluster.pools.items()
            for worker in pool.workers
            if worker.state == READY
        )
