"""What KV events leave a worker with, for the tests that compare two accounts of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from dynamo.protocols.kv import BlocksRemoved, BlocksStored, KvEvent

__all__ = ["held_after"]


def held_after(events: Iterable[KvEvent]) -> dict[int, tuple[int, ...]]:
    """Block hash to its path of token hashes. KeyError: a parent or a removed block is unknown."""
    held: dict[int, tuple[int, ...]] = {}
    for event in events:
        data = event.data
        if isinstance(data, BlocksStored):
            path = () if data.parent_hash is None else held[data.parent_hash]
            hashes = array("Q", data.block_hashes), array("Q", data.tokens_hashes)
            for block, local in zip(*hashes, strict=True):
                held[block] = path = (*path, local)
        elif isinstance(data, BlocksRemoved):
            for block in array("Q", data.block_hashes):
                del held[block]
        else:
            held.clear()
    return held
