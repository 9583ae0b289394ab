"""Measure how long a hung worker (SIGSTOP) stays in routing, and when it returns (SIGCONT).

    python benchmarks/hang_notice.py --hangs 20
    python benchmarks/hang_notice.py --hangs 20 --idle --ttl 2

Two worker processes over file discovery and UNIX sockets. Each hang begins at a random moment while
both have streams of a token every 10 ms: *out* is the time until the client avoids the worker, and
*ended* until its streams have failed. With ``--idle`` no request runs: *out* is the time until
discovery hides the instance, because its lease was not renewed. *back* is the time from SIGCONT to
the end of either. Prints seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import uvloop

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.protocols import codec
from dynamo.runtime import Client, DistributedRuntime

__all__ = ["main", "measure"]

PATH = "bench.worker.generate"
STREAMS = 8
WORKER = f"""
import asyncio
from dynamo.runtime import dynamo_worker

async def generate(request):
    while True:
        await asyncio.sleep(0.01)
        yield {{"token_ids": [1]}}

@dynamo_worker()
async def main(runtime):
    await runtime.endpoint({PATH!r}).serve_endpoint(generate)

asyncio.run(main())
"""


class StreamEnd:
    """A sink that counts the streams that have failed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.failed = 0
        self._changed = changed

    def on_data(self, payload: bytes) -> None:
        """Ignore a token."""

    def on_end(self) -> None:
        """A stream ends only with an error here."""

    def on_error(self, error: DynamoError) -> None:
        """Count it."""
        self.failed += 1
        self._changed()


class Site:
    """The client and two workers."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.changed = asyncio.Event()
        client.on_change(lambda added, removed: self.changed.set())
        client.on_inhibited(lambda instance_id, out: self.changed.set())

    async def until(self, condition: Callable[[], bool]) -> float:
        """Wait for ``condition``; return when it held."""
        async with asyncio.timeout(120):
            while not condition():
                self.changed.clear()
                await self.changed.wait()
        return time.perf_counter()


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of each hang: ``out``, ``ended`` (with streams) and ``back``."""
    found: dict[str, list[float]] = {"out": [], "back": []}
    with tempfile.TemporaryDirectory(prefix="hang-notice-") as directory:
        env = {**os.environ, "DYN_LOCAL_STATE_DIR": directory, "ETCD_LEASE_TTL": str(args.ttl)}
        runtime = DistributedRuntime(None, RuntimeSettings(state_dir=directory))
        site = Site(await runtime.endpoint(PATH).client())
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(2):
                process = _start(env)
                await site.until(lambda: len(site.client.instance_ids()) > len(processes))
                [instance_id] = set(site.client.instance_ids()) - set(processes)
                processes[instance_id] = process
            for number in range(args.hangs):
                hung = list(processes)[number % 2]
                await _hang(site, hung, processes[hung], args.idle, found)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
            await runtime.close()
    return found


def _start(env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER], env=env)


async def _hang(
    site: Site,
    instance_id: int,
    process: subprocess.Popen[bytes],
    idle: bool,
    found: dict[str, list[float]],
) -> None:
    client = site.client

    def is_out() -> bool:
        return client.is_inhibited(instance_id) or instance_id not in client.instance_ids()

    sink = StreamEnd(site.changed.set)
    payload = codec.encode({})
    if not idle:
        for _ in range(STREAMS):
            client.open(instance_id, payload, sink)
    await asyncio.sleep(random.uniform(0.5, 1.5))
    process.send_signal(signal.SIGSTOP)
    begun = time.perf_counter()
    found["out"].append(await site.until(is_out) - begun)
    if not idle:
        ended = await site.until(lambda: sink.failed == STREAMS)
        found.setdefault("ended", []).append(ended - begun)
    await asyncio.sleep(0.2)
    process.send_signal(signal.SIGCONT)
    begun = time.perf_counter()
    found["back"].append(await site.until(lambda: not is_out()) - begun)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hangs", type=int, default=20)
    parser.add_argument("--idle", action="store_true", help="no requests: only the lease shows it")
    parser.add_argument("--ttl", type=float, default=10.0, help="seconds of the workers' leases")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random.seed(1)
    found = uvloop.run(measure(args))
    if args.json:
        print(json.dumps(found))
        return
    for name, seconds in found.items():
        low, high = min(seconds), max(seconds)
        middle = statistics.median(seconds)
        print(f"{name:6} n={len(seconds)} min {low:.3f} median {middle:.3f} max {high:.3f}")


if __name__ == "__main__":
    main()
