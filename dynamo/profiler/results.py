"""What a profile measured, and the thresholds that follow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

__all__ = [
    "DecodeSample",
    "PrefillSample",
    "ProfileResult",
    "ThresholdAdvice",
    "decode_advice",
    "prefill_advice",
]

_LOWEST_QUEUE = 0.1
_LOWEST_KV = 0.1


class PrefillSample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt at a time: its time to first token, and prompt tokens per second and GPU."""

    isl: int
    ttft_ms: float
    tokens_per_s_per_gpu: float


class DecodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """``concurrency`` requests that all decode: time between tokens, tokens per second and GPU.

    ``context_tokens`` is their mean length in the middle of the measurement, prompt and output.
    """

    concurrency: int
    context_tokens: float
    kv_usage: float
    itl_ms: float
    tokens_per_s_per_gpu: float


class ThresholdAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the load policy for one pool, and why."""

    scale_up: float
    scale_down: float
    reason: str


class ProfileResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The profile of one service, or of a prefill and a decode service of the same model."""

    model: str
    services: list[str]
    gpus_per_worker: list[float]
    directory: str
    max_kv_tokens: int | None = None
    prefill: list[PrefillSample] = []
    decode: list[DecodeSample] = []
    skipped: list[str] = []
    prefill_queue: ThresholdAdvice | None = None
    decode_kv: ThresholdAdvice | None = None


def prefill_advice(
    points: Sequence[PrefillSample], isl: int, target_ms: float
) -> ThresholdAdvice | None:
    """Return thresholds of the prefill queue for prompts of ``isl`` tokens; None without points.

    A queue of n requests per slot makes the wait n TTFTs long, so ``target / ttft - 1`` of them fit
    into the target. Scale up at 1.2 times that sum, down at 0.8.
    """
    if not points:
        return None
    ttft_ms = _ttft(points, isl)
    fits = target_ms / ttft_ms
    reason = f"a prompt of {isl} tokens takes {ttft_ms:.0f} ms, the target is {target_ms:g} ms"
    if fits < 1:
        reason += ": no number of workers meets it; use faster workers or shorter prompts"
    return ThresholdAdvice(
        scale_up=round(max(_LOWEST_QUEUE, 1.2 * fits - 1), 3),
        scale_down=round(max(_LOWEST_QUEUE, 0.8 * fits - 1), 3),
        reason=reason,
    )


def decode_advice(
    points: Sequence[DecodeSample], context_tokens: float, target_ms: float
) -> ThresholdAdvice | None:
    """Return thresholds of the KV load for sequences of ``context_tokens``; None without points.

    The point with the most tokens per second within the target, 20 points around its KV usage.
    """
    if not points:
        return None
    context = min((p.context_tokens for p in points), key=lambda c: abs(c - context_tokens))
    near = [p for p in points if abs(p.context_tokens - context) <= 0.15 * context]
    within = [point for point in near if point.itl_ms <= target_ms]
    if within:
        best = max(within, key=lambda point: point.tokens_per_s_per_gpu)
        reason = f"{best.tokens_per_s_per_gpu:.0f} tokens/s per GPU within {target_ms:g} ms"
    else:
        best = min(near, key=lambda point: point.itl_ms)
        reason = f"no point meets {target_ms:g} ms; the fastest takes {best.itl_ms:.1f} ms"
    return ThresholdAdvice(
        scale_up=round(min(1.0, best.kv_usage + 0.2), 3),
        scale_down=round(max(_LOWEST_KV, best.kv_usage - 0.2), 3),
        reason=f"{reason}, at KV load {best.kv_usage:.2f} and {best.context_tokens:.0f} tokens",
    )


def _ttft(points: Sequence[PrefillSample], isl: int) -> float:
    """Interpolate linearly; beyond the measured lengths, scale the nearest by its length."""
    ordered = sorted(points, key=lambda point: point.isl)
    for low, high in pairwise(ordered):
        if low.isl <= isl <= high.isl:
            share = (isl - low.isl) / (high.isl - low.isl)
            return low.ttft_ms + share * (high.ttft_ms - low.ttft_ms)
    end = ordered[0] if isl < ordered[0].isl else ordered[-1]
    return end.ttft_ms * max(1.0, isl / end.isl)
