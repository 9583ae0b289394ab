"""What the planner expects of every policy, whatever it observes."""

from __future__ import annotations

import copy
import math
from random import Random

import pytest
from planner_histories import observation, pools_of, step

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.observation import Observation
from dynamo.planner.policies.base import Policy, ScalingDecision
from dynamo.planner.policies.budget import free_gpus
from dynamo.planner.policies.factory import POLICIES, named_policy

SETTINGS = PlannerSettings(load_predictor="constant")


@pytest.mark.parametrize("prefill", [False, True], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize("name", [*POLICIES, "fixed:3", "hpa:5"])
@pytest.mark.parametrize("seed", range(10))
def test_a_policy_keeps_the_contract(name: str, prefill: bool, seed: int) -> None:
    policy, random = named_policy(name, SETTINGS, prefill), Random(seed)
    for number in range(1, 21):
        now_s = number * policy.interval_s
        seen = observation(random, prefill=prefill, now_s=now_s, interval_s=policy.interval_s)
        # `dynamo planner explain` asks a copy, which must decide the same.
        expected = copy.deepcopy(policy).decide(seen)
        decision = policy.decide(seen)
        assert decision == expected
        check_decision(decision, seen)
        check_limits(policy, decision, seen)
        policy.applied(decision, [pool for pool in pools_of(seen) if random.random() < 0.3])


def check_decision(decision: ScalingDecision, seen: Observation) -> None:
    names = [made.pool for made in decision.pools]
    assert sorted(names) == sorted(pools_of(seen))
    for made in decision.pools:
        assert isinstance(made.wanted, int) and made.wanted >= 0
        assert made.rule
        assert all(math.isfinite(figure) for figure in made.inputs.values())
    assert all(math.isfinite(figure) for figure in decision.forecast.values())


def check_limits(policy: Policy, decision: ScalingDecision, seen: Observation) -> None:
    """Additions have GPUs and stay below the maximum; pools reach and keep their minimum."""
    pools = pools_of(seen)
    added = removed = 0.0
    least = sum(pool.minimum * pool.gpus_per_worker for pool in pools.values())
    for name, pool in pools.items():
        change = step(decision, seen, name)
        wanted = pool.workers + change
        added += max(0, change) * pool.gpus_per_worker
        removed += max(0, -change) * pool.gpus_per_worker
        assert change <= 0 or pool.maximum is None or wanted <= pool.maximum
        assert change >= 0 or wanted >= pool.minimum or least > seen.max_gpus
    # A blocking policy removes first, and the planner waits until the GPUs are free.
    free = free_gpus(seen) + (removed if policy.blocking else 0.0)
    assert added <= max(0.0, free) + 1e-6
    short = [pool for pool in pools.values() if pool.workers < pool.minimum]
    if short and not seen.changed and least <= seen.max_gpus:
        cheapest = min(pool.gpus_per_worker for pool in short)
        assert added or cheapest > free_gpus(seen)
