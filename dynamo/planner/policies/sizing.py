"""What the SLA policy sizes pools for, and Dynamo's formulas. Pure.

Throughputs are per GPU, as the profile has them. With ``rate`` in requests per second:

    prefill = ceil(rate * isl * min(1, prefill correction) / throughput / GPUs of a worker)
    decode  = ceil(rate * osl / throughput at (ITL target / decode correction) / GPUs of a worker)

Queueing formulas: how long requests wait at a number of workers. Pure.

The load is in busy workers: requests per second times the seconds that one keeps the prefill of a
worker busy. Arrivals and lengths vary around that mean, so a small deployment needs more room in
proportion than a large one. The wait of an M/M/c queue, in Sakasegawa's closed form, contains that:

    wait = service time * u ** (sqrt(2 * (c + 1)) - 1) / (c * (1 - u)),   u = load / c

Burstier arrivals and lengths multiply it by a factor, which is observed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo.planner.capacity.learned import DecodeCapacity, PrefillCapacity
from dynamo.planner.policies.budget import Workers

_ROUNDING = 1e-9
_UNREMARKABLE = 3
"""Queued requests that are no backlog."""
MOST_WORKERS = 1024
_TAIL = math.log(10)
"""Times to first token have about an exponential tail: 1 in 10 is above ln 10 times the mean."""
_ITL_SHARE = 0.55
"""A mean ITL at this share of the target leaves room for the variation between requests."""
_KV_USAGE = 0.85
"""A mean that leaves room for the variation between workers."""


def wait_factor(load: float, workers: int) -> float:
    """Return the mean wait in service times; infinite without enough workers."""
    if load <= 0:
        return 0.0
    if load >= workers:
        return math.inf
    usage = load / workers
    return math.pow(usage, math.sqrt(2.0 * (workers + 1)) - 1.0) / (workers * (1.0 - usage))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLimits:
    """Means that a deployment may reach: TTFT and ITL in ms, KV usage as a share."""

    ttft_ms: float
    itl_ms: float
    kv_usage: float


def mean_limits(ttft_ms: float, itl_ms: float) -> MeanLimits:
    """Return the means with which 9 in 10 requests keep the targets."""
    return MeanLimits(ttft_ms=ttft_ms / _TAIL, itl_ms=itl_ms * _ITL_SHARE, kv_usage=_KV_USAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoadModel:
    """What one request costs, as observed.

    A request keeps the prefill of a worker busy for ``service_s``; it waits ``burst`` times as long
    as in an M/M/c queue. A decode step takes ``step_ms`` and ``sequence_ms`` more for each running
    sequence; a reply has ``osl`` tokens. What load adds to a step is ``itl_burst`` times what an
    even load would add. A sequence holds the share ``kv`` of a worker's cache.
    """

    service_s: float
    burst: float = 1.0
    itl_burst: float = 1.0
    step_ms: float = 0.0
    sequence_ms: float = 0.0
    osl: float = 0.0
    kv: float = 0.0

    def ttft_ms(self, rate: float, workers: int) -> float:
        """Return the mean TTFT at ``rate`` requests per second."""
        factor = wait_factor(rate * self.service_s, workers)
        return 1000.0 * self.service_s * (1.0 + self.burst * factor)

    def inter_token_ms(self, rate: float, workers: int) -> float:
        """Return the mean ITL.

        The time that is left beside prompts and the share of each sequence in the steps goes to
        the fixed part of the steps. If u is what they take, an even load gives step / (1 - u): that
        is step * u / (1 - u) more than on an idle worker.
        """
        used = self.usage(rate, workers)
        if used >= 1.0:
            return math.inf
        return self.step_ms * (1.0 + self.itl_burst * used / (1.0 - used))

    def usage(self, rate: float, workers: int) -> float:
        """Return the share of a worker's time that grows with the load."""
        return rate / workers * (self.service_s + self.osl * self.sequence_ms / 1000.0)

    def kv_usage(self, rate: float, workers: int) -> float:
        """Return the mean KV usage of a worker."""
        if not self.kv:
            return 0.0
        reply_s = self.osl * self.inter_token_ms(rate, workers) / 1000.0
        return rate / workers * (self.service_s + reply_s) * self.kv

    def workers(self, rate: float, limits: MeanLimits) -> int:
        """Return the fewest workers that keep all ``limits`` at ``rate``."""
        count = max(1, math.floor(rate * self.service_s))
        while count < MOST_WORKERS and not self.within(rate, count, limits):
            count += 1
        return count

    def within(self, rate: float, workers: int, limits: MeanLimits) -> bool:
        """Return whether ``workers`` keep all ``limits`` at ``rate``."""
        return (
            self.ttft_ms(rate, workers) <= max(limits.ttft_ms, 1500.0 * self.service_s)
            and self.inter_token_ms(rate, workers) <= max(limits.itl_ms, 1.5 * self.step_ms)
            and self.kv_usage(rate, workers) <= limits.kv_usage
        )


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
