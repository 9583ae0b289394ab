from array import array
from typing import final

from typing_extensions import Buffer

__all__ = ["Recency"]

@final
class Recency:
    """The predicted blocks of each slot, in the order in which they are dropped.

    Blocks are chained hashes (columns of u64), slots the dense ids of the prefix index, at most
    65,536. Touching a chain makes its first block the newest and its last the oldest of them, so
    a block is never dropped before its extensions. All slots share one list but those with their
    own list. Time never goes back. Memory: about 60 bytes a block.
    """

    def __init__(self) -> None: ...
    def open(self, slot: int, own_list: bool) -> None:
        """Add ``slot``; with ``own_list`` blocks touched from now on are kept in its own list.

        Raises IndexError for a slot out of range.
        """
    def close(self, slot: int) -> int:
        """Remove ``slot`` and end its leases; return the number of its blocks.

        O(blocks + leases).
        """
    def is_open(self, slot: int) -> bool:
        """Return whether ``slot`` was added. O(1)."""
    def has_own_list(self, slot: int) -> bool:
        """Return whether ``slot`` has its own list. O(1)."""
    def touch(self, slot: int, blocks: Buffer, now_s: float) -> None:
        """Make a chain of blocks the newest of ``slot``; pinned ones stay pinned. O(blocks).

        Raises ValueError for an unknown slot.
        """
    def pin(self, slot: int, blocks: Buffer, now_s: float) -> int:
        """The same, and keep them until ``release`` of the returned lease. O(blocks)."""
    def release(self, lease: int, now_s: float) -> bool:
        """End a lease: blocks without another pin become the newest. O(blocks).

        Return False if it has ended already.
        """
    def age(self, before_s: float, limit: int) -> list[tuple[int, array[int]]]:
        """Drop up to ``limit`` blocks of the common list, last touched at ``before_s`` or earlier.

        Return (slot, blocks) in the order of dropping. O(dropped).
        """
    def evict(self, slot: int, limit: int) -> list[tuple[int, array[int]]]:
        """Drop up to ``limit`` of the oldest blocks of a slot that has its own list.

        Pinned blocks stay. Raises ValueError for another slot. O(dropped).
        """
    def prune(self, limit: int) -> list[tuple[int, array[int]]]:
        """Drop up to ``limit`` of the oldest blocks of all lists; of one instant those of the
        common list first, then of the lower slot. O(dropped + instants × slots).
        """
    def blocks(self) -> int:
        """Return the number of (block, slot) pairs. O(1)."""
    def blocks_of(self, slot: int) -> int:
        """Return the number of blocks of one slot; 0 if it is unknown. O(1)."""
    def leases(self) -> int:
        """Return the number of active leases. O(1)."""
    def memory_bytes(self) -> int:
        """Return the allocated bytes: whole tables, not only their used part.

        O(slots + leases).
        """
    def _check(self) -> None:
        """Assert every invariant. O(blocks)."""
