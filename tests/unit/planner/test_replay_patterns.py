"""Synthetic traffic, traces and their warps."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from dynamo.bench.trace_formats import TraceRequest
from dynamo.errors import ConfigError
from dynamo_lab.simulation.request import (
    ReplayRequest,
    from_trace,
    generate,
    parse_pattern,
    speed_up,
    warp,
)


def counts(requests: list[ReplayRequest], window_s: float) -> list[int]:
    found = [0] * (int(max(request.at_s for request in requests) / window_s) + 1)
    for request in requests:
        found[int(request.at_s / window_s)] += 1
    return found


@pytest.mark.parametrize(
    ("pattern", "rates"),
    [
        ("flat:10", [10, 10, 10, 10]),
        ("sine:2-18:400", [4.9, 15.1, 15.1, 4.9]),
        ("flash:2-20:400", [2, 9.2, 5.6, 2]),
    ],
)
def test_rates_follow_the_curve(pattern: str, rates: list[float]) -> None:
    requests = generate(
        parse_pattern(pattern, "--synthetic"), duration_s=400, isl=10, osl=10, seed=4
    )
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    for count, rate in zip(counts(requests, 100), rates, strict=True):
        assert count / 100 == pytest.approx(rate, rel=0.15)


def test_a_day_has_a_night_and_a_peak() -> None:
    rate = parse_pattern("day:1-9:86400", "--synthetic")
    assert rate(2 * 7200) == pytest.approx(1.0)
    assert rate(10 * 7200) == pytest.approx(9.0)
    assert rate(3 * 86400 + 10 * 7200) == pytest.approx(9.0)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_bursts_have_the_coefficient_of_variation(cv: float) -> None:
    rate = parse_pattern("flat:50", "--synthetic")
    times = [r.at_s for r in generate(rate, duration_s=400, isl=10, osl=10, cv=cv, seed=1)]
    gaps = [b - a for a, b in pairwise(times)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_lengths_spread_around_their_means() -> None:
    rate = parse_pattern("flat:50", "--synthetic")
    requests = generate(rate, duration_s=400, isl=3000, osl=150, spread=1.0, seed=1)
    assert fmean(r.isl for r in requests) == pytest.approx(3000, rel=0.05)
    assert pstdev(r.osl for r in requests) == pytest.approx(150, rel=0.1)
    other = generate(rate, duration_s=400, isl=3000, osl=150, spread=1.0, seed=2)
    assert other[:10] != requests[:10]


def test_a_warp_keeps_order_and_number() -> None:
    requests = [ReplayRequest(number / 10, 10, 10) for number in range(6000)]
    warped = warp(requests, parse_pattern("sine:0.2-2.2:100", "--warp"))
    assert [r.isl for r in warped] == [r.isl for r in requests]
    assert warped[-1].at_s == pytest.approx(500, rel=0.05)  # 1.2 times as fast on average
    slow, fast, *_ = [count / 25 for count in counts(warped, 25)]
    assert slow == pytest.approx(5.6, rel=0.05) and fast == pytest.approx(18.4, rel=0.05)
    assert speed_up(requests, 2.0)[-1].at_s == pytest.approx(requests[-1].at_s / 2)


@pytest.mark.parametrize(
    "text", ["sine", "sine:2-1", "sin:1-2:3", "flat:0", "flat:x", "day:-1-2:3"]
)
def test_a_bad_curve_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--warp must look like flat:RATE"):
        parse_pattern(text, "--warp")


def test_a_warp_that_never_ends_is_rejected() -> None:
    with pytest.raises(ConfigError, match="too low"):
        warp([ReplayRequest(1e6, 10, 10)], parse_pattern("flat:0.0001", "--warp"))


def test_trace_lines_become_requests() -> None:
    """Arrivals are spread over a tick, turns know their parents, partial blocks are not reused."""
    found = from_trace(
        [
            TraceRequest(hash_ids=[1, 2, 3], input_length=1100, output_length=5, timestamp=0),
            TraceRequest(hash_ids=[7], output_length=0, timestamp=0, session_id="a"),
            TraceRequest(hash_ids=[8], output_length=9, timestamp=3000, session_id="a", delay=50),
            TraceRequest(hash_ids=[1, 2, 4, 5], output_length=5, timestamp=9000),
        ]
    )
    assert [request.at_s for request in found] == [0.0, 1.5, 3.0, 9.0]
    assert [request.parent for request in found] == [None, None, 1, 0]
    assert [request.blocks for request in found] == [(1, 2), (), (), (1, 2, 4)]
    assert [request.isl for request in found] == [1100, 512, 512, 2048]
    assert found[1].osl == 1 and found[2].delay_s == 0.05
