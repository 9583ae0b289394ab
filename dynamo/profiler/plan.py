"""Which points a profile measures, from the limits of the engine. Pure.

Prefill points are prompt lengths. Decode points are pairs of context length and KV usage, turned
into a number of requests that decode at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.errors import ConfigError

__all__ = [
    "FULL",
    "QUICK",
    "DecodeStep",
    "Effort",
    "EngineLimits",
    "decode_steps",
    "prefill_lengths",
]

_SHORTEST_PROMPT = 64
_SHORTEST_CONTEXT = 256
_BATCHED_TOKENS = 2048
"""Assumed where the model card does not say how many tokens an iteration computes."""


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
