"""Why a prompt goes where it goes: one row per (worker, dp_rank), also for those left out.

Pure; nothing is booked. Spec 3.1, 3.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo._fast.scoring import Weights
from dynamo.errors import DynamoError
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.filters import exclusion
from dynamo.router.kv import KvPicker
from dynamo.router.survey import Survey

__all__ = ["Candidate", "Explanation", "explain", "table"]


class Candidate(msgspec.Struct, kw_only=True):
    """One rank. The load is what runs there without the prompt; ``decode_blocks`` has it added.

    ``cost`` is None for a rank that may not be chosen; ``excluded`` says why.
    """

    worker_id: int
    dp_rank: int
    overlap_blocks: int
    active_prefill_tokens: int
    active_decode_blocks: int
    active_requests: int
    credit_blocks: float
    prefill_blocks: float
    decode_blocks: int
    cost: float | None = None
    chosen: bool = False
    excluded: str = ""


class Explanation(msgspec.Struct, kw_only=True):
    """The candidates, cheapest first, then those left out; ``error`` if none could be chosen."""

    isl_tokens: int
    prompt_blocks: int
    block_size: int
    prefill_load_scale: float
    overlap_score_credit: float
    temperature: float
    candidates: list[Candidate]
    error: str = ""


def explain(
    picker: KvPicker,
    tokens: Tokens,
    routing: Routing | None = None,
    override: Mapping[str, Any] | None = None,
) -> Explanation:
    """What :meth:`KvPicker.pick` would weigh now. Raises InvalidArgument for a bad ``override``.

    Ties and temperature draw anew with each call, so a later pick may differ.
    """
    survey = picker.survey(tokens, routing, override)
    rows = [_row(picker, survey, routing, slot) for slot in picker.fleet.candidates]
    rows.sort(key=lambda row: (row.cost is None, row.cost or 0.0, not row.chosen, row.worker_id))
    weights = survey.terms.weights
    return Explanation(
        isl_tokens=survey.prompt.isl_tokens,
        prompt_blocks=survey.prompt.blocks,
        block_size=weights.block_size,
        prefill_load_scale=weights.prefill_scale,
        overlap_score_credit=weights.credit,
        temperature=survey.terms.temperature,
        candidates=rows,
        error=_text(survey.error),
    )


def table(explanation: Explanation) -> str:
    """The rows as text for people."""
    found = explanation
    lines = [
        f"prompt: {found.isl_tokens} tokens, {found.prompt_blocks} full blocks of "
        f"{found.block_size}; cost = {found.prefill_load_scale:g} * prefill blocks + decode blocks",
        f"{'':2}{'worker':>20}{'rank':>5}{'overlap':>8}{'credit':>8}{'active prefill':>15}"
        f"{'active decode':>14}{'requests':>9}{'prefill':>9}{'decode':>8}{'cost':>10}  note",
    ]
    for row in found.candidates:
        cost = "-" if row.cost is None else f"{row.cost:.3f}"
        lines.append(
            f"{'->' if row.chosen else '':2}{row.worker_id:>20}{row.dp_rank:>5}"
            f"{row.overlap_blocks:>8}{row.credit_blocks:>8.2f}{row.active_prefill_tokens:>15}"
            f"{row.active_decode_blocks:>14}{row.active_requests:>9}{row.prefill_blocks:>9.3f}"
            f"{row.decode_blocks:>8}{cost:>10}  {'chosen' if row.chosen else row.excluded}"
        )
    if found.error:
        lines.append(f"no worker: {found.error}")
    return "\n".join(lines)


def _row(picker: KvPicker, survey: Survey, routing: Routing | None, slot: int) -> Candidate:
    owner = picker.fleet.owners[slot]
    assert owner is not None, "a candidate slot has an owner"
    prefill_tokens, blocks, requests = picker.active.load(slot)
    overlap = survey.overlaps[slot]
    weights, prompt = survey.terms.weights, survey.prompt
    least = min((survey.prefill[one] for one in survey.slots), default=0)
    credit = _credit(weights, overlap, prefill_tokens - least, prompt.blocks)
    raw = (prefill_tokens + prompt.isl_tokens) / weights.block_size
    excluded = ""
    if slot not in survey.costs:
        member = picker.fleet.members[owner[0]]
        excluded = exclusion(picker.fleet, routing, member, owner[1]) or "bound to another worker"
    return Candidate(
        worker_id=owner[0],
        dp_rank=owner[1],
        overlap_blocks=overlap,
        active_prefill_tokens=prefill_tokens,
        active_decode_blocks=blocks,
        active_requests=requests,
        credit_blocks=credit,
        prefill_blocks=max(raw - credit, 0.0),
        decode_blocks=survey.decode[slot],
        cost=survey.costs.get(slot),
        chosen=slot == survey.chosen,
        excluded=excluded,
    )


def _credit(weights: Weights, overlap: int, excess_tokens: int, prompt_blocks: int) -> float:
    excess = weights.decay * excess_tokens / weights.block_size / max(prompt_blocks, 1)
    return weights.credit * overlap / (1 + excess) if overlap else 0.0


def _text(error: DynamoError | None) -> str:
    return "" if error is None else error.message
