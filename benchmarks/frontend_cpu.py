"""Measure CPU time of the frontend process per request and per token, under external load.

    python benchmarks/frontend_cpu.py [--rounds 3] [--against DIRECTORY] [--json]

A real frontend (kv router), a process with two mock workers, and this process as their client.
``--against`` is another checkout (extensions built in place). Both take turns under the same load,
which makes the comparison fair on a shared machine. Takes about 15 s a round and checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvloop

HERE = Path(__file__).resolve().parents[1]
READY_S = 30.0
LIMIT_S = 60.0
TEXT = (
    "the model answers with a few plain words about tea rivers seven mountains and how light "
    "moves through glass while people walk slowly along some old road to another town"
)


@dataclass(frozen=True)
class Load:
    """``requests`` in all, ``connections`` at a time, of 60 words each.

    ``speedup`` is the mocker's; 0 answers at once.
    """

    name: str
    requests: int
    connections: int
    max_tokens: int
    stream: bool
    speedup: float = 0.0


LOADS = (
    Load("unary, 1 token, 64 connections", 12_000, 64, 1, False),
    Load("unary, 1 token, 1 connection", 3_000, 1, 1, False),
    Load("streamed, 64 tokens, 64 connections", 1_500, 64, 64, True),
    Load("streamed, 512 tokens, 32 connections, trickling", 96, 32, 512, True, 10.0),
)


class Client(asyncio.Protocol):
    """One keep-alive connection that sends requests until ``bodies`` is exhausted."""

    def __init__(self, load: Load, numbers: list[int]) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._load = load
        self._numbers = numbers
        self._answer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if not self._is_complete():
            return
        if not self._answer.startswith(b"HTTP/1.1 200 ") or b'"error"' in self._answer:
            self.done.set_exception(RuntimeError(self._answer[:500].decode()))
            return
        self._answer = b""
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("closed by the frontend"))

    def _next(self) -> None:
        if self._numbers:
            self._transport.write(request(self._load, self._numbers.pop()))
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def _is_complete(self) -> bool:
        answer = self._answer
        if self._load.stream:
            return answer.endswith(b"0\r\n\r\n")
        head, found, body = answer.partition(b"\r\n\r\n")
        return bool(found) and len(body) >= int(head.rpartition(b"content-length: ")[2])


def request(load: Load, number: int) -> bytes:
    """A chat request with a prompt unique to ``number``."""
    prompt = f"Note {number}: " + " ".join(random.Random(number).choices(TEXT.split(), k=60))
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": load.max_tokens,
            "stream": load.stream,
            "ignore_eos": True,
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


class System:
    """``with System(...)``: a frontend and its mockers run, from ``tree``, and answer."""

    def __init__(self, tree: Path, speedup: float) -> None:
        self.port = _free_port()
        self.sent = 0
        self._tree = tree
        self._speedup = speedup
        self.processes: list[subprocess.Popen[bytes]] = []
        self._directory = tempfile.TemporaryDirectory()

    def __enter__(self) -> Self:
        model = str(HERE / "examples" / "model")
        speedup = f"{self._speedup:g}"
        self.start_process("mocker", "--model-path", model, "--model-name", "m", "--num-workers",
                           "2", "--block-size", "16", "--speedup-ratio", speedup)  # fmt: skip
        self.start_process("frontend", "--router-mode", "kv", "--http-port", str(self.port))
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            if time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit(f"not ready within {READY_S:g} s")
            time.sleep(0.1)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._directory.cleanup()

    def measure(self, load: Load) -> dict[str, float]:
        """CPU microseconds of the frontend, each request and each token."""
        before, before_kernel = _cpu_s(self.processes[1].pid)
        numbers = list(range(self.sent, self.sent + load.requests))
        self.sent += load.requests
        started = time.monotonic()
        uvloop.run(_send(self.port, load, numbers))
        wall_s = time.monotonic() - started
        after, after_kernel = _cpu_s(self.processes[1].pid)
        used_us = (after - before) * 1e6
        return {
            "request_us": used_us / load.requests,
            "token_us": used_us / load.requests / load.max_tokens,
            "kernel_share": (after_kernel - before_kernel) / (after - before),
            "busy_share": (after - before) / wall_s,
            "rss_mib": _rss_mib(self.processes[1].pid),
        }

    def start_process(self, module: str, *flags: str) -> subprocess.Popen[bytes]:
        """Start ``python -m dynamo.<module>`` in its own session."""
        root = Path(self._directory.name)
        env = os.environ | {
            "PYTHONPATH": str(self._tree),
            "PYTHONSAFEPATH": "1",
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(root / "store"),
            "DYN_LOCAL_STATE_DIR": str(root / "state"),
        }
        with (root / f"{module}.log").open("wb") as log:
            command = [sys.executable, "-m", f"dynamo.{module}", *flags]
            process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def _is_ready(self) -> bool:
        if any(process.poll() is not None for process in self.processes):
            logs = sorted(Path(self._directory.name).glob("*.log"))
            raise SystemExit("\n".join(log.read_text()[-2000:] for log in logs))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models") as answer:
                return bool(json.load(answer)["data"])
        except OSError:
            return False


async def _send(port: int, load: Load, numbers: list[int]) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LIMIT_S):
        clients = []
        for _ in range(load.connections):
            _, client = await loop.create_connection(
                lambda: Client(load, numbers), "127.0.0.1", port
            )
            clients.append(client)
        for client in clients:
            await client.done


def _cpu_s(pid: int) -> tuple[float, float]:
    """User and kernel time together, and kernel time alone, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, kernel = int(fields[11]), int(fields[12])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + kernel) / ticks, kernel / ticks


def _rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rounds(trees: list[Path], loads: list[Load], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for speedup in sorted({load.speedup for load in loads}):
        with ExitStack() as stack:
            systems = [stack.enter_context(System(tree, speedup)) for tree in trees]
            for load in (one for one in loads if one.speedup == speedup):
                samples: list[list[dict[str, float]]] = [[] for _ in systems]
                for _ in range(rounds):
                    for system, found in zip(systems, samples, strict=True):
                        found.append(system.measure(load))
                rows += [
                    {"load": load.name, "tree": str(tree), "rounds": found}
                    for tree, found in zip(trees, samples, strict=True)
                ]
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    sys.stdout.write(f"{'load':50}{'µs/request':>12}{'least':>9}{'µs/token':>10}{'least':>8}"
                     f"{'kernel':>8}{'busy':>6}{'RSS MiB':>9}\n")  # fmt: skip
    for row in rows:
        column = {key: [one[key] for one in row["rounds"]] for key in row["rounds"][0]}
        middle = {key: statistics.median(values) for key, values in column.items()}
        sys.stdout.write(
            f"{row['load']:50}{middle['request_us']:12.1f}{min(column['request_us']):9.1f}"
            f"{middle['token_us']:10.2f}{min(column['token_us']):8.2f}"
            f"{middle['kernel_share']:8.0%}{middle['busy_share']:6.0%}{middle['rss_mib']:9.0f}"
            f"  {row['tree']}\n"
        )


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only loads whose name contains this")
    parser.add_argument("--against", type=Path, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    loads = [load for load in LOADS if options.only in load.name]
    trees = [HERE, *(tree.resolve() for tree in options.against)]
    rows = _rounds(trees, loads, options.rounds)
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
    else:
        _show(rows)


if __name__ == "__main__":
    main()
