"""The reference implementation of ``dynamo._fast.scoring``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Load", "Weights", "choose", "cost", "costs", "most", "probabilities"]


@dataclass(frozen=True)
class Weights:
    """The coefficients of the cost."""

    block_size: int
    prefill_scale: float = 1.0
    credit: float = 1.0
    decay: float = 0.0
    host: float = 0.75
    disk: float = 0.25
    shared: float = 0.0


@dataclass(frozen=True)
class Load:
    """What is known of one candidate when a request arrives."""

    prefill_tokens: int
    decode_blocks: int
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0


def cost(weights: Weights, isl_tokens: int, load: Load, least_prefill_tokens: int) -> float:
    """The cost of one candidate; ``least_prefill_tokens`` is the minimum over all of them."""
    raw_prefill_blocks = (load.prefill_tokens + isl_tokens) / weights.block_size
    excess_blocks = (load.prefill_tokens - least_prefill_tokens) / weights.block_size
    request_blocks = max(isl_tokens // weights.block_size, 1)
    decay = 1 / (1 + weights.decay * excess_blocks / request_blocks)
    credit_blocks = (
        weights.credit * decay * load.device
        + weights.host * load.host
        + weights.disk * load.disk
        + weights.shared * load.shared
    )
    adjusted_prefill_blocks = max(raw_prefill_blocks - credit_blocks, 0)
    return weights.prefill_scale * adjusted_prefill_blocks + load.decode_blocks


def costs(weights: Weights, isl_tokens: int, loads: Sequence[Load]) -> list[float]:
    """The cost of every candidate."""
    least = min((load.prefill_tokens for load in loads), default=0)
    return [cost(weights, isl_tokens, load, least) for load in loads]


def most(weights: Weights, loads: Sequence[Load]) -> float:
    """The most blocks that a candidate need not compute."""
    held = [one.device + weights.host * one.host + weights.disk * one.disk for one in loads]
    return max(held, default=0.0)


def probabilities(values: Sequence[float], temperature: float) -> list[float]:
    """How likely each candidate is chosen."""
    low, high = min(values), max(values)
    if (high - low) * temperature == 0:
        raw = [float(value == low) for value in values]
    else:
        raw = [math.exp(-(value - low) / ((high - low) * temperature)) for value in values]
    return [share / sum(raw) for share in raw]


def choose(values: Sequence[float], temperature: float, uniform: float) -> int:
    """The first index whose cumulative probability exceeds ``uniform``."""
    running = 0.0
    shares = probabilities(values, temperature)
    for index, share in enumerate(shares):
        running += share
        if running > uniform and share > 0:
            return index
    return max(index for index, share in enumerate(shares) if share > 0)
