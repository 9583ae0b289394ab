"""What programs rely on at the seams: each contract runs on the system and on the simulation.

``python contracts.py real NAME`` and ``python contracts.py simulated NAME`` print the same result.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

__all__ = ["CONTRACTS"]

_TESTS = Path(__file__).resolve().parents[1]
Contract = Callable[[Path], Awaitable[Any]]


class Collector(asyncio.Protocol):
    """Keeps what it receives, and how the connection ended."""

    def __init__(self) -> None:
        self.received = b""
        self.ended = ""
        self.paused = 0
        self.resumed = 0
        self.closed = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> None:
        self.ended += "eof "

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.resumed += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.ended += "lost"
        self.closed.set()


async def until(condition: Callable[[], bool]) -> None:
    """Poll; a contract that does not hold ends with the timeout."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)


async def _connected(directory: Path) -> tuple[Collector, Collector, Any]:
    loop = asyncio.get_running_loop()
    accepted: list[Collector] = []

    def accept() -> Collector:
        accepted.append(Collector())
        return accepted[-1]

    path = str(directory / "s")
    server = await loop.create_unix_server(accept, path)
    _, client = await loop.create_unix_connection(Collector, path)
    await until(lambda: bool(accepted) and accepted[0].transport is not None)
    return client, accepted[0], server


async def bytes_in_order(directory: Path) -> Any:
    """All bytes arrive once and in order, however they were written; then the end."""
    client, server, _ = await _connected(directory)
    parts = [bytes([number % 256]) * (number * 37 % 5000) for number in range(300)]
    for number, part in enumerate(parts):
        client.transport.write(part)
        if not number % 17:
            await asyncio.sleep(0)
    client.transport.close()
    await until(server.closed.is_set)
    return server.received == b"".join(parts), server.ended, client.ended


async def both_directions(directory: Path) -> Any:
    """Both ends may write at once."""
    client, server, _ = await _connected(directory)
    client.transport.write(b"question")
    server.transport.write(b"answer")
    await until(lambda: bool(client.received and server.received))
    await until(lambda: client.received == b"answer" and server.received == b"question")
    return True


async def back_pressure(directory: Path) -> Any:
    """A writer is paused while its peer does not read, and resumed when it does."""
    client, server, _ = await _connected(directory)
    client.transport.set_write_buffer_limits(high=65536)
    server.transport.pause_reading()
    client.transport.write(b"x" * (4 << 20))
    await until(lambda: client.paused == 1)
    before = client.resumed
    server.transport.resume_reading()
    await until(lambda: len(server.received) == 4 << 20 and client.resumed == 1)
    return before, client.paused, client.resumed


async def no_listener(directory: Path) -> Any:
    """No file, and a file without a listener, are two errors."""
    loop = asyncio.get_running_loop()
    path = str(directory / "s")
    found = []
    for _ in range(2):
        try:
            await loop.create_unix_connection(Collector, path)
        except OSError as error:
            found.append(type(error).__name__)
        server = await loop.create_unix_server(Collector, path)
        server.close()
        await server.wait_closed()
        if not Path(path).exists():  # newer Pythons remove it
            Path(path).touch()
    return found


async def callbacks_in_order(directory: Path) -> Any:
    """Callbacks run in the order in which they were added; timers by their time."""
    loop = asyncio.get_running_loop()
    ran: list[str] = []
    loop.call_soon(ran.append, "first")
    cancelled = loop.call_soon(ran.append, "cancelled")
    loop.call_soon(ran.append, "second")
    cancelled.cancel()
    loop.call_later(0.03, ran.append, "late")
    loop.call_later(0.01, ran.append, "early")
    loop.call_later(0.02, ran.append, "never").cancel()
    await loop.run_in_executor(None, lambda: None)
    await until(lambda: "late" in ran)
    return ran


async def timeouts(directory: Path) -> Any:
    """A timeout cancels its block; the time that passed is on every clock."""
    loop = asyncio.get_running_loop()
    started = loop.time(), time.monotonic(), time.time()
    try:
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    except TimeoutError:
        passed = loop.time() - started[0], time.monotonic() - started[1], time.time() - started[2]
        return [0.04 < one < 5 for one in passed]
    return "no timeout"


async def events_in_order(directory: Path) -> Any:
    """Events of a publisher arrive in order, without a gap, also for a late subscriber."""
    from dynamo.runtime.events import channels

    received: list[int] = []
    gaps: list[Any] = []
    address = f"ipc://{directory}/events.sock"
    publisher: Any = channels.ZmqPublisher("topic", 7, address)  # type: ignore[attr-defined]
    publisher.publish(b"before")
    subscriber: Any = channels.ZmqSubscriber(  # type: ignore[attr-defined]
        "topic",
        lambda sender, sequence, payload: received.append(sequence),
        lambda *gap: gaps.append(gap),
    )
    subscriber.connect(publisher.address, 7)

    def joined() -> bool:
        publisher.publish(b"x" * 10)
        return bool(received)

    await until(joined)
    first = received[0]
    for _ in range(500):
        publisher.publish(b"y" * 100)
    await until(lambda: len(received) > 500)
    await until(lambda: received[-1] == publisher.published - 1)
    in_order = received == list(range(first, publisher.published))
    publisher.close()
    subscriber.close()
    return in_order, gaps, first > 0, Path(f"{directory}/events.sock").exists()


async def publisher_again(directory: Path) -> Any:
    """A subscriber connects again to a new publisher at the same address, under another id."""
    from dynamo.runtime.events import channels

    received: list[int] = []
    address = f"ipc://{directory}/events.sock"
    subscriber: Any = channels.ZmqSubscriber(  # type: ignore[attr-defined]
        "topic", lambda sender, sequence, payload: received.append(sender)
    )
    subscriber.connect(address)
    for sender in (1, 2):
        publisher: Any = channels.ZmqPublisher("topic", sender, address)  # type: ignore[attr-defined]

        def heard(publisher: Any = publisher, sender: int = sender) -> bool:
            publisher.publish(b"")
            return sender in received

        await until(heard)
        publisher.close()
    subscriber.close()
    return sorted(set(received))


async def events_on_threads(directory: Path) -> Any:
    """Event threads apply what their sockets receive, of several publishers, until each leaves."""
    from dynamo._fast.radix import RadixTree
    from dynamo.observability.metrics import Registry
    from dynamo.protocols import codec
    from dynamo.protocols.kv import BlocksStored, KvEvent, KvEventBatch
    from dynamo.router.caches.event_threads import EventThreads
    from dynamo.router.caches.indexer import EventMetrics, Indexer
    from dynamo.router.labels import RouterLabels
    from dynamo.runtime.events import channels

    tree = RadixTree()
    place = RouterLabels("box", "worker")
    counts = EventMetrics(Registry(), place, tree)
    threads = EventThreads(tree, 2, "topic", counts)
    indexer = Indexer(tree, lambda recovery: None, counts, threads.ingest)
    threads.start(indexer)
    found: list[Any] = []
    for worker in (1, 2, 3):
        address = f"ipc://{directory}/{worker}.sock"
        publisher: Any = channels.ZmqPublisher("topic", worker, address)  # type: ignore[attr-defined]
        indexer.add(worker, 0, tree.slot(worker, 0), answers=False)
        threads.subscriber.connect(publisher.address, worker)

        def publish(publisher: Any = publisher, worker: int = worker) -> bool:
            number = publisher.published + 1
            block = (number << 8 | worker).to_bytes(8, "little")
            stored = KvEvent(number, BlocksStored(block, block))
            publisher.publish(codec.encode(KvEventBatch(worker, [stored])))
            return threads.ingest.received_any(worker, 0)

        await until(publish)
        for _ in range(300):
            publish()
        slot = tree.slot(worker, 0)
        await until(lambda slot=slot: tree.held(slot) > 300)  # type: ignore[misc]
        threads.subscriber.disconnect(publisher.address)
        if worker == 2:  # another one takes its slot
            indexer.remove(worker)
            tree.remove_worker(worker)
            found.append(tree.held(slot))
        publisher.close()
    threads.close()
    tree._check()
    kinds = [kind for kind, count in threads.ingest.warnings().items() if count]
    return found, kinds, list(threads.ingest.applied())


async def ends_of_processes(directory: Path) -> Any:
    """A pidfd becomes readable when its process ends, also if it had ended before."""
    from dynamo.runtime.discovery.leases import ProcessEnd
    from dynamo.runtime.process import os_process

    pid = await spawn_sleeper()
    ticks = os_process.start_ticks(pid)
    ended = asyncio.Event()
    watch = ProcessEnd(pid, ticks or 0, ended.set)
    await asyncio.sleep(0.05)
    before = ended.is_set()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        await ended.wait()
    watch.close()
    try:
        ProcessEnd(pid, (ticks or 0) + 1, ended.set)
    except ProcessLookupError:
        return before, ended.is_set(), "no such process"
    return "another start time was accepted"


async def spawn_sleeper() -> int:
    """Start a process that does nothing."""
    import fake_os

    if fake_os._machine is None:
        started = await asyncio.create_subprocess_exec("sleep", "60")
        return started.pid

    async def sleep(process: Any) -> int:
        await asyncio.sleep(60)
        return 0

    child = fake_os.machine().spawn("sleeper", {}, sleep, fake_os.machine().current)
    await asyncio.sleep(0.1)
    return child.pid


CONTRACTS: dict[str, Contract] = {
    contract.__name__: contract
    for contract in (
        bytes_in_order,
        both_directions,
        back_pressure,
        no_listener,
        callbacks_in_order,
        timeouts,
        events_in_order,
        publisher_again,
        events_on_threads,
        ends_of_processes,
    )
}


def main() -> None:
    """Print the result of each contract as JSON."""
    kind, names = sys.argv[1], sys.argv[2:] or list(CONTRACTS)
    sys.path[:0] = [str(_TESTS / name) for name in ("simulation", "chaos", "")]
    import fake_os

    if kind == "simulated":
        fake_os.install()
        import event_threads
        import programs

        programs.connect()
        event_threads.LOSSES = (0.0,)
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            work = CONTRACTS[name](Path(directory))
            results[name] = _simulate(work) if kind == "simulated" else asyncio.run(_run(work))
            fake_os.use(None)
    sys.stdout.write(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


async def _run(work: Awaitable[Any]) -> Any:
    return await work


def _simulate(work: Awaitable[Any]) -> Any:
    import fake_os
    from machine import START_S, Machine

    machine = Machine(1)
    fake_os.use(machine)
    found: list[Any] = []

    async def process(process: Any) -> int:
        try:
            found.append(await work)
        except Exception as error:  # noqa: BLE001 - it is the result
            found.append(repr(error))
        return 0

    machine.spawn("contract", {}, process)
    machine.run(lambda: bool(found), START_S + 100)
    return [*found, *machine.failures][0] if found else "never ended"


if __name__ == "__main__":
    main()
