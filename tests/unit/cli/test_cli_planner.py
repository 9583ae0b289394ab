"""``dynamo planner``: its verbs, and what it says without a deployment or a planner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.cli import main as cli
from dynamo.planner.live.decisions import DECISIONS_FILE, DecisionLog, DecisionRecord, PoolChange
from dynamo.planner.reports.explain import ExplainReport, ModelReport, report_text

CHANGE = PoolChange(
    pool="decode", before=1, wanted=2, after=2, rule="KV load 0.95 > 0.9", inputs={"kv_load": 0.95}
)


def record(at_s: float, outcome: str = "done") -> DecisionRecord:
    return DecisionRecord(
        at_s=at_s, model="tiny", mode="load", pools=(CHANGE,), outcome=outcome, duration_s=2.5
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory whose last planner has made three decisions."""
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_NAMESPACE", "box")
    path = tmp_path / "box" / DECISIONS_FILE
    path.parent.mkdir(mode=0o700, parents=True)
    for at_s in (1.0, 2.0, 3.0):
        DecisionLog(path).append(record(at_s))
    return tmp_path


def test_explain_without_a_planner(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["planner", "explain", "-n", "2"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("model tiny, policy load: done in 2.5 s") == 2
    assert "decode 1 -> 2: KV load 0.95 > 0.9 [kv_load=0.95]" in shown
    assert re.search(r"19[67]\d-\d\d-\d\d ", shown)  # a time alone would be of today
    assert "no planner runs in namespace 'box': these are the decisions of the last one" in shown


def test_explain_as_json(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["planner", "explain", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["at_s"] for one in found["decisions"]] == [1.0, 2.0, 3.0]
    assert (found["running"], found["models"]) == (False, [])


def test_explain_of_another_namespace(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["planner", "explain", "--namespace", "other"]) == 1
    assert capsys.readouterr().out == "no planner runs in namespace 'other'\n"


def test_explain_finds_the_only_deployment(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYN_NAMESPACE")
    document = {"namespace": "box", "circus_endpoint": "ipc://x", "components": {}}
    (state / "box.json").write_text(json.dumps({**document, "environment": {}}))
    assert cli.main(["planner", "explain"]) == 1
    assert "these are the decisions of the last one" in capsys.readouterr().out


def test_the_report_of_a_running_planner() -> None:
    now = record(10.0, "decided")
    waiting = ExplainReport(namespace="n", running=True, models=(ModelReport(now=now, next_s=4.2),))
    assert report_text(waiting).splitlines()[:2] == [
        "no decision yet",
        "now       model tiny, policy load: the next decision is due in 4 s",
    ]
    busy = ModelReport(now=now, next_s=0.0, running=(record(7.0, "decided"),))
    text = report_text(ExplainReport(namespace="n", running=True, models=(busy,)))
    assert "running   model tiny, for 3 s" in text
    assert "the next decision is when that is done" in text


def test_the_planner_needs_a_deployment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo", "planner", "--namespace", "box"]
    env = {**os.environ, "DYN_LOCAL_STATE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    reason = f"no deployment runs in namespace 'box' (no {tmp_path}/box.json)"
    assert reason in done.stderr and "--namespace" in done.stderr


CLUSTER = ("--environment", "kubernetes", "--graph-deployment", "my-graph")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--environment", "kubernetes"], "needs --graph-deployment NAME"),
        ([*CLUSTER, "--min-gpu-budget", "0"], "Use at least 1"),
        ([*CLUSTER, "--idle-timeout", "60"], "--idle-timeout with --environment kubernetes: it"),
        ([*CLUSTER, "--min-residency", "60"], "needs the GPUs of one machine"),
        ([*CLUSTER, "--max-sleeping-workers", "1"], "--max-sleeping-workers with --environment"),
        (["--min-gpu-budget", "9"], "is above --max-gpu-budget 8"),
        (["--metric-pulling-interval", "31"], "is above --adjustment-interval 30"),
        (["--environment", "virtual"], "must be one of local, kubernetes"),
        (["--mode", "fast"], "must be one of auto, load, sla, load+sla"),
        (["--min-endpoint", "-1"], "must be >= 0"),
    ],
)
def test_bad_options_are_named(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["planner", *words])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err
