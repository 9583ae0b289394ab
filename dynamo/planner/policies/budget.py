"""Limits that every policy keeps: GPUs of the budget, minimum and maximum of a pool. Pure.

Two bounds count. What a deployment may have in the end is ``max_gpus``; what can be added now is
what no worker holds, those that drain included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dynamo.planner.observation import Observation, Pool
from dynamo.planner.policies.base import DECODE, PREFILL, PoolDecision, ScalingDecision
from dynamo.serve.gpus.gpus import fits

__all__ = ["Workers", "affordable", "at_limits", "clamp", "free_gpus", "kept"]


class Workers(NamedTuple):
    """Workers of both pools, ready and starting; ``prefill`` is 0 in aggregated serving."""

    prefill: int
    decode: int


def free_gpus(seen: Observation) -> float:
    """Return the GPUs of the budget that no worker holds; negative if they hold more."""
    held = seen.decode.gpus + (seen.prefill.gpus if seen.prefill else 0.0)
    return seen.max_gpus - held


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
    allowed = affordable(clamp(now, seen), seen)
    pools = [kept(DECODE, seen.decode, allowed.decode, rule)]
    if seen.prefill is not None:
        pools.insert(0, kept(PREFILL, seen.prefill, allowed.prefill, rule))
    return ScalingDecision(pools=tuple(pools), forecast=forecast or {})


def kept(name: str, pool: Pool, allowed: int, rule: str) -> PoolDecision:
    """Return the decision to keep a pool by ``rule``; ``allowed`` are its workers within limits."""
    if allowed > pool.workers:
        rule = f"{pool.workers} workers, the minimum is {pool.minimum}"
    elif allowed < pool.workers:
        rule = f"{pool.workers} workers, the limits allow {allowed}"
    return PoolDecision(pool=name, wanted=allowed, rule=rule)


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


def _most(free: float, each: float, wanted: int) -> int:
    """Return how many of ``wanted`` shares of ``each`` fit."""
    count = min(math.floor(free / each) + 1, wanted)  # one more than fits, but for rounding
    return max(count if fits(free, count * each) else count - 1, 0)
