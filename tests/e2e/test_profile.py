"""``dynamo profile``: a short sweep of the mocker against the mocker's own timing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Serving

from dynamo.mocker.timing import decode_ms, prefill_ms
from dynamo.planner.capacity.interpolation import read_profile

GRAPH = """
Frontend: {run: dynamo.frontend}
Worker:
  run: dynamo.mocker
  model-path: MODEL
  model-name: tiny
  block-size: 16
  num-gpu-blocks-override: 1024
  speedup-ratio: 0.6
  startup-time: 1.5
  enable-sleep-mode: true
  wake-time: 0.5
"""
SPEED = 0.6
OVERHEAD_MS = 500.0
"""Of the frontend and the client on a machine that is busy with six other tests."""


@pytest.fixture
def command(serving: Serving) -> Iterator[list[str]]:
    model = Path(__file__).resolve().parents[2] / "examples/model"
    path = serving.graph(GRAPH.replace("MODEL", str(model)))
    with tempfile.TemporaryDirectory() as short:  # pytest's is too long for a socket
        serving.env["TMPDIR"] = short
        yield [sys.executable, "-m", "dynamo", "profile", str(path), "--quick", "--no-plots"]


def test_a_profile_of_the_mocker_is_its_own_timing(
    serving: Serving, command: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "profile"
    flags = ["--max-isl", "2048", "--output", str(output), "--json"]
    done = subprocess.run(
        [*command, *flags], env=serving.env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "prefill: 2048 tokens in " in done.stderr and " s to go" in done.stderr
    result = json.loads(done.stdout)
    assert result["model"] == "tiny" and result["max_kv_tokens"] == 16384
    for point in result["prefill"]:
        exact = prefill_ms(point["isl"]) / SPEED
        assert exact * 0.95 <= point["ttft_ms"] <= exact * 1.2 + OVERHEAD_MS, point
    assert max(point["kv_usage"] for point in result["decode"]) > 0.8
    for point in result["decode"]:
        exact = decode_ms(point["kv_usage"]) / SPEED
        assert exact * 0.7 <= point["itl_ms"] <= exact * 1.5 + 100, point
    assert result["decode_kv"]["scale_up"] > result["decode_kv"]["scale_down"]
    read = read_profile(output)
    assert read.prefill.isl.tolist() == [point["isl"] for point in result["prefill"]]
    assert read.decode.max_kv_tokens == 16384 and len(read.decode.itl_ms) == len(result["decode"])
    assert 1.5 <= result["start_s"] == read.start_s
    assert 0.5 <= result["wake_s"] == read.wake_s
    _nothing_is_left(serving)


def test_an_interrupt_leaves_nothing(serving: Serving, command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "profile"
    process = subprocess.Popen(
        [*command, "--output", str(output)], env=serving.env, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if line.startswith("prefill: "):
                process.send_signal(signal.SIGINT)
                break
        rest = lines.read()
    assert process.wait(30) == 130, rest
    assert "interrupted; nothing was written" in rest
    assert list(output.iterdir()) == []
    _nothing_is_left(serving)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--Worker.block-sise=16"], "block-sise is not an option of dynamo.mocker"),
        (["--Worker.ServiceArgs.resources.gpu=2", "--gpus=1"], "needs 2 GPUs, 1 of 1 free"),
    ],
)
def test_what_dynamo_serve_refuses_is_shown(
    serving: Serving, command: list[str], tmp_path: Path, flags: list[str], words: str
) -> None:
    given = [*command, "--output", str(tmp_path / "out"), *flags]
    done = subprocess.run(given, env=serving.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    _nothing_is_left(serving)


def _nothing_is_left(serving: Serving) -> None:
    serving.wait_until_gone()
    assert list(Path(serving.env["TMPDIR"]).iterdir()) == []
