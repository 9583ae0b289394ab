"""The score of a policy: 0 is as good as the best fixed deployment, 1 as good as the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["LEAST_ATTAINMENT", "Point", "frontier", "hours_at", "score"]

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
