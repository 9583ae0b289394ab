"""What a replay reports: cost, attainment, latencies, actions, and the course over time.

The score of a policy: 0 is as good as the best fixed deployment, 1 as good as the oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

from dynamo.simulation.cluster import ReplayCluster
from dynamo.simulation.request import RequestState
from dynamo.simulation.scaling import ReplayPlanner
from dynamo.simulation.service_model import ReplaySetup

LEAST_ATTAINMENT = 0.9
"""Below this attainment there is no score: saving GPUs by missing the targets is easy."""
_LEAST_SAVING = 0.02


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
        found = asdict(self)
        del found["samples"], found["minutes"]
        return found


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
    known = [share for share in minutes if share is not None]
    ttfts = sorted(request.ttft_s for request in served)
    itls = sorted(request.itl_s for request in served if request.osl > 1)
    return ReplayResult(
        policy=name,
        gpu_hours=sum(pool.gpu_s for pool in cluster.pools.values()) / 3600,
        attainment=sum(_attained(r, cluster.setup) for r in served) / total if total else 1.0,
        ttft_p50_ms=_percentile_ms(ttfts, 0.5),
        ttft_p99_ms=_percentile_ms(ttfts, 0.99),
        itl_p99_ms=_percentile_ms(itls, 0.99),
        worst_minute=min(known, default=None),
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
    if not ordered:
        return None
    return 1000 * ordered[max(0, ceil(share * len(ordered)) - 1)]
