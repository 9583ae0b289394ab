"""What every slot holds of one prompt, by storage tier: columns of blocks, indexed by slot.

Nothing is looked up below the device before some worker has told of a block there. Spec 2.1, 3.1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dynamo._fast.radix import RadixTree
from dynamo._fast.scoring import Weights
from dynamo.router.caches.optimistic import OptimisticCache
from dynamo.router.cost import TierCounts, effective_blocks

__all__ = ["DISK", "EXTERNAL", "HOST", "CachedBlocks"]

HOST, DISK, EXTERNAL = 1, 2, 3
"""Tiers of the prefix index, beside 0, the device."""


class CachedBlocks:
    """``device`` is always there; ``host``, ``disk`` and ``shared`` are None while nothing can be.

    ``shares``: blocks on an external tier, whoever told of them, count for every slot, those beyond
    the device's. ``shared_ranges`` are the places of all of them in the prompt, ends exclusive.
    """

    def __init__(self, index: RadixTree | None, shares: bool = False) -> None:
        self._index = index
        self.shares = shares
        self.resize(16)

    def resize(self, width: int) -> None:
        """Columns of ``width`` places."""
        self._width = width
        self.device = array("I", bytes(4 * width))
        self.host: array[int] | None = None
        self.disk: array[int] | None = None
        self.shared: array[int] | None = None
        self.shared_ranges: list[tuple[int, int]] = []

    def look(
        self,
        hashes: array[int],
        optimistic: OptimisticCache | None,
        now_s: float,
        in_progress: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Fill the columns for the prompt of these block hashes.

        The predictions of ``optimistic`` at ``now_s``, and the blocks ``in_progress`` (pairs of
        slot and leading blocks), count as if they were on the device already.
        O(blocks held + slots).
        """
        index = self._index
        if index is None:
            return
        index.match_into(hashes, self.device)
        if optimistic is not None:
            optimistic.raise_into(hashes, self.device, now_s)
        for slot, depth in in_progress:
            self.device[slot] = max(self.device[slot], depth)
        tiers = index.tiers()
        if tiers:
            self._look_below(index, hashes, tiers)

    def of(self, slot: int) -> TierCounts:
        """What one slot holds."""
        return TierCounts(
            self.device[slot],
            0 if self.host is None else self.host[slot],
            0 if self.disk is None else self.disk[slot],
            0 if self.shared is None else self.shared[slot],
        )

    def effective(self, weights: Weights, slot: int) -> float:
        """Blocks that the slot need not compute, those on lower tiers by their weight. O(1)."""
        if self.host is None and self.disk is None:
            return self.device[slot]
        return effective_blocks(weights, self.of(slot))

    @property
    def shared_blocks(self) -> int:
        """Blocks of the prompt in the shared cache."""
        return sum(end - begin for begin, end in self.shared_ranges)

    def best_overlap(self, weights: Weights, slots: array[int]) -> float:
        """The most that one of the slots has of this. O(slots)."""
        return max((self.effective(weights, slot) for slot in slots), default=0.0)

    def copy(self) -> CachedBlocks:
        """As it is now."""
        made = CachedBlocks(None, self.shares)
        made.device = self.device[:]
        made.host = None if self.host is None else self.host[:]
        made.disk = None if self.disk is None else self.disk[:]
        made.shared = None if self.shared is None else self.shared[:]
        made.shared_ranges = self.shared_ranges
        return made

    def _look_below(self, index: RadixTree, hashes: array[int], tiers: int) -> None:
        reached = self.device
        if tiers >> HOST & 1:
            self.host = self.host or array("I", bytes(4 * self._width))
            index.extend_into(hashes, reached, self.host, HOST)
            reached = array("I", map(int.__add__, reached, self.host))
        if tiers >> DISK & 1:
            self.disk = self.disk or array("I", bytes(4 * self._width))
            index.extend_into(hashes, reached, self.disk, DISK)
        if tiers >> EXTERNAL & 1 and self.shares:
            self.shared_ranges = ranges = index.ranges(hashes, EXTERNAL)
            self.shared = array("I", [_beyond(depth, ranges) for depth in self.device])


def _beyond(depth: int, ranges: list[tuple[int, int]]) -> int:
    return sum(end - max(begin, depth) for begin, end in ranges if end > depth)
