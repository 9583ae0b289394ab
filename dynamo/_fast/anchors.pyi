from typing import final

from typing_extensions import Buffer

__all__ = ["Anchors"]

@final
class Anchors:
    """``base + rate * (now - since)`` of each slot, at most ``limit``. 32 bytes a slot.

    What a prefill that was begun has probably computed by now. Spec 3.6.
    """

    def __init__(self) -> None: ...
    def set(self, slot: int, base: float, rate: float, since: float, limit: float) -> None:
        """Replace a slot's. Raises IndexError beyond slot 65,535, ValueError for what is < 0."""
    def value(self, slot: int, now: float) -> float:
        """What it is at ``now``; 0 for a slot that was never set. O(1)."""
    def relieve(self, column: Buffer, now: float) -> None:
        """Subtract the whole part of each slot's value from a column of i64. O(slots)."""
