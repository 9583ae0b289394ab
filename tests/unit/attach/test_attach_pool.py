"""The pool of connections to an attached server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from dynamo.attach.pool import ClientRequest, ConnectionPool, Headers
from dynamo.errors import DynamoError
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
