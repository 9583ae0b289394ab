"""Block hashes of a prompt, as the router computes them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo._fast.hashing import block_hashes, seed_for, xxh3_64

__all__ = [
    "compute_block_hash_for_seq",
    "compute_block_hash_for_seq_py",
    "lora_name_to_id",
    "mm_hashes_of",
    "short_hash",
]

_HEX_64 = re.compile(r"[0-9a-fA-F]{64}")


def compute_block_hash_for_seq(  # noqa: PLR0913 - Dynamo's signature
    tokens: Sequence[int],
    kv_block_size: int,
    block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
    lora_name: str | None = None,
    is_eagle: bool | None = None,
    cache_namespace: str | None = None,
) -> list[int]:
    """Return one unsigned 64-bit hash per complete block of ``kv_block_size`` tokens. O(tokens).

    ``block_mm_infos[i]`` is ``{"mm_objects": [{"mm_hash": int, …}]}`` or None for block i.
    ValueError for a block size of 0.
    """
    return block_hashes(
        tokens,
        kv_block_size,
        seed=seed_for(lora_name, cache_namespace),
        is_eagle=bool(is_eagle),
        mm_hashes=mm_hashes_of(block_mm_infos),
    ).tolist()


compute_block_hash_for_seq_py = compute_block_hash_for_seq
"""The older name."""


def lora_name_to_id(lora_name: str) -> int:
    """Return the id of an adapter, 1..2³¹-1, for engines that number them; equal on all workers."""
    digest = hashlib.blake2b(lora_name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**31 - 1) + 1


def mm_hashes_of(
    block_mm_infos: Sequence[Mapping[str, Any] | None] | None,
) -> list[list[int]] | None:
    """Return the hashes of the multimodal objects in each block; None without any."""
    if not block_mm_infos:
        return None
    return [
        [int(item["mm_hash"]) for item in info["mm_objects"]] if info else []
        for info in block_mm_infos
    ]


def short_hash(identifier: str) -> int:
    """Return the 64 bits of a multimodal object's identifier that block hashes use."""
    if _HEX_64.fullmatch(identifier):
        return int(identifier[:16], 16)
    return xxh3_64(identifier.encode())
