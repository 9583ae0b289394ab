"""The KV cache of the pretended engine: which blocks are in use, cached, evicted.

Capacity is counted in blocks. A full block is known by its sequence hash and shared by every
sequence that reaches it; a block that is not full yet is private to its sequence. Blocks that
nobody uses stay cached until their slot is needed, the least recently used first. Spec 10.3.
"""

from __future__ import annotations

import struct
from array import array

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, seed_for, sequence_hashes, xxh3_64
from dynamo.protocols.codec import Tokens
from dynamo.protocols.kv import BlocksRemoved, BlocksStored

__all__ = ["BlockPool", "SequenceBlocks"]

_PAIR = struct.Struct("<QQ")


class SequenceBlocks:
    """The tokens of one sequence, their block hashes, and the slots that the sequence occupies.

    ``full`` counts the leading blocks held by hash, ``private`` the slots held besides. With
    prefix caching off every slot is private.
    """

    __slots__ = (
        "block_hashes",
        "block_size",
        "full",
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
        self.seed = seed_for(lora_name, cache_namespace)
        self.block_hashes = block_hashes(tokens, block_size, seed=self.seed)
        self.sequence_hashes = sequence_hashes(self.block_hashes)
        self.full = 0
        self.private = 0

    def hash_until(self, count: int) -> None:
        """Make the hashes of the first ``count`` blocks known; their tokens must be there."""
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


class BlockPool:
    """``capacity`` slots of ``block_size`` tokens; every change of the cache is an event.

    Take :attr:`changes` and empty it after each step: the events in order, as they go on the wire.
    """

    def __init__(self, capacity: int, block_size: int, prefix_caching: bool = True) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.changes: list[BlocksStored | BlocksRemoved] = []
        self._active: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._private = 0

    @property
    def used(self) -> int:
        """Slots that a sequence holds."""
        return len(self._active) + self._private

    @property
    def free(self) -> int:
        """Slots that a sequence could get: never used ones and cached ones that nobody holds."""
        return self.capacity - len(self._active) - self._private

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that a later prompt may find again."""
        return len(self._idle)

    def hashes(self) -> set[int]:
        """Sequence hashes of all full blocks, held or cached. O(blocks); for checks and dumps."""
        return self._active.keys() | self._idle.keys()

    def cached_prefix(self, blocks: SequenceBlocks) -> tuple[int, int]:
        """(leading blocks that are here already, how many of them somebody holds).

        The block of the last token never counts: at least one token is computed. O(blocks).
        """
        if not self.prefix_caching:
            return 0, 0
        found = held = 0
        for block_hash in blocks.sequence_hashes[: (len(blocks.tokens) - 1) // self.block_size]:
            if block_hash in self._active:
                held += 1
            elif block_hash not in self._idle:
                break
            found += 1
        return found, held

    def reuse(self, blocks: SequenceBlocks, count: int) -> None:
        """Let ``blocks`` (empty) hold the first ``count`` of its blocks; they must be here."""
        for block_hash in blocks.sequence_hashes[:count]:
            self._hold(block_hash)
        blocks.full = count

    def grow(self, blocks: SequenceBlocks, tokens: int) -> bool:
        """Give ``blocks`` the slots for its first ``tokens`` tokens, all or nothing.

        False when there are not enough, and nothing has changed. Evicts cached blocks as needed.
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
        """Take back every slot; full blocks stay cached, the tail of the chain is oldest."""
        for block_hash in reversed(blocks.sequence_hashes[: blocks.full]):
            count = self._active[block_hash] - 1
            if count:
                self._active[block_hash] = count
            else:
                del self._active[block_hash]
                self._idle[block_hash] = None
        self._private -= blocks.private
        blocks.full = blocks.private = 0

    def _hold(self, block_hash: int) -> None:
        self._idle.pop(block_hash, None)
        self._active[block_hash] = self._active.get(block_hash, 0) + 1

    def _fill(self, blocks: SequenceBlocks, full: int, absent: list[int]) -> None:
        new = {h for h in absent if h not in self._idle}
        for block_hash in blocks.sequence_hashes[blocks.full : full]:
            self._hold(block_hash)
        self._evict_surplus()
        if new:
            self._announce(blocks, full, new)
        blocks.full = full

    def _evict_surplus(self) -> None:
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
        self.changes.append(BlocksRemoved(victims.tobytes()))

    def _announce(self, blocks: SequenceBlocks, full: int, new: set[int]) -> None:
        begin = blocks.full
        while begin < full:
            end = begin
            while end < full and blocks.sequence_hashes[end] in new:
                end += 1
            if end > begin:
                parent = blocks.sequence_hashes[begin - 1] if begin else None
                column, local = blocks.sequence_hashes[begin:end], blocks.block_hashes[begin:end]
                self.changes.append(BlocksStored(column.tobytes(), local.tobytes(), parent, begin))
            begin = end + 1

    def _check(self) -> None:
        """Assert what must always hold; for tests."""
        assert all(count > 0 for count in self._active.values())
        assert not self._active.keys() & self._idle.keys()
        assert self._private >= 0
        assert self.used + self.cached <= self.capacity
