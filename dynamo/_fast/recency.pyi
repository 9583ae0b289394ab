from array import array
from typing import final

from typing_extensions import Buffer

__all__ = ["Recency"]

@final
class Recency:
    """Which blocks are believed on each slot, and which of them go first. Spec 2.5.

    Blocks are chained hashes (columns of u64), slots the dense ids of the prefix index, at most
    65,536. Touching a chain makes its first block the newest and its last the oldest of them, so
    a block never goes before what hangs under it. All slots share one line but those with a line of
    their own. Time never goes back. Memory: about 60 bytes a block.
    """

    def __init__(self) -> None: ...
    def open(self, slot: int, own_line: bool) -> None:
        """Make ``slot`` known; with ``own_line`` what is touched from now on lines up apart.

        Raises IndexError for a slot out of range.
        """
    def close(self, slot: int) -> int:
        """Forget ``slot`` and end its leases; how many blocks it had. O(blocks + leases)."""
    def is_open(self, slot: int) -> bool:
        """Whether ``slot`` is known. O(1)."""
    def has_own_line(self, slot: int) -> bool:
        """Whether the blocks of ``slot`` line up apart. O(1)."""
    def touch(self, slot: int, blocks: Buffer, now_s: float) -> None:
        """Make a chain of blocks the newest of ``slot``; pinned ones stay pinned. O(blocks).

        Raises ValueError for a slot that is not known.
        """
    def pin(self, slot: int, blocks: Buffer, now_s: float) -> int:
        """The same, and hold them until ``release`` of the lease that is returned. O(blocks)."""
    def release(self, lease: int, now_s: float) -> bool:
        """End a lease: blocks that no other holds are the newest now. O(blocks).

        False for one that has ended.
        """
    def age(self, before_s: float, most: int) -> list[tuple[int, array[int]]]:
        """Forget up to ``most`` blocks of the common line, last touched at ``before_s`` or earlier.

        (slot, blocks) in the order of forgetting. O(forgotten).
        """
    def evict(self, slot: int, most: int) -> list[tuple[int, array[int]]]:
        """Forget up to ``most`` of the oldest blocks of a slot with a line of its own.

        None of the pinned ones. Raises ValueError for another slot. O(forgotten).
        """
    def prune(self, most: int) -> list[tuple[int, array[int]]]:
        """Forget up to ``most`` of the oldest blocks of all lines; of one instant the common line
        first, then the lower slot. O(forgotten + instants × slots).
        """
    def blocks(self) -> int:
        """(block, slot) pairs held. O(1)."""
    def blocks_of(self, slot: int) -> int:
        """Blocks of one slot; 0 if it is not known. O(1)."""
    def leases(self) -> int:
        """Leases that have not ended. O(1)."""
    def memory_bytes(self) -> int:
        """Bytes allocated: whole tables, not only their used part. O(slots + leases)."""
    def _check(self) -> None:
        """Assert every invariant. O(blocks)."""
