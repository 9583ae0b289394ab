"""A stop signal to every process at once, as systemd and coreutils `timeout` send it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from deployment import free_port
from serving import QUICKSTART, ROOT, Serving

DISAGG = ROOT / "examples/disagg.yaml"
STREAMS = 8
TOKENS = 150


def start(serving: Serving, *flags: str, under: tuple[str, ...] = ()) -> int:
    """The quickstart on a free port, with workers that take a second for an answer."""
    port = free_port()
    own = ("--namespace", serving.namespace, f"--Frontend.http-port={port}")
    slow = ("--Worker.speedup-ratio=1", "--Worker.reply=random")
    ready = "ready: http://127.0.0.1:.* model: tiny"
    serving.start(QUICKSTART, *own, *slow, *flags, wait=ready, under=under)
    return port


class Stream:
    """A streamed completion; waits for its first bytes if ``begun``."""

    def __init__(self, port: int, number: int, more: str = "count", begun: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        body = {"model": "tiny", "prompt": f"{number} {more}", "max_tokens": TOKENS}
        data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        self.text = self.socket.recv(1) if begun else b""

    def rest(self) -> str:
        with self.socket:
            while data := self.socket.recv(65536):
                self.text += data
        return self.text.decode()


def finished(text: str) -> bool:
    return '"finish_reason":"length"' in text and "data: [DONE]" in text


def in_flight(port: int) -> list[Stream]:
    """Start streams and wait for the first bytes of each."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: Stream(port, number), range(STREAMS)))


def rest(streams: list[Stream]) -> list[str]:
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(Stream.rest, streams))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_every_process_at_once(serving: Serving, signum: signal.Signals) -> None:
    """As systemd's KillMode=control-group does: guard, arbiter, frontend and workers, in any order.

    A SIGHUP, which systemd may add, goes to guard and arbiter only.
    """
    port = start(serving)
    streams = in_flight(port)
    services = [process.pid for process in serving.survivors()]
    if signum == signal.SIGHUP:
        services = [serving.pid, serving.arbiter_pid]
    for pid in sorted(services):
        os.kill(pid, signum)
    texts = rest(streams)
    assert [finished(text) for text in texts] == [True] * STREAMS, [texts, serving.text()]
    assert serving.wait() == 0
    assert "killing the remaining processes" not in serving.text()
    serving.assert_clean()


@pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_coreutils_timeout(serving: Serving, name: str) -> None:
    """It signals its child, and then its own process group, of which the child is a member."""
    port = start(serving, under=("timeout", "-s", name, "600"))
    (guard,) = [process.pid for process in psutil.Process(serving.pid).children()]
    assert os.getpgid(guard) == serving.pid
    streams = in_flight(port)
    os.kill(serving.pid, getattr(signal, f"SIG{name}"))  # as at its timeout
    texts = rest(streams)
    assert [finished(text) for text in texts] == [True] * STREAMS, [texts, serving.text()]
    assert serving.wait() == 0
    assert "killing the remaining processes" not in serving.text()
    serving.assert_clean()


def test_a_repeated_sigterm_kills_nothing(serving: Serving) -> None:
    port = start(serving)
    streams = in_flight(port)
    os.kill(serving.pid, signal.SIGTERM)
    serving.wait_for("stopping; requests in flight may finish")
    for pid in (serving.pid, serving.arbiter_pid, *serving.pids("Frontend")):
        os.kill(pid, signal.SIGTERM)
    texts = rest(streams)
    assert [finished(text) for text in texts] == [True] * STREAMS, [texts, serving.text()]
    assert serving.wait() == 0
    serving.assert_clean()


def metric(port: int, name: str) -> float:
    """The sum of the samples of ``name``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(name + r"[ {]", line))


def test_requests_that_no_worker_has_yet(serving: Serving) -> None:
    """Prompts wait in the frontend for a prefill worker, and then for a decode worker.

    The workers receive the signal too, and must serve until the frontend has finished.
    """
    port = free_port()
    own = ("--namespace", serving.namespace, f"--Frontend.http-port={port}")
    slow = ("--PrefillWorker.speedup-ratio=0.1", "--PrefillWorker.ServiceArgs.workers=1")
    one = ("--Frontend.router-prefill-slots=1",)
    serving.start(DISAGG, *own, *slow, *one, wait="ready: http://127.0.0.1:.* model: tiny")
    serving.until(lambda: metric(port, "dynamo_frontend_prefill_workers"))
    with contextlib.ExitStack() as opened:
        streams = [Stream(port, number, "word " * 800, begun=False) for number in range(3)]
        for stream in streams:
            opened.enter_context(stream.socket)
        serving.until(lambda: metric(port, "dynamo_frontend_prefill_queue_depth") >= 2)
        for process in sorted(serving.survivors(), key=lambda process: process.pid):
            process.send_signal(signal.SIGTERM)
        texts = rest(streams)
    assert [finished(text) for text in texts] == [True] * 3, [texts, serving.text()]
    assert serving.wait() == 0
    serving.assert_clean()
