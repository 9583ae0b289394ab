"""The planner in virtual time, and the report of a simulation: cost, attainment, latency, score."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from dynamo.bench.stats import percentile
from dynamo.planner.capacity.observation import Observation, Pull
from dynamo.planner.capacity.season import USUAL_S, Season
from dynamo.planner.connector import DRAINING, READY, STARTING
from dynamo.planner.policies.base import Policy, ScalingDecision
from dynamo.serve.graph.facts import DECODE, PREFILL
from dynamo_lab.simulation.cluster import ReplayCluster
from dynamo_lab.simulation.request import RequestState, TrafficCounters
from dynamo_lab.simulation.service_model import ReplaySetup, VirtualClock

LEAST_ATTAINMENT = 0.9
"""Below this attainment there is no score: saving GPUs by missing the targets is easy."""
_LEAST_SAVING = 0.02
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
        day_s = cluster.setup.day_s
        self._season = None if day_s is None else Season(day_s=day_s)
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
        self._before, self._before_s = replace(self._cluster.counters), self._clock.now_s
        pools = self._cluster.pools
        deltas = [
            (pool.pool, pool.wanted - pools[pool.pool].view().workers) for pool in decision.pools
        ]
        changes = _Changes(decision, deque(change for change in deltas if change[1]))
        if not self._policy.blocking:
            self._begin()
        self._advance(changes)

    def _observe(self) -> Observation:
        cluster, now_s = self._cluster, self._clock.now_s
        prefill = cluster.pools.get(PREFILL)
        traffic = cluster.counters.since(self._before, now_s - self._before_s)
        usual = None
        if self._season is not None:
            self._season.add(now_s, traffic.arrived, traffic.duration_s)
            usual = self._season.usual(now_s, USUAL_S)
        return Observation(
            now_s=now_s,
            interval_s=self._policy.interval_s,
            decode=cluster.pools[DECODE].view(),
            prefill=prefill.view() if prefill else None,
            traffic=traffic,
            pulls=tuple(self._pulls),
            max_gpus=cluster.setup.max_gpus,
            changed=self._ready_workers() != self._ready,
            usual=usual,
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


class Point(NamedTuple):
    """What a deployment costs and reaches."""

    gpu_hours: float
    attainment: float


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other one beats in both figures, the cheapest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.gpu_hours, -p.attainment)):
        if not best or point.attainment > best[-1].attainment:
            best.append(point)
    return best


def hours_at(points: Sequence[Point], attainment: float) -> float | None:
    """Return the GPU-hours on the line through ``points``, a frontier, at ``attainment``.

    Below the line that is its cheapest point; above it there is none.
    """
    before: Point | None = None
    for point in points:
        if point.attainment >= attainment:
            if before is None:
                return point.gpu_hours
            share = (attainment - before.attainment) / (point.attainment - before.attainment)
            return before.gpu_hours + share * (point.gpu_hours - before.gpu_hours)
        before = point
    return None


def score(reached: Point, fixed: Iterable[Point], oracle: Iterable[Point]) -> float | None:
    """Return (Gs(A) - G) / (Gs(A) - Go(A)) for ``reached``, which is (G, A).

    Gs are the GPU-hours of ``fixed`` deployments and Go those of the ``oracle``, to which the fixed
    schedules are open, too. Above what every fixed deployment reaches Gs is the largest one. None
    below ``LEAST_ATTAINMENT``, or where the oracle saves so little that the score would be noise.
    """
    if reached.attainment < LEAST_ATTAINMENT:
        return None
    statics = frontier(fixed)
    ideal = frontier([*oracle, *statics])
    at_most = min(reached.attainment, ideal[-1].attainment)
    best = hours_at(ideal, at_most)
    static = hours_at(statics, min(reached.attainment, statics[-1].attainment))
    if best is None or static is None or static - best < _LEAST_SAVING * static:
        return None
    return (static - reached.gpu_hours) / (static - best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The deployment at ``at_s``; ``arrived`` counts from the start."""

    at_s: float
    ready: int
    starting: int
    draining: int
    prefill_ready: int
    arrived: int
    queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One policy on one trace.

    ``attainment`` is the share of all requests with TTFT and mean ITL within the targets;
    ``worst_minute`` is the lowest attainment of the requests of one minute. ``minutes`` has the
    attainment of each minute by arrival, None without arrivals.
    """

    policy: str
    gpu_hours: float
    attainment: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    worst_minute: float | None
    actions: int
    workers_changed: int
    reversals: int
    requests: int
    failed: int
    duration_s: float
    samples: Sequence[Sample]
    minutes: Sequence[float | None]
    score: float | None = None

    def figures(self) -> dict[str, Any]:
        """Return the figures of ``--json``: everything but the course over time."""
        fields = asdict(self)
        del fields["samples"], fields["minutes"]
        return fields


def summarize(
    name: str,
    cluster: ReplayCluster,
    planner: ReplayPlanner,
    samples: Sequence[Sample],
    duration_s: float,
) -> ReplayResult:
    """Return the result at the end of a replay."""
    total = cluster.total
    served = [request for request in cluster.ended if not request.rejected]
    minutes = _minutes(cluster, cluster.setup)
    shares = [share for share in minutes if share is not None]
    ttfts = sorted(request.ttft_s for request in served)
    itls = sorted(request.itl_s for request in served if request.osl > 1)
    return ReplayResult(
        policy=name,
        gpu_hours=sum(pool.gpu_s for pool in cluster.pools.values()) / 3600,
        attainment=sum(_attained(r, cluster.setup) for r in served) / total if total else 1.0,
        ttft_p50_ms=_percentile_ms(ttfts, 0.5),
        ttft_p99_ms=_percentile_ms(ttfts, 0.99),
        itl_p99_ms=_percentile_ms(itls, 0.99),
        worst_minute=min(shares, default=None),
        actions=planner.actions,
        workers_changed=planner.workers_changed,
        reversals=planner.reversals,
        requests=total,
        failed=total - len(served),
        duration_s=duration_s,
        samples=samples,
        minutes=minutes,
    )


def _attained(request: RequestState, setup: ReplaySetup) -> bool:
    return request.ttft_s * 1000 <= setup.ttft_ms and request.itl_s * 1000 <= setup.itl_ms


def _minutes(cluster: ReplayCluster, setup: ReplaySetup) -> list[float | None]:
    arrived: dict[int, int] = {}
    attained: dict[int, int] = {}
    for request in cluster.ended:
        minute = int(request.arrived_s // 60)
        arrived[minute] = arrived.get(minute, 0) + 1
        if not request.rejected and _attained(request, setup):
            attained[minute] = attained.get(minute, 0) + 1
    return [
        attained.get(minute, 0) / arrived[minute] if minute in arrived else None
        for minute in range(max(arrived, default=-1) + 1)
    ]


def _percentile_ms(ordered: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile of sorted seconds, in milliseconds."""
    return 1000 * percentile(ordered, share) if ordered else None
