"""``dynamo record --content`` and ``dynamo replay`` of a real frontend: bodies, keys, bounds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import ROOT, Deployment

from dynamo.bench.recording import ContentReader
from dynamo.http.api_keys import key_line, new_key
from dynamo.protocols.status import RecordedContent

WAIT_S = 40
SECRET = "sk-proj-0123456789abcdefghijklmn"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A frontend with two models that repeat the prompt."""
    deployment = Deployment(tmp_path_factory.mktemp("content"))
    try:
        for name in ("tiny", "other"):
            place = ("--endpoint", f"dyn://{deployment.namespace}.{name}.generate")
            words = ("--reply", "echo", "--speedup-ratio", "0", "--model-name", name)
            deployment.mocker(*words, *place)
        deployment.frontend()
        deployment.wait_for_workers(2)
        yield deployment
    finally:
        deployment.close()


def dynamo(deployment: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo", *words, "--url", deployment.url]
    return subprocess.run(
        command, env=deployment.env, capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def start(deployment: Deployment, path: Path, *words: str) -> subprocess.Popen[str]:
    """Start to record; return when the frontend does."""
    command = [sys.executable, "-m", "dynamo", "record", str(path), "--content"]
    recorder = subprocess.Popen(
        [*command, "--url", deployment.url, *words],
        env=deployment.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    deployment.until(lambda: records(deployment), "the recording of content")
    return recorder


def records(deployment: Deployment) -> bool:
    found: dict[str, Any] = json.loads(deployment.request("GET", "/v1/status")[2])
    return bool(found["records_content"])


def ask(deployment: Deployment, text: str, path: str = CHAT, **more: Any) -> None:
    messages = [{"role": "user", "content": text}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 50, **more}
    assert deployment.request("POST", path, body)[0] == 200


def read(path: Path) -> list[RecordedContent]:
    return list(ContentReader(path))


def end(recorder: subprocess.Popen[str], number: int = signal.SIGINT) -> str:
    recorder.send_signal(number)
    out, errors = recorder.communicate(timeout=WAIT_S)
    assert recorder.returncode == 0, errors
    return out


def test_bodies_are_recorded_without_keys_and_replayed_to_another_model(
    echo: Deployment, tmp_path: Path
) -> None:
    ask(echo, "before the recording")
    path = tmp_path / "bodies.jsonl"
    recorder = start(echo, path)
    ask(echo, f"my key is {SECRET}, keep it", user="x", metadata={"password": "hunter2"})
    ask(echo, "a streamed question", stream=True)
    ask(echo, "a message", "/v1/messages")
    echo.until(lambda: path.read_bytes().count(b"\n") == 3, "three lines")
    out = end(recorder)
    assert "3 requests" in out and not records(echo)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert SECRET not in text and "hunter2" not in text and "before the rec" not in text
    plain, streamed, message = read(path)
    assert "my key is [redacted], keep it" in plain.body
    assert json.loads(plain.body)["metadata"] == {"password": "[redacted]"}
    assert "[redacted]" in json.loads(plain.response)["choices"][0]["message"]["content"]
    assert (plain.path, plain.model, plain.outcome, plain.note) == (CHAT, "tiny", "ok", "")
    assert streamed.response.startswith("data: {") and streamed.response.endswith("[DONE]\n\n")
    assert message.path == "/v1/messages"
    done = dynamo(echo, "replay", str(path), "--model", "other", "--json")
    assert done.returncode == 0, done.stderr
    again = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["model"] for one in again] == ["other"] * 3
    assert {one["recorded_model"] for one in again} == {"tiny"}
    for one, asked in zip(again, ("[redacted]", "a streamed question", "a message"), strict=True):
        assert asked in one["answer"] and one["answer"] == one["recorded_answer"]
    shown = dynamo(echo, "replay", str(path), "--model", "none", "--request", plain.request_id)
    assert shown.returncode == 1 and "1 request sent again, 1 failed" in shown.stdout
    assert "404" in shown.stdout and "tiny" in shown.stdout
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1}\n')
    wrong = dynamo(echo, "replay", str(bad))
    assert wrong.returncode == 2 and "line 1: not a request of dynamo record" in wrong.stderr


def test_a_recording_of_content_ends_at_its_bounds(echo: Deployment, tmp_path: Path) -> None:
    full = start(echo, tmp_path / "full.jsonl", "--content-mb", "1")
    second = dynamo(echo, "record", str(tmp_path / "second.jsonl"), "--content")
    assert second.returncode == 1
    assert "one client records content already" in " ".join(second.stderr.split())
    for _ in range(4):
        ask(echo, "hello", metadata={"pad": "x" * 300_000})
    out, errors = full.communicate(timeout=WAIT_S)
    assert full.returncode == 0, errors
    assert "it ended because 1 MiB are recorded" in out and "3 requests" in out
    assert len(read(tmp_path / "full.jsonl")) == 3 and not records(echo)
    timed = start(echo, tmp_path / "timed.jsonl", "--seconds", "3")
    ask(echo, "hello")
    ask(echo, "hello", metadata={"pad": "x" * 600_000})  # too large
    out, errors = timed.communicate(timeout=WAIT_S)
    assert timed.returncode == 0, errors
    assert "its time is over" in out and "1 request," in out and "1 was lost" in out
    for words in (("--seconds", "4000"), ("--content-mb", "0"), ("--content-mb", "2000")):
        done = dynamo(echo, "record", str(tmp_path / "x"), "--content", *words)
        assert done.returncode == 2 and words[0] in done.stderr
    assert not (tmp_path / "x").exists()
    for query in ("content=maybe", "seconds=0", "mb=x", "body=1"):
        assert echo.request("GET", f"/v1/record?{query}")[0] == 400


def test_a_killed_recorder_ends_the_recording(echo: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    recorder = start(echo, path)
    ask(echo, "hello")
    echo.until(lambda: path.read_bytes().count(b"\n") == 1, "a line")
    recorder.kill()
    recorder.communicate(timeout=WAIT_S)
    echo.until(lambda: not records(echo), "the end of the recording")
    assert "hello" in read(path)[0].body


def test_only_operators_record_and_a_stop_ends_it(deployment: Deployment, tmp_path: Path) -> None:
    user, operator = new_key(), new_key()
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", "user", user) + key_line("root", "operator", operator))
    keys.chmod(0o600)
    deployment.mocker("--speedup-ratio", "0")
    frontend = deployment.frontend("--api-key-file", str(keys))
    deployment.until(lambda: deployment.request("GET", "/health")[0] == 200, "a worker")
    path = tmp_path / "keys.jsonl"
    refused = dynamo(deployment, "record", str(path), "--content", "--api-key", user)
    assert refused.returncode == 1
    assert "has the role user" in " ".join(refused.stderr.split())
    command = [sys.executable, "-m", "dynamo", "record", str(path), "--content"]
    recorder = subprocess.Popen(
        [*command, "--url", deployment.url, "--api-key", operator],
        env=deployment.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    deployment.until(lambda: "operator root records the content" in deployment.tail(), "the log")
    body = {"model": "tiny", "prompt": f"Bearer {operator}", "max_tokens": 2}
    headers = {"authorization": f"Bearer {user}"}
    assert deployment.request("POST", "/v1/completions", body, headers)[0] == 200
    deployment.until(lambda: path.exists() and b"\n" in path.read_bytes(), "a line")
    frontend.send_signal(signal.SIGTERM)
    assert frontend.wait(timeout=WAIT_S) == 0  # a recorder delays no stop
    _, errors = recorder.communicate(timeout=WAIT_S)
    assert recorder.returncode == 1 and "ended the recording" in errors
    (one,) = read(path)
    assert "dyn-" not in one.body and user not in path.read_text()
