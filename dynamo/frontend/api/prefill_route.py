"""Which prefill worker a prompt would go to now, and why. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sized

from dynamo.frontend.disagg.prefill_request import DECODE_OVERRIDE, wanted_place
from dynamo.frontend.disagg.router import PrefillRouter
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.router.explain import Explanation, explain
from dynamo.router.kv import KvPicker

__all__ = ["explain_both"]

_NO_SLOT = "no free slot"


def explain_both(
    picker: KvPicker,
    prefill: PrefillRouter | None,
    request: PreprocessedRequest,
    routing: Routing | None,
    queued: Sized,
) -> Explanation:
    """The decode workers' table, with that of the prefill workers inside if the prompt would go to
    one first, or the reason why it would not. Raises InvalidArgument for a bad override."""
    override = request.router_config_override
    tokens = request.token_ids
    if prefill is None or not prefill.active:
        return explain(picker, tokens, routing, override, queued)
    stays = prefill.stays(tokens, routing)
    if stays:
        found = explain(picker, tokens, routing, override, queued)
        found.stays = stays
        return found
    found = explain(picker, tokens, routing, {**(override or {}), **DECODE_OVERRIDE}, queued)
    chooser = prefill.workers.picker
    if isinstance(chooser, KvPicker):
        inner = explain(chooser, tokens, wanted_place(routing), override, prefill.queue)
        found.prefill = _with_slots(inner, prefill)
    return found


def _with_slots(found: Explanation, prefill: PrefillRouter) -> Explanation:
    """``found`` as the line sees it: for the chosen one without a free slot the prompt would wait,
    without patience for any of those that have one."""
    free = prefill.queue.free_workers
    able = [row for row in found.candidates if row.cost is not None]
    for row in able:
        if row.worker_id not in free:
            row.excluded = _NO_SLOT
            row.chosen = row.chosen and prefill.patient
    ready = [row for row in able if not row.excluded]
    if ready and not any(row.chosen for row in able):
        ready[0].chosen = True  # they are in the order of their cost
    return found
