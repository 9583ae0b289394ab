"""The points of a profile: which are measured, the thresholds that follow, and their plots.

Prefill points are prompt lengths. Decode points are pairs of context length and KV usage, turned
into a number of requests that decode at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from dynamo.errors import ConfigError
from dynamo.planner.capacity.interpolation import load_library

_LOWEST_QUEUE = 0.1
_LOWEST_KV = 0.1
_SHORTEST_PROMPT = 64
_SHORTEST_CONTEXT = 256
_BATCHED_TOKENS = 2048
"""Assumed where the model card does not say how many tokens an iteration computes."""
_SAME_CONTEXT = 0.15


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How many points are measured, and how long each of them.

    ``window`` is the number of tokens of each request over which decoding is measured, ``settle``
    those before it.
    """

    lengths: int
    repeats: int
    contexts: int
    usages: tuple[float, ...]
    window: int
    settle: int = 2


FULL = Effort(
    lengths=10, repeats=3, contexts=5, usages=(0.02, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9), window=40
)


QUICK = Effort(lengths=5, repeats=1, contexts=3, usages=(0.05, 0.3, 0.6, 0.9), window=16)


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What the model card says: the longest sequence, the KV cache, the size of a batch."""

    context_tokens: int
    kv_tokens: int
    max_seqs: int | None = None
    batched_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """``concurrency`` requests with prompts of ``isl`` tokens, which decode at the same time.

    ``osl`` is what they may generate at most.
    """

    concurrency: int
    isl: int
    osl: int


def prefill_lengths(limits: EngineLimits, effort: Effort, longest: int | None) -> tuple[int, ...]:
    """Return ascending prompt lengths. Raises ConfigError if ``longest`` does not fit.

    The distance between two of them grows with the length, because attention makes long prompts
    more than proportionally expensive only when they are long.
    """
    room = min(limits.context_tokens - 1, int(0.9 * limits.kv_tokens))
    if longest is not None and longest > room:
        raise ConfigError(
            f"--max-isl {longest} does not fit: the worker takes prompts of at most {room} tokens"
        )
    return _spaced(_SHORTEST_PROMPT, longest or room, effort.lengths)


def decode_steps(
    limits: EngineLimits, effort: Effort, longest: int | None, most: int
) -> tuple[DecodeStep, ...]:
    """Return the steps, by context length and then by concurrency.

    ``most`` bounds the concurrency. A step whose requests would not fit into the KV cache together
    until its measurement has ended is left out.
    """
    margin = effort.window + effort.settle
    room = min(limits.context_tokens, int(0.9 * limits.kv_tokens)) - 2 * margin
    if room <= _SHORTEST_PROMPT:
        raise ConfigError(
            f"the worker's context of {limits.context_tokens} tokens (KV cache {limits.kv_tokens}) "
            f"is too short to measure decoding, which takes {2 * margin} tokens of each request"
        )
    contexts = _spaced(_SHORTEST_CONTEXT, min(longest or room, room), effort.contexts)
    most = min(most, limits.max_seqs or most)
    return tuple(step for isl in contexts for step in _steps_of(limits, effort, isl, most))


def _steps_of(limits: EngineLimits, effort: Effort, isl: int, most: int) -> Sequence[DecodeStep]:
    wanted = [round(share * limits.kv_tokens / isl) for share in effort.usages]
    steps = []
    for concurrency in sorted({min(most, max(1, count)) for count in wanted}):
        # While the last prompt is computed, the first request already generates.
        iterations = -(-concurrency * isl // (limits.batched_tokens or _BATCHED_TOKENS))
        generated = iterations + effort.settle + effort.window
        if concurrency * (isl + generated) > 0.97 * limits.kv_tokens and concurrency > 1:
            concurrency = max(1, int(0.97 * limits.kv_tokens / (isl + generated)))
        osl = min(limits.context_tokens, limits.kv_tokens) - isl
        step = DecodeStep(concurrency=concurrency, isl=isl, osl=osl)
        if step not in steps:
            steps.append(step)
    return steps


def _spaced(first: int, last: int, count: int) -> tuple[int, ...]:
    """Return up to ``count`` whole numbers from ``first`` to ``last`` at a constant ratio."""
    if last <= first:
        return (last,)
    ratio = (last / first) ** (1 / (count - 1))
    return tuple(sorted({*(round(first * ratio**n) for n in range(count - 1)), last}))


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
    """The profile of one service, or of a prefill and a decode service of the same model.

    ``start_s`` is the time from a worker's start until it serves, ``wake_s`` that from its sleep;
    of two services the longer one.
    """

    model: str
    services: list[str]
    gpus_per_worker: list[float]
    directory: str
    max_kv_tokens: int | None = None
    start_s: float | None = None
    wake_s: float | None = None
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


def profile_figure() -> Any:
    """Return the class of the figures. Raises ConfigError without matplotlib."""
    return load_library("matplotlib.figure", "plotting", "--no-plots").Figure


def draw_profile(result: ProfileResult, directory: Path) -> list[Path]:
    """Write ``prefill.png`` and ``decode.png`` into ``directory``; return their paths."""
    drawn = {"prefill": _prefill(result), "decode": _decode(result)}
    paths = []
    for name, figure in drawn.items():
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _prefill(result: ProfileResult) -> Any:
    figure, (left, right) = _panels(result, "prefill, one prompt at a time")
    isl = [point.isl for point in result.prefill]
    left.plot(isl, [point.ttft_ms for point in result.prefill], marker="o")
    right.plot(isl, [point.tokens_per_s_per_gpu for point in result.prefill], marker="o")
    for axes, label in ((left, "TTFT (ms)"), (right, "prompt tokens/s per GPU")):
        axes.set_xlabel("prompt length (tokens)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)  # after plotting: it ends the automatic limits
    return figure


def _decode(result: ProfileResult) -> Any:
    figure, (left, right) = _panels(result, "decode, by context length")
    for context, points in _by_context(result.decode):
        usage = [point.kv_usage for point in points]
        label = f"{context:.0f} tokens"
        left.plot(usage, [point.itl_ms for point in points], marker="o", label=label)
        right.plot(usage, [p.tokens_per_s_per_gpu for p in points], marker="o", label=label)
    for axes, label in ((left, "ITL (ms)"), (right, "output tokens/s per GPU")):
        axes.set_xlabel("KV cache in use")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)  # after plotting: it ends the automatic limits
        axes.legend()
    return figure


def _panels(result: ProfileResult, what: str) -> tuple[Any, Any]:
    figure = profile_figure()(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(f"{result.model} ({', '.join(result.services)}): {what}")
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _by_context(points: Sequence[DecodeSample]) -> list[tuple[float, list[DecodeSample]]]:
    """Group points whose context lengths are nearly the same, each group by KV usage."""
    groups: list[tuple[float, list[DecodeSample]]] = []
    for point in sorted(points, key=lambda point: point.context_tokens):
        if groups and point.context_tokens <= groups[-1][0] * (1 + _SAME_CONTEXT):
            groups[-1][1].append(point)
        else:
            groups.append((point.context_tokens, [point]))
    return [(context, sorted(group, key=lambda p: p.kv_usage)) for context, group in groups]
