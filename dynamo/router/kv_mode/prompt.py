"""A prompt as the prefix index and the load tracker read it: the hashes of its full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, seed_for, sequence_hashes
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import MmObject, Routing

_NO_HASHES = array("Q")


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


def _by_block(objects: list[MmObject], tokens: int, block_size: int) -> list[list[int]]:
    """Return the hashes of the images that overlap each full block."""
    found: list[list[int]] = [[] for _ in range(tokens // block_size)]
    for one in objects:
        blocks = {
            block
            for start, end in one.offsets
            for block in range(start // block_size, min(-(-end // block_size), len(found)))
        }
        for block in blocks:
            found[block].append(one.mm_hash)
    return found
