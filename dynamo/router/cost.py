"""What a router weighs: the terms of the cost, per-request overrides, and how to explain it.

Pure. The arithmetic itself is ``dynamo._fast.scoring``. Spec 3.1-3.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo._fast.scoring import Weights
from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument

__all__ = ["Terms", "formula", "overridden", "terms_of"]

_LARGEST = 1e12
"""Beyond this a cost could overflow and stop being comparable."""


@dataclass(frozen=True)
class Terms:
    """Everything that shapes one decision."""

    weights: Weights
    temperature: float = 0.0
    assume_kv_reuse: bool = True
    track_prefill_tokens: bool = True


def terms_of(settings: RouterSettings, block_size: int) -> Terms:
    """The terms that the settings ask for; weight 0 takes the credit away too. Spec 3.2."""
    ignores_overlap = settings.overlap_score_weight == 0
    weights = Weights(
        block_size,
        prefill_scale=settings.prefill_weight if settings.track_prefill_tokens else 0.0,
        credit=0.0 if ignores_overlap else settings.overlap_score_credit,
        decay=settings.overlap_score_credit_decay,
    )
    return Terms(
        weights, settings.temperature, settings.assume_kv_reuse, settings.track_prefill_tokens
    )


def overridden(terms: Terms, override: Mapping[str, Any]) -> Terms:
    """``terms`` with a request's ``router_config_override``; unknown keys are ignored.

    Raises InvalidArgument that names the key when a value cannot be used.
    """
    old = terms.weights
    scale = _number(override, "prefill_load_scale", old.prefill_scale)
    credit = _number(override, "overlap_score_credit", old.credit)
    weight = _number(override, "overlap_score_weight", None)
    if weight is not None:
        scale = weight
        credit = 0.0 if weight == 0 else credit
    temperature = _number(override, "router_temperature", terms.temperature)
    if scale < 0:
        raise InvalidArgument("prefill_load_scale must be finite and non-negative")
    if temperature < 0:
        raise InvalidArgument("router_temperature must be finite and non-negative")
    track_prefill = _flag(override, "track_prefill_tokens", terms.track_prefill_tokens)
    return Terms(
        Weights(
            old.block_size,
            prefill_scale=scale if track_prefill else 0.0,
            credit=credit,
            decay=old.decay,
            host=old.host,
            disk=old.disk,
        ),
        temperature,
        _flag(override, "assume_kv_reuse", terms.assume_kv_reuse),
        track_prefill,
    )


def formula(
    worker_id: int, weights: Weights, cost: float, decode_blocks: int, cached_blocks: int
) -> str:
    """One candidate's cost as the router guide shows it. Spec 3.4."""
    scale = weights.prefill_scale
    prefill_blocks = (cost - decode_blocks) / scale if scale else 0.0
    return (
        f"Formula for worker_{worker_id}: {cost:.3f} = {scale:.1f} * {prefill_blocks:.3f}"
        f" + {decode_blocks:.1f} (cached_blocks: {cached_blocks})"
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
