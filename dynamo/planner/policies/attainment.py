"""What one request costs, and how many of them keep their targets with some workers. Pure.

The load is in busy workers: requests per second times the seconds that one keeps the prefill of a
worker busy. Arrivals and lengths vary around that mean, so a small deployment needs more room in
proportion than a large one. The wait of an M/M/c queue, in Sakasegawa's closed form, contains that:

    wait = service time * u ** (sqrt(2 * (c + 1)) - 1) / (c * (1 - u)),   u = load / c

Burstier arrivals and lengths multiply it by a factor, which is observed.

The price of a worker: with ``A(n)`` the share of requests that keep their targets with n workers,
the n-th is worth it below A = 0.9, and above if ``A(n) - A(n - 1) >= 0.5 * A(n) / n``. That is half
of what one of n workers attains on average. So small deployments may attain 90 %, and large ones
attain more, where a worker is a small part of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_WORKERS = 1024
_TAIL = math.log(10)
"""Times to first token have about an exponential tail: 1 in 10 is above ln 10 times the mean."""
_KV_USAGE = 0.85
"""A mean that leaves room for the variation between workers."""
_ENOUGH, _WORTH = 0.9, 0.5
"""See the top of this module."""


def wait_factor(load: float, workers: int) -> float:
    """Return the mean wait in service times; infinite without enough workers."""
    if load <= 0:
        return 0.0
    if load >= workers:
        return math.inf
    usage = load / workers
    return math.pow(usage, math.sqrt(2.0 * (workers + 1)) - 1.0) / (workers * (1.0 - usage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request is to keep: its TTFT, and its mean ITL, in ms."""

    ttft_ms: float
    itl_ms: float

    @property
    def mean_ttft_ms(self) -> float:
        """The mean TTFT with which 9 in 10 requests keep the target."""
        return self.ttft_ms / _TAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoadModel:
    """What one request costs, as observed.

    A request keeps the prefill of a worker busy for ``service_s``; it waits ``burst`` times as long
    as in an M/M/c queue. A decode step takes ``step_ms`` and ``sequence_ms`` more for each running
    sequence; a reply has ``osl`` tokens. What load adds to a step is ``itl_burst`` times what an
    even load would add, with the variance ``itl_variance`` in squares of its mean. A sequence holds
    the share ``kv`` of a worker's cache.
    """

    service_s: float
    burst: float = 1.0
    itl_burst: float = 1.0
    itl_variance: float = 1.0
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
        # Little's law: rate times duration is the number of sequences that run at once.
        return rate / workers * (self.service_s + reply_s) * self.kv

    def attained(self, rate: float, workers: int, targets: Targets) -> float:
        """Return the share of requests that keep ``targets``; 0 if the KV caches are too small.

        The TTFT has an exponential tail. What load adds to the ITL has a gamma distribution, with
        the variance observed.
        """
        ttft_ms, itl_ms = self.ttft_ms(rate, workers), self.inter_token_ms(rate, workers)
        if math.isinf(ttft_ms + itl_ms) or self.kv_usage(rate, workers) > _KV_USAGE:
            return 0.0
        # No number of workers beats an idle one, so the targets are at least these multiples of it.
        target_ms = max(targets.ttft_ms, 1500.0 * _TAIL * self.service_s)
        in_time = 1.0 - math.exp(-target_ms / ttft_ms) if ttft_ms > 0 else 1.0
        added_ms = itl_ms - self.step_ms
        if added_ms <= 0:
            return in_time
        room_ms = max(targets.itl_ms - self.step_ms, 0.5 * _TAIL * self.step_ms)
        return in_time * gamma_share(room_ms / added_ms, self.itl_variance)

    def workers(self, rate: float, targets: Targets) -> int:
        """Return the workers that are worth their price at ``rate``.

        They are as many as 9 in 10 requests need, and more while the next one makes half as many
        requests attain their targets as each of the others serves.
        """
        # With fewer, prompts arrive faster than they are computed.
        count = max(1, math.floor(rate * self.service_s))
        attained = self.attained(rate, count, targets)
        while count < MOST_WORKERS:
            more = self.attained(rate, count + 1, targets)
            if attained >= _ENOUGH and more - attained < _WORTH * more / (count + 1):
                break
            count, attained = count + 1, more
        return count


def gamma_share(value: float, variance: float) -> float:
    """Return the share below ``value`` of a gamma distribution with mean 1.

    By the approximation of Wilson and Hilferty: its cube root is about normal.
    """
    spread = variance / 9.0
    score = (math.cbrt(value) - 1.0 + spread) / math.sqrt(spread)
    return 0.5 * math.erfc(-score / math.sqrt(2.0))
