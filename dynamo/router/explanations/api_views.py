"""Cached blocks and load by worker, in the format of the public API."""

from __future__ import annotations

import json
from typing import Any

from dynamo._fast.radix import RadixTree
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.protocols.kv import STORAGE_TIERS
from dynamo.router.kv_mode.cost import cached_tokens
from dynamo.router.kv_mode.kv import KvPicker


def overlap_scores(
    picker: KvPicker, tokens: Tokens, routing: Routing | None = None
) -> dict[str, Any]:
    """Leading blocks of the prompt by worker and tier.

    The count of a lower tier includes the higher tiers; ``…_extension_blocks`` does not.
    """
    snapshot = picker.snapshot(tokens, routing)
    cached = snapshot.cached_blocks
    workers = []
    for worker_id, rank, slot in _owners(picker):
        tiers = cached.of(slot)
        workers.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "device_blocks": tiers.device,
                "host_pinned_blocks": tiers.device + tiers.host,
                "disk_blocks": tiers.device + tiers.host + tiers.disk,
                "host_pinned_extension_blocks": tiers.host,
                "disk_extension_blocks": tiers.disk,
                "shared_beyond_device_blocks": tiers.shared if cached.shares else None,
            }
        )
    return {
        "block_size": picker.block_size,
        "num_blocks": snapshot.prompt.blocks,
        "workers": workers,
        "shared_cache": {
            "enabled": cached.shares,
            "total_hit_blocks": cached.shared_blocks,
            "ranges": [list(pair) for pair in cached.shared_ranges],
            "error": None,
        },
    }


def potential_loads(
    picker: KvPicker, tokens: Tokens, routing: Routing | None = None
) -> list[dict[str, int]]:
    """The load of each rank with the prompt added."""
    snapshot = picker.snapshot(tokens, routing)
    weights = snapshot.params.weights
    loads = []
    for worker_id, rank, slot in _owners(picker):
        cached = cached_tokens(weights, snapshot.cached_blocks.effective(weights, slot))
        fresh = max(snapshot.prompt.isl_tokens - cached, 0)
        loads.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "potential_prefill_tokens": snapshot.prefill[slot] + fresh,
                "potential_decode_blocks": snapshot.decode[slot],
                "active_requests": picker.active.load(slot)[2],
            }
        )
    return loads


def events_of(index: RadixTree) -> str:
    """Return a JSON list of events that rebuild ``index`` when applied in order."""
    events = []
    for number, (worker, rank, parent, blocks, local, tier) in enumerate(index.dump_tiers()):
        pairs = zip(blocks, local, strict=True)
        chain = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
        stored = {"stored": {"parent_hash": parent, "blocks": chain}}
        events.append(
            {
                "worker_id": worker,
                "storage_tier": STORAGE_TIERS[tier],
                "residency_domain": "worker",
                "event": {"event_id": number, "data": stored, "dp_rank": rank},
            }
        )
    return json.dumps(events)


def _owners(picker: KvPicker) -> list[tuple[int, int, int]]:
    pool = picker.worker_pool
    return sorted((*pool.owners[slot], slot) for slot in pool.candidates)
