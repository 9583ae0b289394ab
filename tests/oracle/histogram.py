"""The reference implementation of ``dynamo._fast.histogram``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["Histogram"]


class Histogram:
    """As the compiled one."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
