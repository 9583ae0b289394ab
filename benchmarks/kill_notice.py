"""Measure the time from ``kill -9`` of a worker to the watcher's event. Real processes and files.

    python benchmarks/kill_notice.py --kills 100 --load 0.8 --loop uvloop --json

Each kill: a worker process registers one instance in a file store. Once the watcher reports it, the
worker is killed, and the time until the watcher's ``delete`` event is measured. Only one worker
dies at a time; ``--bystanders`` others stay. ``--load`` keeps the watcher's loop busy for that
share of the time in slices of ``--slice-ms``, as a frontend under traffic would be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvloop

from dynamo.runtime.discovery import FileDiscovery, KeyEvent

__all__ = ["main", "measure"]

WORKER = """
import asyncio, sys
from pathlib import Path
from dynamo.runtime.discovery import FileDiscovery

async def main():
    store = FileDiscovery(Path(sys.argv[1]))
    lease = await store.grant(10.0, int(sys.argv[2]))
    await store.put(f"v1/instances/ns/comp/ep/{lease.id:x}", b"{}", lease.id)
    await lease.lost.wait()

asyncio.run(main())
"""


class Watcher:
    """Turns key events into futures: one for the put, one for the delete of each key."""

    def __init__(self, store: FileDiscovery) -> None:
        self._waiting: dict[tuple[str, str], asyncio.Future[float]] = {}
        self._watch = store.watch("v1/instances/", self._on_event)

    def expect(self, kind: str, lease_id: int) -> asyncio.Future[float]:
        """Return the loop time of the event."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[kind, f"v1/instances/ns/comp/ep/{lease_id:x}"] = future
        return future

    def _on_event(self, event: KeyEvent) -> None:
        future = self._waiting.pop((event.kind, event.key), None)
        if future is not None:
            future.set_result(time.perf_counter())


async def measure(args: argparse.Namespace) -> list[float]:
    """Milliseconds from the return of kill(2) to the watcher's event, one per kill."""
    with tempfile.TemporaryDirectory(prefix="kill-notice-") as directory:
        root = Path(directory) / "store"
        store = FileDiscovery(root)
        await store.start()
        watcher = Watcher(store)
        async with _busy(args.load, args.slice_ms / 1e3), _workers(root, watcher) as start:
            for number in range(args.bystanders):
                await start(10_000 + number)
            times_ms = []
            for lease_id in range(1, args.kills + 1):
                process = await start(lease_id)
                gone = watcher.expect("delete", lease_id)
                killed_at = time.perf_counter()
                os.kill(process.pid, signal.SIGKILL)
                async with asyncio.timeout(30):
                    times_ms.append((await gone - killed_at) * 1e3)
        await store.close()
        return times_ms


@contextlib.asynccontextmanager
async def _workers(
    root: Path, watcher: Watcher
) -> AsyncIterator[Callable[[int], Awaitable[subprocess.Popen[bytes]]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def spawn(lease_id: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", WORKER, str(root), str(lease_id)])
        processes.append(process)
        return process

    async def start(lease_id: int) -> subprocess.Popen[bytes]:
        up = watcher.expect("put", lease_id)
        process = spawn(lease_id)
        async with asyncio.timeout(60):
            await up
        return process

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def _busy(share: float, slice_s: float) -> AsyncIterator[None]:
    async def burn() -> None:
        while True:
            until = time.perf_counter() + slice_s
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(slice_s * (1 - share) / share)

    if share <= 0:
        yield
        return
    async with asyncio.TaskGroup() as group:
        task = group.create_task(burn())
        try:
            yield
        finally:
            task.cancel()


def summary(times_ms: list[float]) -> dict[str, float]:
    """min, p50, p90, p99 and max in milliseconds."""
    ordered = sorted(times_ms)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    return {
        "kills": len(ordered),
        "min_ms": round(ordered[0], 3),
        "p50_ms": round(cuts[49], 3),
        "p90_ms": round(cuts[89], 3),
        "p99_ms": round(cuts[98], 3),
        "max_ms": round(ordered[-1], 3),
    }


def main() -> int:
    """Print one summary; status 1 if the slowest detection took longer than ``--limit-ms``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--bystanders", type=int, default=8, help="workers that stay alive")
    parser.add_argument("--load", type=float, default=0.0, help="busy share of the loop, 0 to <1")
    parser.add_argument("--slice-ms", type=float, default=2.0, help="length of one busy slice")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--limit-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    run = uvloop.run if args.loop == "uvloop" else asyncio.run
    times_ms = run(measure(args))
    result = {**summary(times_ms), "load": args.load, "loop": args.loop}
    if args.json:
        print(json.dumps(result))
    else:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    return 0 if result["max_ms"] <= args.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
