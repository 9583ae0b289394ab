"""Does a series grow? Theil-Sen's slope with Sen's confidence interval, over medians of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import NamedTuple

__all__ = ["Trend", "trend"]

BLOCKS = 40
"""Neighbouring samples depend on each other, so the medians of this many blocks are compared."""

FEWEST_BLOCKS = 8
Z = 2.576
"""99 % of a normal distribution."""


class Trend(NamedTuple):
    """A slope an hour with its 99 % interval, and what it means.

    ``level`` is the median, ``late_slope`` with its interval that of the second half. ``verdict``
    is ``flat`` (0 is in the interval, or the change is within the tolerance), ``settles`` (it grew,
    but not in the second half, whose interval has 0 and not the slope of the whole), ``grows``,
    ``falls``, or ``short`` (too few samples).
    """

    samples: int
    level: float
    slope: float
    low: float
    high: float
    late_slope: float
    late_low: float
    late_high: float
    verdict: str


def trend(points: Sequence[tuple[float, float]], warm_up_s: float, tolerance: float = 0.0) -> Trend:
    """Judge ``points`` (seconds, value), without the first ``warm_up_s``.

    Growth of less than ``tolerance`` (in units of the value) over the whole time counts as none.
    """
    begin = points[0][0] + warm_up_s if points else 0.0
    kept = [point for point in points if point[0] >= begin]
    if len(kept) < FEWEST_BLOCKS:
        level = median(value for _, value in kept) if kept else 0.0
        return Trend(len(kept), level, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "short")
    whole = _sen(_blocks(kept))
    half = kept[len(kept) // 2 :]
    late = _sen(_blocks(half)) if len(half) >= FEWEST_BLOCKS else whole
    span_h = (kept[-1][0] - kept[0][0]) / 3600
    verdict = "flat"
    if whole[1] > 0 and whole[0] * span_h > tolerance:
        verdict = "settles" if late[1] <= 0 and late[2] < whole[0] else "grows"
    elif whole[2] < 0 and -whole[0] * span_h > tolerance:
        verdict = "falls"
    return Trend(len(kept), median(value for _, value in kept), *whole, *late, verdict)


def _blocks(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The medians of at most BLOCKS runs of neighbours, with times in hours."""
    count = min(BLOCKS, len(points))
    edges = [len(points) * number // count for number in range(count + 1)]
    return [
        (
            median(at_s for at_s, _ in points[begin:end]) / 3600,
            median(value for _, value in points[begin:end]),
        )
        for begin, end in pairwise(edges)
    ]


def _sen(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The median of all pairs' slopes, and its interval by the variance of Kendall's S."""
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
    )
    count = len(points)
    spread = Z * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, int((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, int((len(slopes) + spread) / 2) + 1)
    return median(slopes), slopes[low], slopes[high]
