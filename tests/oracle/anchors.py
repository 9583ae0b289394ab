"""Numbers by slot that grow with time, the plain way."""

from __future__ import annotations

from array import array

__all__ = ["OracleAnchors"]


class OracleAnchors:
    """As :class:`dynamo._fast.anchors.Anchors`, in a dict."""

    def __init__(self) -> None:
        self._anchors: dict[int, tuple[float, float, float, float]] = {}

    def set(self, slot: int, base: float, rate: float, since: float, limit: float) -> None:
        """Replace a slot's."""
        self._anchors[slot] = base, rate, since, limit

    def value(self, slot: int, now: float) -> float:
        """What it is at ``now``."""
        base, rate, since, limit = self._anchors.get(slot, (0.0, 0.0, 0.0, 0.0))
        return min(base + rate * max(now - since, 0.0), limit)

    def subtract_done(self, column: array[int], now: float) -> None:
        """Subtract whole parts."""
        for slot in range(len(column)):
            column[slot] -= int(self.value(slot, now))
