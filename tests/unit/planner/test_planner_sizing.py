"""Dynamo's SLA formulas with worked numbers, and the capacity models behind them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.interpolation import (
    DecodePoints,
    DecodeSurface,
    PrefillCurve,
    PrefillPoints,
    WorkerProfile,
    write_profile,
)
from dynamo.planner.capacity.learned import (
    DecodePoint,
    LearnedDecode,
    LearnedPrefill,
    Line,
    fit_line,
)
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic
from dynamo.planner.policies.base import ScalingDecision
from dynamo.planner.policies.sizing import (
    Demand,
    backlog,
    decode_workers,
    prefill_workers,
)
from dynamo.planner.policies.sla import SlaPolicy
from dynamo.serve.graph.facts import DECODE, PREFILL


class FlatPrefill(LearnedPrefill):
    """10,000 prompt tokens per second and GPU; TTFT 0.1 ms a token."""

    def __init__(self) -> None:
        super().__init__(Line(0.1, 0.0), 1)

    def ttft_ms(self, isl: float) -> float:
        return isl / 10

    def tokens_per_s(self, isl: float) -> float:
        return 10_000.0


class LinearDecode(LearnedDecode):
    """ITL 10 ms plus 1 ms a sequence: n sequences give n / (10 + n) tokens per ms."""

    def __init__(self) -> None:
        super().__init__(Line(1.0, 10.0), math.inf, 1)

    def itl_ms(self, concurrency: float, context: float) -> float:
        return 10.0 + concurrency

    def best(self, itl_ms: float, context: float) -> DecodePoint:
        running = max(itl_ms - 10.0, 1.0)
        return DecodePoint(tokens_per_s=1000.0 * running / (10 + running), itl_ms=10 + running)


def test_prefill_workers() -> None:
    """8 requests/s of 3000 tokens are 24,000 tokens/s; on 10,000 a GPU that is 2.4 GPUs."""
    assert prefill_workers(Demand(rate=8, isl=3000, osl=1), FlatPrefill(), gpus=1) == 3
    assert prefill_workers(Demand(rate=8, isl=3000, osl=1), FlatPrefill(), gpus=2) == 2
    # A third of each prompt is cached: 1.6 GPUs. A TTFT above the profile's changes nothing.
    cached = Demand(rate=8, isl=3000, osl=1, prefill_correction=2 / 3)
    assert prefill_workers(cached, FlatPrefill(), gpus=1) == 2
    slow = Demand(rate=8, isl=3000, osl=1, prefill_correction=5)
    assert prefill_workers(slow, FlatPrefill(), gpus=1) == 3


def test_decode_workers() -> None:
    """A target of 50 ms allows 40 sequences: 800 tokens/s. 20 * 150 = 3000 tokens/s need 3.75."""
    demand = Demand(rate=20, isl=3000, osl=150)
    assert decode_workers(demand, LinearDecode(), gpus=1, itl_ms=50) == 4
    assert decode_workers(demand, LinearDecode(), gpus=2, itl_ms=50) == 2
    # ITL twice the profile's: 25 ms to look up, 15 sequences, 600 tokens/s, 5 workers.
    slow = Demand(rate=20, isl=3000, osl=150, decode_correction=2)
    assert decode_workers(slow, LinearDecode(), gpus=1, itl_ms=50) == 5
    # A correction of 0 or below is none.
    assert (
        decode_workers(
            Demand(rate=20, isl=3000, osl=150, decode_correction=0), LinearDecode(), 1, 50
        )
        == 4
    )


def test_exact_fits_are_not_rounded_up() -> None:
    assert prefill_workers(Demand(rate=3, isl=10_000, osl=1), FlatPrefill(), gpus=1) == 3
    assert prefill_workers(Demand(rate=0, isl=10_000, osl=1), FlatPrefill(), gpus=1) == 0


def test_queued_requests_are_part_of_the_demand() -> None:
    """100 queued requests within 50 s are 2 more a second: 10 of 3000 tokens are 3 GPUs."""
    demand = Demand(rate=8, isl=3000, osl=1, queued=100, within_s=50)
    assert demand.work_rate == 10
    assert prefill_workers(demand, FlatPrefill(), gpus=1) == 3
    # 8 requests/s with a mean TTFT of 0.5 s have 4 waiting, and 3 are no backlog.
    assert [backlog(queued, 8.0, 500.0) for queued in (0, 7, 27)] == [0.0, 0.0, 20.0]


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 50), st.floats(10, 9_000), st.floats(1, 900), st.floats(20, 200))
def test_more_traffic_never_needs_fewer_workers(
    rate: float, isl: float, osl: float, itl_ms: float
) -> None:
    one, two = (Demand(rate=r, isl=isl, osl=osl) for r in (rate, 1.5 * rate))
    fewer, more = (
        (
            prefill_workers(demand, FlatPrefill(), 1),
            decode_workers(demand, LinearDecode(), 1, itl_ms),
        )
        for demand in (one, two)
    )
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_interpolation_is_cubic_and_clamped() -> None:
    isl = np.array([1000.0, 2000.0, 3000.0, 5000.0, 8000.0])
    cubic = 50 + isl / 20 + isl**2 / 1e6 + isl**3 / 1e10
    curve = PrefillCurve(PrefillPoints(isl=isl, ttft_ms=cubic, tokens_per_s=1000 * isl / cubic))
    want = 50 + 4000 / 20 + 4000**2 / 1e6 + 4000**3 / 1e10
    assert curve.ttft_ms(4000) == pytest.approx(want)
    assert curve.ttft_ms(10) == pytest.approx(cubic[0])
    assert curve.ttft_ms(1e6) == pytest.approx(cubic[-1])
    one = PrefillCurve(
        PrefillPoints(
            isl=np.array([500.0]), ttft_ms=np.array([20.0]), tokens_per_s=np.array([25_000.0])
        )
    )
    assert one.ttft_ms(9999) == 20.0


def plane(usage: Any, context: Any) -> Any:
    return 5 + 40 * usage + context / 1000


def grid(usage: Any, context: Any) -> tuple[Any, Any]:
    points: Any = np.meshgrid(usage, context)
    return points[0].ravel(), points[1].ravel()


def surface() -> DecodeSurface:
    """ITL 5 ms + 40 ms * usage + 1 ms per 1000 tokens, known from usage 0.1 to 0.9."""
    usage, context = grid(np.linspace(0.1, 0.9, 9), [500.0, 1000.0, 2000.0, 3000.0, 4000.0])
    itl = plane(usage, context)
    rate = 1000 * usage * 100_000 / context / itl
    return DecodeSurface(
        DecodePoints(
            kv_usage=usage, context=context, itl_ms=itl, tokens_per_s=rate, max_kv_tokens=100_000
        )
    )


def test_decode_surface_between_and_outside_the_points() -> None:
    model = surface()
    # 25 sequences of 2000 tokens use half of the cache; a cell is 1 % wide.
    assert model.itl_ms(25, 2000) == pytest.approx(27.0, abs=0.5)
    # Outside of the points the nearest one counts: usage 0.9 and context 500.
    assert model.itl_ms(1e9, 1) == pytest.approx(5 + 36 + 0.5, abs=0.5)
    assert math.isfinite(model.itl_ms(0, 1e9))


def test_best_point_is_the_highest_usage_within_the_target() -> None:
    model = surface()
    best = model.best(27.0, 2000)
    assert best.kv_usage == pytest.approx(0.5, abs=0.02)
    assert best.itl_ms <= 27.0
    assert best.tokens_per_s == pytest.approx(1000 * 25 / 27, rel=0.05)
    hopeless = model.best(1.0, 2000)
    assert hopeless.kv_usage == 0.0
    assert hopeless.itl_ms > 1.0


def test_a_profile_of_one_context_length_works() -> None:
    usage = np.array([0.2, 0.4, 0.6, 0.8])
    same = np.full(4, 1000.0)
    model = DecodeSurface(
        DecodePoints(
            kv_usage=usage, context=same, itl_ms=10 * usage, tokens_per_s=same, max_kv_tokens=1000
        )
    )
    assert model.itl_ms(0.61, 1000) == pytest.approx(6.0)


def test_learned_lines_ignore_outliers_and_need_a_slope() -> None:
    points = [(float(x), 3.0 * x + 7.0) for x in range(20)] + [(5.0, 900.0), (12.0, -400.0)]
    line = fit_line(points)
    assert line is not None
    assert line.slope == pytest.approx(3.0, rel=0.02)
    assert line.offset == pytest.approx(7.0, abs=0.5)
    assert fit_line([(1.0, 2.0)] * 10) is None
    assert fit_line([(float(x), 5.0 - x) for x in range(10)]) is None
    assert fit_line(points[:4]) is None


def test_learned_capacity_in_numbers() -> None:
    prefill = LearnedPrefill(Line(0.1, 20.0), gpus=2)
    assert prefill.ttft_ms(1800) == pytest.approx(200.0)
    assert prefill.tokens_per_s(1800) == pytest.approx(4500.0)  # 9000 a worker of two GPUs
    decode = LearnedDecode(Line(0.001, 10.0), most=50_000, gpus=1)
    best = decode.best(50.0, 1000)  # 40 ms are 40,000 tokens, 40 sequences
    assert best.itl_ms == pytest.approx(50.0)
    assert best.tokens_per_s == pytest.approx(800.0)
    assert decode.best(500.0, 1000).tokens_per_s == pytest.approx(1000 * 100 / 110)  # 2 * most


def options(**changes: object) -> PlannerSettings:
    fields: dict[str, object] = {"load_predictor": "constant", "ttft_ms": 500, "itl_ms": 50}
    return PlannerSettings(**{**fields, **changes})  # type: ignore[arg-type]


def seen(traffic: Traffic, queue: float | None = None, max_gpus: float = 32) -> Observation:
    """Return an interval of two prefill and two decode workers."""
    return Observation(
        now_s=0.0,
        interval_s=60.0,
        decode=Pool(ready=2),
        prefill=Pool(ready=2),
        traffic=traffic,
        pulls=(Pull(at_s=0.0, prefill_queue=queue),),
        max_gpus=max_gpus,
    )


def wanted(decision: ScalingDecision) -> dict[str, int]:
    return {pool.pool: pool.wanted for pool in decision.pools}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile: TTFT isl / 10 ms, 10,000 tokens/s, and the plane of the decode surface."""
    isl = np.array([100.0, 1000.0, 4000.0, 8000.0])
    usage, context = grid(np.linspace(0, 1, 21), [2000.0, 2500.0, 2800.0, 3100.0, 3400.0, 4000.0])
    itl = plane(usage, context)
    profile = WorkerProfile(
        prefill=PrefillPoints(isl=isl, ttft_ms=isl / 10, tokens_per_s=np.full(4, 10_000.0)),
        decode=DecodePoints(
            kv_usage=usage,
            context=context,
            itl_ms=itl,
            tokens_per_s=1000 * usage * 100_000 / context / itl,
            max_kv_tokens=100_000,
        ),
    )
    path = tmp_path_factory.mktemp("profile")
    write_profile(path, profile)
    return path


def profiled(directory: Path, **changes: object) -> SlaPolicy:
    return SlaPolicy(options(profile_results_dir=str(directory), **changes), prefill=True)


TRAFFIC = Traffic(
    duration_s=60,
    arrived=480,
    finished=480,
    isl=3000,
    osl=200,
    ttft_ms=300,
    itl_ms=20,
    request_s=4.3,
    inflight=30,
)


def test_the_policy_with_a_profile(directory: Path) -> None:
    """8 requests/s of 3000 + 200 tokens, TTFT as profiled: 2.4 prefill workers.

    Decode: without corrections 50 ms at a context of 3100 tokens is above the whole cache's
    5 + 40 + 3.1 = 48.1 ms, so a worker gives 1000 * 100,000 / 3100 / 48.1 = 671 tokens/s for
    1600: 2.4 workers.
    """
    decision = profiled(directory, no_correction=True).decide(seen(TRAFFIC))
    assert wanted(decision) == {PREFILL: 3, DECODE: 3}
    assert [pool.pool for pool in decision.pools] == [PREFILL, DECODE]
    assert decision.forecast["predicted_requests_per_second"] == pytest.approx(8.0)
    assert decision.forecast["predicted_input_sequence_tokens"] == 3000
    assert decision.forecast["predicted_num_prefill_replicas"] == 3
    assert decision.forecast["estimated_ttft_ms"] == pytest.approx(300, rel=0.01)


def test_corrections_of_the_policy(directory: Path) -> None:
    """TTFT half of the profile's: 1.2 prefill workers.

    Concurrency 8 * 4.3 / 2 = 17.2 sequences of 3100 tokens use 53 % of the cache: the profile has
    5 + 21.3 + 3.1 = 29.4 ms. Observed are 58.8: the ITL to look up is 25 ms, at 42 % usage:
    1000 * 42,250 / 3100 / 25 = 545 tokens/s, so 1600 need 2.9 workers.
    """
    traffic = replace(TRAFFIC, ttft_ms=150, itl_ms=58.8)
    decision = profiled(directory).decide(seen(traffic))
    assert wanted(decision) == {PREFILL: 2, DECODE: 3}
    inputs = decision.pools[1].inputs
    assert inputs["prefill_correction"] == pytest.approx(0.5, rel=0.01)
    assert inputs["decode_correction"] == pytest.approx(2.0, rel=0.02)


def test_the_budget_limits_both_pools(directory: Path) -> None:
    """3 and 3 wanted, 4 GPUs: prefill floor(3 * 4 / 6) = 2, decode the rest."""
    policy = profiled(directory, no_correction=True)
    assert wanted(policy.decide(seen(TRAFFIC, max_gpus=4))) == {PREFILL: 2, DECODE: 2}


def test_an_interval_with_a_missing_figure_is_skipped(directory: Path) -> None:
    policy = profiled(directory)
    for missing in ("isl", "osl", "ttft_ms", "itl_ms", "request_s"):
        for value in (None, math.nan):
            traffic = replace(TRAFFIC, **{missing: value})  # type: ignore[arg-type]
            kept = wanted(policy.decide(seen(traffic)))
            assert kept == {PREFILL: 2, DECODE: 2}, (missing, value)


def test_idle_intervals_shrink_to_the_minimum(directory: Path) -> None:
    policy = profiled(directory)
    idle = seen(Traffic(duration_s=60))
    counts = [wanted(policy.decide(idle)) for _ in range(3)]
    assert counts == [{PREFILL: 2, DECODE: 2}] * 2 + [{PREFILL: 1, DECODE: 1}]


def test_without_a_profile_the_capacity_is_learned() -> None:
    """TTFT 0.1 ms a token and ITL 10 ms + 1 µs a token: after five intervals it decides."""
    policy = SlaPolicy(options(), prefill=True)
    decisions = []
    for rate in range(4, 11):
        tokens = rate * 4.0 / 2 * 3100  # of the running sequences of each of two workers
        traffic = Traffic(
            duration_s=60,
            arrived=60 * rate,
            finished=60 * rate,
            isl=3000,
            osl=200,
            ttft_ms=0.1 * 3000 * (1 + rate / 10),
            itl_ms=10 + tokens / 1000,
            request_s=4.0,
        )
        decisions.append(wanted(policy.decide(seen(traffic, queue=rate / 10))))
    assert decisions[:4] == [{PREFILL: 2, DECODE: 2}] * 4
    # 10 requests/s: 30,000 tokens/s on 10,000 each are 3. 50 ms allow 40,000 tokens, 12.9
    # sequences, 258 tokens/s; 2000 tokens/s need 7.75 workers.
    assert decisions[-1] == {PREFILL: 3, DECODE: 8}
