"""KV cache events: which blocks a worker has stored, removed or cleared. Spec 2.1, 2.6.

Hashes travel as columns of raw u64 little-endian bytes, so that one event of any length is applied
to the index by one call without a Python object per block.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "KV_EVENTS",
    "KV_QUERY",
    "STORAGE_TIERS",
    "TIER_NUMBERS",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "KvEvent",
    "KvEventBatch",
    "KvQuery",
    "KvQueryAnswer",
]

KV_EVENTS = "kv-events"
"""Topic of KV events; a message is one :class:`KvEventBatch`."""

KV_QUERY = "kv_query"
"""Endpoint, beside the worker's own, that answers a :class:`KvQuery` with one
:class:`KvQueryAnswer`."""

STORAGE_TIERS = ("device", "host_pinned", "disk", "external")
"""Where a block is stored, nearest first. ``_fast/kv_events.hpp`` has the same order."""

TIER_NUMBERS = {name: number for number, name in enumerate(STORAGE_TIERS)}
"""Number of a tier in the index, by name."""


class BlocksStored(msgspec.Struct, tag_field="kind", tag="stored", omit_defaults=True):
    """A chain of blocks under ``parent_hash`` (None = root): equal-length u64le columns.

    ``block_hashes`` are the engine's own 64-bit ids, ``tokens_hashes`` the local block hashes. Off
    the device ``tokens_hashes`` may be empty: the ids are of blocks that other tiers hold.
    """

    block_hashes: bytes
    tokens_hashes: bytes
    parent_hash: int | None = None
    start_position: int | None = None


class BlocksRemoved(msgspec.Struct, tag_field="kind", tag="removed"):
    """These blocks (u64le engine ids) are gone."""

    block_hashes: bytes


class BlocksCleared(msgspec.Struct, tag_field="kind", tag="cleared"):
    """The (worker, dp_rank) has no blocks at all; off the device: none on that tier."""


class KvEvent(msgspec.Struct, omit_defaults=True):
    """One change; ``event_id`` rises by one per (worker, dp_rank)."""

    event_id: int
    data: BlocksStored | BlocksRemoved | BlocksCleared
    dp_rank: int = 0
    storage_tier: str = "device"


class KvEventBatch(msgspec.Struct):
    """Events of one worker, in order."""

    worker_id: int
    events: list[KvEvent]


class KvQuery(msgspec.Struct, omit_defaults=True):
    """Asked of a worker's local indexer: events start..end inclusive, or a dump (no start)."""

    dp_rank: int = 0
    start_event_id: int | None = None
    end_event_id: int | None = None


class KvQueryAnswer(msgspec.Struct, omit_defaults=True):
    """``kind``: events | tree_dump | invalid_range | too_new. For a dump the events recreate the
    tree (parents first) and ``last_event_id`` is the state they describe. ``block_size``: tokens of
    the worker's blocks, where it knows."""

    kind: str
    events: list[KvEvent] = []
    last_event_id: int = 0
    newest_available: int | None = None
    block_size: int | None = None
