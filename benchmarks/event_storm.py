"""Measure the event loop under a storm of KV events, with and without event threads.

    python benchmarks/event_storm.py [--rates 0,50000,200000] [--threads 1,2,4] [--blocks 4]
        [--seconds 4] [--publishers 2] [--json OUT.json]

Publisher processes send over the real event plane, one event of ``--blocks`` blocks a message, and
hold their live size constant: half of the messages store a chain, half remove the oldest. A rate
counts blocks named in events per second, over all publishers. The router (kv mode, uvloop) runs in
this process. Every 2 ms another process sends a datagram that triggers a pick for a prompt of 64
blocks. The table shows the delay of the datagram, the duration of the pick, and the CPU share of
the loop thread and of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard, RuntimeConfig, instance_key
from dynamo.protocols.kv import KV_EVENTS, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from dynamo.router.connect.kv_router import ConnectedKvRouter, connect
from dynamo.router.connect.router import RoutedWorkers
from dynamo.runtime import DistributedRuntime

BLOCK = 16
HEARTBEAT_S = 0.002
TICK_S = 0.002
LIVE_BLOCKS = 20_000
PATH = ("storm", "backend", "generate")


@dataclass
class Row:
    """One cell of the table; times in microseconds, shares of one core."""

    threads: int
    rate: int
    blocks_per_s: int
    messages_per_s: int
    lost: int
    late_p50_us: float
    late_p99_us: float
    late_max_us: float
    pick_p50_us: float
    pick_p99_us: float
    pick_max_us: float
    loop_cpu: float
    process_cpu: float


class Sender:
    """A worker that only publishes. Each line of its standard input is a rate in blocks/s."""

    def __init__(self, runtime: DistributedRuntime, blocks: int) -> None:
        self.runtime = runtime
        self.blocks = blocks
        self.rate = 0
        self._source = Random(runtime.instance_id)
        self._held: deque[bytes] = deque()
        self._event_id = 0

    async def run(self) -> None:
        """Publish until standard input ends."""
        namespace, component, endpoint = PATH
        self._publisher = await self.runtime.publisher(namespace, component, KV_EVENTS)
        card = ModelCard("m", "m", "/m", *PATH, self.runtime.instance_id)
        card.kv_cache_block_size = BLOCK
        card.runtime_config = RuntimeConfig(enable_local_indexer=False)
        lease = await self.runtime.granted()
        key = "v1/mdc/" + instance_key(*PATH, self.runtime.instance_id)
        await self.runtime.discovery.put(key, msgspec.json.encode(card), lease.id)
        serving = self.runtime.endpoint(f"{namespace}.{component}.{endpoint}")
        self.runtime.tasks.spawn(serving.serve_push(lambda stream, _: stream.end()), name="serve")
        commands = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        sending = self.runtime.tasks.spawn(self._send(), name="send")
        while line := await commands.readline():
            self.rate = int(line)
        sending.cancel()

    async def _send(self) -> None:
        due, before = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            due = min(due + (now - before) * self.rate / self.blocks, 4096)
            before = now
            while due >= 1:
                due -= 1
                self._publish()

    def _publish(self) -> None:
        self._event_id += 1
        if len(self._held) * self.blocks >= LIVE_BLOCKS and self._event_id % 2:
            data: BlocksStored | BlocksRemoved = BlocksRemoved(self._held.popleft())
        else:
            names = self._source.randbytes(8 * self.blocks)
            self._held.append(names)
            data = BlocksStored(names, self._source.randbytes(8 * self.blocks))
        batch = KvEventBatch(self.runtime.instance_id, [KvEvent(self._event_id, data)])
        self._publisher.publish(codec.encode(batch))


async def publish(state_dir: str, blocks: int) -> None:
    """Run a publisher process."""
    async with running(state_dir) as runtime:
        await Sender(runtime, blocks).run()


@asynccontextmanager
async def running(state_dir: str) -> AsyncIterator[DistributedRuntime]:
    """A runtime on one box, file discovery, UNIX sockets."""
    settings = RuntimeSettings(namespace=PATH[0], state_dir=state_dir)
    runtime = DistributedRuntime(None, settings)
    try:
        yield runtime
    finally:
        await runtime.close()


class Heartbeats:
    """Datagrams from another process, each with its send time; each triggers a pick."""

    def __init__(self, live: ConnectedKvRouter, source: socket.socket) -> None:
        self.late_us: list[float] = []
        self.pick_us: list[float] = []
        self._live = live
        self._source = source
        self._prompts = [array("I", Random(i).choices(range(50_000), k=1024)) for i in range(8)]

    async def run(self, seconds: float) -> None:
        """Receive datagrams for that time."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._source, self._receive)
        await asyncio.sleep(seconds)
        loop.remove_reader(self._source)

    def _receive(self) -> None:
        sent_s = struct.unpack("d", self._source.recv(8))[0]
        begin = time.perf_counter()
        self._live.picker.pick(None, self._prompts[len(self.late_us) % 8])
        self.late_us.append((begin - sent_s) * 1e6)
        self.pick_us.append((time.perf_counter() - begin) * 1e6)


def send_heartbeats(descriptor: int) -> None:
    """Run the process that sends heartbeats, until the receiver closes."""
    with socket.socket(fileno=descriptor) as sender, suppress(ConnectionError):
        while True:
            time.sleep(HEARTBEAT_S)
            sender.send(struct.pack("d", time.perf_counter()))


@contextmanager
def heart() -> Iterator[socket.socket]:
    """The process that sends a datagram every 2 ms."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    command = [sys.executable, __file__, "--heartbeat", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]), ours:
        theirs.close()
        yield ours


async def measure(state_dir: str, threads: int, rate: int, args: argparse.Namespace) -> Row:
    """One router, one storm."""
    async with running(state_dir) as runtime:
        chosen = RouterSettings(mode="kv", event_threads=threads)
        live = await connect(runtime, RoutedWorkers(*PATH, BLOCK), chosen)
        assert isinstance(live, ConnectedKvRouter)
        await live.start()
        while len(live.picker.worker_pool.members) < args.publishers:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.01)
        await command(args.senders, rate)
        with heart() as source:
            await Heartbeats(live, source).run(1.0)  # warm
            before, lost = counts(runtime)
            loop_s, process_s, begin = time.thread_time(), time.process_time(), time.perf_counter()
            heartbeats = Heartbeats(live, source)
            await heartbeats.run(args.seconds)
            wall_s = time.perf_counter() - begin
            loop_cpu = (time.thread_time() - loop_s) / wall_s
            process_cpu = (time.process_time() - process_s) / wall_s
        after, lost_after = counts(runtime)
        await command(args.senders, 0)
        await live.close()
    events = (after - before) / wall_s
    late, pick = (quantiles(values) for values in (heartbeats.late_us, heartbeats.pick_us))
    loads = int(events * args.blocks), int(events), lost_after - lost
    return Row(threads, rate, *loads, *late, *pick, loop_cpu, process_cpu)


async def command(senders: list[subprocess.Popen[bytes]], rate: int) -> None:
    """Send every publisher its share of the rate."""
    for sender in senders:
        assert sender.stdin is not None
        sender.stdin.write(f"{rate // len(senders)}\n".encode())
        sender.stdin.flush()


def counts(runtime: DistributedRuntime) -> tuple[int, int]:
    """Return applied events and lost messages, from the metrics."""
    applied = lost = 0.0
    for line in runtime.metrics.render().decode().splitlines():
        if "kv_cache_events_applied" in line and not line.startswith("#"):
            applied += float(line.rpartition(" ")[2])
        elif 'warning_kind="sequence_gap"' in line:
            lost += float(line.rpartition(" ")[2])
    return int(applied), int(lost)


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """The median, the 99th percentile and the maximum."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


def show(rows: list[Row]) -> None:
    """Print the table, and the rate from which threads pay."""
    table = Table(title="a storm of KV events, and the loop")
    names = ["threads", "blocks/s", "messages/s", "lost", "late p50", "p99", "max µs"]
    for name in [*names, "pick p50", "p99", "max µs", "loop", "process"]:
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{value:,.0f}" for value in list(asdict(row).values())[5:11]]
        cells = [
            str(row.threads),
            f"{row.blocks_per_s:,}",
            f"{row.messages_per_s:,}",
            str(row.lost),
        ]
        table.add_row(*cells, *times, f"{row.loop_cpu:.0%}", f"{row.process_cpu:.0%}")
    console = Console(width=140)
    console.print(table)
    for rate in sorted({row.rate for row in rows if row.rate}):
        alone = [row for row in rows if row.rate == rate and row.threads == 1]
        others = [row for row in rows if row.rate == rate and row.threads > 1]
        if alone and others:
            best = min(others, key=lambda row: row.late_p99_us)
            console.print(
                f"{rate:,} blocks/s: {best.threads} threads take {alone[0].loop_cpu:.0%} of the "
                f"loop down to {best.loop_cpu:.0%}, p99 lateness {alone[0].late_p99_us:,.0f} to "
                f"{best.late_p99_us:,.0f} µs, process CPU {alone[0].process_cpu:.0%} to "
                f"{best.process_cpu:.0%}"
            )


def main() -> None:
    """Start publishers, measure every cell, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="0,50000,200000")
    parser.add_argument("--threads", default="1,2,4")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--publishers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publish", help=argparse.SUPPRESS)
    parser.add_argument("--heartbeat", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.heartbeat is not None:
        send_heartbeats(args.heartbeat)
        return
    if args.publish:
        uvloop.run(publish(args.publish, args.blocks))
        return
    rows = []
    with tempfile.TemporaryDirectory() as state_dir:
        child = [sys.executable, __file__, "--publish", state_dir, "--blocks", str(args.blocks)]
        args.senders = [
            subprocess.Popen(child, stdin=subprocess.PIPE) for _ in range(args.publishers)
        ]
        try:
            for rate in map(int, args.rates.split(",")):
                for threads in map(int, args.threads.split(",")):
                    rows.append(uvloop.run(measure(state_dir, threads, rate, args)))
        finally:
            for sender in args.senders:
                assert sender.stdin is not None
                sender.stdin.close()
                sender.wait(timeout=10)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
