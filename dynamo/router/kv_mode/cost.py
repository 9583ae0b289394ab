"""The parameters of the cost, the overrides of a request, and the cost split into its terms.

Pure. ``dynamo._fast.scoring`` computes the cost.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo._fast.scoring import Weights
from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument

_LARGEST = 1e12
"""Above this a cost could become infinite, and infinite costs cannot be compared."""


@dataclass(frozen=True)
class CostParams:
    """The parameters of one decision. ``request_weight`` is in blocks for each running request."""

    weights: Weights
    temperature: float = 0.0
    assume_kv_reuse: bool = True
    track_prefill_tokens: bool = True
    request_weight: float = 0.0
    duplicate_cost: float = 0.0


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
    )


def overridden(params: CostParams, override: Mapping[str, Any]) -> CostParams:
    """Return ``params`` with a request's ``router_config_override``; unknown keys are ignored.

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
    )


class TierCounts(NamedTuple):
    """The blocks of a prompt that one rank can use. ``device`` counts from the start of the prompt,
    ``host`` continues behind it, and ``disk`` behind both; ``shared`` are all shared blocks that
    the device does not have, at any position."""

    device: int
    host: int = 0
    disk: int = 0
    shared: int = 0


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


def effective_blocks(weights: Weights, tiers: TierCounts) -> float:
    """Blocks that need not be computed; those below the device count by the weight of their tier.

    A block in host memory or on disk must first be loaded, which costs part of computing it.
    """
    return tiers.device + weights.host * tiers.host + weights.disk * tiers.disk


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
    for place, slot in enumerate(slots):
        costs[place] += weight * load(slot)[2]


def duplicate_price(params: CostParams, best_overlap: float, prompt_blocks: int) -> float:
    """The price of each duplicated block, in blocks of prefill."""
    return params.duplicate_cost * best_overlap / max(prompt_blocks, 1)


def formula(
    worker_id: int, scale: float, cost: float, found: CostBreakdown, cached_blocks: float
) -> str:
    """Return one candidate's cost as Dynamo's router guide shows it.

    Running requests and the factor of taints appear only where they change the cost.
    """
    summed = f"{scale:.1f} * {found.prefill_blocks:.3f} + {found.decode_blocks:.1f}"
    plain = scale * found.prefill_blocks + found.decode_blocks + found.request_blocks
    if found.request_blocks:
        summed += f" + {found.request_blocks:.1f}"
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
