"""``dynamo record`` of a real frontend: a trace goes in by ``dynamo bench`` and comes out again."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import ROOT, Deployment
from forked_kit import run_verb

from dynamo.bench.trace import read_trace
from dynamo.bench.trace_formats import TraceRequest

SAMPLE = ROOT / "benchmarks/traces/sample.jsonl"
REQUESTS, SPEEDUP = 30, 10.0


def dynamo(deployment: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    return run_verb(*words, env=deployment.env)


def start(deployment: Deployment, path: Path, *words: str) -> subprocess.Popen[str]:
    """Start to record; return when the frontend does."""
    before = deployment.sample("dynamo_frontend_http_connections")
    command = [sys.executable, "-m", "dynamo", "record", str(path), "--url", deployment.url, *words]
    recorder = subprocess.Popen(command, env=deployment.env, stdout=-1, stderr=-1, text=True)
    assert recorder.stderr is not None
    assert "recording" in recorder.stderr.readline()
    deployment.until(
        lambda: deployment.sample("dynamo_frontend_http_connections") > before, "recording"
    )
    return recorder


def bench(deployment: Deployment, trace: Path, *words: str) -> dict[str, Any]:
    options = ("--endpoint-type", "completions", "--prompt-format", "tokens", "--json")
    done = dynamo(
        deployment, "bench", "--url", deployment.url, "--trace", str(trace), *options, *words
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def is_isomorphic(traces: tuple[list[TraceRequest], list[TraceRequest]]) -> bool:
    """Whether a bijection of ids maps one to the other; the last blocks are partial ones."""
    pairs = set()
    for one, other in zip(*traces, strict=True):
        assert len(one.hash_ids) == len(other.hash_ids)
        pairs |= set(zip(one.hash_ids[:-1], other.hash_ids[:-1], strict=True))
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_a_trace_comes_out_as_it_went_in(shared_deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    recorder = start(shared_deployment, path)
    sent = bench(
        shared_deployment, SAMPLE, "--requests", str(REQUESTS), "--trace-speedup", str(SPEEDUP)
    )
    recorder.send_signal(signal.SIGINT)
    out, errors = recorder.communicate(timeout=20)
    assert recorder.returncode == 0, errors
    assert f"{REQUESTS} requests" in out and "still running" not in out and "lost" not in out
    original, recorded = read_trace(SAMPLE, REQUESTS), read_trace(path)
    begun_ms = original[0].timestamp
    for trace in (original, recorded):  # requests of one moment arrive in any order
        trace.sort(key=lambda request: (request.input_length, request.output_length))
    for before, after in zip(original, recorded, strict=True):
        assert (after.input_length, after.output_length) == (
            before.input_length,
            before.output_length,
        )
    assert is_isomorphic((original, recorded))
    lags_ms = [
        after.timestamp - (before.timestamp - begun_ms) / SPEEDUP
        for before, after in zip(original, recorded, strict=True)
    ]
    assert abs(statistics.median(lags_ms)) < 1000
    fields = {key for line in path.read_text().splitlines() for key in json.loads(line)}
    assert fields == {"timestamp", "input_length", "output_length", "hash_ids"}
    again = bench(shared_deployment, path, "--trace-speedup", "5")
    assert (again["completed"], again["prompt_tokens"]) == (REQUESTS, sent["prompt_tokens"])
    words = ("--policy", "fixed:1", "--json", "--no-score", "--min-gpu-budget", "1")
    replayed = dynamo(shared_deployment, "planner", "replay", str(path), *words)
    assert replayed.returncode == 0, replayed.stderr
    (figures,) = json.loads(replayed.stdout)["policies"]
    assert figures["requests"] == REQUESTS and figures["failed"] == 0


def test_all_kinds_of_requests_and_a_limit(shared_deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "kinds.jsonl"
    recorder = start(shared_deployment, path, "--requests", "5", "--model", "tiny")
    message = [{"role": "user", "content": "hello " * 40}]
    chat = {"model": "tiny", "messages": message, "max_tokens": 4, "ignore_eos": True}
    session = {"x-dynamo-session-id": "alice"}
    for body, path_of_api in (
        (chat, "/v1/chat/completions"),
        (chat | {"stream": True}, "/v1/chat/completions"),
        ({"model": "tiny", "prompt": "x", "max_tokens": 2, "n": 2}, "/v1/completions"),
        ({"model": "tiny", "prompt": "x", "max_tokens": 2}, "/v1/completions"),
    ):
        assert shared_deployment.request("POST", path_of_api, body, session)[0] == 200
    out, errors = recorder.communicate(timeout=20)
    assert recorder.returncode == 0, errors
    assert "5 requests" in out
    chats, others = read_trace(path)[:2], read_trace(path)[2:]
    assert chats[0].hash_ids == chats[1].hash_ids and chats[0].output_length == 4
    assert {one.session_id for one in chats + others} == {"0"}
    assert chats[1].delay > 0
    assert len({one.hash_ids[0] for one in others}) == 1 and len(others) == 3
    assert "alice" not in path.read_text()


def test_errors_name_the_cause(shared_deployment: Deployment, tmp_path: Path) -> None:
    url = ("--url", shared_deployment.url)
    path = tmp_path / "x.jsonl"
    none = dynamo(shared_deployment, "record", str(path), *url, "--model", "nope")
    assert (none.returncode, "Model not found: nope" in none.stderr) == (1, True)
    idle = dynamo(shared_deployment, "record", str(path), *url, "--seconds", "0.2")
    assert (idle.returncode, "no request ended" in idle.stderr) == (1, True)
    away = dynamo(shared_deployment, "record", str(path), "--url", "http://127.0.0.1:9")
    assert (away.returncode, "cannot connect" in away.stderr) == (1, True)
    assert "name the file" in dynamo(shared_deployment, "record").stderr
    assert not path.exists()


def test_a_stopped_frontend_ends_the_recording(deployment: Deployment, tmp_path: Path) -> None:
    deployment.mocker("--speedup-ratio", "0")
    frontend = deployment.frontend()
    deployment.wait_for_workers(1)
    path = tmp_path / "cut.jsonl"
    recorder = start(deployment, path)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    assert deployment.request("POST", "/v1/completions", body)[0] == 200
    frontend.send_signal(signal.SIGTERM)
    assert frontend.wait(timeout=10) == 0  # a recorder delays no stop
    out, errors = recorder.communicate(timeout=20)
    assert recorder.returncode == 1 and "ended the recording" in errors
    assert "1 request," in out and len(read_trace(path)) == 1


def test_a_killed_recorder_leaves_its_lines(shared_deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    recorder = start(shared_deployment, path)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    for _ in range(3):
        assert shared_deployment.request("POST", "/v1/completions", body)[0] == 200
    shared_deployment.until(lambda: path.read_bytes().count(b"\n") == 3, "three lines")
    recorder.kill()
    recorder.communicate(timeout=20)
    assert len(read_trace(path)) == 3
    again = dynamo(shared_deployment, "record", str(path), "--url", shared_deployment.url)
    assert (again.returncode, "exists: name another file" in again.stderr) == (2, True)


@pytest.mark.parametrize("words", [("--seconds", "0"), ("--requests", "0")])
def test_limits_are_positive(deployment: Deployment, tmp_path: Path, words: tuple[str]) -> None:
    done = dynamo(deployment, "record", str(tmp_path / "x"), *words)
    assert done.returncode == 2 and words[0] in done.stderr
