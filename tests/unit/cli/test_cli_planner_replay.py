"""``dynamo planner replay``: traffic, table, JSON, plot and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dynamo.cli.main import main
from dynamo.planner.capacity.interpolation import (
    DecodePoints,
    PrefillPoints,
    WorkerProfile,
    write_profile,
)

SHORT = ("--synthetic", "flat:4", "--duration", "20", "--start-up", "5", "--max-gpu-budget", "2")
TRACE = """{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]}
{"timestamp": 5000, "input_length": 900, "output_length": 20, "hash_ids": [1, 3]}
"""

OWN_POLICY = """
from dynamo.planner.policies.base import DECODE, PoolDecision, ScalingDecision

class Mine:
    name, interval_s, blocking = "mine", 5.0, False
    def __init__(self, settings, prefill):
        self.most = settings.max_gpu_budget
    def decide(self, seen):
        return ScalingDecision(pools=(PoolDecision(pool=DECODE, wanted=self.most, rule="all"),))
    def applied(self, decision, failed):
        pass
"""


def replay(*words: str) -> int:
    return main(["planner", "replay", *words])


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[dict[str, object]]]:
    assert replay("--json", *words) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_table_has_the_policies_and_the_fixed_deployments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay(*SHORT, "--policy", "load", "--policy", "oracle") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["load", "oracle", "score:"]
    assert lines[-1].startswith("score: 0 as the best of fixed:1 to fixed:2, 1 as the oracle;")
    assert "GPU-hours" in lines[0] and "score" in lines[0]


def test_json_has_the_figures_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, *SHORT, "--policy", "hpa:4")
    assert {"policies", "fixed", "oracle"} == set(found)
    (result,) = found["policies"]
    assert result["policy"] == "hpa:4" and result["attainment"] == 1.0
    for name in ("gpu_hours", "ttft_p99_ms", "itl_p99_ms", "worst_minute", "actions", "reversals"):
        assert isinstance(result[name], int | float)
    assert "score" in result


def test_the_policy_of_the_mode_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = figures(capsys, *SHORT, "--no-score")["policies"]
    assert result["policy"] == "load"


def test_a_worker_starts_as_long_as_its_profile_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = np.array([1000.0])
    prefill = PrefillPoints(isl=point, ttft_ms=point / 10, tokens_per_s=10 * point)
    decode = DecodePoints(
        kv_usage=point / 2000, context=point, itl_ms=point, tokens_per_s=point, max_kv_tokens=9000
    )
    write_profile(tmp_path, WorkerProfile(prefill=prefill, decode=decode, start_s=300.0))
    none = ("--synthetic", "flat:1", "--duration", "30", "--initial-workers", "0", "--no-score")
    profiled = (*none, "--policy", "load", "--profile-results-dir", str(tmp_path))
    assert float(str(figures(capsys, *profiled)["policies"][0]["ttft_p50_ms"])) > 280_000
    short = figures(capsys, *profiled, "--start-up", "10")["policies"][0]
    assert float(str(short["ttft_p50_ms"])) < 60_000


def test_a_trace_is_warped_and_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    plain = ("--no-score", "--policy", "fixed:1", str(trace))
    (whole,) = figures(capsys, *plain)["policies"]
    (cut,) = figures(capsys, *plain, "--rate", "2", "--duration", "2.4")["policies"]
    (slow,) = figures(capsys, *plain, "--warp", "flat:0.1")["policies"]
    assert (whole["requests"], cut["requests"]) == (2, 1)
    assert slow["duration_s"] == pytest.approx(50, rel=0.01)


def test_own_policies_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "replay_own_policy.py").write_text(OWN_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    (result,) = figures(capsys, *SHORT, "--no-score", "--policy", "replay_own_policy:Mine")[
        "policies"
    ]
    assert result["workers_changed"] == 1


def test_disaggregated_serving_has_no_score(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, *SHORT, "--initial-prefill-workers", "1", "--policy", "fixed:1x1")
    assert list(found) == ["policies"]
    assert found["policies"][0]["failed"] == 0


def test_the_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "replay.png"
    assert replay(*SHORT, "--policy", "hpa:4", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either a trace or --synthetic"),
        (("--synthetic", "flat:1", "trace.jsonl"), "either a trace or --synthetic"),
        (("--synthetic", "sine:5"), "--synthetic must look like"),
        (("--synthetic", "flat:1", "--warp", "flat:2"), "--warp and --rate need a trace"),
        (("missing.jsonl",), "cannot read the trace"),
        ((*SHORT, "--policy", "best"), "'best'"),
        ((*SHORT, "--policy", "oracle", "--no-score"), "--policy oracle needs"),
        ((*SHORT, "--no-score", "--plot", "/nowhere/a.png"), "can't write /nowhere/a.png"),
    ],
)
def test_errors_name_the_remedy(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(*words) == 2
    assert message in capsys.readouterr().err
