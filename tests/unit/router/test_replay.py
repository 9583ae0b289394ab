"""Routing a trace over simulated workers: hits, balance, and the router's book of them."""

from __future__ import annotations

import dataclasses
import os
from array import array
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offline_trace import main, replay
from dynamo.bench.trace import read_trace
from dynamo.config.router import RouterSettings
from dynamo.router.replay import Arrival, SimulatedWorker, _Job

ROOT = Path(__file__).parents[3]
KV = RouterSettings(mode="kv")
PREDICTED = RouterSettings(mode="kv", kv_events=False, approximate_cache_policy="lru")
CACHE_FIRST = RouterSettings(mode="kv", prefill_load_scale=64.0, duplicate_cost=32.0)
"""Long prompts, short answers: what weighs is what must be computed, and what is cached twice."""


def conversations(count: int, turns: int, gap_s: float = 20.0) -> list[Arrival]:
    """Conversations of three new blocks a turn, all under one system prompt block."""
    arrivals = []
    for turn in range(turns):
        for number in range(count):
            ids = [0] + [1 + number * 100 + block for block in range(3 * (turn + 1))]
            arrivals.append(Arrival(turn * gap_s + number * gap_s / count, ids, 20))
    return arrivals


def test_conversations_stay_with_their_worker() -> None:
    report = replay(conversations(40, 6, gap_s=2.0), KV, workers=4, blocks_per_worker=2000)
    assert report.of_infinite > 0.7
    assert report.request_imbalance <= 1.3
    assert report.predicted_blocks == report.hit_blocks


def test_kv_beats_round_robin() -> None:
    trace = conversations(11, 6)
    kv = replay(trace, KV, 4, 500)
    turns = replay(trace, RouterSettings(mode="round-robin"), 4, 500)
    assert kv.hit_rate > 2 * turns.hit_rate
    assert kv.utilisation < turns.utilisation
    assert turns.request_imbalance == pytest.approx(1.0, abs=0.1)


def test_small_caches_forget() -> None:
    trace = conversations(12, 6)
    small = replay(trace, KV, 4, 40)
    assert 0 < small.hit_rate < replay(trace, KV, 4, 500).hit_rate
    assert small.blocks == sum(len(arrival.block_ids) for arrival in trace)
    assert small.infinite_hit_rate == replay(trace, KV, 1, 10_000).hit_rate


def test_the_same_trace_gives_the_same_report() -> None:
    trace = conversations(8, 4)
    assert replay(trace, KV, 3, 100) == replay(trace, KV, 3, 100)


def test_a_worker_never_holds_more_than_it_can() -> None:
    worker = SimulatedWorker(1, 6)
    jobs = [
        _Job(str(i), 0.0, 1, array("Q"), array("Q", ids))
        for i, ids in enumerate(([1, 2, 3], [1, 2, 4], [9, 8, 7]))
    ]
    assert worker.admit(jobs[0]) == []
    assert worker.admit(jobs[1]) == []
    assert jobs[1].hits == 2
    assert worker.admit(jobs[2]) is None
    worker.release(jobs[0])
    assert worker.admit(jobs[2]) == [3]
    assert len(worker.pinned) + len(worker.idle) == 6
    worker.release(jobs[1])
    assert list(worker.idle) == [4, 2, 1]


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    sample = str(ROOT / "benchmarks/traces/sample.jsonl")
    main(["--trace", sample, "--workers", "2", "--blocks-per-worker", "50", "500"])
    assert capsys.readouterr().out.count("\nkv ") == 2
    main(["--trace", sample, "--mode", "kv,random", "--limit", "20", "--json"])
    assert '"mode": "random"' in capsys.readouterr().out
    main(["--trace", sample, "--limit", "20", "--predict"])
    assert "kv, lru" in capsys.readouterr().out


def test_predicting_by_capacity_is_as_good_as_events() -> None:
    trace = conversations(12, 6)
    predicted = replay(trace, PREDICTED, 4, 60)
    assert predicted.hit_blocks == pytest.approx(replay(trace, KV, 4, 60).hit_blocks, rel=0.1)
    assert predicted.hit_blocks > 0


@pytest.fixture(scope="module")
def mooncake() -> list[Arrival]:
    """The full public trace, where there is one."""
    name = "mooncake_conversation_trace.jsonl"
    path = Path(os.environ.get("DYN_TRACE", ROOT.parent / "shared/traces" / name))
    if not path.exists():
        pytest.skip(f"no trace at {path} (kvcache-ai/Mooncake, FAST25-release/traces/{name})")
    lines = read_trace(path)
    return [Arrival(line.timestamp / 1e3, line.hash_ids, line.output_length) for line in lines]


@pytest.mark.trace
def test_the_public_trace_with_default_settings(mooncake: list[Arrival]) -> None:
    report = replay(mooncake, KV, 8, 8000)
    assert report.infinite_hit_rate == pytest.approx(0.366, abs=0.001)
    assert report.of_infinite > 0.7
    assert report.computed_imbalance <= 1.1
    assert report.request_imbalance <= 1.1
    turns = replay(mooncake, RouterSettings(), 8, 8000)
    assert turns.hit_rate == pytest.approx(0.12, abs=0.01)
    assert report.ttft_mean_s < turns.ttft_mean_s


@pytest.mark.trace
def test_the_public_trace_with_cache_first_settings(mooncake: list[Arrival]) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"kv_events": False, "approximate_cache_policy": "lru"},
        {"kv_events": False, "ttl_s": 1800.0},
    )
    for change in changes:
        settings = dataclasses.replace(CACHE_FIRST, **change)
        large, small = (replay(mooncake, settings, 8, blocks) for blocks in (8000, 2000))
        assert large.of_infinite >= 0.97
        assert small.hit_rate >= 0.26
        for report in (large, small):
            assert report.computed_imbalance <= 1.1
            assert report.request_imbalance <= 1.1


@pytest.mark.trace
def test_the_public_trace_without_events(mooncake: list[Arrival]) -> None:
    events, predicted = replay(mooncake, KV, 8, 8000), replay(mooncake, PREDICTED, 8, 8000)
    assert predicted.hit_rate == pytest.approx(events.hit_rate, rel=0.02)
    assert predicted.computed_imbalance <= 1.1
