"""A prompt as a decision reads it: the hashes of its blocks, and the blocks that every slot has
cached.

Lower tiers are searched only after a worker has reported a block there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, seed_for, sequence_hashes
from dynamo._fast.radix import RadixTree
from dynamo._fast.scoring import Weights
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import MmObject, Routing
from dynamo.router.caches.predicted import OptimisticCache

_NO_HASHES = array("Q")
HOST, DISK, EXTERNAL = 1, 2, 3
"""Tiers of the prefix index, beside 0, the device."""


class HashedPrompt(msgspec.Struct, gc=False):
    """``blocks`` counts the full ones; ``hashes`` and ``chained`` are empty where not needed.

    As active load the prompt has ``shared`` blocks, chained hashes that other requests may have in
    common with it, or ``unique_blocks`` without a hash.

    ``*_s`` are the ends of the steps of the decision, in seconds. The last two fields are set
    after the search: ``best_overlap`` are the most effective blocks that one of the eligible slots
    has cached.
    """

    isl_tokens: int
    blocks: int
    hashes: array[int]
    chained: array[int]
    shared: array[int]
    unique_blocks: int = 0
    begun_s: float = 0.0
    hashed_s: float = 0.0
    chained_s: float = 0.0
    matched_s: float = 0.0
    best_overlap: float = 0.0


class Hasher(NamedTuple):
    """Computes only the hashes that index (``local``), predictions (``chain``) and load need."""

    block_size: int
    local: bool
    chain: bool
    load: bool
    clock: Callable[[], float]

    def hash(
        self, tokens: Tokens, routing: Routing | None, reuse: bool, begun_s: float
    ) -> HashedPrompt:
        """Hash a prompt. ``reuse``: requests may share its blocks. O(tokens).

        A prompt with images is hashed as ``routing.mm_routing_info`` describes it.
        """
        clock = self.clock
        seed, mm_hashes = BLOCK_SEED, None
        if routing is not None:
            if routing.lora_name or routing.cache_namespace:
                # Adapter and namespace change what a block holds, and so each hash.
                seed = seed_for(routing.lora_name, routing.cache_namespace)
            if routing.mm_routing_info is not None:
                tokens = routing.mm_routing_info.routing_token_ids
                objects = routing.mm_routing_info.mm_objects
                mm_hashes = _by_block(objects, len(tokens), self.block_size)
        isl_tokens = len(tokens)
        blocks = isl_tokens // self.block_size
        hashes = chained = shared = _NO_HASHES
        unique_blocks = 0
        if self.local or self.load:
            hashes = block_hashes(tokens, self.block_size, seed=seed, mm_hashes=mm_hashes)
        hashed_s = clock()
        shares = self.load and reuse
        if shares or self.chain:
            chained = sequence_hashes(hashes)
        if shares:
            shared = chained
        elif self.load:
            unique_blocks = blocks
        return HashedPrompt(
            isl_tokens, blocks, hashes, chained, shared, unique_blocks, begun_s, hashed_s, clock()
        )


class TierCounts(NamedTuple):
    """The blocks of a prompt that one rank can use. ``device`` counts from the start of the prompt,
    ``host`` continues behind it, and ``disk`` behind both; ``shared`` are all shared blocks that
    the device does not have, at any position."""

    device: int
    host: int = 0
    disk: int = 0
    shared: int = 0


def effective_blocks(weights: Weights, tiers: TierCounts) -> float:
    """Blocks that need not be computed; those below the device count by the weight of their tier.

    A block in host memory or on disk must first be loaded, which costs part of computing it.
    """
    return tiers.device + weights.host * tiers.host + weights.disk * tiers.disk


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
        raise_into: Callable[[array[int]], None] | None = None,
    ) -> None:
        """Fill the columns for the prompt of these block hashes. O(cached blocks + slots).

        Blocks predicted at ``now_s`` count as if they were on the device already, and so do those
        ``in_progress``: pairs of slot and leading blocks. ``raise_into`` may raise the column of
        the device.
        """
        index = self._index
        if index is None:
            return
        index.match_into(hashes, self.device)
        # Raise the column of the device first: lower tiers extend the prefix that it shows.
        if self._optimistic is not None:
            self._optimistic.raise_into(hashes, self.device, now_s)
        for slot, depth in in_progress:
            self.device[slot] = max(self.device[slot], depth)
        if raise_into is not None:
            raise_into(self.device)
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

    def ranges(self) -> list[tuple[int, int]] | None:
        """:attr:`shared_ranges`, or None without a shared cache."""
        return self.shared_ranges if self.shares else None

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


def _by_block(objects: list[MmObject], tokens: int, block_size: int) -> list[list[int]]:
    """Return the hashes of the images that overlap each full block."""
    by_block: list[list[int]] = [[] for _ in range(tokens // block_size)]
    for image in objects:
        # Ends are exclusive: round up. A partial block at the end has no hash to change.
        blocks = {
            block
            for start, end in image.offsets
            for block in range(start // block_size, min(-(-end // block_size), len(by_block)))
        }
        for block in blocks:
            by_block[block].append(image.mm_hash)
    return by_block
