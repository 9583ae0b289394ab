"""What the SLA policy sizes pools for, and Dynamo's formulas. Pure.

Throughputs are per GPU, as the profile has them. With ``rate`` in requests per second:

    prefill = ceil(rate * isl * min(1, prefill correction) / throughput / GPUs of a worker)
    decode  = ceil(rate * osl / throughput at (ITL target / decode correction) / GPUs of a worker)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo.planner.capacity.model import DecodeCapacity, PrefillCapacity
from dynamo.planner.policies.budget import Workers

__all__ = ["Demand", "Sized", "backlog", "decode_workers", "prefill_workers"]

_ROUNDING = 1e-9

_UNREMARKABLE = 3
"""Queued requests that are no backlog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests per second and their mean lengths, with the corrections of what the profile says.

    ``queued`` requests wait longer than they should; they are to be served ``within_s``.
    ``prefill_correction`` is the observed TTFT divided by the profile's, ``decode_correction`` the
    same of the ITL.
    """

    rate: float
    isl: float
    osl: float
    queued: float = 0.0
    within_s: float = 1.0
    prefill_correction: float = 1.0
    decode_correction: float = 1.0

    @property
    def context(self) -> float:
        """Mean length of a running sequence."""
        return self.isl + self.osl / 2

    @property
    def work_rate(self) -> float:
        """Requests per second to serve: those that arrive, and those that wait."""
        return self.rate + self.queued / self.within_s

    def itl_target_ms(self, itl_ms: float) -> float:
        """Return the ITL to look up for a target of ``itl_ms``."""
        return itl_ms / self.decode_correction if self.decode_correction > 0 else itl_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The workers for a demand, the figures used, and estimates by the names of metrics."""

    workers: Workers
    inputs: Mapping[str, float] = field(default_factory=dict)
    estimates: Mapping[str, float] = field(default_factory=dict)


def backlog(queued: int, rate: float, ttft_ms: float) -> float:
    """Return how many of ``queued`` are more than wait at a mean TTFT of ``ttft_ms``."""
    return max(queued - rate * ttft_ms / 1000.0 - _UNREMARKABLE, 0.0)


def prefill_workers(demand: Demand, model: PrefillCapacity, gpus: float) -> int:
    """Return the prefill workers of ``gpus`` GPUs that ``demand`` needs."""
    # A TTFT above the profile's comes from waiting: that is load, which the rate already says.
    # One below it comes from cached prefixes: they are work that is not done.
    tokens_per_s = demand.work_rate * demand.isl * min(1.0, demand.prefill_correction)
    return _ceil(tokens_per_s / model.tokens_per_s(demand.isl) / gpus)


def decode_workers(demand: Demand, model: DecodeCapacity, gpus: float, itl_ms: float) -> int:
    """Return the decode workers of ``gpus`` GPUs that keep ``itl_ms``."""
    best = model.best(demand.itl_target_ms(itl_ms), demand.context)
    return _ceil(demand.work_rate * demand.osl / best.tokens_per_s / gpus)


def _ceil(workers: float) -> int:
    return max(math.ceil(workers - _ROUNDING), 0)
