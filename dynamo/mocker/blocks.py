"""The KV cache of the simulated engine: blocks in use, cached blocks, eviction.

Capacity is counted in blocks. A full block has its sequence hash as its id and is shared by all
sequences with that prefix; a partial block is private to its sequence. An unused full block stays
cached until its slot is needed; the least recently used one is evicted first. With host memory, an
evicted block is copied there, and a prompt that finds it there gets it back without computing it.
"""

from __future__ import annotations

import struct
from array import array
from typing import NamedTuple

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, seed_for, sequence_hashes, xxh3_64
from dynamo.protocols.codec import Tokens
from dynamo.protocols.kv import STORAGE_TIERS, BlocksCleared, BlocksRemoved, BlocksStored, KvChange

_PAIR = struct.Struct("<QQ")
DEVICE, HOST = STORAGE_TIERS[:2]


class SequenceBlocks:
    """The tokens of one sequence, the hashes of its full blocks, and the slots that it occupies.

    ``full`` counts its leading blocks that are in the pool by hash, ``private`` its other slots.
    Without prefix caching every slot is private.
    """

    __slots__ = (
        "block_hashes",
        "block_size",
        "cache_namespace",
        "full",
        "lora_name",
        "private",
        "seed",
        "sequence_hashes",
        "tokens",
    )

    def __init__(
        self,
        tokens: Tokens,
        block_size: int,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.lora_name = lora_name
        self.cache_namespace = cache_namespace
        self.seed = seed_for(lora_name, cache_namespace)
        self.block_hashes = block_hashes(tokens, block_size, seed=self.seed)
        self.sequence_hashes = sequence_hashes(self.block_hashes)
        self.full = 0
        self.private = 0

    def hash_until(self, count: int) -> None:
        """Compute the hashes of the first ``count`` blocks, whose tokens are complete."""
        while len(self.sequence_hashes) < count:
            begin = len(self.sequence_hashes) * self.block_size
            block = self.tokens[begin : begin + self.block_size]
            local = block_hashes(block, self.block_size, seed=self.seed)[0]
            if self.sequence_hashes:
                self.sequence_hashes.append(
                    xxh3_64(_PAIR.pack(self.sequence_hashes[-1], local), BLOCK_SEED)
                )
            else:
                self.sequence_hashes.append(local)
            self.block_hashes.append(local)


class CacheChange(NamedTuple):
    """A change of the cache on a tier, in wire format; stored blocks are some of ``blocks``."""

    change: KvChange
    storage_tier: str = DEVICE
    blocks: SequenceBlocks | None = None


class BlockPool:
    """``capacity`` slots of ``block_size`` tokens; each change of the cache is an event.

    ``host_capacity`` evicted blocks are kept in host memory. :attr:`changes` collects the events in
    order; the caller empties it.
    """

    def __init__(
        self, capacity: int, block_size: int, prefix_caching: bool = True, host_capacity: int = 0
    ) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.host_capacity = host_capacity
        self.changes: list[CacheChange] = []
        self._active: dict[int, int] = {}  # full blocks: how many sequences use each
        self._idle: dict[int, None] = {}  # cached blocks, the next to evict first
        self._host: dict[int, None] = {}  # blocks in host memory, the next to remove first
        self._private = 0

    @property
    def used(self) -> int:
        """Slots that sequences occupy."""
        return len(self._active) + self._private

    @property
    def free(self) -> int:
        """Slots that a sequence could get: empty ones and those of unused cached blocks."""
        return self.capacity - len(self._active) - self._private

    @property
    def cached(self) -> int:
        """Unused blocks that a later prompt may reuse."""
        return len(self._idle)

    def hashes(self) -> set[int]:
        """Return the sequence hashes of all full blocks, used or cached. O(blocks); for tests."""
        return self._active.keys() | self._idle.keys()

    def host_hashes(self) -> set[int]:
        """Return the sequence hashes of the blocks in host memory. O(blocks); for tests."""
        return set(self._host)

    def cached_prefix(self, blocks: SequenceBlocks) -> tuple[int, int]:
        """Return (leading blocks in the cache, how many of them are in use). O(blocks).

        Blocks in host memory count, too: each needs a slot, as an unused one does.
        The block of the last token never counts: at least one token must be computed to produce
        the next one.
        """
        if not self.prefix_caching:
            return 0, 0
        count = used = 0
        for block_hash in blocks.sequence_hashes[: (len(blocks.tokens) - 1) // self.block_size]:
            if block_hash in self._active:
                used += 1
            elif block_hash not in self._idle and block_hash not in self._host:
                break
            count += 1
        return count, used

    def reuse(self, blocks: SequenceBlocks, count: int) -> None:
        """Add the first ``count`` blocks, which :meth:`cached_prefix` found, to ``blocks``."""
        hashes = blocks.sequence_hashes[:count]
        absent = [h for h in hashes if h not in self._active] if self._host else []
        if absent:
            self._fill(blocks, count, absent)
            return
        for block_hash in hashes:
            self._reference(block_hash)
        blocks.full = count

    def grow(self, blocks: SequenceBlocks, tokens: int) -> bool:
        """Allocate slots for the first ``tokens`` tokens, evicting cached blocks as needed.

        Return False, and change nothing, if too few slots are free.
        """
        full, rest = divmod(tokens, self.block_size)
        if not self.prefix_caching:
            more = full + (rest > 0) - blocks.private
            if more > self.free:
                return False
            blocks.private += more
            self._private += more
            return True
        blocks.hash_until(full)
        fresh = blocks.sequence_hashes[blocks.full : full]
        # Blocks that other sequences use need no slot. A cached block does: it leaves the free
        # slots. The private slot that this sequence had is one of those that it needs now.
        absent = [h for h in fresh if h not in self._active]
        if len(absent) + (rest > 0) - blocks.private > self.free:
            return False
        self._private += (rest > 0) - blocks.private
        blocks.private = int(rest > 0)
        if fresh:
            self._fill(blocks, full, absent)
        elif rest:
            self._evict_surplus()
        return True

    def release(self, blocks: SequenceBlocks) -> None:
        """Free every slot; full blocks stay cached, and the last one is evicted first."""
        # The last block first: without its end a chain is still a prefix, without its start none.
        for block_hash in reversed(blocks.sequence_hashes[: blocks.full]):
            count = self._active[block_hash] - 1
            if count:
                self._active[block_hash] = count
            else:
                del self._active[block_hash]
                self._idle[block_hash] = None
        self._private -= blocks.private
        blocks.full = blocks.private = 0

    def clear(self) -> bool:
        """Drop all cached blocks; False, and nothing is dropped, while sequences use some."""
        if self.used:
            return False
        self._idle.clear()
        self._host.clear()
        self.changes.append(CacheChange(BlocksCleared()))
        return True

    def _reference(self, block_hash: int) -> None:
        self._idle.pop(block_hash, None)
        self._active[block_hash] = self._active.get(block_hash, 0) + 1

    def _fill(self, blocks: SequenceBlocks, full: int, absent: list[int]) -> None:
        # Find out what is new before _reference() takes cached blocks out of _idle.
        new = {h for h in absent if h not in self._idle}
        for block_hash in blocks.sequence_hashes[blocks.full : full]:
            self._reference(block_hash)
        self._evict_surplus()
        if new:
            self._record_stored(blocks, full, new)
        blocks.full = full

    def _evict_surplus(self) -> None:
        # Allocation counted cached blocks as free; here their slots are taken back.
        surplus = len(self._active) + self._private + len(self._idle) - self.capacity
        if surplus <= 0:
            return
        victims = array("Q")
        for block_hash in self._idle:
            victims.append(block_hash)
            if len(victims) == surplus:
                break
        for block_hash in victims:
            del self._idle[block_hash]
        if self.host_capacity:
            self._offload(victims)
        self.changes.append(CacheChange(BlocksRemoved(victims.tobytes())))

    def _offload(self, victims: array[int]) -> None:
        """Copy blocks to host memory; their event comes before that of their removal here."""
        host = self._host
        new = {block_hash for block_hash in victims if block_hash not in host}
        for block_hash in victims:
            host.pop(block_hash, None)  # it becomes the one that was used last
            host[block_hash] = None
        removed = array("Q")
        while len(host) > self.host_capacity:
            oldest = next(iter(host))
            del host[oldest]
            if oldest in new:
                new.remove(oldest)
            else:
                removed.append(oldest)
        stored = array("Q", [block_hash for block_hash in victims if block_hash in new])
        if stored:
            self.changes.append(CacheChange(BlocksStored(stored.tobytes(), b""), HOST))
        if removed:
            self.changes.append(CacheChange(BlocksRemoved(removed.tobytes()), HOST))

    def _record_stored(self, blocks: SequenceBlocks, full: int, new: set[int]) -> None:
        # One event for each run of new blocks: a block in between that the pool has already was
        # published before and is the parent of the next run.
        begin = blocks.full
        while begin < full:
            end = begin
            while end < full and blocks.sequence_hashes[end] in new:
                end += 1
            if end > begin:
                parent = blocks.sequence_hashes[begin - 1] if begin else None
                hashes, local = blocks.sequence_hashes[begin:end], blocks.block_hashes[begin:end]
                stored = BlocksStored(hashes.tobytes(), local.tobytes(), parent, begin)
                self.changes.append(CacheChange(stored, DEVICE, blocks))
            begin = end + 1

    def _check(self) -> None:
        """Assert all invariants; for tests."""
        assert all(count > 0 for count in self._active.values())
        assert not self._active.keys() & self._idle.keys()
        assert self._private >= 0
        assert self.used + self.cached <= self.capacity
        assert len(self._host) <= self.host_capacity
