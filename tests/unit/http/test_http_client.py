"""The HTTP client against a socket that answers known bytes."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo.http.client import HttpClient, ResponseError, Target, call, cause, request_head


@asynccontextmanager
async def serving(*answers: bytes, close: bool = True) -> AsyncIterator[int]:
    """Answer the requests of each connection with ``answers`` in turn; yield the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for one in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(one)
            if not close:
                await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        plain(b"hello"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + plain(b"hello"),
    ],
)
async def test_get(answer: bytes) -> None:
    async with asyncio.timeout(10), serving(answer) as port:
        found = await call(Target("127.0.0.1", port, False), "GET", "/x", 5, 10)
    assert (found.status, bytes(found.body), found.usable) == (200, b"hello", False)


async def test_the_cause_of_a_failed_connection_is_that_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(OSError) as refused:
            await HttpClient(1).connect(host, port)
        assert cause(refused.value) == "Connection refused"
    with pytest.raises(OSError) as unknown:
        await HttpClient(1).connect("host.invalid", port)
    assert "Errno" not in cause(unknown.value)
    each = "[Errno 111] Connect call failed ('{}', 1, 0, 0)"
    several = f"Multiple exceptions: {each.format('::1')}, {each.format('127.0.0.1')}"
    assert cause(OSError(several)) == "Connection refused"
    assert cause(TimeoutError()) == "timeout"
    assert cause(ResponseError("disconnected")) == "disconnected"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (plain(b"x" * 6), "the answer is too large"),
        (b"SSH-2.0-x\r\n", "not HTTP"),
        (b"", "disconnected"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "disconnected"),
    ],
)
async def test_failures(answer: bytes, reason: str) -> None:
    async with asyncio.timeout(10), serving(answer) as port:
        with pytest.raises(ResponseError, match=reason):
            await call(Target("127.0.0.1", port, False), "GET", "/x", 5, 10)


async def test_a_connection_is_closed_when_its_answer_is_too_large() -> None:
    """The rest of it would be read as the answer to the next request."""
    async with asyncio.timeout(10), serving(plain(b"x" * 6), plain(b"y"), close=False) as port:
        client = HttpClient(5)
        await client.connect("127.0.0.1", port)
        with pytest.raises(ResponseError, match="too large"):
            await client.request(request_head("GET", "/", "box"))
        assert not client.usable


async def test_a_connection_is_kept_until_bytes_arrive_that_were_not_requested() -> None:
    unrequested = plain(b"two") + plain(b"three")
    async with asyncio.timeout(10), serving(plain(b"one"), unrequested, close=False) as port:
        client = HttpClient(100)
        await client.connect("127.0.0.1", port)
        head = request_head("GET", "/", "box")
        for body in (b"one", b"two"):
            assert client.usable
            await client.request(head)
            assert bytes(client.body) == body
        assert not client.usable
        client.close()


async def test_a_closed_connection_keeps_nothing_of_the_last_response() -> None:
    async with asyncio.timeout(10), serving(plain(b"one")) as port:
        client = await call(Target("127.0.0.1", port, False), "GET", "/", 100, 10)
        with pytest.raises(ResponseError, match="disconnected"):
            await client.request(request_head("GET", "/", "box"))
        assert (client.status, bytes(client.body)) == (0, b"")
        with pytest.raises(ResponseError, match="disconnected"):  # also once the loop knows it
            await client.request(request_head("GET", "/", "box"))


async def test_a_closed_connection_is_freed_without_a_collection() -> None:
    """A page of metrics is large, and read often."""
    gc.disable()
    try:
        async with asyncio.timeout(60), serving(plain(b"hello")) as port:
            found = await call(Target("127.0.0.1", port, False), "GET", "/x", 5, 10)
            gone = weakref.ref(found)
            del found
            while gone() is not None:  # noqa: ASYNC110 - the loop closes the socket
                await asyncio.sleep(0)
    finally:
        gc.enable()
