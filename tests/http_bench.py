"""A connection of the HTTP server without a socket: bytes in, bytes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.http import Exchange, HttpLimits, HttpServer
from dynamo.http.connection import HttpConnection, WriteBatch


class MockTransport(asyncio.Transport):
    """Records what was written and called."""

    def __init__(self, peer: str = "127.0.0.1") -> None:
        super().__init__({"peername": (peer, 1)})
        self.out = b""
        self.writes = 0
        self.unsent_bytes = 0
        self.closed = self.eof = self.aborted = self.paused = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.out += bytes(data)
        self.writes += 1

    def write_eof(self) -> None:
        self.eof = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False


class AtOnce(WriteBatch):
    """Flushes at once: these tests are not about the turns of the loop."""

    def flush_later(self, flush: Callable[[], None]) -> None:
        flush()


class Bench:
    """A server without a socket, one connection to it, and every exchange that it dispatched."""

    def __init__(self, handler: Callable[[Exchange], None] | None = None, **limits: Any) -> None:
        self.seen: list[Exchange] = []
        self.refused: list[int] = []
        self.answer = True
        self.server = HttpServer(
            handler or self.handle,
            HttpLimits(**limits),
            self.refused.append,
            AtOnce(),
            is_reserved="/live".__eq__,
        )
        self.transport, self.connection = self.connect()

    def connect(self, peer: str = "127.0.0.1") -> tuple[MockTransport, HttpConnection]:
        transport, connection = MockTransport(peer), HttpConnection(self.server)
        connection.connection_made(transport)
        return transport, connection

    def handle(self, exchange: Exchange) -> None:
        self.seen.append(exchange)
        if self.answer:
            exchange.respond(200, b"<%s>" % exchange.body, "text/plain")

    def feed(self, *pieces: bytes) -> bytes:
        for piece in pieces:
            self.connection.data_received(piece)
        return self.transport.out

    def later(self, seconds: float) -> None:
        """Sweep as if ``seconds`` had passed."""
        self.server.clock += seconds
        if self.connection.deadline <= self.server.clock:
            self.connection.sweep()


def error_json(
    message: str, kind: str, status: int, openai: tuple[str, str | None, str | None], **members: Any
) -> dict[str, Any]:
    """The body of an error; ``openai`` are type, param and code of the object of its clients."""
    error = dict(zip(("type", "param", "code"), openai, strict=True))
    body = {"message": message, "type": kind, "code": status, **members}
    return {**body, "error": {"message": message, **error}}
