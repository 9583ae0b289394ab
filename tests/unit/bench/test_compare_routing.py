"""``dynamo bench --compare-routing``: every mode on one trace, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.bench.trace_formats import TraceRequest
from dynamo.cli import bench
from dynamo_lab.cli import compare_routing
from dynamo_lab.routing.replay import POLICIES, RoutingResult, arrivals_of, compare

SAMPLE = str(Path(__file__).parents[3] / "benchmarks/traces/sample.jsonl")
COMMAND = ["--compare-routing", "--trace", SAMPLE, "--workers", "4"]


def test_the_table_begins_with_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*COMMAND, "--requests", "60", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(POLICIES)
    means = [row["ttft_mean_s"] for row in rows]
    assert means == sorted(means) and means[0] > 0
    hits = {row["name"]: row["hit_rate"] for row in rows}
    assert hits["kv, cache first"] > hits["round-robin"]
    assert bench.main([*COMMAND, "--requests", "60"]) == 0
    title, head, first, *_ = capsys.readouterr().out.splitlines()
    assert title == "60 requests, 4 workers, in virtual time"
    assert head.split()[:3] == ["routing", "TTFT", "mean"] and rows[0]["name"] in first


@pytest.mark.parametrize("complete", [0, 2])
def test_ctrl_c_shows_the_modes_so_far(
    complete: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, *trace: Any) -> RoutingResult:
        if name == [*POLICIES][complete]:
            raise KeyboardInterrupt
        return compare(name, *trace)

    monkeypatch.setattr(compare_routing, "compare", interrupted)
    assert bench.main([*COMMAND, "--requests", "60", "--json"]) == 130
    shown = capsys.readouterr()
    assert {row["name"] for row in json.loads(shown.out)} == {*[*POLICIES][:complete]}
    assert shown.err == "dynamo bench: interrupted\n"
    assert bench.main([*COMMAND, "--requests", "60"]) == 130
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith(f"interrupted: {complete} of {len(POLICIES)} modes")
    assert len(rows) == (complete + 1 if complete else 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--compare-routing"], "needs --trace; dynamo record makes one"),
        ([*COMMAND, "--worker-blocks", "3"], "give the workers at least 31 blocks"),
        (["--compare-routing", "--trace", "none.jsonl"], "none.jsonl"),
    ],
)
def test_errors_say_what_to_do(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(words) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_prompts_without_ids_share_nothing_and_turns_follow_each_other() -> None:
    turns = [
        TraceRequest([], 10, input_length=1000, timestamp=5000.0),
        TraceRequest([7, 8], 10, timestamp=6000.0, session_id="a"),
        TraceRequest([], 3, input_length=100, timestamp=6000.0),
        TraceRequest([7, 8, 9], 1, timestamp=7000.0, session_id="a", delay=500.0),
    ]
    found = arrivals_of(turns, 512, 2.0, 0.5)
    assert [one.block_ids for one in found] == [[0, 1], [2, 3], [4], [2, 3, 5]]
    assert [one.at_s for one in found] == [0.0, 0.5, 0.5, 1.0]
    assert [one.output_tokens for one in found] == [5, 5, 2, 1]
    assert [(one.parent, one.think_s) for one in found[2:]] == [(None, 0.0), (1, 0.25)]
    assert compare("round-robin", found, 1, 10, 1.0).hit_rate == pytest.approx(2 / 8)
