"""What the log says of a decision: who was chosen (INFO), and what everybody would cost (DEBUG).

A line a request costs more than the decision, so it is heard only when asked for:
``DYN_LOG=info,dynamo.router.decision_log=info`` (or ``=debug``). Spec 3.4.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynamo.router.cost import TierCounts, formula
from dynamo.router.decision_snapshot import DecisionSnapshot
from dynamo.router.load.active import ActiveLoad
from dynamo.router.picker import Decision

__all__ = ["log", "log_candidates", "log_selected"]

log = logging.getLogger(__name__)

Owners = Sequence[tuple[int, int] | None]


def log_candidates(
    snapshot: DecisionSnapshot, owners: Owners, active: ActiveLoad, decision: Decision
) -> None:
    """The cost of every candidate as the router guide shows it, and the choice."""
    weights = snapshot.params.weights
    for slot, cost in snapshot.costs.items():
        owner = owners[slot]
        assert owner is not None, "a candidate slot has an owner"
        found = snapshot.parts(slot, active.load(slot)[2])
        cached = snapshot.held.effective(weights, slot)
        log.debug(formula(owner[0], weights.prefill_scale, cost, found, cached))
    log.debug("[ROUTING] Best: worker_%s dp_rank=%d with %d/%d blocks overlap", *decision)


def log_selected(
    request_id: str, decision: Decision, held: TierCounts, cost: float, worker_type: str
) -> None:
    """One line, and the same as fields where the log is JSON."""
    fields = {
        "router_mode": "kv",
        "request_id": request_id,
        "worker_id": decision.worker_id,
        "worker_type": worker_type,
        "dp_rank": decision.dp_rank,
        "logit": round(cost, 3),
        "overlap_blocks": decision.overlap_blocks,
        "host_pinned_blocks": held.host,
        "disk_blocks": held.disk,
    }
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    log.info("Selected worker %s", text, extra=fields)
