"""Measure how soon a request stops costing anything after its client has disconnected, and what a
rejected request costs the frontend.

    python benchmarks/cancellation.py [--rounds 100] [--streams 32] [--only STAGE] [--json]

Real processes: a frontend, mock workers, and this process as the client. For each stage it sends a
request, waits until the request is there, closes the connection, and takes the time until the queue
has dropped it or the engine has aborted it (``benchmarks/cancellation_probe.py`` reports both).
``--streams`` other requests run beside it. Takes about two minutes. Exits with 1 above a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

__all__ = ["main"]

HERE = Path(__file__).resolve().parents[1]
CHAT = "/v1/chat/completions"
READY_S = 60.0
BAR_MS = 100.0
REJECTION_BAR_MS = 1.0
SHORT = "hello"
WORDS = (HERE / "benchmarks/peers/words.txt").read_text().split()
LONG = "word " * 6000
SLOW = ("--speedup-ratio", "0.01")  # 6,000 words take some 15 s to prefill
BUSY = re.compile(rb"dynamo_component_router_busy_workers\{[^}]*} 1")
QUEUED, ARRIVED = "queued", "arrived"


@dataclass(frozen=True)
class Stage:
    """Where a request is when its client disconnects: until it has reported ``there``.

    ``ahead`` requests of the same kind occupy what it then waits for.
    """

    name: str
    text: str
    there: str
    gone: str
    ahead: int = 0
    frontend: tuple[str, ...] = ()
    workers: tuple[tuple[str, ...], ...] = ((),)
    env: tuple[tuple[str, str], ...] = ()


STAGES = (
    Stage(
        "queue of the router",
        LONG,
        QUEUED,
        "left",
        1,
        ("--router-queue-threshold", "0.001"),
        (SLOW,),
    ),
    Stage("queue of a worker", SHORT, QUEUED, "left", 1, env=(("DYN_ENGINE_REQUEST_LIMIT", "1"),)),
    Stage(
        "queue before prefill workers",
        LONG,
        QUEUED,
        "left",
        1,
        ("--router-prefill-slots", "1"),
        (("--disaggregation-mode", "prefill", *SLOW), ("--disaggregation-mode", "decode")),
    ),
    Stage("prefill", LONG, ARRIVED, "aborted", workers=(SLOW,)),
    Stage(
        "prefill worker",
        LONG,
        ARRIVED,
        "aborted",
        workers=(("--disaggregation-mode", "prefill", *SLOW), ("--disaggregation-mode", "decode")),
    ),
    Stage("decode", SHORT, ARRIVED, "aborted"),
)


class Deployment:
    """A frontend and its workers, with probes; their reports arrive at :meth:`report`."""

    def __init__(
        self,
        frontend: tuple[str, ...] = (),
        workers: tuple[tuple[str, ...], ...] = ((),),
        **env: str,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._root = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._probe = str(self._root / "probe")
        self._reports = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._reports.bind(self._probe)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        clean = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        state = {"DYN_LOCAL_STATE_DIR": str(self._root / "state"), "DYN_NAMESPACE": "cancellation"}
        self._env = {**clean, **state, "PYTHONPATH": str(HERE), **env}
        self._workers = workers
        self._flags = ("--http-port", str(self.port), "--router-mode", "kv", *frontend)

    def __enter__(self) -> Self:
        for flags in self._workers:
            model = ("--model-path", str(HERE / "examples/model"), "--model-name", "tiny")
            self._start("dynamo.mocker", *model, "--block-size", "16", *flags)
        self.frontend = self._start("dynamo.frontend", *self._flags)
        deadline = time.monotonic() + READY_S
        while not self._ready():
            if time.monotonic() > deadline:
                raise SystemExit(f"not ready:\n{(self._root / 'log').read_text()[-4000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def report(self, step: str) -> int:
        """Wait for the next report of ``step``; return its time in nanoseconds."""
        self._reports.settimeout(READY_S)
        while True:
            name, _, at_ns = self._reports.recv(100).decode().partition(" ")
            if name == step:
                return int(at_ns)

    def forget_reports(self) -> None:
        """Drop the reports that have arrived."""
        self._reports.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._reports.recv(100)

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def send(self, text: str, stream: bool, max_tokens: int = 8000) -> socket.socket:
        """Send one chat; return its connection."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=READY_S)
        client.sendall(chat(text, stream, max_tokens))
        return client

    def _start(self, module: str, *flags: str) -> subprocess.Popen[bytes]:
        probe = str(HERE / "benchmarks/cancellation_probe.py")
        with (self._root / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, probe, self._probe, module, *flags],
                env=self._env,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _ready(self) -> bool:
        try:
            instances = json.loads(self.get("/health")).get("instances", [])
            models = json.loads(self.get("/v1/models"))["data"]
        except (OSError, ValueError, http.client.HTTPException):
            return False
        generate = [one for one in instances if one["endpoint"] == "generate"]
        return len(generate) == len(self._workers) and bool(models)


def chat(text: str, stream: bool, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    asked = {"model": "tiny", "messages": messages, "stream": stream, "max_tokens": max_tokens}
    body = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def beside(deployment: Deployment, streams: int) -> Iterator[None]:
    """Keep ``streams`` other answers running, and read them."""
    clients = [deployment.send(SHORT, True, 100_000) for _ in range(streams)]
    for client in clients:
        deployment.report(ARRIVED)
        client.setblocking(False)
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.05):
            for client in clients:
                with contextlib.suppress(BlockingIOError):
                    client.recv(1 << 20)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()
        for client in clients:
            client.close()


def measure(stage: Stage, rounds: int, streams: int) -> list[float]:
    """Milliseconds from the close of the connection to the end of the request, per round."""
    moments = random.Random(1)
    times_ms: list[float] = []
    with Deployment(stage.frontend, stage.workers, **dict(stage.env)) as deployment:
        # A queue would hold the others as well.
        load = 0 if stage.ahead or stage.text == LONG else streams
        with beside(deployment, load):
            ahead = [deployment.send(stage.text, True) for _ in range(stage.ahead)]
            for _ in ahead:
                deployment.report(ARRIVED)
            for number in range(rounds):
                deployment.forget_reports()
                stream = number % 2 == 0
                client = deployment.send(stage.text, stream)
                deployment.report(stage.there)
                if stage.name == "decode" and stream:
                    client.recv(4096)
                time.sleep(moments.uniform(0, 0.02))
                closed_ns = time.monotonic_ns()
                client.close()
                times_ms.append((deployment.report(stage.gone) - closed_ns) / 1e6)
            for client in ahead:
                client.close()
    return times_ms


def rejection(early: bool, requests: int, body_bytes: int) -> float:
    """CPU milliseconds of the frontend for each rejected request of ``body_bytes``."""
    flags = ("--admission-control", "token-capacity", "--active-decode-blocks-threshold", "0")
    more = () if early else ("--no-early-rejection",)
    slow = (("--speedup-ratio", "0.02"),)  # three tokens a second: all else is rejections
    with Deployment((*flags, *more), slow) as deployment:
        running = deployment.send(SHORT, True)
        deployment.report(ARRIVED)
        prompts = [chat(prose(number, body_bytes), True, 16) for number in range(requests)]
        deadline = time.monotonic() + READY_S
        while not BUSY.search(deployment.get("/metrics")):
            if time.monotonic() > deadline:
                raise SystemExit("the worker did not become busy")
            time.sleep(0.1)
        client = socket.create_connection(("127.0.0.1", deployment.port), timeout=READY_S)
        frontend = psutil.Process(deployment.frontend.pid)
        before = frontend.cpu_times()
        for prompt in prompts:
            if ask(client, prompt) != 503:
                raise SystemExit("a request was not rejected")
        after = frontend.cpu_times()
        client.close()
        running.close()
    spent_s = after.user - before.user + after.system - before.system
    return spent_s / requests * 1e3


def prose(seed: int, size_bytes: int) -> str:
    """A prompt that no cache of tokens has seen."""
    words = random.Random(seed).choices(WORDS, k=size_bytes // 4)
    return " ".join(words)[:size_bytes]


def ask(client: socket.socket, request: bytes) -> int:
    """Send ``request``; return the status of its response."""
    client.sendall(request)
    answer = client.recv(65536)
    while b"}" not in answer:
        answer += client.recv(65536)
    return int(answer[9:12])


def summary(stage: Stage, times_ms: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
    row = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(times_ms)}
    return {"stage": stage.name, **{name: round(value, 2) for name, value in row.items()}}


def main() -> int:
    """Print a row per stage, then the cost of a rejection; status 1 above a bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--streams", type=int, default=32, help="beside decode, at most 255")
    parser.add_argument("--only", default="", help="stages whose name contains this; rejection")
    parser.add_argument("--rejections", type=int, default=500)
    parser.add_argument("--body-bytes", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    failed = False
    for stage in STAGES:
        if args.only in stage.name:
            row = summary(stage, measure(stage, args.rounds, args.streams))
            failed |= row["p99_ms"] > BAR_MS
            show(row, args.json)
    if args.only in "rejection":
        costs = [
            round(rejection(early, args.rejections, args.body_bytes), 3) for early in (True, False)
        ]
        failed |= costs[0] > REJECTION_BAR_MS
        show({"stage": "rejection", "cpu_ms": costs[0], "without_early_ms": costs[1]}, args.json)
    return int(failed)


def show(row: dict[str, Any], as_json: bool) -> None:
    text = (
        json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items())
    )
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
