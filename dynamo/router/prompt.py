"""A prompt as the prefix index and the load tracker read it: the hashes of its full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, seed_for, sequence_hashes
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing

__all__ = ["HashedPrompt", "Hasher"]

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
        """Hash a prompt. ``reuse``: requests may share its blocks. O(tokens)."""
        clock = self.clock
        seed = BLOCK_SEED
        if routing is not None and (routing.lora_name or routing.cache_namespace):
            seed = seed_for(routing.lora_name, routing.cache_namespace)
        isl_tokens = len(tokens)
        blocks = isl_tokens // self.block_size
        hashes = chained = shared = _NO_HASHES
        unique_blocks = 0
        if self.local or self.load:
            hashes = block_hashes(tokens, self.block_size, seed=seed)
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
