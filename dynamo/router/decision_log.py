"""Logs decisions: the chosen worker (INFO) and the cost of every candidate (DEBUG).

A log entry costs more than the decision, so these are off by default; ``DYN_LOG`` turns them on:
``DYN_LOG=info,dynamo.router.decision_log=info`` (or ``=debug``). Spec 3.4.
"""

from __future__ import annotations

import logging

from dynamo.router.cost import formula
from dynamo.router.decision_snapshot import DecisionSnapshot
from dynamo.router.load.active import ActiveLoad
from dynamo.router.metrics import DecisionMetrics
from dynamo.router.picker import Decision
from dynamo.router.worker_pool import WorkerPool

__all__ = ["log", "log_decision"]

log = logging.getLogger(__name__)


def log_decision(
    request_id: str | None,
    decision: Decision,
    snapshot: DecisionSnapshot,
    worker_pool: WorkerPool,
    active: ActiveLoad,
    metrics: DecisionMetrics | None,
) -> None:
    """Log what was weighed and, for a request that is booked, the choice."""
    if log.isEnabledFor(logging.DEBUG):
        _log_candidates(decision, snapshot, worker_pool, active)
    if request_id is not None:
        worker_type = "decode" if metrics is None else metrics.worker_type
        _log_selected(request_id, decision, snapshot, worker_type)


def _log_candidates(
    decision: Decision, snapshot: DecisionSnapshot, worker_pool: WorkerPool, active: ActiveLoad
) -> None:
    """The cost of every candidate as the router guide shows it, and the choice."""
    weights = snapshot.params.weights
    for slot, cost in snapshot.costs.items():
        owner = worker_pool.owners[slot]
        assert owner is not None, "a candidate slot has an owner"
        breakdown = snapshot.breakdown(slot, active.load(slot)[2])
        cached = snapshot.cached_blocks.effective(weights, slot)
        log.debug(formula(owner[0], weights.prefill_scale, cost, breakdown, cached))
    log.debug("[ROUTING] Best: worker_%s dp_rank=%d with %d/%d blocks overlap", *decision)


def _log_selected(
    request_id: str, decision: Decision, snapshot: DecisionSnapshot, worker_type: str
) -> None:
    """One text line, with the same values as fields where the log is JSON."""
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
