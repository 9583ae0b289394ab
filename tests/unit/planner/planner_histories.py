"""Random observations for the tests of policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.policies.base import ScalingDecision
from dynamo.serve.graph.facts import DECODE, PREFILL

__all__ = ["observation", "pools_of", "step"]


def observation(random: Random, *, prefill: bool, now_s: float, interval_s: float) -> Observation:
    """Return any observation at all; it has nothing to do with the one before."""
    return Observation(
        now_s=now_s,
        interval_s=interval_s,
        decode=_pool(random),
        prefill=_pool(random) if prefill else None,
        traffic=_traffic(random, interval_s),
        pulls=[_pull(random) for _ in range(random.randint(0, 4))],
        max_gpus=random.randint(0, 10),
        changed=random.random() < 0.2,
    )


def pools_of(seen: Observation) -> Mapping[str, Pool]:
    """Return the pools by name."""
    return {DECODE: seen.decode} | ({PREFILL: seen.prefill} if seen.prefill else {})


def step(decision: ScalingDecision, seen: Observation, name: str) -> int:
    """Return how many workers more (or fewer, if negative) the pool ``name`` is to have."""
    wanted = [made.wanted for made in decision.pools if made.pool == name]
    return wanted[0] - pools_of(seen)[name].workers if wanted else 0


def _pool(random: Random) -> Pool:
    return Pool(
        ready=random.randint(0, 6),
        starting=random.randint(0, 2),
        draining=random.randint(0, 2),
        asleep=random.randint(0, 1),
        gpus_per_worker=random.choice([0.1, 0.5, 1.0, 2.0]),
        minimum=random.randint(0, 3),
        maximum=random.choice([None, 3, 6]),
    )


def _pull(random: Random) -> Pull:
    workers = tuple(
        WorkerLoad(
            worker_id=number,
            kv_used_blocks=random.randint(0, 20),
            kv_total_blocks=random.choice([0, 20]),
            running=random.randint(0, 3),
            waiting=random.randint(0, 20),
            active_prefill_tokens=random.randint(0, 10_000),
        )
        for number in range(random.randint(0, 4))
    )
    depth = random.choice([None, math.nan, 0.0, 0.3, random.uniform(0, 50)])
    return Pull(at_s=0.0, decode=workers, prefill_queue=depth)


def _traffic(random: Random, interval_s: float) -> Traffic:
    isl, osl, ttft_ms, itl_ms, request_s = (
        random.choice([None, 0.0, random.uniform(0, 10), random.uniform(0, 1e5)]) for _ in range(5)
    )
    queued = random.randint(0, 50)
    return Traffic(
        duration_s=interval_s,
        arrived=random.choice([0, random.randint(0, 1000)]),
        finished=random.randint(0, 1000),
        isl=isl,
        osl=osl,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        request_s=request_s,
        queued=queued,
        inflight=queued + random.randint(0, 200),
        known=random.random() < 0.8,
    )
