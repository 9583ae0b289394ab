from typing import final

from typing_extensions import Buffer

__all__ = ["PrefillProgress"]

@final
class PrefillProgress:
    """``base + rate * (now - since)`` of each slot, at most ``limit``. 32 bytes a slot.

    The tokens that a running prefill has probably computed by now.
    """

    def __init__(self) -> None: ...
    def set(self, slot: int, base: float, rate: float, since: float, limit: float) -> None:
        """Replace a slot's progress.

        Raises IndexError beyond slot 65,535, ValueError for a negative argument or NaN.
        """
    def value(self, slot: int, now: float) -> float:
        """Return the slot's progress at ``now``; 0 for a slot that was never set. O(1)."""
    def subtract_done(self, column: Buffer, now: float) -> None:
        """Subtract the whole part of each slot's progress from a column of i64. O(slots)."""
