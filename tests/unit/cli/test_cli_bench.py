"""``dynamo bench`` at the terminal: output, failures, and no lost result."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from dynamo.bench.stats import Outcome, summarize
from dynamo.cli import bench

CHUNK = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
STREAM = "".join(f"data: {json.dumps(each)}\r\n\r\n" for each in (CHUNK, USAGE))


class Endpoint(BaseHTTPRequestHandler):
    """Answers every POST with ``status``, ``kind`` and ``body``."""

    status, kind, body = 200, "text/event-stream", STREAM

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.send_header("content-type", self.kind)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    made = type("Made", (Endpoint,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        server.endpoint = made  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


WORDS = ("--model", "m", "--endpoint-type", "completions", "--prompt-format", "tokens")
FEW = (*WORDS, "--requests", "3", "--concurrency", "2")


def test_a_run_reports_where_its_clock_starts(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--url", url, *FEW]) == 0
    shown = capsys.readouterr().out
    assert "m: 3 of 3 requests" in shown
    assert "TTFT and latency count from before the connection is made" in shown
    assert bench.main(["--url", url, *FEW, "--rate", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "schedule lag" in shown and "count from the scheduled time" in shown


def test_an_endpoint_without_usage_has_its_tokens_counted(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
    events = (token, token, CHUNK)
    monkeypatch.setattr(Endpoint, "body", "".join(f"data: {json.dumps(e)}\n\n" for e in events))
    few = ("--model", "m", "--requests", "3")
    assert bench.main(["--url", url, *few]) == 0  # text prompts, of words then
    shown = capsys.readouterr().out
    assert " 0 output tokens/s" not in shown and "unknown tokens/s in and out" in shown
    assert "the endpoint sends no usage: each piece of a stream counts" in shown
    assert bench.main(["--url", url, *few, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["output_tokens"], found["prompt_tokens"], found["counted"]) == (9, None, True)
    monkeypatch.setattr(Endpoint, "kind", "application/json")
    answer = {"choices": [{"message": {"content": "a b c"}, "finish_reason": "stop"}]}
    monkeypatch.setattr(Endpoint, "body", json.dumps(answer))
    assert bench.main(["--url", url, *few, "--no-stream"]) == 0
    assert "requests/s, unknown output tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["40", "80"])
def test_figures_are_never_cut(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outcomes = [
        Outcome(finished_s=s + 1, first_token_s=s, gaps_s=[1.61423, s], output_tokens=9)
        for s in (0.01234, 1614.2345, 98765.4321)
    ]
    bench.show(Console(), summarize(outcomes, 10.0), "m")
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "m: 3 of 3 requests"
    assert " ".join(head.split()) == "ms avg min p50 p90 p99 max"
    assert "…" not in "".join(rows)
    assert rows[0].split() == ["TTFT", "33,459,893", "12.34", "1,614,234", *["98,765,432"] * 3]
    assert len(rows[0]) == len(head) <= 80 and rows[1].startswith("ITL")


def test_an_unwritable_output_fails_before_the_run(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "none" / "out.json"
    assert bench.main(["--url", url, *FEW, "--output", str(bad)]) == 2
    shown = capsys.readouterr()
    assert f"cannot write {bad}" in shown.err.replace("\n", "") and shown.out == ""
    good = tmp_path / "out.json"
    assert bench.main(["--url", url, *FEW, "--output", str(good)]) == 0
    assert json.loads(good.read_text())["completed"] == 3


def test_an_output_that_fails_during_the_run_loses_nothing(
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "_try_output", lambda path: None)
    assert bench.main(["--url", url, *FEW, "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "m: 3 of 3 requests" in shown.out and "--output: cannot write" in shown.err


def test_a_pipe_as_output_is_not_tried_before_the_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    bench._try_output(str(tmp_path / "pipe"))  # would block until a reader opens it


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("text/html", "<html>", "3 failed: not an event stream: text/html"),
        (
            "text/event-stream",
            'data: {"error":"[/red]\\u001b[2J"}\n\n',
            r"in stream: [/red]\x1b[2J",
        ),
    ],
)
def test_an_invalid_answer_is_a_named_failure(
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    body: str,
    reason: str,
) -> None:
    monkeypatch.setattr(Endpoint, "kind", kind)
    monkeypatch.setattr(Endpoint, "body", body)
    assert bench.main(["--url", url, *FEW]) == 1
    shown = capsys.readouterr()
    assert reason in shown.out and shown.err == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_prints_the_figures_so_far(
    url: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, fourth, end = itertools.count(1), threading.Event(), threading.Event()
    answer = Endpoint.do_POST

    def do_POST(self: Endpoint) -> None:
        if next(requests) < 4:
            answer(self)
        else:
            fourth.set()
            end.wait(60)

    monkeypatch.setattr(Endpoint, "do_POST", do_POST)
    output = tmp_path / "out.json"
    words = ["--url", url, *WORDS, "--concurrency", "1", "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo", "bench", *words, *(["--json"] if form == "json" else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert fourth.wait(60)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    finally:
        end.set()
        process.kill()
    assert (process.returncode, errors) == (130, "dynamo bench: interrupted\n")
    if form == "text":
        assert shown.startswith("m: 3 of 3 requests, interrupted") and "TTFT" in shown
    for text in (output.read_text(), *([shown] if form == "json" else [])):
        figures = json.loads(text)
        assert (figures["interrupted"], figures["completed"]) == (True, 3)


@pytest.mark.parametrize("url", ["http://h:99999", "http://[::1", "h"])
def test_a_bad_url_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--url", url]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("dynamo bench: --url") and "Traceback" not in shown
