"""Progress by slot, in plain Python."""

from __future__ import annotations

from array import array

__all__ = ["OraclePrefillProgress"]


class OraclePrefillProgress:
    """The reference implementation of :class:`dynamo._fast.prefill_progress.PrefillProgress`."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[float, float, float, float]] = {}

    def set(self, slot: int, base: float, rate: float, since: float, limit: float) -> None:
        """Replace a slot's progress."""
        self._slots[slot] = base, rate, since, limit

    def value(self, slot: int, now: float) -> float:
        """Return the slot's progress at ``now``."""
        base, rate, since, limit = self._slots.get(slot, (0.0, 0.0, 0.0, 0.0))
        return min(base + rate * max(now - since, 0.0), limit)

    def subtract_done(self, column: array[int], now: float) -> None:
        """Subtract the whole part of each slot's progress."""
        for slot in range(len(column)):
            column[slot] -= int(self.value(slot, now))
