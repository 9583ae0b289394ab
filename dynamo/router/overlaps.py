"""What is cached where, and what would run where, in the words of the public API. Spec 3.7."""

from __future__ import annotations

import json
from typing import Any

from dynamo._fast.radix import RadixTree
from dynamo.protocols.codec import Tokens
from dynamo.router.kv import KvPicker

__all__ = ["events_of", "overlap_scores", "potential_loads"]


def overlap_scores(picker: KvPicker, tokens: Tokens) -> dict[str, Any]:
    """Leading blocks of the prompt by worker. Blocks on host, disk or shared are not known."""
    survey = picker.survey(tokens)
    workers = []
    for worker_id, rank, slot in _owners(picker):
        device = survey.overlaps[slot]
        workers.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "device_blocks": device,
                "host_pinned_blocks": device,
                "disk_blocks": device,
                "host_pinned_extension_blocks": 0,
                "disk_extension_blocks": 0,
                "shared_beyond_device_blocks": None,
            }
        )
    return {
        "block_size": picker.block_size,
        "num_blocks": survey.prompt.blocks,
        "workers": workers,
        "shared_cache": {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None},
    }


def potential_loads(picker: KvPicker, tokens: Tokens) -> list[dict[str, int]]:
    """What each rank would have to do with the prompt added."""
    survey = picker.survey(tokens)
    loads = []
    for worker_id, rank, slot in _owners(picker):
        cached = survey.overlaps[slot] * picker.block_size
        fresh = max(survey.prompt.isl_tokens - cached, 0)
        loads.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "potential_prefill_tokens": survey.prefill[slot] + fresh,
                "potential_decode_blocks": survey.decode[slot],
                "active_requests": picker.active.load(slot)[2],
            }
        )
    return loads


def events_of(index: RadixTree) -> str:
    """JSON list of events that rebuild ``index`` when applied in order, parents first. Spec 2.1."""
    events = []
    for number, (worker, rank, parent, blocks, local) in enumerate(index.dump()):
        pairs = zip(blocks, local, strict=True)
        chain = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
        stored = {"stored": {"parent_hash": parent, "blocks": chain}}
        events.append(
            {
                "worker_id": worker,
                "storage_tier": "device",
                "residency_domain": "worker",
                "event": {"event_id": number, "data": stored, "dp_rank": rank},
            }
        )
    return json.dumps(events)


def _owners(picker: KvPicker) -> list[tuple[int, int, int]]:
    owners = picker.fleet.owners
    found = [(owners[slot], slot) for slot in picker.fleet.candidates]
    return sorted((*owner, slot) for owner, slot in found if owner is not None)
