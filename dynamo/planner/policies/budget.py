"""Limits of scaling: GPU budget, minimum and maximum of a pool, pace of actions. Pure.

Two bounds count. What a deployment may have in the end is ``max_gpus``; what can be added now is
what no worker holds, those that drain included.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from dynamo.observability.logs import counted
from dynamo.planner.capacity.interpolation import ProfiledCapacity
from dynamo.planner.capacity.observation import Observation, Pool
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.graph.facts import PREFILL

_PER_HOUR = 24.0
_BURST = 5.0
"""Together at most 29 in any hour."""
_KEPT_FOR_UP = 1.0
"""An action that only adding workers may use: too few workers are worse than too many."""
_FIRST_GUESS_S, _FIRST_WAKE_S = 60.0, 5.0
_RECENT = 5


class ActionLimit:
    """A token bucket; one action is one change of the pools."""

    def __init__(self) -> None:
        self._tokens = _BURST
        self._at_s: float | None = None

    def refill(self, now_s: float) -> None:
        """Add what the time since the last call allows."""
        if self._at_s is not None:
            self._tokens += (now_s - self._at_s) * _PER_HOUR / 3600.0
            self._tokens = min(self._tokens, _BURST)
        self._at_s = now_s

    def allows(self, up: bool) -> bool:
        """Return whether workers may be added (``up``) or removed now."""
        return self._tokens >= 1.0 + (0.0 if up else _KEPT_FOR_UP)

    @property
    def next_s(self) -> float:
        """The time from an action now until workers may be added again."""
        # An action takes one token, and the addition after it needs another.
        return max(2.0 - self._tokens, 0.0) * 3600.0 / _PER_HOUR

    def use(self) -> None:
        """Count one action."""
        self._tokens -= 1.0


class StartUpTime:
    """Follows the workers of one pool from the decision that adds them until they serve.

    :attr:`seconds` is the longest of the last few starts: a worker that comes late costs more than
    one that comes early. Before the first one it is a guess, or the time that the current start
    has already taken. :attr:`wake_s` is the same for workers that slept: they are woken first.
    A ``profile`` that has the times is the first guess.
    """

    def __init__(self, profile: ProfiledCapacity | None = None) -> None:
        start_s = None if profile is None else profile.start_s
        wake_s = None if profile is None else profile.wake_s
        self._starts = _Times(_FIRST_GUESS_S if start_s is None else start_s)
        self._wakes = _Times(_FIRST_WAKE_S if wake_s is None else wake_s)
        self._asleep = 0

    @property
    def seconds(self) -> float:
        """The expected time of a start."""
        return self._starts.seconds

    @property
    def wake_s(self) -> float:
        """The expected time of a wake, if a worker sleeps; else that of a start."""
        return min(self._wakes.seconds, self.seconds) if self._asleep else self.seconds

    def observe(self, pool: Pool, now_s: float) -> None:
        """Take the state of the pool; a worker that starts no more has become ready."""
        self._asleep = pool.asleep
        pending = len(self._starts.begun) + len(self._wakes.begun)
        # A negative number, so no turn, if more workers start than were decided here.
        for _ in range(pending - pool.starting):
            # A wake takes seconds, a start minutes: the wakes are over first.
            times = self._wakes if self._wakes.begun else self._starts
            times.taken.append(now_s - times.begun.popleft())
        for times in (self._starts, self._wakes):
            times.waiting_s = now_s - times.begun[0] if times.begun else 0.0

    def changed(self, pool: Pool, wanted: int, now_s: float) -> None:
        """Note that the pool is to have ``wanted`` workers; the newest ones go first."""
        for number in range(wanted - pool.workers):
            (self._wakes if number < pool.asleep else self._starts).begun.append(now_s)
        for _ in range(min(pool.workers - wanted, pool.starting)):
            times = self._starts if self._starts.begun else self._wakes
            if times.begun:
                times.begun.pop()

    def failed(self, now_s: float) -> None:
        """Forget the starts of the decision at ``now_s``."""
        for times in (self._starts, self._wakes):
            while times.begun and times.begun[-1] == now_s:
                times.begun.pop()


class _Times:
    """When the starts in progress began, and how long the last ones took."""

    def __init__(self, guess_s: float) -> None:
        self.begun: deque[float] = deque()
        self.taken: deque[float] = deque(maxlen=_RECENT)
        self.waiting_s = 0.0
        self._guess_s = guess_s

    @property
    def seconds(self) -> float:
        return max(max(self.taken, default=self._guess_s), self.waiting_s)


class Workers(NamedTuple):
    """Workers of both pools, ready and starting; ``prefill`` is 0 in aggregated serving."""

    prefill: int
    decode: int

    def of(self, pool: str) -> int:
        """Return the workers of ``pool``."""
        return self.prefill if pool == PREFILL else self.decode


def free_gpus(seen: Observation) -> float:
    """Return the GPUs of the budget that no worker holds; negative if they hold more."""
    in_use = seen.decode.gpus + (seen.prefill.gpus if seen.prefill else 0.0)
    return seen.max_gpus - in_use


def allowed(wanted: Workers, seen: Observation) -> Workers:
    """Return ``wanted`` within all limits, and as far as GPUs are free now."""
    return affordable(clamp(wanted, seen), seen)


def clamp(wanted: Workers, seen: Observation) -> Workers:
    """Return ``wanted`` within the limits of both pools and ``seen.max_gpus``.

    Above the budget both pools shrink in proportion, but not below their minima, as in
    Dynamo 1.x. Two cases differ from it. Decode never gets more than was wanted from what rounding
    leaves over. If the minima do not fit, Dynamo stops every worker; here decode workers get what
    fits, because they serve a prompt without prefill workers, too.
    """
    prefill, decode, budget = seen.prefill or _NO_POOL, seen.decode, seen.max_gpus
    within = Workers(_within_pool(wanted.prefill, prefill), _within_pool(wanted.decode, decode))
    if fits(budget, _cost(within, seen)):
        return within
    least = Workers(prefill.minimum, decode.minimum)
    if not fits(budget, _cost(least, seen)):
        some = _count(budget, decode, least.decode)
        left = budget - some * decode.gpus_per_worker
        return Workers(_count(left, prefill, least.prefill), some)
    # In proportion: prefill * budget / cost, rounded down.
    share = _most(within.prefill * budget, _cost(within, seen), within.prefill)
    beside_decode = budget - least.decode * decode.gpus_per_worker
    fewer = max(least.prefill, _count(beside_decode, prefill, share))
    left = budget - fewer * prefill.gpus_per_worker
    return Workers(fewer, _count(left, decode, within.decode))


def affordable(wanted: Workers, seen: Observation) -> Workers:
    """Return ``wanted``, but add only workers for which GPUs are free now, prefill first.

    GPUs that a removal frees do not count before its worker has exited.
    """
    free = free_gpus(seen)
    prefill = wanted.prefill
    if seen.prefill is not None and prefill > seen.prefill.workers:
        added = _count(free, seen.prefill, prefill - seen.prefill.workers)
        prefill = seen.prefill.workers + added
        free -= added * seen.prefill.gpus_per_worker
    decode = wanted.decode
    if decode > seen.decode.workers:
        decode = seen.decode.workers + _count(free, seen.decode, decode - seen.decode.workers)
    return Workers(prefill, decode)


def at_limits(
    seen: Observation, rule: str, forecast: Mapping[str, float] | None = None
) -> ScalingDecision:
    """Return the decision to keep the workers because of ``rule``, as far as the limits allow.

    A pool below its minimum gets workers: without any there is no load to decide by.
    """
    now = Workers(seen.prefill.workers if seen.prefill else 0, seen.decode.workers)
    within = allowed(now, seen)
    pools = [kept(name, pool, within.of(name), rule) for name, pool in seen.pools.items()]
    return ScalingDecision(pools=tuple(pools), forecast=forecast or {})


def kept(name: str, pool: Pool, wanted: int, rule: str) -> PoolDecision:
    """Return the decision to keep a pool by ``rule``; the limits allow ``wanted`` workers."""
    if wanted > pool.workers:
        rule = f"{counted(pool.workers, 'worker')}, the minimum is {pool.minimum}"
    elif wanted < pool.workers:
        rule = f"{counted(pool.workers, 'worker')}, the limits allow {wanted}"
    return PoolDecision(pool=name, wanted=wanted, rule=rule)


_NO_POOL = Pool(ready=0, minimum=0, maximum=0)


def _within_pool(wanted: int, pool: Pool) -> int:
    most = wanted if pool.maximum is None else min(wanted, pool.maximum)
    return max(most, pool.minimum)


def _cost(workers: Workers, seen: Observation) -> float:
    prefill = seen.prefill or _NO_POOL
    return workers.prefill * prefill.gpus_per_worker + workers.decode * seen.decode.gpus_per_worker


def _count(gpus: float, pool: Pool, wanted: int) -> int:
    """Return how many of ``wanted`` workers ``gpus`` are enough for; 0 if negative."""
    return _most(gpus, pool.gpus_per_worker, wanted) if pool.gpus_per_worker > 0 else wanted


def _most(free: float, size: float, wanted: int) -> int:
    """Return how many of ``wanted`` shares of this ``size`` fit."""
    count = min(math.floor(free / size) + 1, wanted)  # one more than fits, but for rounding
    return max(count if fits(free, count * size) else count - 1, 0)
