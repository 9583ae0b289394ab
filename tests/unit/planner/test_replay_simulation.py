"""The simulation of a deployment: requests, workers, GPUs and decisions in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.capacity.observation import Observation
from dynamo.planner.policies.base import Policy, PoolDecision, ScalingDecision
from dynamo.planner.policies.factory import named_policy
from dynamo.serve.graph.facts import DECODE, PREFILL
from dynamo_lab.simulation.cluster import ReplayCluster
from dynamo_lab.simulation.compare import SchedulePolicy, compare, run_policy, simulate
from dynamo_lab.simulation.request import ReplayRequest, flat, generate, parse_pattern
from dynamo_lab.simulation.result import ReplayPlanner
from dynamo_lab.simulation.service_model import ReplaySetup, VirtualClock, service_model

SETTINGS = PlannerSettings(adjustment_interval_s=10.0, ttft_ms=1000.0)
SETUP = ReplaySetup(start_up_s=10.0, ttft_ms=1000.0)


class ScriptedPolicy:
    """Wants what a function of (pool, seconds) says."""

    name = "scripted"

    def __init__(
        self, wanted: Callable[[float], Mapping[str, int]], blocking: bool, interval_s: float = 10.0
    ) -> None:
        self.wanted, self.blocking, self.interval_s = wanted, blocking, interval_s
        self.seen: list[Observation] = []
        self.learned: list[tuple[float, Collection[str]]] = []

    def decide(self, seen: Observation) -> ScalingDecision:
        self.seen.append(seen)
        return ScalingDecision(
            pools=tuple(
                PoolDecision(pool=pool, wanted=count, rule="scripted")
                for pool, count in self.wanted(seen.now_s).items()
            )
        )

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        self.learned.append((self.seen[-1].now_s, tuple(failed)))


def traffic(rate: float, duration_s: float = 120.0) -> list[ReplayRequest]:
    return generate(flat(rate), duration_s=duration_s, isl=2000, osl=100, spread=1.0, seed=2)


def ended(
    policy: Policy, requests: list[ReplayRequest], setup: ReplaySetup
) -> tuple[ReplayCluster, ReplayPlanner, float]:
    clock = VirtualClock()
    cluster = ReplayCluster(clock, setup, requests)
    planner = ReplayPlanner(clock, cluster, policy)
    while not cluster.complete:
        assert clock.run_next()
    return cluster, planner, clock.now_s


@pytest.mark.parametrize("prefill", [None, 1], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize("name", ["load", "hpa:4"])
def test_each_request_ends_once_with_all_its_tokens(name: str, prefill: int | None) -> None:
    requests = traffic(60.0, 30.0)
    setup = replace(SETUP, prefill_workers=prefill, max_queue=60)
    policy = named_policy(name, SETTINGS, prefill is not None)
    cluster, _, _ = ended(policy, requests, setup)
    assert sorted(request.index for request in cluster.ended) == list(range(len(requests)))
    counters = cluster.counters
    assert counters.arrived == len(requests) == counters.finished + counters.rejected
    assert counters.rejected == sum(request.rejected for request in cluster.ended) > 0
    for request in cluster.ended:
        if not request.rejected:
            assert request.arrived_s < request.first_s <= request.end_s
    served = [request for request in cluster.ended if not request.rejected]
    assert counters.tokens == sum(request.osl - 1 for request in served)
    for pool in cluster.pools.values():
        for worker in pool.workers:
            assert worker.idle
            assert worker.engine is None or worker.engine.kv_used == 0


def test_preempted_requests_end_once_with_all_their_tokens() -> None:
    model = replace(service_model("mocker"), kv_tokens=20_000)
    cluster, _, _ = ended(
        named_policy("fixed:1", SETTINGS, False),
        generate(flat(20.0), duration_s=5, isl=300, osl=600, seed=1),
        replace(SETUP, model=model),
    )
    assert cluster.counters.tokens == 599 * len(cluster.ended)
    assert len({request.index for request in cluster.ended}) == len(cluster.ended)


def test_the_same_seed_gives_the_same_result() -> None:
    results = [
        simulate(named_policy("load", SETTINGS, False), traffic(12.0), SETUP).figures()
        for _ in range(2)
    ]
    assert results[0] == results[1]


def test_gpu_hours_count_from_the_start_of_loading_to_the_end_of_draining() -> None:
    """One worker all the time; a second one from 10 s to its removal at 50 s, when it is idle."""
    policy = ScriptedPolicy(lambda now: {DECODE: 2 if now < 45 else 1}, blocking=False)
    requests = [ReplayRequest(at_s, 100, 2) for at_s in (0.0, 99.0)]
    result = simulate(policy, requests, replace(SETUP, gpus_per_worker=2.0, stop_s=3.0))
    assert result.duration_s == pytest.approx(99.0, abs=0.1)
    assert result.gpu_hours * 3600 == pytest.approx(2 * (99 + 40 + 3), abs=0.5)
    assert (result.actions, result.workers_changed, result.reversals) == (2, 2, 1)


def test_a_draining_worker_finishes_its_requests_and_gets_no_new_ones() -> None:
    policy = ScriptedPolicy(lambda now: {DECODE: 1}, blocking=True)
    requests = [ReplayRequest(0.1 * number, 500, 3000) for number in range(40)]
    requests += [ReplayRequest(60.0, 500, 10)]
    cluster, _, _ = ended(policy, requests, replace(SETUP, workers=2))
    assert not any(request.rejected for request in cluster.ended)
    (left,) = cluster.pools[DECODE].workers
    assert left.number == 0
    # Blocking: after the decision at 10 s the next one waits for the drain.
    assert policy.seen[0].now_s == 10.0 and policy.seen[0].decode.ready == 2
    assert policy.seen[1].now_s > 25.0 and policy.seen[1].decode.ready == 1
    assert policy.seen[1].pulls[0].at_s == pytest.approx(policy.seen[1].now_s - 10.0)
    assert policy.seen[1].traffic.duration_s == pytest.approx(policy.seen[1].now_s - 10.0)


def test_without_blocking_decisions_go_on_during_a_start() -> None:
    policy = ScriptedPolicy(lambda now: {DECODE: 3}, blocking=False)
    ended(policy, traffic(2.0), replace(SETUP, start_up_s=25.0))
    starting = [(seen.now_s, seen.decode.starting, seen.decode.ready) for seen in policy.seen[:5]]
    assert starting == [(10.0, 0, 1), (20.0, 2, 1), (30.0, 2, 1), (40.0, 0, 3), (50.0, 0, 3)]
    assert [seen.changed for seen in policy.seen[:5]] == [False, False, False, True, False]
    assert all(len(seen.pulls) == 10 for seen in policy.seen)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_budget_is_never_exceeded(blocking: bool) -> None:
    """A removal in the same decision frees its GPUs only if the changes follow one another."""
    policy = ScriptedPolicy(lambda now: {PREFILL: 1, DECODE: 5}, blocking)
    setup = replace(SETUP, workers=2, prefill_workers=3, max_gpus=6)
    clock = VirtualClock()
    cluster = ReplayCluster(clock, setup, traffic(4.0))
    ReplayPlanner(clock, cluster, policy)
    while not cluster.complete:
        clock.run_next()
        assert sum(len(pool.workers) for pool in cluster.pools.values()) <= 6
    assert policy.learned[0][1] == (() if blocking else (DECODE,))
    assert policy.seen[-1].decode.ready == 5


def test_turns_wait_for_the_answer_before_them() -> None:
    requests = [
        ReplayRequest(0.0, 1000, 2000),
        ReplayRequest(1.0, 2000, 10, parent=0, delay_s=2.0),
        ReplayRequest(90.0, 3000, 10, parent=1),
    ]
    cluster, _, _ = ended(named_policy("fixed:1", SETTINGS, False), requests, SETUP)
    first, second, third = cluster.ended
    assert second.arrived_s == pytest.approx(first.end_s + 2.0)
    assert third.arrived_s == 90.0


def test_requests_wait_for_the_first_worker() -> None:
    policy = ScriptedPolicy(lambda now: {DECODE: 1}, blocking=False)
    setup = replace(SETUP, workers=0, minimum=0)
    cluster, _, _ = ended(policy, [ReplayRequest(1.0, 100, 5)], setup)
    (request,) = cluster.ended
    assert request.first_s == pytest.approx(20.0, abs=0.1)


def test_a_request_that_never_ends_is_counted_as_failed() -> None:
    policy = ScriptedPolicy(lambda now: {}, blocking=False)
    result = simulate(policy, [ReplayRequest(1.0, 100, 5)], replace(SETUP, workers=0))
    assert (result.requests, result.failed, result.attainment) == (1, 1, 0.0)


def test_traffic_is_counted_as_a_frontend_counts_it() -> None:
    policy = ScriptedPolicy(lambda now: {DECODE: 2}, blocking=False)
    cluster, _, _ = ended(policy, traffic(5.0), replace(SETUP, workers=2))
    total = sum(seen.traffic.arrived for seen in policy.seen)
    last = policy.seen[-1]
    assert total == sum(request.arrived_s <= last.now_s for request in cluster.ended)
    assert sum(seen.traffic.finished for seen in policy.seen) == total - last.traffic.inflight
    itls = [r.itl_s for r in cluster.ended]
    for seen in policy.seen[:10]:
        assert seen.traffic.itl_ms is not None and seen.traffic.isl is not None
        assert 0 < seen.traffic.itl_ms <= 1000 * max(itls)
        assert seen.traffic.queued <= seen.traffic.inflight


def test_the_oracle_is_at_least_as_good_as_every_fixed_deployment() -> None:
    requests = generate(
        parse_pattern("sine:1-20:200", "--synthetic"), duration_s=300, isl=6000, osl=200, seed=1
    )
    setup = replace(SETUP, workers=1, max_gpus=5)
    found = compare(["oracle", "fixed:3"], requests, setup, SETTINGS, 0.9)
    oracle, fixed = found.results
    assert found.baseline is not None
    assert oracle.attainment >= 0.9
    enough = [run.gpu_hours for run in found.baseline.fixed if run.attainment >= 0.9]
    assert oracle.gpu_hours < min(enough)
    assert oracle.score == pytest.approx(1.0, abs=0.1)
    assert fixed.policy == "fixed:3" and fixed.score in (None, pytest.approx(0.0))
    for run in found.baseline.fixed:
        hours = found.baseline.oracle_hours(run.attainment)
        assert hours is not None and hours <= run.gpu_hours


def test_fixed_deployments_start_complete() -> None:
    result = run_policy("fixed:2x3", traffic(2.0), replace(SETUP, prefill_workers=1), SETTINGS)
    assert result.actions == 0
    assert result.gpu_hours == pytest.approx(5 * result.duration_s / 3600)


def test_an_unknown_policy_and_an_empty_trace_are_rejected() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        compare(["nonsense"], traffic(1.0), SETUP, SETTINGS, None)
    with pytest.raises(ConfigError, match="no request"):
        compare(["load"], [], SETUP, SETTINGS, None)


def test_a_removed_worker_sleeps_and_is_woken() -> None:
    """It holds no GPU asleep, and serves again after a wake instead of a start."""
    setup = replace(SETUP, start_up_s=100.0, wake_s=2.0, sleeping=1)
    clock = VirtualClock()
    pool = ReplayCluster(clock, setup, []).pools[DECODE]

    def changed(change: Callable[[Callable[[], None]], bool]) -> float:
        """Return when a change is complete."""
        at_s: list[float] = []
        assert change(lambda: at_s.append(clock.now_s))
        begin_s = clock.now_s
        while not at_s:
            assert clock.run_next()
        return at_s[0] - begin_s

    assert clock.run_next()  # the first worker serves
    assert changed(pool.add) == 100.0
    for _ in range(2):
        changed(pool.remove)
    assert (pool.view().ready, pool.view().asleep, pool.view().gpus) == (0, 1, 0.0)
    assert changed(pool.add) == 2.0
    assert changed(pool.add) == 100.0
    assert (pool.view().ready, pool.view().asleep) == (2, 0)


def test_the_oracle_wakes_later_than_it_starts() -> None:
    policy = SchedulePolicy([1, 1, 1, 1, 4, 4], start_up_s=30.0, wake_s=5.0)
    assert [policy.wanted(at_s) for at_s in (0.0, 10.0)] == [1, 4]
    assert policy.wanted(10.0, asleep=2) == 2  # the others are woken when they are needed
    assert policy.wanted(30.0, asleep=2) == 4


def test_each_pool_has_its_own_minimum() -> None:
    setup = replace(SETUP, prefill_workers=3, minimum=1, prefill_minimum=2)
    pools = ReplayCluster(VirtualClock(), setup, []).pools
    assert {name: pool.view().minimum for name, pool in pools.items()} == {DECODE: 1, PREFILL: 2}
