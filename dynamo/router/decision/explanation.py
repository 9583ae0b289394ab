"""What the kv mode would weigh for a prompt, as rows for tables, log lines and the public API.

All of it is read from the inputs of the decision. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import DynamoError
from dynamo.router.decision.cost import cached_tokens, formula
from dynamo.router.decision.receipt import KvInputs
from dynamo.router.load.active_load import ActiveLoad
from dynamo.router.load.prefill_model import PrefillSpeed
from dynamo.router.worker_pool import WorkerPool

log = logging.getLogger("dynamo.router.explanations.decision_log")
"""A log entry costs more than the decision, so these are off by default; ``DYN_LOG`` turns them on
by this name, which is documented: the chosen worker (INFO), every candidate's cost (DEBUG)."""


# A tuple, which the collector visits: the traceback of the error may refer back to it.
class Weighed(NamedTuple):
    """What a decision would weigh now, over all ranks, and the ``error`` if it would fail.

    ``shared_ranges`` are the positions in the prompt of blocks in a shared cache, ends exclusive;
    None without such a cache.
    """

    inputs: KvInputs
    error: DynamoError | None
    shared_ranges: Sequence[tuple[int, int]] | None


class Candidate(msgspec.Struct, kw_only=True):
    """One rank. The load excludes the prompt, except that ``decode_blocks`` includes it.

    ``overlap_blocks`` are on the device from the start of the prompt; ``host_pinned_blocks`` and
    then ``disk_blocks`` continue behind them; ``shared_blocks`` are those of the shared cache that
    the device does not have.

    ``cost`` is None for a rank that may not be chosen; ``excluded`` is the reason. ``seconds`` are
    the terms of a cost in seconds; those in blocks then had no part in the choice. It takes
    ``slowness`` times as long as the model of the pool says.
    """

    worker_id: int
    dp_rank: int
    overlap_blocks: int
    active_prefill_tokens: int
    active_decode_blocks: int
    active_requests: int
    host_pinned_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0
    raw_prefill_blocks: float
    credit_decay: float = 1.0
    credit_blocks: float
    prefill_blocks: float
    decode_blocks: int
    request_blocks: float = 0.0
    seconds: dict[str, float] = {}
    slowness: float = 1.0
    cost: float | None = None
    chosen: bool = False
    excluded: str = ""


class Explanation(msgspec.Struct, kw_only=True):
    """The candidates, cheapest first, then the excluded ranks; ``error`` if none can be chosen.

    The prompt would be queued with ``queued_requests``. ``prefill`` is the table of the prefill
    workers if one of them would compute the prompt first; ``stays`` is the reason why the decode
    worker computes it although prefill workers exist: the prompt is ``short`` or ``cached``, or
    their ``queue`` is long. ``speed`` is there where costs are in seconds.
    """

    isl_tokens: int
    prompt_blocks: int
    block_size: int
    prefill_load_scale: float
    overlap_score_credit: float
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.0
    decode_active_request_weight: float = 0.0
    duplicate_cost: float = 0.0
    temperature: float
    router_cost: str = "blocks"
    candidates: list[Candidate]
    queued_requests: int = 0
    error: str = ""
    stays: str = ""
    speed: PrefillSpeed | None = None
    prefill: Explanation | None = None


def explanation(
    weighed: Weighed,
    worker_pool: WorkerPool,
    active: ActiveLoad,
    queued_requests: int = 0,
) -> Explanation:
    """Return the rows of what was ``weighed`` just now, with its constraints."""
    inputs, error = weighed.inputs, weighed.error
    rows = _candidates(inputs, worker_pool, active)
    # Ranks without a cost last; of equal costs the chosen rank first.
    rows.sort(key=lambda row: (row.cost is None, row.cost or 0.0, not row.chosen, row.worker_id))
    params, weights = inputs.params, inputs.params.weights
    return Explanation(
        isl_tokens=inputs.isl_tokens,
        prompt_blocks=inputs.prompt_blocks,
        block_size=weights.block_size,
        prefill_load_scale=weights.prefill_scale,
        overlap_score_credit=weights.credit,
        host_cache_hit_weight=weights.host,
        disk_cache_hit_weight=weights.disk,
        shared_cache_multiplier=weights.shared,
        decode_active_request_weight=params.request_weight,
        duplicate_cost=params.duplicate_cost,
        temperature=params.temperature,
        router_cost="seconds" if params.in_seconds else "blocks",
        candidates=rows,
        queued_requests=queued_requests,
        error="" if error is None else error.message,
    )


def _candidates(inputs: KvInputs, worker_pool: WorkerPool, active: ActiveLoad) -> list[Candidate]:
    costs, least, excluded = inputs.cost_by_slot(), inputs.least_prefill(), inputs.excluded()
    indices = {slot: index for index, slot in enumerate(inputs.slots)}
    rows = []
    for slot in worker_pool.candidates:
        worker_id, dp_rank = worker_pool.owners[slot]
        _, blocks, requests = active.load(slot)
        load, tiers = inputs.load(slot, requests, least), inputs.tiers(slot)
        terms = inputs.breakdown(slot, load)
        row = Candidate(
            worker_id=worker_id,
            dp_rank=dp_rank,
            overlap_blocks=tiers.device,
            host_pinned_blocks=tiers.host,
            disk_blocks=tiers.disk,
            shared_blocks=tiers.shared,
            active_prefill_tokens=load.prefill_tokens,
            active_decode_blocks=blocks,
            active_requests=requests,
            raw_prefill_blocks=terms.raw_prefill_blocks,
            credit_decay=terms.credit_decay,
            credit_blocks=terms.credit_blocks,
            prefill_blocks=terms.prefill_blocks,
            decode_blocks=terms.decode_blocks,
            request_blocks=terms.request_blocks,
            seconds=inputs.seconds(indices[slot], costs[slot]) if slot in costs else {},
            cost=costs.get(slot),
            chosen=slot == inputs.chosen,
            excluded=excluded.get(slot, ""),
        )
        rows.append(row)
    return rows


def log_decision(inputs: KvInputs, request_id: str | None, worker_type: str) -> None:
    """Log the choice, and at DEBUG before it the cost of every candidate as Dynamo's router guide
    shows it. Without a request, no choice was made for one."""
    worker_id, dp_rank = inputs.owners[inputs.chosen]
    costs, tiers = inputs.cost_by_slot(), inputs.tiers(inputs.chosen)
    if log.isEnabledFor(logging.DEBUG):
        scale, least = inputs.params.weights.prefill_scale, inputs.least_prefill()
        for index, (slot, cost) in enumerate(costs.items()):
            if inputs.terms:
                log.debug(_sum(inputs.owners[slot][0], cost, inputs.seconds(index, cost)))
                continue
            terms = inputs.breakdown(slot, inputs.load_at(index, least))
            owner = inputs.owners[slot][0]
            log.debug(formula(owner, scale, cost, terms, inputs.effective(slot)))
        best = worker_id, dp_rank, tiers.device, inputs.prompt_blocks
        log.debug("[ROUTING] Best: worker_%s dp_rank=%d with %d/%d blocks overlap", *best)
    if request_id is None:
        return
    fields = {
        "router_mode": "kv",
        "request_id": request_id,
        "worker_id": worker_id,
        "worker_type": worker_type,
        "dp_rank": dp_rank,
        "logit": round(costs[inputs.chosen], 6 if inputs.terms else 3),
        "overlap_blocks": tiers.device,
        "host_pinned_blocks": tiers.host,
        "disk_blocks": tiers.disk,
    }
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    log.info("Selected worker %s", text, extra=fields)


def _sum(worker_id: int, cost: float, terms: dict[str, float]) -> str:
    """Return a cost in seconds as the sum of its terms, in milliseconds."""
    parts = " + ".join(f"{name} {value * 1e3:.1f}" for name, value in terms.items())
    return f"Cost of worker_{worker_id}: {cost * 1e3:.1f} ms = {parts}"


def overlap_scores(weighed: Weighed, worker_pool: WorkerPool) -> dict[str, Any]:
    """Return the leading blocks of the prompt by worker and tier, as the public API does.

    The count of a lower tier includes the higher tiers; ``…_extension_blocks`` does not.
    """
    inputs, ranges = weighed.inputs, weighed.shared_ranges
    workers = []
    for worker_id, rank, slot in _ranks(worker_pool):
        tiers = inputs.tiers(slot)
        workers.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "device_blocks": tiers.device,
                "host_pinned_blocks": tiers.device + tiers.host,
                "disk_blocks": tiers.device + tiers.host + tiers.disk,
                "host_pinned_extension_blocks": tiers.host,
                "disk_extension_blocks": tiers.disk,
                "shared_beyond_device_blocks": None if ranges is None else tiers.shared,
            }
        )
    return {
        "block_size": inputs.params.weights.block_size,
        "num_blocks": inputs.prompt_blocks,
        "workers": workers,
        "shared_cache": {
            "enabled": ranges is not None,
            "total_hit_blocks": sum(end - begin for begin, end in ranges or ()),
            "ranges": [list(pair) for pair in ranges or ()],
            "error": None,
        },
    }


def potential_loads(
    inputs: KvInputs, worker_pool: WorkerPool, active: ActiveLoad
) -> list[dict[str, int]]:
    """Return the load of each rank with the prompt added, as the public API does."""
    rows = []
    for worker_id, rank, slot in _ranks(worker_pool):
        requests = active.load(slot)[2]
        load = inputs.load(slot, requests)
        cached = cached_tokens(inputs.params.weights, inputs.effective(slot))
        rows.append(
            {
                "worker_id": worker_id,
                "dp_rank": rank,
                "potential_prefill_tokens": load.prefill_tokens
                + max(inputs.isl_tokens - cached, 0),
                "potential_decode_blocks": load.decode_blocks,
                "active_requests": requests,
            }
        )
    return rows


def _ranks(worker_pool: WorkerPool) -> list[tuple[int, int, int]]:
    return sorted((*worker_pool.owners[slot], slot) for slot in worker_pool.candidates)
