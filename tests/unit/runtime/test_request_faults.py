"""What the network and the peers can do to the request plane, and what must not follow from it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from request_kit import ENDPOINT, TIMEOUT_S, Recorder, pair, until

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import (
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    InvalidArgument,
    Overloaded,
    WorkerSilent,
)
from dynamo.protocols.engine import TOKEN_PREFIX
from dynamo.runtime.requests import RequestClient, RequestServer, ServerStream
from dynamo.runtime.requests.client_connection import StreamOwner
from dynamo.runtime.requests.frames import (
    DATA,
    END,
    ERROR,
    HEADER_SIZE_BYTES,
    KILL,
    LAST_KIND,
    OPEN,
    PREAMBLE,
    Splitter,
    encode_headers,
    pack,
    pack_open,
)

ITEMS = [b"one", b"", b"three" * 10]
RESPONSE = PREAMBLE + b"".join(pack(DATA, 1, item) for item in ITEMS) + pack(END, 1, b"")


@asynccontextmanager
async def fake_worker(path: Path, response: bytes, *, hang: bool = False) -> AsyncIterator[str]:
    """A worker that answers the first bytes it gets with ``response``, then closes or hangs."""
    held = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(response)
        if hang:
            await held.wait()
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield f"uds:{path}"
    finally:
        held.set()
        server.close()
        await asyncio.sleep(0)


def call(client: RequestClient, address: str) -> Recorder:
    sink = Recorder()
    client.open(address, ENDPOINT, {}, b"request", sink)
    return sink


async def test_a_response_cut_at_any_byte_is_disconnected_never_finished(tmp_path: Path) -> None:
    client = RequestClient()
    for cut in range(len(RESPONSE) + 1):
        async with fake_worker(tmp_path / f"{cut}", RESPONSE[:cut]) as address:
            sink = await call(client, address).finish()
        expected = [f[2] for f in Splitter(999, PREAMBLE, LAST_KIND).feed(RESPONSE[:cut])]
        if cut == len(RESPONSE):
            assert sink.items == ITEMS and sink.ends == 1
        else:
            assert sink.items == expected and isinstance(sink.errors[0], Disconnected)
    assert len(client) == 0
    await client.close()


async def test_a_request_cut_at_any_byte_starts_nothing_or_is_killed(tmp_path: Path) -> None:
    request = PREAMBLE + pack_open(1, ENDPOINT, encode_headers({"a": "b"}), b"request")
    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, plane.hold)
        for cut in range(len(request) + 1):
            _, writer = await asyncio.open_unix_connection(tmp_path / "plane.sock")
            writer.write(request[:cut])
            await writer.drain()
            if cut == len(request):
                await plane.held()
            writer.close()
            await writer.wait_closed()
        last = await plane.held()
        await last.context.async_killed_or_stopped()
        await plane.quiet()
        assert len(plane.streams) == 1 and last.context.is_killed()
        assert stats.cancellations.value == 1 and plane.tables()[1:] == (0, 0, 0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"DYNR\x02" + bytes(20),
        PREAMBLE + b"\xff" * 64,
        PREAMBLE + bytes(9),
        PREAMBLE + pack(DATA, 1, b"clients send no data"),
        PREAMBLE + pack(OPEN, 1, b"\xff\xff\xff"),
        PREAMBLE + pack_open(1, ENDPOINT, b"", b"") * 2,
    ],
)
async def test_garbage_closes_that_connection_with_a_logged_reason(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, healthy = plane.open()
        await plane.held()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "plane.sock")
        writer.write(garbage)
        async with asyncio.timeout(TIMEOUT_S):
            while await _read(reader):
                pass
        writer.close()
        assert "closing the connection" in caplog.text
        plane.streams[0].end()
        assert (await healthy.finish()).ends == 1
        await plane.quiet()
        assert plane.tables() == (0, 0, 0, 0)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1000)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        PREAMBLE + pack(DATA, 1, b"good") + b"\xff" * 20,
        PREAMBLE + pack(DATA, 1, b"good") + pack(KILL, 1, b""),
    ],
)
async def test_garbage_from_a_worker_disconnects(tmp_path: Path, garbage: bytes) -> None:
    client = RequestClient()
    async with fake_worker(tmp_path / "s", garbage, hang=True) as address:
        sink = await call(client, address).finish()
        assert isinstance(sink.errors[0], Disconnected)
        assert sink.items in ([], [b"good"])
    await client.close()


async def test_frames_of_unknown_streams_are_ignored(tmp_path: Path) -> None:
    strays = b"".join(pack(kind, 99, b"\x00") for kind in (DATA, END, ERROR))
    client = RequestClient()
    response = PREAMBLE + strays + RESPONSE[len(PREAMBLE) :] + strays
    async with fake_worker(tmp_path / "s", response) as address:
        sink = await call(client, address).finish()
        assert sink.items == ITEMS and sink.ends == 1
    await client.close()


async def test_a_huge_item_fails_its_stream_and_no_other(tmp_path: Path) -> None:
    settings = RequestPlaneSettings(max_message_size_bytes=1024)
    client = RequestClient(settings)
    response = PREAMBLE + pack(DATA, 1, bytes(5000)) + pack(DATA, 2, b"fine") + pack(END, 2, b"")
    async with fake_worker(tmp_path / "s", response, hang=True) as address:
        sinks = [call(client, address) for _ in range(2)]
        await sinks[0].finish()
        await sinks[1].finish()
    assert "5000 bytes exceeds DYN_TCP_MAX_MESSAGE_SIZE=1024" in sinks[0].errors[0].message
    assert sinks[1].items == [b"fine"] and sinks[1].ends == 1
    await client.close()


async def test_a_worker_that_never_answers_times_out(tmp_path: Path) -> None:
    client = RequestClient(RequestPlaneSettings(request_timeout_s=0.1))
    async with fake_worker(tmp_path / "s", b"", hang=True) as address:
        sink = await call(client, address).finish()
        assert isinstance(sink.errors[0], ConnectionTimeout) and sink.errors[0].retryable
    async with fake_worker(tmp_path / "t", PREAMBLE + pack(DATA, 1, b"x"), hang=True) as address:
        sink = await call(client, address).finish()
        assert isinstance(sink.errors[0], WorkerSilent) and sink.items == [b"x"]
    await client.close()


@pytest.mark.parametrize(("other", "released"), [(True, False), (False, False), (False, True)])
async def test_only_the_streams_of_a_silent_worker_that_may_move_end_before_its_connection(
    tmp_path: Path, other: bool, released: bool
) -> None:
    settings = RequestPlaneSettings(silence_timeout_s=1000, request_timeout_s=2000)
    client = RequestClient(settings)
    response = PREAMBLE + pack(DATA, 1, b"x")
    async with fake_worker(tmp_path / "s", response, hang=True) as address:
        sink = Recorder()
        stream = client.open(address, ENDPOINT, {}, b"request", sink)
        owner = Owner(other)
        stream.owner = owner
        await sink.have(1)
        connection = client.connection(address)
        if released:
            client.release(address)
        connection._tick()  # something was received since the last one
        for _ in range(3):
            connection._tick()
        assert not connection.silent and not sink.over
        connection._tick()
        assert connection.silent and sink.over is (other or released)
        assert len(owner.errors) == len(sink.errors)
        for _ in range(3):
            connection._tick()
        assert connection.closed is released  # it had no stream left
        connection._tick()
        assert isinstance(sink.errors[0], WorkerSilent) and connection.closed
    await client.close()


class Owner(StreamOwner):
    """An instance beside another one, or not."""

    def __init__(self, other: bool) -> None:
        self.other = other
        self.errors: list[DynamoError] = []

    def failed(self, error: DynamoError) -> None:
        self.errors.append(error)

    def may_move(self) -> bool:
        return self.other


async def test_a_stream_on_a_released_connection_keeps_it_open(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        plane.open()
        await plane.held()
        connection = plane.client.connection(plane.address)
        plane.client.release(plane.address)
        plane.open()
        await plane.held(2)
        for stream in plane.streams:
            stream.end()
        await plane.quiet()
        assert not connection.closed and plane.client.connection(plane.address) is connection


async def test_a_silent_worker_that_answers_pings_keeps_its_connection(tmp_path: Path) -> None:
    settings = RequestPlaneSettings(request_timeout_s=0.05)
    async with pair(tmp_path, settings=settings) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, sink = plane.open()
        stream = await plane.held()
        await asyncio.sleep(0.3)
        stream.send(b"slow but here")
        stream.end()
        assert (await sink.finish()).items == [b"slow but here"]


async def test_a_connection_that_is_never_accepted_times_out() -> None:
    with FullListener() as address:
        client = RequestClient(RequestPlaneSettings(connect_timeout_s=0.2, request_timeout_s=0.2))
        sink = await call(client, address).finish()
        assert isinstance(sink.errors[0], ConnectionTimeout)
        await client.close()


class FullListener:
    """A TCP socket whose backlog is full, so that a further connection hangs."""

    def __enter__(self) -> str:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self._fill = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self._listener.getsockname())
            self._fill.append(filler)
        return f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *args: object) -> None:
        for sock in (*self._fill, self._listener):
            sock.close()


WORKER = f"""
import asyncio, sys
from dynamo.runtime.requests import RequestServer

def handle(stream, payload):
    stream.send(b"first")

async def main():
    server = RequestServer()
    server.register({ENDPOINT!r}, handle)
    print(await server.start(sys.argv[1]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["uds", "tcp"])
async def test_kill_9_of_the_worker_disconnects_every_stream_at_once(
    tmp_path: Path, kind: str
) -> None:
    wanted = f"uds:{tmp_path / 's'}" if kind == "uds" else "tcp:127.0.0.1:0"
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, wanted, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    client = RequestClient()
    try:
        address = (await worker.stdout.readline()).decode().strip()
        sinks = [call(client, address) for _ in range(50)]
        for sink in sinks:
            await sink.have(1)
        loop = asyncio.get_running_loop()
        os.kill(worker.pid, signal.SIGKILL)
        killed_at = loop.time()
        for sink in sinks:
            await sink.finish()
            assert sink.items == [b"first"] and type(sink.errors[0]) is Disconnected
        assert loop.time() - killed_at < 5
        assert len(client) == 0
    finally:
        await client.close()
        if worker.returncode is None and worker.pid:
            await worker.wait()


async def test_a_client_that_stops_reading_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RequestPlaneSettings(hard_cap_bytes=1_000_000, high_water_bytes=64_000)
    async with pair(tmp_path, settings=settings) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, writer = await asyncio.open_unix_connection(tmp_path / "plane.sock", limit=2**16)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(PREAMBLE + pack_open(1, ENDPOINT, b"", b""))
        stream = await plane.held()
        async with asyncio.timeout(TIMEOUT_S):
            while not stream.closed:
                stream.send(bytes(10_000))
                await asyncio.sleep(0)
        assert "does not read" in caplog.text
        writer.transport.abort()


async def test_drained_waits_for_a_reader_and_for_its_death(tmp_path: Path) -> None:
    settings = RequestPlaneSettings(high_water_bytes=64_000)
    async with pair(tmp_path, settings=settings) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "plane.sock", limit=2**16)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(PREAMBLE + pack_open(1, ENDPOINT, b"", b"") + pack_open(2, ENDPOINT, b"", b""))
        stream, other = await plane.held(1), await plane.held(2)
        await _fill(stream)
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(each.drained()) for each in (stream, other)]
            await asyncio.sleep(0.01)
            assert not any(wait.done() for wait in waits)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            while not all(wait.done() for wait in waits):
                await reader.read(100_000)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await _fill(stream)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            group.create_task(stream.drained())
            await asyncio.sleep(0)
            writer.transport.abort()
        assert stream.closed and plane.tables()[1:] == (0, 0, 0)


async def _fill(stream: ServerStream) -> None:
    while not stream.above_high_water:
        stream.send(bytes(10_000))
        await asyncio.sleep(0)


async def test_a_client_whose_worker_stops_reading_refuses_new_requests(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    server = await asyncio.start_unix_server(deaf, tmp_path / "s", limit=1024)
    client = RequestClient(RequestPlaneSettings(hard_cap_bytes=1_000_000, high_water_bytes=64_000))
    refused = None
    for _ in range(100):
        sink = Recorder()
        client.open(f"uds:{tmp_path / 's'}", ENDPOINT, {}, bytes(50_000), sink)
        await asyncio.sleep(0.001)
        if sink.over:
            refused = sink.errors[0]
            break
    assert isinstance(refused, Overloaded) and "unsent bytes" in refused.message
    held.set()
    await client.close()
    server.close()


async def test_a_burst_before_the_connection_is_bounded(tmp_path: Path) -> None:
    settings = RequestPlaneSettings(hard_cap_bytes=1_000_000)
    async with pair(tmp_path, settings=settings) as plane:
        plane.server.register(ENDPOINT, lambda stream, payload: stream.end())
        sinks = [plane.open(bytes(100_000))[1] for _ in range(20)]
        for sink in sinks:
            await sink.finish()
        assert [sink.ends for sink in sinks] == [1] * 9 + [0] * 11
        assert all(isinstance(sink.errors[0], Overloaded) for sink in sinks[9:])
        assert (await plane.open(bytes(100_000))[1].finish()).ends == 1


class CuttingProxy(asyncio.Protocol):
    """Sits between client and worker and cuts both ends after ``budget`` bytes from the worker."""

    def __init__(self, target: Path, budget: int) -> None:
        self.target, self.budget = target, budget
        self.client: asyncio.Transport | None = None
        self.early: list[bytes] = []
        self.worker: asyncio.Transport | None = None
        self.cut = asyncio.Event()
        self.connected = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client = transport  # type: ignore[assignment]
        self.connected.set()

    def data_received(self, data: bytes) -> None:
        if self.worker is None:
            self.early.append(data)
        elif not self.worker.is_closing():
            self.worker.write(data)

    async def dial(self) -> None:
        proxy = self

        class Upstream(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                worker = cast(asyncio.Transport, transport)
                proxy.worker = worker
                for data in proxy.early:
                    worker.write(data)

            def data_received(self, data: bytes) -> None:
                proxy.forward(data)

        await asyncio.get_running_loop().create_unix_connection(Upstream, str(self.target))

    def forward(self, data: bytes) -> None:
        assert self.client is not None and self.worker is not None
        part = data[: self.budget]
        self.budget -= len(part)
        if not self.client.is_closing():
            self.client.write(part)
        if self.budget <= 0:
            self.client.close()
            self.worker.abort()
            self.cut.set()


@pytest.mark.parametrize("budget", [6, 7, 100, 1000, 4321, 9999])
async def test_a_connection_cut_under_many_streams(tmp_path: Path, budget: int) -> None:
    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, plane.hold)
        proxy = CuttingProxy(tmp_path / "plane.sock", budget)
        loop = asyncio.get_running_loop()
        front = await loop.create_unix_server(lambda: proxy, str(tmp_path / "proxy.sock"))
        plane.closers.append(front.close)
        sinks = [call(plane.client, f"uds:{tmp_path / 'proxy.sock'}") for _ in range(20)]
        await until(proxy.connected)
        await proxy.dial()
        await plane.held(20)
        async with asyncio.timeout(TIMEOUT_S):
            step = 0
            while not proxy.cut.is_set():
                for stream in plane.streams:
                    stream.send(b"%06d" % step)
                step += 1
                await asyncio.sleep(0)
        for sink in sinks:
            await sink.finish()
            assert type(sink.errors[0]) is Disconnected
            assert sink.items == [b"%06d" % i for i in range(len(sink.items))]
        for stream in plane.streams:
            await stream.context.async_killed_or_stopped()
        assert stats.cancellations.value == 20 and stats.inflight.value == 0
        assert plane.tables()[1:] == (0, 0, 0)


async def test_the_limit_counts_endpoint_and_headers_too(tmp_path: Path) -> None:
    settings = RequestPlaneSettings(max_message_size_bytes=1024)
    frame = pack_open(1, ENDPOINT, b"", b"")
    room = 1024 - (len(frame) - HEADER_SIZE_BYTES)
    async with pair(tmp_path, settings=settings) as plane:
        plane.server.register(ENDPOINT, lambda stream, payload: stream.end())
        assert (await plane.open(bytes(room))[1].finish()).ends == 1
        [error] = (await plane.open(bytes(room + 1))[1].finish()).errors
        assert isinstance(error, InvalidArgument)


async def test_close_does_not_wait_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    server = RequestServer(RequestPlaneSettings(high_water_bytes=64_000))
    arrived = asyncio.Event()
    streams: list[ServerStream] = []

    def hold(stream: ServerStream, payload: bytes) -> None:
        streams.append(stream)
        arrived.set()

    server.register(ENDPOINT, hold)
    await server.start(f"uds:{tmp_path / 's'}")
    _, writer = await asyncio.open_unix_connection(tmp_path / "s", limit=2**16)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(PREAMBLE + pack_open(1, ENDPOINT, b"", b""))
    await until(arrived)
    await _fill(streams[0])
    async with asyncio.timeout(TIMEOUT_S):
        await server.close()
    assert streams[0].closed
    writer.transport.abort()


async def test_a_lost_worker_and_its_requests_are_freed_without_a_collection(
    tmp_path: Path,
) -> None:
    """The tokens of the last read name their streams, and these their connection."""
    client = RequestClient()
    texts: list[str] = []
    tokens: list[int] = []
    response = PREAMBLE + b"".join(pack(DATA, 1, TOKEN_PREFIX + bytes((one,))) for one in (1, 2))
    gc.disable()
    try:
        async with fake_worker(tmp_path / "worker", response) as address:
            sink = Recorder()
            stream = client.open(address, ENDPOINT, {}, b"request", sink)
            stream.pass_tokens(
                [None, "a", "b"], frozenset(), texts, lambda ids, *_: tokens.extend(ids)
            )
            await sink.finish()
        assert (tokens, texts) == ([1, 2], ["a", "b"])
        assert isinstance(sink.errors[0], Disconnected)
        gone = weakref.ref(sink)
        del stream, sink
        async with asyncio.timeout(30):
            while gone() is not None:  # noqa: ASYNC110 - the loop closes the connection
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        await client.close()
