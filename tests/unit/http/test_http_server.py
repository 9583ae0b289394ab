"""The HTTP server on real sockets, asyncio's loop and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from until import until

from dynamo.http import Exchange, HttpLimits, HttpServer

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


class Site:
    """A server with an echo route, a streaming route and a route that never answers."""

    def __init__(self, **limits: Any) -> None:
        self.server = HttpServer(self.handle, HttpLimits(**limits))
        self.port = 0
        self.waiting: asyncio.Queue[Exchange] = asyncio.Queue()
        self.gone = asyncio.Event()

    def handle(self, exchange: Exchange) -> None:
        if exchange.path == "/hold":
            exchange.on_disconnect = self.gone.set
            self.waiting.put_nowait(exchange)
        else:
            exchange.respond(200, exchange.body or b"empty", "text/plain")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(sweep_s=0.02, header_timeout_s=1.0, linger_s=0.1)
    _, site.port = await site.server.start("127.0.0.1", 0)
    yield site
    await site.server.close(0.2)


async def read_response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_keep_alive_and_a_large_body(site: Site) -> None:
    reader, writer = await site.connect()
    body = bytes(range(256)) * 16384
    for _ in range(3):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        head, answer = await read_response(reader)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and answer == body
    await shut(writer)


async def test_half_a_request_meets_its_deadline_and_others_do_not_notice(site: Site) -> None:
    slow = [await site.connect() for _ in range(20)]
    for _, writer in slow:
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
    reader, writer = await site.connect()
    writer.write(GET)
    assert (await read_response(reader))[1] == b"empty"
    for reader, slow_writer in slow:
        slow_writer.write(b"y")
        head, _ = await read_response(reader)
        assert head.startswith(b"HTTP/1.1 408 ")
        assert await reader.read() == b""
        await shut(slow_writer)
    await shut(writer)


async def test_a_refused_upload_still_gets_its_answer(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\n")
    head, _ = await read_response(reader)
    assert head.startswith(b"HTTP/1.1 413 ")
    writer.write(b"x" * 100_000)  # discarded, not answered with a reset
    assert await reader.read() == b""
    await shut(writer)


async def test_a_client_that_leaves_is_noticed(site: Site) -> None:
    for streaming in (False, True):
        site.gone.clear()
        _, writer = await site.connect()
        writer.write(GET.replace(b"/x", b"/hold"))
        exchange = await site.waiting.get()
        if streaming:
            exchange.start(200, "text/event-stream")
            exchange.write(b"data: 1\n\n")
        await shut(writer)
        await asyncio.wait_for(site.gone.wait(), 20)
        assert exchange.gone
        exchange.end()


async def test_a_slow_reader_stops_the_writer_and_starts_it_again(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(GET.replace(b"/x", b"/hold"))
    exchange = await site.waiting.get()
    drained = asyncio.Event()
    exchange.on_drain = drained.set
    exchange.start(200, "text/plain")
    sent = 0
    while not exchange.above_high_water:
        exchange.write(b"#" * 65536)
        sent += 1
        await asyncio.sleep(0)
    received = asyncio.create_task(reader.readuntil(b"0\r\n\r\n"))
    reader._limit = 1 << 30  # type: ignore[attr-defined]
    await asyncio.wait_for(drained.wait(), 20)
    exchange.end()
    assert (await received).count(b"#") == sent * 65536
    await shut(writer)


async def test_over_the_cap_is_503(site: Site) -> None:
    crowded = Site(connections=1)
    _, crowded.port = await crowded.server.start("127.0.0.1", 0)
    _, writer = await crowded.connect()
    writer.write(GET.replace(b"/x", b"/hold"))
    await crowded.waiting.get()
    refused, other = await crowded.connect()
    other.write(GET)
    assert (await read_response(refused))[0].startswith(b"HTTP/1.1 503 ")
    assert await refused.read() == b""
    await shut(other)
    await shut(writer)
    await crowded.server.close()


async def test_closing_lets_written_bytes_leave_and_cuts_the_rest(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(GET.replace(b"/x", b"/hold"))
    exchange = await site.waiting.get()
    exchange.start(200, "text/plain")
    exchange.write(b"partial")
    await site.server.close(0.05)
    assert (await reader.read()).endswith(b"7\r\npartial\r\n")
    assert exchange.gone and site.server.connections == 0
    await shut(writer)
    with pytest.raises(OSError):
        await site.connect()


async def test_all_are_gone_when_the_last_one_is(site: Site) -> None:
    clients = [await site.connect() for _ in range(2)]
    for reader, writer in clients:
        writer.write(GET)
        await read_response(reader)
    gone = asyncio.ensure_future(site.server.gone(60))
    await shut(clients[0][1])
    await until(lambda: site.server.connections < 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert site.server.connections == 1 and not gone.done()
    await shut(clients[1][1])
    assert await gone and site.server.connections == 0


async def test_a_burst_over_the_limit_is_refused_and_not_reset() -> None:
    """Their requests are on their way: none may take the place of one just connected."""
    crowded = Site(connections=8)
    _, crowded.port = await crowded.server.start("127.0.0.1", 0)
    clients = [socket.create_connection(("127.0.0.1", crowded.port)) for _ in range(30)]
    for client in clients:
        client.sendall(GET.replace(b"/x", b"/hold"))
        client.setblocking(False)
    loop, statuses = asyncio.get_running_loop(), []
    async with asyncio.timeout(20):
        for _ in range(7):
            await crowded.waiting.get()
        for client in clients[7:]:
            statuses.append((await loop.sock_recv(client, 12))[9:])
    assert statuses == [b"503"] * 23
    for client in clients:
        client.close()
    await crowded.server.close(0.2)


async def test_a_port_in_use_is_an_error(site: Site) -> None:
    with pytest.raises(OSError):
        await Site().server.start("127.0.0.1", site.port)


async def test_a_client_that_vanishes_is_noticed_by_tcp(site: Site) -> None:
    """The kernel probes accepted connections; a cut cable itself is beyond a unit test."""
    _, writer = await site.connect()
    writer.write(GET.replace(b"/x", b"/hold"))
    async with asyncio.timeout(20):
        await site.waiting.get()
    (connection,) = site.server._connections
    assert connection._transport is not None
    accepted = connection._transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
    await shut(writer)
    async with asyncio.timeout(20):
        await site.gone.wait()
