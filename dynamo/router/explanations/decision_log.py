"""Logs decisions: the chosen worker (INFO) and the cost of every candidate (DEBUG).

A log entry costs more than the decision, so these are off by default; ``DYN_LOG`` turns them on:
``DYN_LOG=info,dynamo.router.explanations.decision_log=info`` (or ``=debug``).
"""

from __future__ import annotations

import logging

from dynamo.router.explanations.explain import DecisionSnapshot
from dynamo.router.kv_mode.cost import formula
from dynamo.router.load.active import ActiveLoad
from dynamo.router.picker import Decision
from dynamo.router.worker_pool import WorkerPool

log = logging.getLogger(__name__)


def log_candidates(
    decision: Decision, snapshot: DecisionSnapshot, worker_pool: WorkerPool, active: ActiveLoad
) -> None:
    """Log the cost of every candidate as Dynamo's router guide shows it, and the choice."""
    weights = snapshot.params.weights
    for slot, cost in snapshot.costs.items():
        worker_id, _ = worker_pool.owners[slot]
        breakdown = snapshot.breakdown(slot, active.load(slot)[2])
        cached = snapshot.cached_blocks.effective(weights, slot)
        log.debug(formula(worker_id, weights.prefill_scale, cost, breakdown, cached))
    log.debug("[ROUTING] Best: worker_%s dp_rank=%d with %d/%d blocks overlap", *decision)


def log_selected(
    request_id: str, decision: Decision, snapshot: DecisionSnapshot, worker_type: str
) -> None:
    """Log the choice: one text line, with the same values as fields where the log is JSON."""
    assert snapshot.chosen is not None, "a decision was made"
    tiers = snapshot.cached_blocks.of(snapshot.chosen)
    fields = {
        "router_mode": "kv",
        "request_id": request_id,
        "worker_id": decision.worker_id,
        "worker_type": worker_type,
        "dp_rank": decision.dp_rank,
        "logit": round(snapshot.costs[snapshot.chosen], 3),
        "overlap_blocks": decision.overlap_blocks,
        "host_pinned_blocks": tiers.host,
        "disk_blocks": tiers.disk,
    }
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    log.info("Selected worker %s", text, extra=fields)
