"""The explanation of a decision: one row per (worker, dp_rank), also for excluded ones.

Pure; books nothing.

The inputs and the outcome of one decision of the kv mode, for logs and tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import msgspec

from dynamo.errors import DynamoError
from dynamo.protocols.engine import Routing
from dynamo.router.caches.cached_blocks import CachedBlocks
from dynamo.router.eligibility.filters import exclusion
from dynamo.router.kv_mode.cost import CostBreakdown, CostParams, Load, breakdown
from dynamo.router.kv_mode.duplicates import duplicate_price
from dynamo.router.kv_mode.prompt import HashedPrompt
from dynamo.router.load.active import ActiveLoad
from dynamo.router.worker_pool import WorkerPool


class DecisionSnapshot(NamedTuple):
    """Columns by slot; ``costs`` of the eligible ``slots`` only.

    ``chosen`` is None when ``error`` gives the reason why no slot was chosen. ``free_copy`` is the
    slot that may compute what others have cached without the price of a copy.
    """

    prompt: HashedPrompt
    params: CostParams
    slots: array[int]
    cached_blocks: CachedBlocks
    prefill: array[int]
    decode: array[int]
    costs: dict[int, float]
    chosen: int | None = None
    error: DynamoError | None = None
    free_copy: int | None = None

    def breakdown(self, slot: int, requests: int) -> CostBreakdown:
        """Return the terms of the cost of ``slot`` with ``requests`` running there. O(slots).

        Its prefill blocks include the price of duplicates.
        """
        tokens = self.prefill[slot]
        least = min((self.prefill[one] for one in self.slots), default=tokens)
        load = Load(tokens, max(tokens - least, 0), self.decode[slot], requests)
        cached = self.cached_blocks
        plain = breakdown(self.params, self.prompt.isl_tokens, cached.of(slot), load)
        if not self.params.duplicate_cost or not self.slots:
            return plain
        weights = self.params.weights
        best = cached.best_overlap(weights, self.slots)
        lacking = max(best - cached.effective(weights, slot), 0.0)
        # A free copy counts as if the slot had the prefix already.
        copies = (
            -lacking
            if slot == self.free_copy
            else lacking * duplicate_price(self.params, best, self.prompt.blocks)
        )
        return plain._replace(prefill_blocks=plain.prefill_blocks + copies)


class Candidate(msgspec.Struct, kw_only=True):
    """One rank. The load excludes the prompt, except that ``decode_blocks`` includes it.

    ``overlap_blocks`` are on the device from the start of the prompt; ``host_pinned_blocks`` and
    then ``disk_blocks`` continue behind them; ``shared_blocks`` are those of the shared cache that
    the device does not have.

    ``cost`` is None for a rank that may not be chosen; ``excluded`` is the reason.
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
    cost: float | None = None
    chosen: bool = False
    excluded: str = ""


class Explanation(msgspec.Struct, kw_only=True):
    """The candidates, cheapest first, then the excluded ranks; ``error`` if none can be chosen.

    The prompt would be queued with ``queued_requests``. ``prefill`` is the table of the prefill
    workers if one of them would compute the prompt first; ``stays`` is the reason why the decode
    worker computes it although prefill workers exist: the prompt is ``short`` or ``cached``, or
    their ``queue`` is long.
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
    candidates: list[Candidate]
    queued_requests: int = 0
    error: str = ""
    stays: str = ""
    prefill: Explanation | None = None


def explain(
    snapshot: DecisionSnapshot,
    worker_pool: WorkerPool,
    active: ActiveLoad,
    routing: Routing | None,
    queued_requests: int = 0,
) -> Explanation:
    """Return the rows of ``snapshot``, taken for a request with ``routing``."""
    rows = [_row(snapshot, worker_pool, active, routing, slot) for slot in worker_pool.candidates]
    rows.sort(key=lambda row: (row.cost is None, row.cost or 0.0, not row.chosen, row.worker_id))
    weights = snapshot.params.weights
    return Explanation(
        isl_tokens=snapshot.prompt.isl_tokens,
        prompt_blocks=snapshot.prompt.blocks,
        block_size=weights.block_size,
        prefill_load_scale=weights.prefill_scale,
        overlap_score_credit=weights.credit,
        host_cache_hit_weight=weights.host,
        disk_cache_hit_weight=weights.disk,
        shared_cache_multiplier=weights.shared,
        decode_active_request_weight=snapshot.params.request_weight,
        duplicate_cost=snapshot.params.duplicate_cost,
        temperature=snapshot.params.temperature,
        candidates=rows,
        queued_requests=queued_requests,
        error=_text(snapshot.error),
    )


def table(explanation: Explanation) -> str:
    """Return the rows as text; columns of lower tiers only where a rank has blocks there.

    With prefill workers, their rows precede those of the decode workers.
    """
    found = explanation
    if found.prefill is not None:
        return "\n".join(
            ["prefill workers", *_lines(found.prefill), "decode workers", *_lines(found)]
        )
    return "\n".join(_lines(found))


def _lines(found: Explanation) -> list[str]:
    shown = [
        column for column in _COLUMNS if column.always or any(map(column.of, found.candidates))
    ]
    lines = [
        f"prompt: {found.isl_tokens} tokens, {found.prompt_blocks} full blocks of "
        f"{found.block_size}; {_formula(found)}",
        "  " + "".join(f"{column.title:>{column.width}}" for column in shown) + "  note",
    ]
    for row in found.candidates:
        cells = "".join(f"{column.text(row):>{column.width}}" for column in shown)
        note = ", ".join(filter(None, ["chosen" if row.chosen else "", row.excluded]))
        lines.append(f"{'->' if row.chosen else '':2}{cells}  {note}")
    if found.queued_requests:
        lines.append(f"{found.queued_requests} requests are queued")
    if found.stays:
        lines.append(f"no prefill worker: {_STAYS.get(found.stays, found.stays)}")
    if found.error:
        lines.append(f"no worker: {found.error}")
    return lines


_STAYS = {
    "short": "the prompt is short",
    "cached": "the decode worker has most of it cached",
    "queue": "too many requests are queued for one",
}


class _Column(NamedTuple):
    title: str
    width: int
    of: Callable[[Candidate], float | None]
    form: str = "d"
    always: bool = True

    def text(self, row: Candidate) -> str:
        value = self.of(row)
        return "-" if value is None else format(value, self.form)


_COLUMNS = (
    _Column("worker", 20, attrgetter("worker_id"), "x"),
    _Column("rank", 5, attrgetter("dp_rank")),
    _Column("overlap", 8, attrgetter("overlap_blocks")),
    _Column("host", 6, attrgetter("host_pinned_blocks"), always=False),
    _Column("disk", 6, attrgetter("disk_blocks"), always=False),
    _Column("shared", 7, attrgetter("shared_blocks"), always=False),
    _Column("credit", 8, attrgetter("credit_blocks"), ".2f"),
    _Column("active prefill", 15, attrgetter("active_prefill_tokens")),
    _Column("active decode", 14, attrgetter("active_decode_blocks")),
    _Column("requests", 9, attrgetter("active_requests")),
    _Column("prefill", 9, attrgetter("prefill_blocks"), ".3f"),
    _Column("decode", 8, attrgetter("decode_blocks")),
    _Column("cost", 10, attrgetter("cost"), ".3f"),
)


def _formula(found: Explanation) -> str:
    text = f"cost = {found.prefill_load_scale:g} * prefill blocks + decode blocks"
    if found.decode_active_request_weight:
        text += f" + {found.decode_active_request_weight:g} * requests"
    if found.duplicate_cost:
        text += (
            f"; a block that another worker has cached counts as {found.duplicate_cost:g} more, "
        )
        text += "times the cached share"
    return text


def _row(
    snapshot: DecisionSnapshot,
    worker_pool: WorkerPool,
    active: ActiveLoad,
    routing: Routing | None,
    slot: int,
) -> Candidate:
    owner = worker_pool.owners[slot]
    _, blocks, requests = active.load(slot)
    tiers = snapshot.cached_blocks.of(slot)
    terms = snapshot.breakdown(slot, requests)
    excluded = ""
    if slot not in snapshot.costs:
        member = worker_pool.members[owner[0]]
        excluded = exclusion(worker_pool, routing, member, owner[1]) or "bound to another worker"
    return Candidate(
        worker_id=owner[0],
        dp_rank=owner[1],
        overlap_blocks=tiers.device,
        host_pinned_blocks=tiers.host,
        disk_blocks=tiers.disk,
        shared_blocks=tiers.shared,
        active_prefill_tokens=snapshot.prefill[slot],
        active_decode_blocks=blocks,
        active_requests=requests,
        raw_prefill_blocks=terms.raw_prefill_blocks,
        credit_decay=terms.credit_decay,
        credit_blocks=terms.credit_blocks,
        prefill_blocks=terms.prefill_blocks,
        decode_blocks=terms.decode_blocks,
        request_blocks=terms.request_blocks,
        cost=snapshot.costs.get(slot),
        chosen=slot == snapshot.chosen,
        excluded=excluded,
    )


def _text(error: DynamoError | None) -> str:
    return "" if error is None else error.message
