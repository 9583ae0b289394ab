"""The blocks of one prompt that every slot has cached, by storage tier: columns indexed by slot.

Lower tiers are searched only after a worker has reported a block there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dynamo._fast.radix import RadixTree
from dynamo._fast.scoring import Weights
from dynamo.router.caches.predicted import OptimisticCache
from dynamo.router.kv_mode.cost import TierCounts, effective_blocks

HOST, DISK, EXTERNAL = 1, 2, 3
"""Tiers of the prefix index, beside 0, the device."""


class CachedBlocks:
    """``device`` always exists; ``host``, ``disk`` and ``shared`` are None until a block is there.

    ``tiered``: one of ``host`` and ``disk`` exists. ``shares``: a block on an external tier counts
    for every slot that does not have it on the device, whichever worker reported it.
    ``shared_ranges`` are the positions of these blocks in the prompt, ends exclusive.
    """

    def __init__(
        self,
        index: RadixTree | None,
        shares: bool = False,
        optimistic: OptimisticCache | None = None,
    ) -> None:
        self._index = index
        self._optimistic = optimistic
        self.shares = shares
        self.resize(16)

    def resize(self, width: int) -> None:
        """Replace the columns by empty ones for ``width`` slots."""
        self._width = width
        self.device = array("I", bytes(4 * width))
        self.host: array[int] | None = None
        self.disk: array[int] | None = None
        self.shared: array[int] | None = None
        self.shared_ranges: list[tuple[int, int]] = []
        self.tiered = False

    def match(
        self,
        hashes: array[int],
        now_s: float,
        in_progress: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Fill the columns for the prompt of these block hashes. O(cached blocks + slots).

        Blocks predicted at ``now_s`` count as if they were on the device already, and so do those
        ``in_progress``: pairs of slot and leading blocks.
        """
        index = self._index
        if index is None:
            return
        index.match_into(hashes, self.device)
        if self._optimistic is not None:
            self._optimistic.raise_into(hashes, self.device, now_s)
        for slot, depth in in_progress:
            self.device[slot] = max(self.device[slot], depth)
        tiers = index.tiers()
        if tiers:
            self._match_lower(index, hashes, tiers)

    def of(self, slot: int) -> TierCounts:
        """The counts of one slot."""
        return TierCounts(
            self.device[slot],
            0 if self.host is None else self.host[slot],
            0 if self.disk is None else self.disk[slot],
            0 if self.shared is None else self.shared[slot],
        )

    def effective(self, weights: Weights, slot: int) -> float:
        """Blocks that the slot need not compute, those on lower tiers by their weight. O(1)."""
        if not self.tiered:
            return self.device[slot]
        return effective_blocks(weights, self.of(slot))

    def lower_columns(self) -> tuple[bytes, bytes, bytes]:
        """``host``, ``disk`` and ``shared`` as bytes, empty for those that do not exist."""
        host, disk, shared = (
            b"" if column is None else column.tobytes()
            for column in (self.host, self.disk, self.shared)
        )
        return host, disk, shared

    @property
    def shared_blocks(self) -> int:
        """Blocks of the prompt in the shared cache."""
        return sum(end - begin for begin, end in self.shared_ranges)

    def _match_lower(self, index: RadixTree, hashes: array[int], tiers: int) -> None:
        """Extend each slot's prefix tier by tier: a block counts only behind all before it."""
        reached = self.device
        if tiers >> HOST & 1:
            self.host = self.host or array("I", bytes(4 * self._width))
            index.extend_into(hashes, reached, self.host, HOST)
            self.tiered = True
            reached = array("I", map(int.__add__, reached, self.host))
        if tiers >> DISK & 1:
            self.disk = self.disk or array("I", bytes(4 * self._width))
            index.extend_into(hashes, reached, self.disk, DISK)
            self.tiered = True
        if tiers >> EXTERNAL & 1 and self.shares:
            self.shared_ranges = ranges = index.ranges(hashes, EXTERNAL)
            self.shared = array("I", [_beyond(depth, ranges) for depth in self.device])


def _beyond(depth: int, ranges: list[tuple[int, int]]) -> int:
    """Blocks of ``ranges`` from ``depth`` on."""
    return sum(end - max(begin, depth) for begin, end in ranges if end > depth)
