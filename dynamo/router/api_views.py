"""What is cached where, and what would run where, in the words of the public API. Spec 3.7."""

from __future__ import annotations

import json
from typing import Any

from dynamo._fast.radix import RadixTree
from dynamo.protocols.codec import Tokens
from dynamo.protocols.kv import STORAGE_TIERS
from dynamo.router.cost import cached_tokens
from dynamo.router.kv import KvPicker

__all__ = ["events_of", "overlap_scores", "potential_loads"]


def overlap_scores(picker: KvPicker, tokens: Tokens) -> dict[str, Any]:
    """Leading blocks of the prompt by worker and tier; those on lower tiers have the higher ones
    in them, ``…_extension_blocks`` have not."""
    snapshot = picker.snapshot(tokens)
    shares, ranges = snapshot.held.shares, snapshot.held.shared_ranges
    workers = []
    for worker_id, rank, slot in _owners(picker):
        held = snapshot.held.of(slot)
        workers.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "device_blocks": held.device,
                "host_pinned_blocks": held.device + held.host,
                "disk_blocks": held.device + held.host + held.disk,
                "host_pinned_extension_blocks": held.host,
                "disk_extension_blocks": held.disk,
                "shared_beyond_device_blocks": held.shared if shares else None,
            }
        )
    return {
        "block_size": picker.block_size,
        "num_blocks": snapshot.prompt.blocks,
        "workers": workers,
        "shared_cache": {
            "enabled": shares,
            "total_hit_blocks": snapshot.held.shared_blocks,
            "ranges": [list(pair) for pair in ranges],
            "error": None,
        },
    }


def potential_loads(picker: KvPicker, tokens: Tokens) -> list[dict[str, int]]:
    """What each rank would have to do with the prompt added."""
    snapshot = picker.snapshot(tokens)
    loads = []
    for worker_id, rank, slot in _owners(picker):
        weights = snapshot.params.weights
        cached = cached_tokens(weights, snapshot.held.effective(weights, slot))
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
    """JSON list of events that rebuild ``index`` when applied in order, parents first. Spec 2.1."""
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
    owners = picker.worker_pool.owners
    found = [(owners[slot], slot) for slot in picker.worker_pool.candidates]
    return sorted((*owner, slot) for owner, slot in found if owner is not None)
