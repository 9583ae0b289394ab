"""Routing a trace over simulated workers: hits, balance, and the router's book of them."""

from __future__ import annotations

import dataclasses
import os
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from make_trace import agents
from offline_trace import main

from dynamo.bench.trace import parents, read_trace
from dynamo.bench.trace_formats import TraceRequest
from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError
from dynamo.router.modes.picker import InflightPicker
from dynamo_lab.routing.replay import Arrival, Replay, replay
from dynamo_lab.routing.simulated_worker import Job, SimulatedWorker, WorkerSpeed

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
        Job(i, 0.0, 1, array("Q"), array("Q", ids))
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
    main(["--trace", sample, "--limit", "60", "--closed-loop", "--speed", "50"])
    waiting = capsys.readouterr().out
    main(["--trace", sample, "--limit", "60", "--speed", "50"])
    assert capsys.readouterr().out != waiting


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


def test_a_prompt_that_no_worker_can_hold_is_refused() -> None:
    trace = [Arrival(0.0, [1, 2, 3], 1), Arrival(1.0, range(10, 15), 1)]
    with pytest.raises(ConfigError, match=r"1 of 2 prompts do not fit a worker of 4 blocks.* 5"):
        replay(trace, KV, 2, 4)
    assert replay(trace, KV, 2, 5).requests == 2


def test_the_command_ends_with_one_line_for_what_it_cannot_replay() -> None:
    sample = str(ROOT / "benchmarks/traces/sample.jsonl")
    with pytest.raises(SystemExit, match="error: 106 of"):
        main(["--trace", sample, "--blocks-per-worker", "3"])
    with pytest.raises(SystemExit, match="error: cannot read the trace"):
        main(["--trace", "/nonexistent", "--blocks-per-worker", "3"])


def test_a_turn_waits_for_the_answer_before_it() -> None:
    """20 ms and 25.6 ms a block to the first token, 10 ms a token behind it."""
    trace = [
        Arrival(0.0, [0, 1], 100),
        Arrival(0.1, [0, 1, 2], 100, parent=0, think_s=0.5),
        Arrival(9.0, [0, 1, 2, 3], 100, parent=1),
    ]
    run = Replay(512, WorkerSpeed())
    picker = InflightPicker("least-loaded")
    run.attach(picker, None, 1, 100)
    report = run.run(trace)
    assert report.hit_blocks == 2 + 3
    assert report.ttft_mean_s == pytest.approx(0.02 + 4 / 3 * 0.0256)
    # the second comes 0.5 s after the first's end and not at 0.1 s, the third at its own time
    assert run.now() == pytest.approx(9.0 + 0.02 + 0.0256 + 1.0)
    late = [trace[0], trace[1], trace[2]._replace(at_s=0.2)]
    run = Replay(512, WorkerSpeed())
    run.attach(InflightPicker("least-loaded"), None, 1, 100)
    run.run(late)
    assert run.now() == pytest.approx(3 * (0.02 + 1.0) + 4 * 0.0256 + 0.5)


def test_a_parent_comes_before_its_child() -> None:
    with pytest.raises(ConfigError, match="request 0 of the trace waits for request 1"):
        replay([Arrival(0.0, [1], 1, parent=1), Arrival(0.0, [1], 1)], KV, 1, 10)


@pytest.mark.parametrize("per_request_s", [0.0, 0.01])
def test_decoding_slows_down_with_the_batch(per_request_s: float) -> None:
    """Two requests at once, of 100 and 300 tokens, prefills too short to count."""
    service = WorkerSpeed(1e12, 0.0, 0.01, per_request_s)
    run = Replay(512, service)
    run.attach(InflightPicker("least-loaded"), None, 1, 100)
    run.run([Arrival(0.0, [1], 100), Arrival(0.0, [2], 300)])
    # 100 steps of both, then 200 of one
    assert run.now() == pytest.approx(100 * (0.01 + per_request_s) + 200 * 0.01)


def test_sessions_and_continued_prompts_have_parents() -> None:
    def request(blocks: list[int], session: str | None = None) -> TraceRequest:
        return TraceRequest(blocks, 1, session_id=session)

    trace = [
        request([0, 1, 2]),
        request([0, 5, 6]),  # another conversation under the same system prompt
        request([0, 1, 3, 4]),  # block 2 was partly filled: it is another one now
        request([0, 1, 3, 4, 7]),
        request([0, 1, 3]),  # not longer than what it shares its blocks with
        request([0, 1, 3, 4, 7], "a"),
        request([9], "b"),
        request([8], "a"),
    ]
    assert parents(trace) == [None, None, 0, 2, None, None, None, 5]


def test_agents_start_their_next_turn_when_the_last_is_answered() -> None:
    trace = [msgspec.convert(row, TraceRequest) for row in agents(sessions=12, turns=6)]
    arrivals = [
        Arrival(one.timestamp / 1e3, one.hash_ids, one.output_length, parent, one.delay / 1e3)
        for one, parent in zip(trace, parents(trace), strict=True)
    ]
    plain, cache_first = (replay(arrivals, one, 3, 120) for one in (KV, CACHE_FIRST))
    assert cache_first.hit_rate > plain.hit_rate + 0.05
    assert cache_first.ttft_mean_s < plain.ttft_mean_s
