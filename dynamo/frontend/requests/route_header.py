"""The response header ``x-dynamo-route``: why a request went to its worker, as one line of JSON.

Sent where the request has a header of the same name. Everyone who may use a model sees its own
worker, as in ``nvext.worker_id``; the other candidates show the load of other clients, so that they
are for operators. ``GET /v1/requests/{id}`` has the terms of the costs.
"""

from __future__ import annotations

import msgspec

from dynamo.protocols.status import RouteReceipt
from dynamo.router.explanations.receipt import DecisionInputs
from dynamo.router.picker import Decision

__all__ = ["ROUTE_HEADER", "route_header"]

ROUTE_HEADER = "x-dynamo-route"
_MOST = 8  # candidates: a header should have less than 1 KB


class _Candidate(msgspec.Struct, array_like=True):
    """One row of ``candidates``."""

    worker: str
    dp_rank: int
    overlap: float
    cost: float | None


class _Route(msgspec.Struct, omit_defaults=True):
    """The header. ``request`` is the id for ``dynamo explain``; ``cost`` is in blocks."""

    request: str
    worker: str
    dp_rank: int
    overlap: int
    blocks: int
    queued_ms: float
    mode: str = ""
    index: str = ""
    reason: str = ""
    cost: float | None = None
    prefill_worker: str = ""
    prefill_reason: str = ""
    candidates: list[_Candidate] = []


def route_header(
    request_id: str,
    decision: Decision,
    inputs: tuple[DecisionInputs | None, DecisionInputs | None],
    queued_s: float,
    to_operator: bool,
) -> tuple[str, str]:
    """Return name and value. ``inputs`` are those of the (decode) worker and the prefill worker;
    ``queued_s`` passed until the worker was chosen."""
    route = _Route(
        request_id,
        f"{decision.worker_id:x}",
        decision.dp_rank,
        decision.overlap_blocks,
        decision.prompt_blocks,
        round(queued_s * 1e3, 3),
    )
    chosen, prefill = (None if one is None else one.receipt() for one in inputs)
    if chosen is not None:
        route.mode, route.index, route.reason = chosen.mode, chosen.index, chosen.reason
        route.cost = next((one.cost for one in chosen.candidates if one.chosen), None)
        if to_operator:
            route.candidates = _rows(chosen)
    if prefill is not None:
        route.prefill_reason = prefill.reason
        route.prefill_worker = next((one.worker for one in prefill.candidates if one.chosen), "")
    return ROUTE_HEADER, msgspec.json.encode(route).decode()


def _rows(receipt: RouteReceipt) -> list[_Candidate]:
    eligible = [one for one in receipt.candidates if not one.excluded]
    return [
        _Candidate(one.worker, one.dp_rank, one.overlap_blocks, one.cost)
        for one in eligible[:_MOST]
    ]
