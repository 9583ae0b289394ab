"""The pool of connections to an attached server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from dynamo.attach import pool as pool_module
from dynamo.attach.pool import ClientRequest, ConnectionPool, Headers
from dynamo.errors import Disconnected, DynamoError
from dynamo.http.client import Target

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Sink:
    """Collects a response; with ``pauses`` each part of the body pauses reading."""

    def __init__(self, pauses: bool = False) -> None:
        self.request: ClientRequest | None = None
        self.pauses = pauses
        self.data = b""
        self.done = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200

    def on_body(self, data: bytes) -> None:
        self.data += data
        if self.pauses and self.request is not None:
            self.request.pause()

    def on_end(self) -> None:
        self.done.set()

    def on_failure(self, error: DynamoError) -> None:
        raise AssertionError(error)


@asynccontextmanager
async def pool_of_server() -> AsyncIterator[tuple[ConnectionPool, list[int]]]:
    """A pool before a server that answers every request in one write; its connections."""
    connections: list[int] = []
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(RESPONSE)
        except asyncio.IncompleteReadError:
            writer.close()
            closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Target("127.0.0.1", port, False), 10.0)
        try:
            yield pool, connections
        finally:
            await pool.close()
            await closed.wait()


async def test_a_connection_paused_by_its_last_part_reads_the_next_response() -> None:
    async with asyncio.timeout(20), pool_of_server() as (pool, connections):
        slow = Sink(pauses=True)
        slow.request = pool.send(REQUEST, cast(Any, slow))
        await slow.done.wait()
        for _ in range(2):
            sink = Sink()
            pool.send(REQUEST, cast(Any, sink))
            await sink.done.wait()
            assert sink.data == b"ok"
        assert len(connections) == 1


async def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MAX_IDLE", 1)
    async with asyncio.timeout(20), pool_of_server() as (pool, connections):
        sinks = [Sink() for _ in range(3)]
        for sink in sinks:
            pool.send(REQUEST, cast(Any, sink))
        for sink in sinks:
            await sink.done.wait()
        assert len(connections) == 3 and len(pool.idle) == 1


class Outcome:
    """How a response began and ended."""

    def __init__(self) -> None:
        self.heads = 0
        self.data = b""
        self.failure: DynamoError | None = None
        self.body = asyncio.Event()
        self.ended = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.heads += 1

    def on_body(self, data: bytes) -> None:
        self.data += data
        self.body.set()

    def on_end(self) -> None:
        self.ended.set()

    def on_failure(self, error: DynamoError) -> None:
        self.failure = error
        self.ended.set()


async def test_a_request_whose_answer_began_is_not_sent_again() -> None:
    """On a kept connection, too: the client has a part of the first answer."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(RESPONSE if len(requests) != 2 else RESPONSE[:-1])
                if len(requests) == 2:
                    break
        writer.close()

    async with asyncio.timeout(20), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Target("127.0.0.1", port, False), 10.0)
        outcomes = [Outcome(), Outcome()]
        for outcome in outcomes:
            pool.send(REQUEST, cast(Any, outcome))
            await outcome.ended.wait()
        assert outcomes[0].data == b"ok" and outcomes[0].failure is None
        assert isinstance(outcomes[1].failure, Disconnected)
        assert (outcomes[1].heads, outcomes[1].data, len(requests)) == (1, b"o", 2)
        await pool.close()


async def test_a_paused_answer_is_not_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SWEEP_S", 0.01)
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(RESPONSE[:-1])
        await go_on.wait()
        writer.write(RESPONSE[-1:])
        writer.close()

    async with asyncio.timeout(20), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Target("127.0.0.1", port, False), 10.0, response_timeout_s=0.1)
        outcome = Outcome()
        request = pool.send(REQUEST, cast(Any, outcome))
        await outcome.body.wait()
        request.pause()
        await asyncio.sleep(0.4)  # longer than a server may be silent
        assert outcome.failure is None
        request.resume()
        go_on.set()
        await outcome.ended.wait()
        assert (outcome.data, outcome.failure) == (b"ok", None)
        await pool.close()
