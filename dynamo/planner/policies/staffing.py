"""Queueing formulas: how long requests wait at a number of workers. Pure.

The load is in busy workers: requests per second times the seconds that one keeps the prefill of a
worker busy. Arrivals and lengths vary around that mean, so a small deployment needs more room in
proportion than a large one. The wait of an M/M/c queue, in Sakasegawa's closed form, contains that:

    wait = service time * u ** (sqrt(2 * (c + 1)) - 1) / (c * (1 - u)),   u = load / c

Burstier arrivals and lengths multiply it by a factor, which is observed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MOST_WORKERS", "Limits", "WorkerLoadModel", "wait_factor"]

MOST_WORKERS = 1024


def wait_factor(load: float, workers: int) -> float:
    """Return the mean wait in service times; infinite without enough workers."""
    if load <= 0:
        return 0.0
    if load >= workers:
        return math.inf
    usage = load / workers
    return math.pow(usage, math.sqrt(2.0 * (workers + 1)) - 1.0) / (workers * (1.0 - usage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Means that a deployment may reach: TTFT and ITL in ms, KV usage as a share."""

    ttft_ms: float
    itl_ms: float
    kv_usage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoadModel:
    """What one request costs, as observed.

    A request keeps the prefill of a worker busy for ``service_s``; it waits ``burst`` times as long
    as in an M/M/c queue. ``itl_ms`` is the ITL without prefills in between when ``running``
    sequences share a worker, and grows by ``itl_slope_ms`` for each one more. A request holds
    ``kv`` of the cache of a worker for ``request_s``.
    """

    service_s: float
    burst: float = 1.0
    itl_ms: float = 0.0
    running: float = 0.0
    itl_slope_ms: float = 0.0
    kv: float = 0.0
    request_s: float = 0.0

    def ttft_ms(self, rate: float, workers: int) -> float:
        """Return the mean TTFT at ``rate`` requests per second."""
        factor = wait_factor(rate * self.service_s, workers)
        return 1000.0 * self.service_s * (1.0 + self.burst * factor)

    def inter_token_ms(self, rate: float, workers: int) -> float:
        """Return the mean ITL: tokens come only while no prompt is computed."""
        free = 1.0 - rate * self.service_s / workers
        if free <= 0:
            return math.inf
        more = rate * self.request_s / workers - self.running
        return (self.itl_ms + self.itl_slope_ms * more) / free

    def kv_usage(self, rate: float, workers: int) -> float:
        """Return the mean KV usage of a worker."""
        return rate * self.request_s * self.kv / workers

    def workers(self, rate: float, limits: Limits) -> int:
        """Return the fewest workers that keep all ``limits`` at ``rate``."""
        count = max(1, math.floor(rate * self.service_s))
        while count < MOST_WORKERS and not self.within(rate, count, limits):
            count += 1
        return count

    def within(self, rate: float, workers: int, limits: Limits) -> bool:
        """Return whether ``workers`` keep all ``limits`` at ``rate``."""
        return (
            self.ttft_ms(rate, workers) <= max(limits.ttft_ms, 1500.0 * self.service_s)
            and self.inter_token_ms(rate, workers) <= max(limits.itl_ms, 1.5 * self.itl_ms)
            and self.kv_usage(rate, workers) <= limits.kv_usage
        )
