"""load+sla: its formulas in numbers, what it learns, its limits, and how it does in a replay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.policies.attainment import (
    Targets,
    WorkerLoadModel,
    gamma_share,
    wait_factor,
)
from dynamo.planner.policies.budget import ActionLimit, StartUpTime
from dynamo.planner.policies.combined import CombinedPolicy
from dynamo.planner.policies.factory import named_policy
from dynamo.planner.policies.kalman import RateForecast
from dynamo.planner.policies.sizing import LoadMeter
from dynamo.serve.graph.facts import DECODE, PREFILL
from dynamo_lab.simulation.compare import run_policy, simulate
from dynamo_lab.simulation.request import flat, generate, parse_pattern, sine
from dynamo_lab.simulation.service_model import ReplaySetup

SETTINGS = PlannerSettings(ttft_ms=2000.0, itl_ms=50.0)
TARGETS = Targets(ttft_ms=2000.0, itl_ms=50.0)


def test_the_wait_of_one_worker_is_that_of_an_mm1_queue() -> None:
    for load in (0.1, 0.5, 0.9):
        assert wait_factor(load, 1) == pytest.approx(load / (1 - load))
    assert wait_factor(0.0, 3) == 0.0
    assert wait_factor(3.0, 3) == math.inf
    # M/M/2 at 50 % waits 1/3 of a service time; the closed form is within a few percent.
    assert wait_factor(1.0, 2) == pytest.approx(1 / 3, rel=0.1)


def test_latencies_of_the_model() -> None:
    """2 requests/s of 0.25 s on one worker: half busy, a wait of one service time."""
    model = WorkerLoadModel(service_s=0.25, burst=2.0)
    assert model.ttft_ms(2.0, 1) == pytest.approx(250 * (1 + 2 * 1.0))
    # 100 tokens at 1 ms a sequence are 0.1 s a request: with the prefill 70 % of the time at 2/s.
    model = WorkerLoadModel(service_s=0.25, step_ms=6.0, sequence_ms=1.0, osl=100.0, kv=0.05)
    assert model.usage(2.0, 1) == pytest.approx(0.7)
    assert model.inter_token_ms(2.0, 1) == pytest.approx(6.0 / 0.3)
    assert model.inter_token_ms(2.0, 2) == pytest.approx(6.0 / 0.65)
    assert model.inter_token_ms(3.0, 1) == math.inf
    # 20 ms a token: 2 s of decode and 0.25 s of prefill, 4.5 sequences at 5 % each.
    assert model.kv_usage(2.0, 1) == pytest.approx(2.0 * 2.25 * 0.05)


@given(
    st.floats(0.0, 100.0),
    st.floats(0.001, 3.0),
    st.floats(0.3, 8.0),
    st.floats(1.0, 60.0),
    st.floats(0.0, 3.0),
)
@settings(max_examples=80, deadline=None)
def test_the_last_worker_is_worth_its_price(
    rate: float, service_s: float, burst: float, step_ms: float, sequence_ms: float
) -> None:
    model = WorkerLoadModel(
        service_s=service_s,
        burst=burst,
        step_ms=step_ms,
        sequence_ms=sequence_ms,
        osl=200.0,
        kv=0.02,
    )
    count = model.workers(rate, TARGETS)
    attained = model.attained(rate, count, TARGETS)
    assert attained >= 0.9
    # The next one gains less than half of what each serves; this one was needed or gained more.
    more = model.attained(rate, count + 1, TARGETS)
    assert (more - attained) * (count + 1) < 0.5 * more
    fewer = model.attained(rate, count - 1, TARGETS) if count > 1 else 0.0
    assert fewer < 0.9 or (attained - fewer) * count >= 0.5 * attained


def test_shares_of_a_gamma_distribution() -> None:
    """With a variance of 1 it is exponential; with a small one everything is near the mean."""
    for value in (0.5, 1.0, 2.3, 4.0):
        assert gamma_share(value, 1.0) == pytest.approx(1.0 - math.exp(-value), abs=0.01)
    assert gamma_share(1.5, 0.05) > 0.97
    assert gamma_share(0.5, 0.05) < 0.01


def test_more_workers_are_worth_it_for_irregular_traffic() -> None:
    """A mean ITL of 25 ms is enough for a target of 50 ms if it varies little."""
    model = WorkerLoadModel(service_s=0.2, step_ms=7.0, sequence_ms=0.3, osl=300.0)
    even, irregular = replace(model, itl_variance=0.1), replace(model, itl_variance=2.0)
    assert even.workers(8.0, TARGETS) < irregular.workers(8.0, TARGETS)


def test_a_large_pool_attains_more_than_a_small_one() -> None:
    """A worker is a third of a small pool, and a part of a large one that costs little."""
    model = WorkerLoadModel(service_s=0.2, burst=4.0, step_ms=7.0, sequence_ms=0.3, osl=300.0)
    shares = []
    for rate in (2.0, 100.0):
        shares.append(
            min(
                model.attained(
                    tenth * rate / 10, model.workers(tenth * rate / 10, TARGETS), TARGETS
                )
                for tenth in range(10, 20)
            )
        )
    assert 0.9 <= shares[0] < shares[1]


def rates(forecast: RateForecast, values: list[float]) -> None:
    for value in values:
        forecast.add(round(value * 15), 15.0)


def test_a_rise_is_extrapolated_but_not_far_beyond_what_was_seen() -> None:
    forecast = RateForecast(15.0)
    rates(forecast, [2.0 + 0.2 * step for step in range(20)])  # 0.8 more each minute
    assert forecast.path(60.0)[3] == pytest.approx(2.0 + 0.2 * 23, rel=0.1)
    young = RateForecast(15.0)
    rates(young, [1.0, 3.0])
    assert max(young.path(600.0)) <= 6.5


def test_a_pattern_is_forecast_before_it_begins_again() -> None:
    """A wave of 20 minutes: at its low a trend sees nothing of the rise, its history does."""
    wave = [5.0 - 4.0 * math.cos(2 * math.pi * step / 80) for step in range(241)]
    once, often = RateForecast(15.0), RateForecast(15.0)
    rates(once, wave[:81])
    rates(often, wave)
    # 20 steps after the low the wave is at its middle.
    assert once.path(300.0)[19] < 2.0
    assert often.path(300.0)[19] == pytest.approx(5.0, abs=1.5)


def test_start_up_times_are_learned() -> None:
    start = StartUpTime()
    assert start.seconds == 60.0
    start.changed(Pool(ready=1), 3, 100.0)
    start.observe(Pool(ready=1, starting=2), 170.0)
    assert start.seconds == 70.0  # it takes at least so long
    start.observe(Pool(ready=2, starting=1), 190.0)
    start.observe(Pool(ready=3), 200.0)
    assert start.seconds == 100.0
    start.changed(Pool(ready=3), 4, 300.0)
    start.failed(300.0)
    start.observe(Pool(ready=3), 310.0)
    assert start.seconds == 100.0
    start.changed(Pool(ready=3), 4, 400.0)
    start.changed(Pool(ready=3, starting=1), 3, 405.0)  # removed before it served
    start.observe(Pool(ready=3), 500.0)
    assert start.seconds == 100.0


def test_wakes_are_learned_beside_starts() -> None:
    start = StartUpTime()
    start.observe(Pool(ready=1), 0.0)
    assert start.wake_s == start.seconds == 60.0
    start.observe(Pool(ready=1, asleep=1), 5.0)
    assert start.wake_s < start.seconds
    start.changed(Pool(ready=1, asleep=1), 3, 10.0)  # one wakes, one starts
    start.observe(Pool(ready=1, starting=2), 12.0)
    start.observe(Pool(ready=2, starting=1), 13.0)
    start.observe(Pool(ready=3), 110.0)
    assert start.wake_s == start.seconds == 100.0  # no worker sleeps
    start.observe(Pool(ready=2, asleep=1), 200.0)
    assert (start.wake_s, start.seconds) == (3.0, 100.0)
    start.changed(Pool(ready=2, asleep=1), 3, 300.0)
    start.failed(300.0)
    start.observe(Pool(ready=2, asleep=1), 330.0)
    assert start.wake_s == 3.0


@given(st.lists(st.tuples(st.floats(0.1, 600.0), st.booleans()), max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_hour_has_more_than_30_actions(steps: list[tuple[float, bool]]) -> None:
    limit, now_s, used = ActionLimit(), 0.0, []
    for pause_s, up in steps:
        now_s += pause_s
        limit.refill(now_s)
        if limit.allows(up):
            limit.use()
            used.append(now_s)
    for first in used:
        assert sum(first <= at < first + 3600.0 for at in used) <= 30


def loads(count: int, busy: int, running: int = 4) -> tuple[WorkerLoad, ...]:
    return tuple(
        WorkerLoad(
            worker_id=number,
            running=running,
            kv_used_blocks=20,
            kv_total_blocks=100,
            active_prefill_tokens=1000 * (number < busy),
        )
        for number in range(count)
    )


def seen(number: int, rate: float = 4.0, workers: int = 4, **changes: object) -> Observation:
    """One of many 5 s intervals: 4 requests/s, one of four workers in prefill: 0.25 s each."""
    more: dict[str, object] = {"decode": Pool(ready=workers), "queued": 0, "max_gpus": 8}
    more |= changes
    pulls = tuple(Pull(at_s=5.0 * number + k, decode=loads(workers, 1)) for k in range(5))
    return Observation(
        now_s=5.0 * number,
        interval_s=5.0,
        decode=more["decode"],  # type: ignore[arg-type]
        traffic=Traffic(
            duration_s=5.0,
            arrived=round(5 * rate),
            finished=round(5 * rate),
            isl=4000.0,
            osl=200.0,
            ttft_ms=260.0,
            itl_ms=10.0,
            request_s=2.3,
            queued=int(more["queued"]),  # type: ignore[call-overload]
            inflight=10,
        ),
        pulls=pulls,
        max_gpus=more["max_gpus"],  # type: ignore[arg-type]
    )


def test_the_cost_of_a_request_is_measured() -> None:
    meter = LoadMeter(aggregated=True)
    assert meter.model(DECODE) is None
    for number in range(100):
        meter.observe(seen(number), 0)
    model = meter.model(DECODE)
    assert model is not None
    assert model.service_s == pytest.approx(0.25)
    assert model.kv == pytest.approx(0.05)
    # One in four is busy: of the ITL, 7.5 ms are decode. The parts of a step add up to it.
    assert model.step_ms + 4 * model.sequence_ms == pytest.approx(7.5)
    isl, osl = meter.lengths
    assert (round(isl), round(osl)) == (4000, 200)


def test_workers_that_report_no_prompts_are_measured_by_their_latency() -> None:
    meter = LoadMeter(aggregated=True)
    for number in range(20):
        given = seen(number)
        silent = [
            replace(pull, decode=tuple(replace(w, active_prefill_tokens=0) for w in pull.decode))
            for pull in given.pulls
        ]
        meter.observe(replace(given, pulls=silent), 0)
    model = meter.model(DECODE)
    ttft_ms = seen(0).traffic.ttft_ms
    assert model is not None and ttft_ms is not None
    assert model.service_s == pytest.approx(ttft_ms / 1000)


def test_one_slow_request_does_not_tell_what_a_request_costs() -> None:
    """The first one on a new engine waits for its start, or warms it up."""
    policy = CombinedPolicy(SETTINGS, False)
    pool = Pool(ready=1, minimum=0)
    for number in range(1, 40):
        given_ = seen(number, 0.2 if number == 1 else 0.0, 1, decode=pool)
        slow = replace(given_.traffic, ttft_ms=30_000.0 if number == 1 else None, itl_ms=None)
        silent = [Pull(at_s=pull.at_s, decode=loads(1, 0)) for pull in given_.pulls]
        made = policy.decide(replace(given_, traffic=slow, pulls=silent)).pools
        assert [one.wanted for one in made] == [1]
        assert "not learned yet" in made[0].rule


def test_workers_are_removed_late_and_added_at_once() -> None:
    policy = CombinedPolicy(SETTINGS, False)
    wanted = []
    for number in range(1, 80):
        made = policy.decide(seen(number)).pools
        wanted.append(made[0].wanted if made else 4)
    assert set(wanted[:60]) == {4}
    assert min(wanted) < 4  # here it stays, so the limit of actions is used up
    # An hour later 300 queued requests of 0.25 s are 75 s of work, which four workers finish beside
    # the arrivals before another one would serve; of 2000 much is left then.
    assert policy.decide(seen(800, queued=300)).pools[0].wanted == 4
    decision = policy.decide(seen(801, queued=2000))
    assert decision.pools[0].wanted > 4
    assert "queued requests" in decision.pools[0].rule
    assert decision.forecast["load_scaling_decision"] == 1.0
    assert decision.forecast["predicted_requests_per_second"] == pytest.approx(4.0, rel=0.1)


def test_the_rule_of_workers_that_stay_names_the_forecast_alone() -> None:
    policy = CombinedPolicy(SETTINGS, False)
    workers, rules = 4, []
    for number in range(1, 400):
        (made,) = policy.decide(seen(number, workers=workers)).pools
        workers = made.wanted
        rules.append(made.rule)
    assert rules[-1].startswith("forecast 4.") and rules[-1].endswith(f"needs {workers} workers")
    assert any(rule.endswith(" keep 4") for rule in rules)


def test_a_decision_lasts_until_the_next_one_is_allowed() -> None:
    """After many actions the next one is not soon: a rise has to be met from further away."""

    def forecast(workers: int) -> float:
        policy, found = CombinedPolicy(SETTINGS, False), 0.0
        for number in range(1, 120):
            rate = 4.0 + max(number - 90, 0) / 5
            given_ = seen(number, rate, 4, decode=Pool(ready=workers), max_gpus=workers + 1)
            decision = policy.decide(given_)
            policy.applied(decision, [DECODE])  # no start succeeds: none is waited for
            found = decision.forecast.get("predicted_requests_per_second", 0.0)
        return found

    assert forecast(1) > 1.1 * forecast(20)


@given(st.lists(st.tuples(st.floats(0, 60), st.integers(0, 500)), min_size=70, max_size=90))
@settings(max_examples=15, deadline=None)
def test_limits_hold_for_any_traffic(intervals: list[tuple[float, int]]) -> None:
    policy = CombinedPolicy(SETTINGS, False)
    pool = Pool(ready=3, minimum=2, maximum=6)
    for number, (rate, queued) in enumerate(intervals, 1):
        given_ = seen(number, rate, max(pool.ready, 1), decode=pool, queued=queued, max_gpus=5)
        for made in policy.decide(given_).pools:
            assert 2 <= made.wanted <= 5
            pool = Pool(ready=made.wanted, minimum=2, maximum=6)


def test_below_the_minimum_nothing_has_to_be_learned_first() -> None:
    policy = CombinedPolicy(SETTINGS, False)
    empty = seen(1, 0.0, 1, decode=Pool(ready=0, minimum=1))
    assert [made.wanted for made in policy.decide(empty).pools] == [1]


def test_disaggregated_pools_are_sized_apart() -> None:
    policy = named_policy("load+sla", SETTINGS, True)
    decided: dict[str, int] = {}
    for number in range(1, 120):
        one = seen(number, rate=20.0)
        both = Observation(
            now_s=one.now_s,
            interval_s=5.0,
            decode=one.decode,
            prefill=Pool(ready=2),
            traffic=one.traffic,
            pulls=one.pulls,
            max_gpus=16,
        )
        for made in policy.decide(both).pools:
            decided[made.pool] = max(decided.get(made.pool, 0), made.wanted)
    # 20 requests/s of 0.26 s keep 5.2 workers busy.
    assert decided[PREFILL] >= 6
    assert 1 <= decided[DECODE] <= 8


def replayed(rate: object, start_up_s: float) -> tuple[float, float, float, float]:
    """Return attainment, GPU-hours, actions an hour and those GPU-hours of 8 workers."""
    requests = generate(
        rate,  # type: ignore[arg-type]
        duration_s=1800.0,
        isl=8000,
        osl=200,
        spread=1.0,
        seed=5,
    )
    policy = CombinedPolicy(SETTINGS, False)
    result = simulate(policy, requests, ReplaySetup(start_up_s=start_up_s, workers=2))
    hours = result.duration_s / 3600
    return result.attainment, result.gpu_hours, result.actions / hours, 8 * hours


def test_a_sine_load_is_served_with_fewer_gpus() -> None:
    attainment, gpu_hours, actions, most = replayed(sine(1.0, 8.0, 900.0), 60.0)
    assert attainment >= 0.9
    assert gpu_hours < 0.7 * most
    assert actions <= 40  # the limit of a whole hour, of which this is half: a burst is in it


def test_a_flat_load_is_left_alone() -> None:
    attainment, _, actions, _ = replayed(flat(4.0), 60.0)
    assert attainment >= 0.9
    assert actions <= 16


def test_a_wave_like_the_last_one_is_not_followed_above_its_peak() -> None:
    forecast = RateForecast(15.0)
    wave = [2.0 + 2.0 * math.sin(number / 20 * 2 * math.pi) for number in range(60)]
    highest = 0.0
    for number, rate in enumerate(wave):
        forecast.add(round(rate * 15), 15.0)
        if number > 30:
            highest = max(highest, float(forecast.path(120.0).max()))
    assert 3.5 < highest < 1.25 * 4.0
    for number in range(10):  # higher than ever: the trend counts
        forecast.add(round((4.0 + number) * 15), 15.0)
    assert forecast.path(120.0).max() > 14.0


def test_half_of_the_workers_stay_for_some_start_ups() -> None:
    def curve(at_s: float) -> float:
        return 6.0 if at_s < 900.0 else 0.5

    traffic = generate(curve, duration_s=2400.0, isl=8000, osl=350, cv=1.0, spread=1.0, seed=5)
    setup = ReplaySetup(workers=4, ttft_ms=2000.0, itl_ms=50.0, start_up_s=60.0)
    result = run_policy("load+sla", traffic, setup, SETTINGS)

    def ready(begin_s: float, end_s: float) -> list[int]:
        return [one.ready for one in result.samples if begin_s <= one.at_s < end_s]

    highest = max(ready(600.0, 900.0))
    assert highest >= 4
    # Fewer were needed at once; four start-ups later there are fewer.
    assert highest > min(ready(1000.0, 1120.0)) >= 0.55 * highest - 1
    assert max(ready(2200.0, 2400.0)) <= 0.5 * highest


def test_a_small_box_does_not_pay_for_waves_that_it_cannot_follow() -> None:
    """A wave of five minutes, start-ups of one: chasing it cost 1.38 times four fixed workers."""
    curve = parse_pattern("sine:1.2-3.6:300", "curve")
    traffic = generate(curve, duration_s=1500.0, isl=12000, osl=350, cv=1.0, spread=1.0, seed=3)
    setup = ReplaySetup(workers=4, ttft_ms=2000.0, itl_ms=50.0, start_up_s=60.0)
    result = run_policy("load+sla", traffic, setup, SETTINGS)
    fixed = run_policy("fixed:4", traffic, setup, SETTINGS)
    assert result.attainment > 0.9
    assert result.gpu_hours <= 1.3 * fixed.gpu_hours
