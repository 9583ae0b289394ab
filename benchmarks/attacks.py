"""Measure hostile requests: the worst latency of GET /live beside each, and the memory used.

    python benchmarks/attacks.py [--only TEXT] [--tree DIRECTORY] [--memory-gb 6] [--markdown]

Each attack gets a fresh frontend (kv router, two mock workers) with an address-space limit, so
that a defect cannot take the machine down. ``--tree`` measures another checkout
(extensions built in place). Takes about three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Self

from frontend_cpu import HERE, System

ANSWER_S = 40.0
PROBE_EVERY_S = 0.003
HOLD_S = 1.0
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
SLOW_NUMBER = b"1.7976931348623157e308"
TOOL = b'{"type":"function","function":{"name":"f","parameters":{}}}'
MESSAGE = b'{"role":"user","content":"a"}'


@dataclass(frozen=True)
class Attack:
    """``payload`` returns the bytes that each of ``connections`` sends.

    ``unfinished``: the bytes are an incomplete request, so no response is expected.
    """

    name: str
    payload: Callable[[], bytes]
    connections: int = 1
    unfinished: bool = False


def post(path: str, body: bytes, headers: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def chat(fields: str | bytes = b"", messages: bytes = MESSAGE) -> bytes:
    extra = fields.encode() if isinstance(fields, str) else fields
    start = b'{"model":"m","max_tokens":16,"messages":[' + messages + b"]"
    return post(CHAT, start + (b"," + extra if extra else b"") + b"}")


def completion(prompt: bytes, fields: str = "", path: str = COMPLETION) -> bytes:
    extra = f",{fields}" if fields else ""
    return post(path, b'{"model":"m","max_tokens":16,"prompt":' + prompt + extra.encode() + b"}")


def array(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def members(count: int) -> bytes:
    return b",".join(b'"k%d":1' % number for number in range(count))


def text(size: int) -> bytes:
    return b'"' + (b"word " * (size // 5 + 1))[:size] + b'"'


def letter(count: int) -> bytes:
    return completion(b'"' + b"a" * count + b'"')


def metadata(value: bytes) -> bytes:
    return chat(b'"metadata":' + value)


def repeated_annotations(count: int) -> str:
    names = array(b'"token_ids"', count).decode()
    return f'"stream":true,"nvext":{{"annotations":{names}}}'


def small_chunks(size: int) -> bytes:
    body = b'{"model":"m","prompt":"' + b"a" * size + b'"}'
    head = post(COMPLETION, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


def unfinished(size: int) -> bytes:
    return post(CHAT, b"a" * size)[:-1]


_MIB = 1 << 20
_STOPS = ",".join(f'"{number:05d}"' for number in range(300_000))
ATTACKS = (
    Attack("stop: one string of 100,000 characters", lambda: chat(f'"stop":"{"x" * 100_000}"')),
    Attack(
        "stop: 3,000 characters, n 128, 4 prompts",
        lambda: completion(b'["a","b","c","d"]', f'"n":128,"stop":"{"x" * 3000}"'),
    ),
    Attack("stop: 300,000 strings", lambda: chat(f'"stop":[{_STOPS}]')),
    Attack("60,000 prompts, n 128", lambda: completion(array(b'"a"', 60_000), '"n":128')),
    Attack("1M prompts, 34 MB", lambda: completion(array(text(31), 1_000_000))),
    Attack("5M prompts of one id, 19 MB", lambda: completion(array(b"[1]", 4_900_000))),
    Attack("2M prompts of one id, 8 MB", lambda: completion(array(b"[1]", 2_000_000))),
    Attack(
        "60,000 prompts, n 128, /v1/route",
        lambda: completion(array(b'"a"', 60_000), '"n":128', "/v1/route"),
    ),
    Attack(
        "annotations: token_ids 3,000 times, 120 kB",
        lambda: completion(text(120_000), repeated_annotations(3000)),
    ),
    Attack("1-byte chunks, 12 MB", lambda: small_chunks(2_000_000)),
    Attack("1-byte chunks, 16 connections", lambda: small_chunks(1_000_000), 16),
    Attack("1M messages, 32 MB", lambda: chat(messages=array(MESSAGE, 1_000_000)[1:-1])),
    Attack("200,000 messages, 6 MB", lambda: chat(messages=array(MESSAGE, 200_000)[1:-1])),
    Attack("16,000 messages", lambda: chat(messages=array(MESSAGE, 16_000)[1:-1])),
    Attack("8,500 messages, 250 kB", lambda: chat(messages=array(MESSAGE, 8_500)[1:-1])),
    Attack("1,024 prompts, streamed", lambda: completion(array(text(200), 1024), '"stream":true')),
    Attack("4,000 tools", lambda: chat(b'"tools":' + array(TOOL, 4_000))),
    Attack("24 unfinished bodies of 44 MiB", lambda: unfinished(44 * _MIB), 24, True),
    Attack("24 unfinished bodies of 7 MiB", lambda: unfinished(7 * _MIB), 24, True),
    Attack("prompt: one letter, 44 MB", lambda: letter(44_000_000)),
    Attack("prompt: one letter, 44 MB, 3 at once", lambda: letter(44_000_000), 3),
    Attack("prompt: one letter, 7 MB, 8 at once", lambda: letter(7_000_000), 8),
    Attack("prompt: one letter, 1.9 MB, 8 at once", lambda: letter(1_900_000), 8),
    Attack("prompt: 120,000 ids, n 128", lambda: completion(array(b"7", 120_000), '"n":128')),
    Attack("metadata: 14M empty arrays, 44 MB", lambda: metadata(array(b"[]", 14_500_000))),
    Attack("metadata: 2.6M empty arrays, 8 MB", lambda: metadata(array(b"[]", 2_600_000))),
    Attack("metadata: 600,000 empty arrays", lambda: metadata(array(b"[]", 600_000))),
    Attack("metadata: 300,000 slow numbers", lambda: metadata(array(SLOW_NUMBER, 300_000))),
    Attack("metadata: nested 100,000 deep", lambda: metadata(b"[" * 100_000 + b"]" * 100_000)),
    Attack("300,000 tools", lambda: chat(b'"tools":' + array(b'{"type":"function"}', 300_000))),
    Attack("1M unknown keys", lambda: chat(members(1_000_000))),
    Attack("harmless: a prompt of 120,000 tokens", lambda: completion(text(375_000))),
)


class Target(System):
    """``with Target(...)``: a frontend with two mock workers, from ``tree``, with little memory."""

    def __init__(self, tree: Path, memory_bytes: int) -> None:
        super().__init__(tree, speedup=0.0)
        self._memory_bytes = memory_bytes

    def start_process(self, module: str, *flags: str) -> subprocess.Popen[bytes]:
        """Start a process with an address-space limit."""
        process = super().start_process(module, *flags)
        limits = self._memory_bytes, self._memory_bytes
        resource.prlimit(process.pid, resource.RLIMIT_AS, limits)
        return process

    def meet(self, attack: Attack) -> dict[str, Any]:
        """Run ``attack`` with a probe beside it."""
        payload = attack.payload()
        frontend = self.processes[1]
        Path(f"/proc/{frontend.pid}/clear_refs").write_text("5")  # reset the peak
        before = _status_mb(frontend.pid, "VmRSS")
        answers: list[str] = []
        begun = time.monotonic()
        with Probe(self.port) as probe:
            clients = [
                threading.Thread(
                    target=_send, args=(self.port, payload, attack.unfinished, answers)
                )
                for _ in range(attack.connections)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        lost = frontend.poll() is not None
        return {
            "attack": attack.name,
            "status": "the frontend died" if lost else ", ".join(sorted(set(answers))),
            "live_ms": probe.worst_ms,
            "rss_mb": 0.0 if lost else _status_mb(frontend.pid, "VmHWM") - before,
            "seconds": time.monotonic() - begun,
        }


class Probe:
    """A process that sends GET /live continuously: ``with Probe(port)``, then ``worst_ms``."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, self._stop = context.Event(), context.Event()
        self._found = context.SimpleQueue()
        arguments = (port, self._ready, self._stop, self._found)
        self._process = context.Process(target=_probe, args=arguments)
        self.worst_ms = 0.0

    def __enter__(self) -> Self:
        self._process.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self.worst_ms = self._found.get() * 1e3
        self._process.join()


def _probe(port: int, ready: Event, stop: Event, found: Any) -> None:
    worst_s, begun = 0.0, time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as one:
            while not stop.is_set():
                begun = time.perf_counter()
                one.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if not one.recv(4096):
                    break
                worst_s = max(worst_s, time.perf_counter() - begun)
                ready.set()
                time.sleep(PROBE_EVERY_S)
    except OSError:
        worst_s = max(worst_s, time.perf_counter() - begun)  # no response
    found.put(worst_s)


def _send(port: int, payload: bytes, unfinished: bool, answers: list[str]) -> None:
    """Send, read to the end, record the status or the error."""
    head = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as one:
            with contextlib.suppress(ConnectionError, TimeoutError):
                one.sendall(payload)  # the server may have responded and stopped reading
            one.settimeout(HOLD_S if unfinished else ANSWER_S)
            while data := one.recv(1 << 18):
                head = head or data[:64]
    except TimeoutError:
        if not head and not unfinished:
            head = b"- none within 40 s"
    except OSError:
        head = head or b"- reset"
    answers.append(head.split(b"\r\n")[0].decode().partition(" ")[2] or "held")


def _status_mb(pid: int, name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1e3 if found else 0.0


def _show(row: dict[str, Any], markdown: bool) -> None:
    live, rss, took = f"{row['live_ms']:,.0f}", f"{row['rss_mb']:,.0f}", f"{row['seconds']:.1f}"
    if markdown:
        line = f"| {row['attack']} | {row['status']} | {live} | {rss} | {took} |"
    else:
        line = f"{row['attack']:52}{row['status']:32}{live:>10}{rss:>10}{took:>8}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print one row for each attack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="only attacks whose name contains this")
    parser.add_argument("--tree", type=Path, default=HERE)
    parser.add_argument("--memory-gb", type=float, default=6.0)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.markdown:
        head = "| attack | answer | worst /live, ms | peak RSS growth, MB | s |\n"
        head += "|---|---|--:|--:|--:|\n"
    else:
        head = f"{'attack':52}{'answer':32}{'/live ms':>10}{'RSS MB':>10}{'s':>8}\n"
    sys.stdout.write(head)
    for attack in (one for one in ATTACKS if options.only in one.name):
        with Target(options.tree.resolve(), int(options.memory_gb * 1e9)) as system:
            _show(system.meet(attack), options.markdown)


if __name__ == "__main__":
    main()
