"""Block hashes of a prompt as the router computes them, and an index of prefixes."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dynamo._fast import radix
from dynamo._fast.hashing import block_hashes, seed_for, xxh3_64

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_HEX_64 = re.compile(r"[0-9a-fA-F]{64}")


def compute_block_hash_for_seq(
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
    # + 1: 0 is no adapter. A signed 32-bit number takes the largest id.
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


class OverlapScores:
    """``scores`` maps (worker_id, dp_rank) to the number of leading blocks in its cache."""

    __slots__ = ("frequencies", "scores")

    def __init__(
        self, scores: Mapping[tuple[int, int], int], frequencies: Sequence[int] = ()
    ) -> None:
        self.scores = dict(scores)
        self.frequencies = list(frequencies)

    def __repr__(self) -> str:
        """Return the scores as text."""
        return f"OverlapScores(scores={self.scores}, frequencies={self.frequencies})"


class _Block(msgspec.Struct):
    block_hash: int
    tokens_hash: int
    mm_extra_info: Any = None


class _StoredBody(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None
    start_position: int | None = None


class _RemovedBody(msgspec.Struct):
    block_hashes: list[int]


class _Data(msgspec.Struct):
    stored: _StoredBody | None = None
    removed: _RemovedBody | None = None


class _Event(msgspec.Struct):
    event_id: int
    data: _Data | Literal["cleared"]
    dp_rank: int = 0


_decode = msgspec.json.Decoder(_Event).decode


class RadixTree:
    """An index of the prefixes that workers cache, by signed or unsigned 64-bit hashes."""

    def __init__(self, expiration_duration_secs: float | None = None) -> None:
        if expiration_duration_secs is not None:
            raise ValueError("expiration_duration_secs is not supported; leave it out")
        self._tree = radix.RadixTree()

    def find_matches(self, sequence: Iterable[int], early_exit: bool = False) -> OverlapScores:
        """Count the leading blocks of ``sequence`` (local hashes) that each worker has cached."""
        return OverlapScores(self._tree.match(_column(sequence), early_exit))

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Apply one JSON event. Raises ValueError: not an event; RuntimeError: not applicable."""
        try:
            event = _decode(kv_cache_event_bytes)
            if event.data != "cleared" and (event.data.stored is None) is (
                event.data.removed is None
            ):
                raise msgspec.ValidationError("data must be one of stored, removed, cleared")
        except msgspec.MsgspecError as error:
            raise ValueError(f"Failed to deserialize KvCacheEvent: {error}") from None
        try:
            self._apply(self._tree.slot(worker_id, event.dp_rank), event.data)
        except radix.ParentNotFound:
            raise RuntimeError("Failed to apply event: Failed to find parent block") from None
        except radix.InvalidSequence:
            raise RuntimeError("Failed to apply event: Invalid block sequence") from None

    def remove_worker(self, worker_id: int) -> None:
        """Remove the worker, all its ranks."""
        self._tree.remove_worker(worker_id)

    def clear_all_blocks(self, worker_id: int) -> None:
        """Remove the worker's blocks, of all its ranks."""
        for worker, _, slot in self._tree.slots():
            if worker == worker_id:
                self._tree.clear(slot)

    def dump_tree_as_events(self) -> list[str]:
        """Return JSON events that rebuild the tree when applied in order, parents first."""
        return [
            msgspec.json.encode(
                {
                    "worker_id": worker,
                    "storage_tier": "device",
                    "event": {
                        "event_id": number,
                        "data": {"stored": _stored(parent, blocks, local)},
                        "dp_rank": rank,
                    },
                }
            ).decode()
            for number, (worker, rank, parent, blocks, local) in enumerate(self._tree.dump())
        ]

    def _apply(self, slot: int, data: _Data | Literal["cleared"]) -> None:
        if data == "cleared":
            self._tree.clear(slot)
        elif data.stored is not None:
            parent = data.stored.parent_hash
            self._tree.store(
                slot,
                None if parent is None else parent & _U64,
                _column(block.block_hash for block in data.stored.blocks),
                _column(block.tokens_hash for block in data.stored.blocks),
            )
        elif data.removed is not None and self._tree.remove(
            slot, _column(data.removed.block_hashes)
        ):
            raise RuntimeError("Failed to apply event: Failed to find block")


def _column(hashes: Iterable[int]) -> array[int]:
    return array("Q", [value & _U64 for value in hashes])


def _stored(
    parent: int | None, blocks: Iterable[int], local: Iterable[int]
) -> dict[str, int | list[dict[str, int]] | None]:
    return {
        "parent_hash": parent,
        "blocks": [
            {"block_hash": block, "tokens_hash": tokens}
            for block, tokens in zip(blocks, local, strict=True)
        ],
    }
