"""CPU of the request plane, both ends, per request and per streamed token.

Two processes over a UNIX socket: this one is the client, a child serves. CPU is read from
``/proc/<pid>/task/*/schedstat``, so kernel time counts and idle time does not.

    python benchmarks/micro/bench_request_plane.py [--rounds 3] [--loop uvloop|asyncio]

``unary``: 60-word request (240 ids), one answer of 60 bytes, N requests in flight.
``streamed``: a token per stream per tick, as an engine step makes them: the server sends one item
on each of N open streams, lets the loop run, and continues.
``one a turn``: every token has a loop iteration of the server to itself, so each is one write.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from dynamo.errors import DynamoError
from dynamo.runtime.requests import RequestClient, RequestServer, ServerStream

ITEM = bytes(48)
PROMPT = bytes(960)
TOKENS = 64
TICK_S = 0.002


class Engine:
    """Answers ``unary`` at once; steps all open ``tokens`` streams together."""

    def __init__(self) -> None:
        self._left: dict[ServerStream, int] = {}
        self._ticking = False
        self._queue: deque[tuple[ServerStream, int]] = deque()

    def unary(self, stream: ServerStream, payload: bytes) -> None:
        """One item and the end."""
        stream.send(ITEM)
        stream.end()

    def tokens(self, stream: ServerStream, payload: bytes) -> None:
        """``TOKENS`` items, one per step."""
        self._left[stream] = TOKENS
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK_S, self._step)

    def trickle(self, stream: ServerStream, payload: bytes) -> None:
        """``TOKENS`` items, each in a loop turn that sends nothing else."""
        self._queue.append((stream, TOKENS))
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        stream, left = self._queue.popleft()
        stream.send(ITEM)
        if left == 1:
            stream.end()
        else:
            self._queue.append((stream, left - 1))
        if self._queue:
            asyncio.get_running_loop().call_soon(self._turn)

    def _step(self) -> None:
        for stream, left in list(self._left.items()):
            stream.send(ITEM)
            if left == 1:
                stream.end()
                del self._left[stream]
            else:
                self._left[stream] = left - 1
        self._ticking = bool(self._left)
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK_S, self._step)


class Driver:
    """Keeps ``width`` streams open until ``total`` have ended; also the sink of all."""

    def __init__(self, client: RequestClient, address: str, endpoint: str, total: int) -> None:
        self._open = partial(client.open, address, endpoint, {}, PROMPT, self)
        self._left = total
        self._running = 0
        self._done = asyncio.Event()
        self.items = 0

    async def run(self, width: int) -> None:
        """Until all have ended."""
        for _ in range(width):
            self._next()
        await self._done.wait()

    def on_data(self, payload: bytes) -> None:
        """Count."""
        self.items += 1

    def on_end(self) -> None:
        """Start the next."""
        self._running -= 1
        self._next()
        if not self._running:
            self._done.set()

    def on_error(self, error: DynamoError) -> None:
        """Not in this benchmark."""
        raise error

    def _next(self) -> None:
        if self._left:
            self._left -= 1
            self._running += 1
            self._open()


async def serve(address: str) -> None:
    """The child: until stdin is closed."""
    server, engine = RequestServer(), Engine()
    server.register("bench/worker/unary", engine.unary)
    server.register("bench/worker/tokens", engine.tokens)
    server.register("bench/worker/trickle", engine.trickle)
    await server.start(address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


async def drive(address: str, pid: int, rounds: int) -> None:
    """The parent: all cases, median of ``rounds``."""
    client = RequestClient()
    await Driver(client, address, "bench/worker/unary", 2000).run(64)
    sys.stdout.write(f"{'case':34}{'client µs':>12}{'server µs':>12}{'sum µs':>10}\n")
    for name, endpoint, total, width, per_item in (
        ("unary, 1 in flight", "unary", 10_000, 1, False),
        ("unary, 32 in flight", "unary", 40_000, 32, False),
        ("unary, 256 in flight", "unary", 40_000, 256, False),
        ("per token, 256 streams stepping", "tokens", 8_192, 256, True),
        ("per token, 32 streams stepping", "tokens", 1_024, 32, True),
        ("per token, 32 streams, one a turn", "trickle", 1_024, 32, True),
    ):
        rows = []
        for _ in range(rounds):
            driver = Driver(client, address, f"bench/worker/{endpoint}", total)
            before = _cpu_s(os.getpid()), _cpu_s(pid)
            await driver.run(width)
            after = _cpu_s(os.getpid()), _cpu_s(pid)
            count = driver.items if per_item else total
            rows.append([(b - a) / count * 1e6 for a, b in zip(before, after, strict=True)])
        ours, theirs = (statistics.median(column) for column in zip(*rows, strict=True))
        sys.stdout.write(f"{name:34}{ours:12.2f}{theirs:12.2f}{ours + theirs:10.2f}\n")
    await client.close()


def main() -> None:
    """Parse, start the child, drive, stop the child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run: Callable[..., None] = uvloop.run if options.loop == "uvloop" else asyncio.run
    if options.serve:
        run(serve(options.serve))
        return
    with tempfile.TemporaryDirectory() as directory:
        address = f"uds:{Path(directory) / 'bench.sock'}"
        command = [sys.executable, __file__, "--serve", address, "--loop", options.loop]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            if child.stdout is None or child.stdout.readline() != "ready\n":
                raise SystemExit("the server did not start")
            run(drive(address, child.pid, options.rounds))
            child.communicate(timeout=10)


def _cpu_s(pid: int) -> float:
    """User plus system time of a single-threaded process: the first field of schedstat, in ns."""
    return (
        sum(
            int(task.joinpath("schedstat").read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
    )


if __name__ == "__main__":
    main()
