"""A prompt as the prefix index and the load tracker see it: hashes of its full blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from dynamo._fast.hashing import BLOCK_SEED, block_hashes, seed_for, sequence_hashes
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing

__all__ = ["HashedPrompt", "Hasher"]

_NO_HASHES = array("Q")


class HashedPrompt(NamedTuple):
    """``blocks`` are the full ones; ``hashes`` and ``chained`` are empty where nobody needs them.

    As active load, ``unique_blocks`` count without a hash, and without them ``chained`` ones do.
    """

    isl_tokens: int
    blocks: int
    hashes: array[int]
    chained: array[int]
    unique_blocks: int

    @property
    def shared(self) -> array[int]:
        """The chained hashes of blocks that other requests may share."""
        return _NO_HASHES if self.unique_blocks else self.chained


class Hasher(NamedTuple):
    """Hashes no more than index (``local``), predictions (``chain``) and load (``load``) need."""

    block_size: int
    local: bool
    chain: bool
    load: bool

    def hash(
        self,
        tokens: Tokens,
        routing: Routing | None,
        reuse: bool,
        clock: Callable[[], float],
        times: list[float],
    ) -> HashedPrompt:
        """The prompt; ``reuse``: its blocks may be shared. Appends the ends of the two steps."""
        seed = BLOCK_SEED
        if routing is not None and (routing.lora_name or routing.cache_namespace):
            seed = seed_for(routing.lora_name, routing.cache_namespace)
        hashes = chained = _NO_HASHES
        if self.local or self.load:
            hashes = block_hashes(tokens, self.block_size, seed=seed)
        times.append(clock())
        shared = self.load and reuse
        if shared or self.chain:
            chained = sequence_hashes(hashes)
        times.append(clock())
        blocks = len(tokens) // self.block_size
        return HashedPrompt(
            len(tokens), blocks, hashes, chained, blocks if self.load and not shared else 0
        )
