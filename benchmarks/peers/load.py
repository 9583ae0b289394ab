"""The client's side: wrk with counted requests, and a stopwatch for first tokens."""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORDS = HERE / "words.txt"
_FIRST_CONTENT = re.compile(rb'"content":"[^"]')
_END = b"0\r\n\r\n"


class LoadError(Exception):
    """The client could not generate the load of the row."""


@dataclass(frozen=True)
class Load:
    """Chat requests of ``words`` words each, ``connections`` of them at a time."""

    words: int
    max_tokens: int
    connections: int
    stream: bool = False
    repeated: bool = False


@dataclass(frozen=True)
class Served:
    """The result of ``requests`` requests by wrk, and its own CPU time."""

    requests: int
    failed: int
    wall_s: float
    received_bytes: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    client_cpu_s: float


@dataclass(frozen=True)
class FirstToken:
    """One streamed answer: seconds to its first content, and from there to its end."""

    first_s: float
    rest_s: float


def run_wrk(wrk: str, port: int, load: Load, first: int, total: int, limit_s: int) -> Served:
    """Send ``total`` requests, the prompts numbered from ``first``; at most ``limit_s`` seconds."""
    command = [
        *(wrk, "-t1", f"-c{min(load.connections, total)}", f"-d{limit_s}s", "--latency"),
        *("--timeout", f"{limit_s}s", "-s", str(HERE / "prompts.lua")),
        *(f"http://127.0.0.1:{port}/", "--", str(WORDS)),
        *map(str, (load.words, load.max_tokens, int(load.stream), int(load.repeated))),
        *map(str, (first, total)),
    ]
    before_s = _children_cpu_s()
    output = _interrupted_when_finished(command)
    client_cpu_s = _children_cpu_s() - before_s
    lines = [line for line in output.splitlines() if line.startswith("result ")]
    if not lines:
        raise LoadError(f"wrk: {output[-500:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix("result "))
    if found["requests"] < total:
        raise LoadError(f"only {found['requests']} of {total} requests within {limit_s} s")
    return Served(client_cpu_s=client_cpu_s, **found)


class Stopwatch:
    """One keep-alive connection that times streamed answers.

    ``acknowledges_at_once`` spares a server that leaves Nagle's algorithm on the 40 ms that the
    kernel's delayed acknowledgements cost it; ordinary clients do not.
    """

    def __init__(self, port: int, acknowledges_at_once: bool) -> None:
        self._acknowledges_at_once = acknowledges_at_once
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, prompt: str, max_tokens: int) -> FirstToken:
        """Send one request and read its whole answer."""
        body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._socket.sendall(head.encode() + body)
        answer = bytearray()
        first = 0.0
        while not answer.endswith(_END):
            if self._acknowledges_at_once:  # the kernel resets the option after a while
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            piece = self._socket.recv(65536)
            if not piece:
                raise LoadError(f"connection closed after {bytes(answer[-300:])!r}")
            answer += piece
            if not first and _FIRST_CONTENT.search(answer):
                first = time.perf_counter()
        if not first:
            raise LoadError(f"no content in {bytes(answer[:500])!r}")
        return FirstToken(first - started, time.perf_counter() - first)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Prompts:
    """Prompts like those of prompts.lua, for clients written in Python; never the same twice."""

    def __init__(self) -> None:
        self._words = WORDS.read_text().split()
        self._source = random.Random(1)
        self._number = 0

    def next(self, words: int) -> str:
        """A new prompt of ``words`` words."""
        self._number += 1
        count = len(self._words)
        drawn = (self._words[int(self._source.random() ** 2 * count)] for _ in range(words))
        return f"Letter {self._number}: {' '.join(drawn)}"


def _interrupted_when_finished(command: list[str]) -> str:
    """Return the output of wrk, and stop it: it would sleep for the rest of its time."""
    output = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output += line
                if line == "finished\n":
                    process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            raise
    return output


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
