"""How many workers a predicted load needs. Spec 6.5 of the planner. Pure.

Throughputs are per GPU, as the profile has them. With ``rate`` in requests per second:

    prefill = ceil(rate * isl * min(1, prefill correction) / throughput / GPUs of a worker)
    decode  = ceil(rate * osl / throughput at (ITL target / decode correction) / GPUs of a worker)

An aggregated worker divides its time between both. If prefill takes the share ``p`` of it, tokens
come at the pace of the profile only in the rest, so the ITL is that of the profile / (1 - p). And
prompts wait for each other: 9 in 10 have their first token within 2.3 TTFT / (1 - p), as in an
M/M/1 queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo.planner.capacity.model import DecodeCapacity, PrefillCapacity

__all__ = [
    "ITL_SHARE",
    "TAIL",
    "Demand",
    "aggregated_workers",
    "decode_workers",
    "prefill_workers",
    "unqueued_workers",
]

_ROUNDING = 1e-9
TAIL = math.log(10)
"""Times to first token have about an exponential tail: 1 in 10 is above ln 10 times the mean."""

ITL_SHARE = 0.55
"""A mean ITL at this share of the target leaves room for the variation between requests."""
_MOST = 4096
"""Where a search ends; a budget is below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests per second and their mean lengths, with the corrections of what the profile says.

    ``prefill_correction`` is the observed TTFT divided by the profile's, ``decode_correction`` the
    same of the ITL.
    """

    rate: float
    isl: float
    osl: float
    prefill_correction: float = 1.0
    decode_correction: float = 1.0

    @property
    def context(self) -> float:
        """Mean length of a running sequence."""
        return self.isl + self.osl / 2

    def itl_target_ms(self, itl_ms: float) -> float:
        """Return the ITL to look up for a target of ``itl_ms``."""
        return itl_ms / self.decode_correction if self.decode_correction > 0 else itl_ms


def prefill_workers(demand: Demand, model: PrefillCapacity, gpus: float) -> int:
    """Return the prefill workers of ``gpus`` GPUs that ``demand`` needs."""
    # A TTFT above the profile's comes from waiting: that is load, which the rate already says.
    # One below it comes from cached prefixes: they are work that is not done.
    tokens_per_s = demand.rate * demand.isl * min(1.0, demand.prefill_correction)
    return _ceil(tokens_per_s / model.tokens_per_s(demand.isl) / gpus)


def decode_workers(demand: Demand, model: DecodeCapacity, gpus: float, itl_ms: float) -> int:
    """Return the decode workers of ``gpus`` GPUs that keep ``itl_ms``."""
    best = model.best(demand.itl_target_ms(itl_ms), demand.context)
    return _ceil(demand.rate * demand.osl / best.tokens_per_s / gpus)


def unqueued_workers(demand: Demand, model: PrefillCapacity, gpus: float, ttft_ms: float) -> int:
    """Return the aggregated workers on which 9 in 10 prompts keep ``ttft_ms``, if any number does.

    Otherwise those that can compute all prompts.
    """
    computed = min(1.0, demand.prefill_correction)
    busy = demand.rate * demand.isl * computed / model.tokens_per_s(demand.isl) / gpus
    alone = TAIL * model.ttft_ms(demand.isl) * computed / ttft_ms
    return _ceil(busy / (1.0 - alone) if alone < 1.0 else busy)


def aggregated_workers(
    demand: Demand,
    prefill: PrefillCapacity,
    decode: DecodeCapacity,
    gpus: float,
    targets_ms: tuple[float, float],
) -> int:
    """Return the aggregated workers of ``gpus`` GPUs that keep the targets, TTFT and mean ITL.

    The profile has prefill and decode apart, so both take their share of a worker's time.
    """
    if demand.rate <= 0:
        return 0
    ttft_ms, itl_ms = targets_ms
    tokens_per_s = demand.rate * demand.isl * min(1.0, demand.prefill_correction)
    busy = tokens_per_s / prefill.tokens_per_s(demand.isl) / gpus
    target = demand.itl_target_ms(itl_ms)
    reachable = decode.best(target, demand.context).itl_ms <= target
    for workers in range(max(unqueued_workers(demand, prefill, gpus, ttft_ms), 1), _MOST):
        free = 1.0 - busy / workers
        best = decode.best(target * free, demand.context)
        enough = best.tokens_per_s * gpus * free * workers + _ROUNDING >= demand.rate * demand.osl
        if enough and (best.itl_ms <= target * free or not reachable):
            return workers
    return _MOST


def _ceil(workers: float) -> int:
    return max(math.ceil(workers - _ROUNDING), 0)
