"""The request plane for tests: a recording sink, a pair of server and client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import DynamoError
from dynamo.protocols import codec
from dynamo.runtime.requests import (
    ClientStream,
    RequestClient,
    RequestServer,
    ResponseStream,
    ServerStream,
)
from dynamo.runtime.requests.context import Context

TIMEOUT_S = 60.0
ENDPOINT = "ns/worker/generate"


class Recorder:
    """A sink that records everything and lets a test wait for it."""

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.ends = 0
        self.errors: list[DynamoError] = []
        self.changed = asyncio.Event()

    def on_data(self, payload: bytes) -> None:
        self.items.append(payload)
        self.changed.set()

    def on_end(self) -> None:
        self.ends += 1
        self.changed.set()

    def on_error(self, error: DynamoError) -> None:
        self.errors.append(error)
        self.changed.set()

    @property
    def over(self) -> bool:
        assert self.ends + len(self.errors) <= 1
        return self.ends + len(self.errors) == 1

    async def finish(self) -> Recorder:
        """Wait for the end or error."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.over:
                self.changed.clear()
                await self.changed.wait()
        return self

    async def have(self, count: int) -> None:
        """Wait for ``count`` items."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.items) < count:
                self.changed.clear()
                await self.changed.wait()


class Pair:
    """A server and a client in one process."""

    def __init__(self, server: RequestServer, client: RequestClient, address: str) -> None:
        self.server = server
        self.client = client
        self.address = address
        self.streams: list[ServerStream] = []
        self.arrived = asyncio.Event()
        self.closers: list[Callable[[], object]] = []

    def hold(self, stream: ServerStream, payload: bytes) -> None:
        """A handler that keeps the stream for the test to drive."""
        self.streams.append(stream)
        self.arrived.set()

    async def held(self, count: int = 1) -> ServerStream:
        """Wait for ``count`` streams; return the last one."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.streams) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return self.streams[count - 1]

    def open(
        self,
        payload: bytes = b"",
        *,
        endpoint: str = ENDPOINT,
        headers: dict[str, str] | None = None,
        context: Context | None = None,
        sink: Recorder | None = None,
    ) -> tuple[ClientStream, Recorder]:
        """Open one request."""
        sink = sink or Recorder()
        return self.client.open(self.address, endpoint, headers or {}, payload, sink, context), sink

    async def quiet(self) -> None:
        """Wait until both ends have handled everything written before."""
        _, sink = self.open(endpoint="not/served/here")
        await sink.finish()

    def tables(self) -> tuple[int, int, int, int]:
        """Count streams: client, server, tables of the server's connections, waiting handlers."""
        connections = self.server._connections
        return (
            len(self.client),
            self.server.inflight,
            sum(len(connection.streams) for connection in connections),
            sum(len(connection.waiting) for connection in connections),
        )


def open_stream(client: RequestClient, address: str, request: Any) -> ResponseStream:
    """Send ``request`` (plain values) to ``ENDPOINT`` and iterate over the response."""
    response = ResponseStream()
    payload = codec.encode(request)
    return response.attach(client.open(address, ENDPOINT, {}, payload, response.sink))


@asynccontextmanager
async def pair(
    directory: Path, kind: str = "uds", settings: RequestPlaneSettings | None = None
) -> AsyncIterator[Pair]:
    """A started pair over a UNIX socket or TCP, closed at the end."""
    server, client = RequestServer(settings), RequestClient(settings)
    wanted = f"uds:{directory / 'plane.sock'}" if kind == "uds" else "tcp:127.0.0.1:0"
    address = await server.start(wanted)
    made = Pair(server, client, address)
    try:
        yield made
    finally:
        for close in made.closers:
            close()
        await client.close()
        await server.close()


async def until(condition: asyncio.Event) -> None:
    """Wait with the tests' deadline."""
    async with asyncio.timeout(TIMEOUT_S):
        await condition.wait()
