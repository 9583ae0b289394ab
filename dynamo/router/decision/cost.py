"""The cost of the kv mode: parameters, overrides of a request, terms, and the price of duplicates.

Pure. ``dynamo._fast.scoring`` computes the cost.

A duplicate costs more than its work: a block that is cached twice takes the space of another one
for as long as it stays, and Dynamo's cost includes only the work of this prompt. The price grows
with the prefix, and demand does not lower it: alone, it would queue thousands of prompts of one hot
document at a single worker. So copies follow the ski-rental rule. Queueing is the rent, the copy is
the purchase: once the prompts of a prefix have paid enough rent, the next one makes a copy.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from dynamo._fast.scoring import Weights
from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument
from dynamo.router.caches.prompt import CachedBlocks, HashedPrompt, TierCounts

_LARGEST = 1e12
"""Above this a cost could become infinite, and infinite costs cannot be compared."""
_LOSS_PER_PRICE = 0.25
"""Share of a copy's price that the prompts of a prefix must have lost before a copy is free.

Less than 1 because the queue keeps growing while the copy is computed. 0.1 to 0.5 behave alike
(docs/routing/measurements.md).
"""
_LOSS_HALF_LIFE_S = 10.0
"""A loss counts half after this time: a copy pays off only for a prefix that is in demand now."""
_MAX_PREFIXES = 4096
"""Prefixes with a recorded loss, about 250 bytes each. The least recently used one is dropped."""
_WEIGHTS = (
    "prefill_load_scale",
    "overlap_score_credit",
    "overlap_score_weight",
    "decode_active_request_weight",
    "shared_cache_multiplier",
)
_MAX_COPIES_IN_PROGRESS = 64
"""Bounds the search of each decision; no free copy is offered above it."""


@dataclass(frozen=True)
class CostParams:
    """The parameters of one decision. ``request_weight`` is in blocks for each running request.

    ``in_seconds``: the cost is that of :mod:`dynamo.router.decision.seconds`, which has no weights.
    """

    weights: Weights
    temperature: float = 0.0
    assume_kv_reuse: bool = True
    track_prefill_tokens: bool = True
    request_weight: float = 0.0
    duplicate_cost: float = 0.0
    in_seconds: bool = False


def cost_params(settings: RouterSettings, block_size: int) -> CostParams:
    """Return the parameters in the settings."""
    # The legacy weight 0 means "ignore caches": it removes the credit, not only the prefill cost.
    ignores_overlap = settings.overlap_score_weight == 0
    weights = Weights(
        block_size,
        prefill_scale=settings.prefill_weight if settings.track_prefill_tokens else 0.0,
        credit=0.0 if ignores_overlap else settings.overlap_score_credit,
        decay=settings.overlap_score_credit_decay,
        host=settings.host_cache_hit_weight,
        disk=settings.disk_cache_hit_weight,
        shared=settings.shared_cache_multiplier or 0.0,
    )
    return CostParams(
        weights,
        settings.temperature,
        settings.assume_kv_reuse,
        settings.track_prefill_tokens,
        settings.decode_active_request_weight,
        settings.duplicate_cost,
        settings.in_seconds,
    )


def overridden(params: CostParams, override: Mapping[str, Any]) -> CostParams:
    """Return ``params`` with a request's ``router_config_override``; unknown keys are ignored.

    With a weight in it, this request's cost is in blocks.

    Raises InvalidArgument that names the key when a value cannot be used.
    """
    old = params.weights
    scale = _number(override, "prefill_load_scale", old.prefill_scale)
    credit = _number(override, "overlap_score_credit", old.credit)
    weight = _number(override, "overlap_score_weight", None)
    if weight is not None:
        scale = weight
        credit = 0.0 if weight == 0 else credit
    temperature = _number(override, "router_temperature", params.temperature)
    requests = _number(override, "decode_active_request_weight", params.request_weight)
    for name, value in (
        ("prefill_load_scale", scale),
        ("router_temperature", temperature),
        ("decode_active_request_weight", requests),
    ):
        if value < 0:
            raise InvalidArgument(f"{name} must be finite and non-negative")
    track_prefill = _flag(override, "track_prefill_tokens", params.track_prefill_tokens)
    return CostParams(
        Weights(
            old.block_size,
            prefill_scale=scale if track_prefill else 0.0,
            credit=credit,
            decay=old.decay,
            host=old.host,
            disk=old.disk,
            shared=_number(override, "shared_cache_multiplier", old.shared),
        ),
        temperature,
        _flag(override, "assume_kv_reuse", params.assume_kv_reuse),
        track_prefill,
        requests,
        params.duplicate_cost,
        params.in_seconds and all(override.get(key) is None for key in _WEIGHTS),
    )


class Load(NamedTuple):
    """The load of one rank. ``excess_tokens`` of its active prefill exceed that of the least loaded
    candidate; ``decode_blocks`` includes the prompt."""

    prefill_tokens: int
    excess_tokens: int
    decode_blocks: int
    requests: int


class CostBreakdown(NamedTuple):
    """The terms of a cost: ``prefill_scale * prefill_blocks + decode_blocks + request_blocks``,
    times the factor of preferred taints. All in blocks."""

    raw_prefill_blocks: float
    credit_decay: float
    credit_blocks: float
    prefill_blocks: float
    decode_blocks: int
    request_blocks: float


def breakdown(params: CostParams, isl_tokens: int, tiers: TierCounts, load: Load) -> CostBreakdown:
    """Return the terms of one rank's cost, as ``dynamo._fast.scoring.costs`` adds them."""
    weights = params.weights
    size = weights.block_size
    # In prompts of this length: at a decay of 1, one prompt more than the least halves the credit.
    excess = weights.decay * load.excess_tokens / size / max(isl_tokens // size, 1)
    decay = 1.0 / (1.0 + excess)
    credit = (
        weights.credit * decay * tiers.device
        + weights.host * tiers.host
        + weights.disk * tiers.disk
        + weights.shared * tiers.shared
    )
    raw = (load.prefill_tokens + isl_tokens) / size
    return CostBreakdown(
        raw,
        decay,
        credit,
        max(raw - credit, 0.0),
        load.decode_blocks,
        params.request_weight * load.requests,
    )


def cached_tokens(weights: Weights, blocks: float) -> int:
    """Return the prompt tokens in effective ``blocks``: they are no prefill load.

    Rounds half up, as Dynamo does: ``round`` would round half to even.
    """
    return int(blocks * weights.block_size + 0.5)


def add_requests(
    weight: float,
    slots: array[int],
    costs: array[float],
    load: Callable[[int], tuple[int, int, int]],
) -> None:
    """Add ``weight`` blocks to the cost of each slot for each of its running requests."""
    for index, slot in enumerate(slots):
        costs[index] += weight * load(slot)[2]


def duplicate_price(params: CostParams, best_overlap: float, prompt_blocks: int) -> float:
    """The price of each duplicated block, in blocks of prefill."""
    return params.duplicate_cost * best_overlap / max(prompt_blocks, 1)


def formula(
    worker_id: int, scale: float, cost: float, terms: CostBreakdown, cached_blocks: float
) -> str:
    """Return one candidate's cost as Dynamo's router guide shows it.

    Running requests and the factor of taints appear only where they change the cost.
    """
    summed = f"{scale:.1f} * {terms.prefill_blocks:.3f} + {terms.decode_blocks:.1f}"
    plain = scale * terms.prefill_blocks + terms.decode_blocks + terms.request_blocks
    if terms.request_blocks:
        summed += f" + {terms.request_blocks:.1f}"
    # Only taints multiply a cost; a smaller difference is rounding of the compiled sum.
    if plain and abs(cost - plain) > 1e-9 * plain:
        summed = f"({summed}) * {cost / plain:.3f}"
    return (
        f"Formula for worker_{worker_id}: {cost:.3f} = {summed} (cached_blocks: {cached_blocks:g})"
    )


def _number(override: Mapping[str, Any], key: str, default: Any) -> Any:
    value = override.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{key} must be a number, got {value!r}")
    if not math.isfinite(value) or abs(value) > _LARGEST:
        limit = "finite and non-negative" if key == "router_temperature" else "finite"
        raise InvalidArgument(f"{key} must be {limit}")
    return float(value)


def _flag(override: Mapping[str, Any], key: str, default: bool) -> bool:
    value = override.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidArgument(f"{key} must be true or false, got {value!r}")
    return value


class CopyOffer(NamedTuple):
    """The best place for another copy of a prompt's cached prefix of ``depth`` blocks.

    ``loss``: the cost of queueing instead of running on slot ``target`` as if it had the prefix,
    summed over this prompt and, decayed, those before it. ``free``: those before it have lost
    enough, so the copy has no price.
    """

    prefix: int
    depth: int
    target: int
    loss: float
    free: bool


class CopyPolicy:
    """Prices copies of cached prefixes, and waives the price for prefixes that are in demand.

    Deterministic; time is a parameter. Stores at most ``_MAX_PREFIXES`` losses.
    """

    def __init__(self) -> None:
        self._losses: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._in_progress: dict[str, tuple[int, int, int]] = {}

    def add_prices(
        self,
        params: CostParams,
        slots: array[int],
        cached: CachedBlocks,
        prompt: HashedPrompt,
        costs: array[float],
    ) -> CopyOffer | None:
        """Raise ``costs[i]`` by the blocks that ``slots[i]`` lacks of the prompt's best overlap.

        Each such block costs ``duplicate_cost`` blocks of prefill, times the share of the prompt
        that is cached at best: a prompt that is mostly new goes where the load is least. A free
        copy gives its target the cost that it would have with the prefix. Returns None where no
        other slot would be cheaper even with a copy. Records nothing. O(slots).
        """
        best_overlap, now_s = prompt.best_overlap, prompt.begun_s
        weights = params.weights
        price = weights.prefill_scale * duplicate_price(params, best_overlap, prompt.blocks)
        if not price:
            return None
        # ``least`` is the cost of the cheapest slot, ``unpriced`` the same without its price;
        # ``with_copy`` is the least cost that a slot without the prefix would have with it.
        least = unpriced = with_copy = inf
        target, lacking = -1, 0.0
        for index, slot in enumerate(slots):
            cost = priced = costs[index]
            missing = best_overlap - cached.effective(weights, slot)
            if missing > 0:
                priced = costs[index] = cost + price * missing
                if cost - weights.prefill_scale * missing < with_copy:
                    with_copy = cost - weights.prefill_scale * missing
                    target, lacking = index, missing
            if priced < least:
                least, unpriced = priced, cost
        if unpriced <= with_copy or not prompt.chained:
            return None
        depth = min(max(int(best_overlap), 1), len(prompt.chained))
        prefix = prompt.chained[depth - 1]
        lost, at_s = self._losses.get(prefix, (0.0, now_s))
        lost *= 0.5 ** ((now_s - at_s) / _LOSS_HALF_LIFE_S)
        free = lost >= _LOSS_PER_PRICE * price * lacking and self._has_room()
        if free:
            costs[target] = max(with_copy, 0.0)
        return CopyOffer(prefix, depth, slots[target], lost + unpriced - with_copy, free)

    def routed(self, request_id: str, slot: int, offer: CopyOffer, now_s: float) -> None:
        """Record the chosen slot of a prompt with an ``offer``. O(1)."""
        losses = self._losses
        if slot == offer.target:
            # The copy is made: the next one has to be earned by new losses.
            losses.pop(offer.prefix, None)
            if self._has_room():
                self._in_progress[request_id] = offer.prefix, offer.depth, slot
            return
        losses[offer.prefix] = offer.loss, now_s
        losses.move_to_end(offer.prefix)
        if len(losses) > _MAX_PREFIXES:
            losses.popitem(last=False)

    def in_progress(self, chained: array[int]) -> list[tuple[int, int]]:
        """Slot and blocks of each copy of a prefix of this prompt that is being computed.

        These slots count as having the prefix: the next prompts queue there, or make another copy.
        """
        if not self._in_progress:
            return []
        blocks = len(chained)
        return [
            (slot, depth)
            for prefix, depth, slot in self._in_progress.values()
            if depth <= blocks and chained[depth - 1] == prefix
        ]

    def ended(self, request_id: str) -> None:
        """Forget the copy of a request whose prefill, or which itself, has ended."""
        self._in_progress.pop(request_id, None)

    def drop_slot(self, slot: int) -> None:
        """Forget the copies on the slot of a removed worker."""
        copies = self._in_progress
        self._in_progress = {name: copy for name, copy in copies.items() if copy[2] != slot}

    def _has_room(self) -> bool:
        return len(self._in_progress) < _MAX_COPIES_IN_PROGRESS
