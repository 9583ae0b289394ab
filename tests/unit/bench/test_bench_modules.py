"""The pure modules of the load generator: traces, prompts, figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.bench.stats import Goodput, Outcome, parse_goodput, percentile, summarize
from dynamo.bench.trace import read_trace
from dynamo.bench.trace_formats import TraceRequest
from dynamo.bench.workload import Prompts, from_trace, synthetic
from dynamo.errors import ConfigError

SAMPLE = Path(__file__).resolve().parents[3] / "benchmarks/traces/sample.jsonl"


def outcome(start: float, first: float | None, end: float, **more: object) -> Outcome:
    made = Outcome(started_s=start, first_token_s=first, finished_s=end)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_sample_trace_reads_and_keeps_its_clock() -> None:
    requests = read_trace(SAMPLE)
    planned = from_trace(requests, speedup=2.0)
    assert len(planned) == len(requests) > 100
    assert planned[-1].at_s == requests[-1].timestamp / 2000
    for request, plan in zip(requests, planned, strict=True):
        assert plan.input_tokens == request.input_length
        assert plan.output_tokens == request.output_length


def test_limit_and_bad_lines_name_file_and_line(tmp_path: Path) -> None:
    assert len(read_trace(SAMPLE, 5)) == 5
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"hash_ids": [1], "output_length": 2}\n{"hash_ids": "x"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: .*hash_ids"):
        read_trace(bad)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.jsonl")
    bad.write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(bad)


def test_shrunk_blocks_shrink_every_prompt_alike() -> None:
    trace = [TraceRequest([1, 2, 3], 10, input_length=512 * 2 + 256)]
    (plan,) = from_trace(trace, block_tokens=64)
    assert plan.segments == ((1, 64), (2, 64), (3, 32))


def test_equal_prefixes_become_equal_text() -> None:
    prompts = Prompts(seed=3)
    long = prompts.text(((1, 40), (2, 40)))
    other = prompts.text(((1, 40), (9, 40)))
    shared = prompts.text(((1, 40),))
    assert long.startswith(shared) and other.startswith(shared) and long != other
    assert Prompts(seed=4).text(((1, 40),)) != shared
    ids = prompts.token_ids(((1, 16), (2, 16)))
    assert ids[:16] == prompts.token_ids(((1, 16),)) and len(ids) == 32


@given(st.integers(1, 50), st.integers(1, 500), st.floats(0, 1))
def test_synthetic_prompts_have_the_requested_length(count: int, isl: int, ratio: float) -> None:
    planned = synthetic(count, isl=isl, osl=7, prefix_ratio=ratio)
    assert [p.input_tokens for p in planned] == [isl] * count
    assert {p.output_tokens for p in planned} == {7}


def test_poisson_arrivals_rise() -> None:
    times = [p.at_s or 0.0 for p in synthetic(200, isl=8, osl=1, rate=100.0)]
    assert times == sorted(times) and 1.0 < times[-1] < 4.0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_is_a_member_and_monotone(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert percentile(ordered, share) in ordered
    assert percentile(ordered, 0.0) == ordered[0] and percentile(ordered, 1.0) == ordered[-1]


def test_summary_counts_outcomes() -> None:
    outcomes = [
        outcome(
            0,
            0.1,
            1.0,
            gaps_s=[0.02, 0.02],
            prompt_tokens=100,
            output_tokens=3,
            cached_tokens=50,
            worker_id=1,
        ),
        outcome(
            0,
            0.3,
            2.0,
            gaps_s=[0.05],
            prompt_tokens=100,
            output_tokens=2,
            cached_tokens=0,
            worker_id=2,
        ),
        outcome(0, 0.2, 1.0, prompt_tokens=100, output_tokens=1, cached_tokens=100, worker_id=1),
        outcome(0, None, 0.1, error="503: busy"),
    ]
    summary = summarize(outcomes, 2.0, Goodput(ttft=250, itl=25))
    assert (summary.requests, summary.completed, summary.errors) == (4, 3, {"503: busy": 1})
    assert summary.hit_rate == 0.5 and summary.output_tokens_per_s == 3.0
    assert summary.busiest_share == pytest.approx(2 / 3) and summary.imbalance == pytest.approx(
        4 / 3
    )
    assert summary.ttft_ms is not None and summary.ttft_ms.max == pytest.approx(300)
    assert summary.good_requests == 2 and summary.good_requests_per_s == 1.0


def test_missing_measurements_are_not_reported() -> None:
    summary = summarize([outcome(0, None, 0.1, error="x")], 1.0)
    assert summary.ttft_ms is None and summary.hit_rate is None and summary.busiest_share is None


def test_goodput_text() -> None:
    assert parse_goodput("ttft:2000, itl:25") == Goodput(ttft=2000, itl=25)
    for bad in ("ttft", "ttft:x", "tpot:3"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput(bad)


def test_percentiles_are_of_the_nearest_rank() -> None:
    ten = [float(number) for number in range(1, 11)]
    assert [percentile(ten, share) for share in (0.1, 0.5, 0.9, 0.91)] == [1, 5, 9, 10]
    assert percentile([1.0, 2.0], 0.5) == 1.0 and percentile([7.0], 0.99) == 7.0
