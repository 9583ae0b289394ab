"""A pool of keep-alive connections to one server: responses are pushed while they arrive."""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol

from dynamo.attach.connection import Headers, PooledConnection
from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    ConnectTimeout,
    Disconnected,
    DynamoError,
)
from dynamo.http.target import Target
from dynamo.runtime.process.tasks import Tasks

__all__ = ["ClientRequest", "ConnectionPool", "ResponseSink"]

_MAX_IDLE = 256
_SWEEP_S = 1.0


class ResponseSink(Protocol):
    """Receives one response; ``on_end`` or ``on_failure`` is the last call."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Status and headers arrived."""

    def on_body(self, data: bytes) -> None:
        """A part of the body arrived, cut anywhere and never empty."""

    def on_end(self) -> None:
        """The response is complete."""

    def on_failure(self, error: DynamoError) -> None:
        """The server is unreachable, or its response broke off."""


class ConnectionPool:
    """Requests to ``target``, each on a connection of its own, kept for a later request.

    The caller bounds the requests in flight; at most 256 idle connections are kept.
    ``response_timeout_s`` limits the silence of the server within a request (0: no limit).
    """

    def __init__(
        self, target: Target, connect_timeout_s: float, response_timeout_s: float = 0.0
    ) -> None:
        self.target = target
        self.connect_timeout_s = connect_timeout_s
        self.response_timeout_s = response_timeout_s
        self.tls = ssl.create_default_context() if target.tls else None
        self.idle: list[PooledConnection] = []
        self.active: set[ClientRequest] = set()
        self._tasks = Tasks("connection pool")
        self._sweep_timer: asyncio.TimerHandle | None = None

    def send(self, message: bytes, sink: ResponseSink) -> ClientRequest:
        """Send ``message``, head and body; never blocks. ``sink`` is called in a later read."""
        request = ClientRequest(self, message, sink)
        self.active.add(request)
        if self.response_timeout_s and self._sweep_timer is None:
            self._sweep_later()
        request.start()
        return request

    def connect(self, request: ClientRequest) -> None:
        """Connect for ``request`` in the background."""
        self._tasks.spawn(self._connect(request), name=f"connect {self.target.url}")

    def release(self, connection: PooledConnection) -> None:
        """Keep ``connection`` for the next request, or close it."""
        if connection.usable and len(self.idle) < _MAX_IDLE:
            self.idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: PooledConnection) -> None:
        """Drop a lost connection."""
        if connection in self.idle:
            self.idle.remove(connection)

    async def close(self) -> None:
        """Cancel all requests, without a call of their sinks, and close all connections."""
        for request in tuple(self.active):
            request.cancel()
        for connection in self.idle:
            connection.close()
        self.idle.clear()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        await self._tasks.close()

    async def _connect(self, request: ClientRequest) -> None:
        target, connection = self.target, PooledConnection(self.release, self.forget)
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await connection.connect(target.host, target.port, self.tls)
        except TimeoutError:
            seconds = self.connect_timeout_s
            request.failed(ConnectTimeout(f"cannot connect to {target.url} within {seconds:g} s"))
        except (OSError, UnicodeError) as error:
            request.failed(CannotConnect(f"cannot connect to {target.url}: {error}"))
        else:
            request.connected(connection)

    def _sweep_later(self) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        limit = asyncio.get_running_loop().time() - self.response_timeout_s
        for request in tuple(self.active):
            if request.active_s < limit and not request.paused:
                request.time_out()
        if self.active:
            self._sweep_later()


class ClientRequest:
    """One request of a pool, in flight until its sink's last call or :meth:`cancel`.

    A server may close an idle connection just when a request is sent on it. A request that ends so,
    without a byte of the response, is sent once more on a new connection.
    """

    __slots__ = ("_connection", "_message", "_pool", "_retried", "_sink", "active_s", "paused")

    def __init__(self, pool: ConnectionPool, message: bytes, sink: ResponseSink) -> None:
        self.active_s = asyncio.get_running_loop().time()
        self.paused = False
        self._pool = pool
        self._message = message
        self._sink: ResponseSink | None = sink
        self._connection: PooledConnection | None = None
        self._retried = False

    def start(self) -> None:
        """Send on an idle connection, else on a new one."""
        idle = self._pool.idle
        while idle:
            connection = idle.pop()
            if connection.usable:
                self._connection = connection
                connection.send(self, self._message)
                return
        self._retried = True
        self._pool.connect(self)

    def connected(self, connection: PooledConnection) -> None:
        """Send on the new ``connection``; release it if the request was cancelled."""
        if self._sink is None:
            self._pool.release(connection)
        elif not connection.usable:
            self.failed(Disconnected(f"{self._pool.target.url} closed the connection"))
        else:
            self._connection = connection
            connection.send(self, self._message)

    def cancel(self) -> None:
        """Close the connection at once, which ends the request in the server. Idempotent."""
        self._sink = None
        self._pool.active.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def pause(self) -> None:
        """Stop reading the response, so that TCP slows the server down."""
        self.paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read again."""
        self.paused = False
        self.active_s = asyncio.get_running_loop().time()
        if self._connection is not None:
            self._connection.resume()

    def head(self, status: int, headers: Headers) -> None:
        """Forward the head to the sink."""
        self._message = b""  # a long prompt is not kept while its response streams
        if self._sink is not None:
            self._sink.on_head(status, headers)

    def body(self, data: bytes) -> None:
        """Forward a part of the body to the sink."""
        self.active_s = asyncio.get_running_loop().time()
        if self._sink is not None:
            self._sink.on_body(data)

    def complete(self, failure: str | None, received: bool) -> None:
        """End the request; ``received``: whether any byte of a response arrived."""
        self._connection = None
        if failure is not None and not received and not self._retried and self._sink is not None:
            self._retried = True
            self._pool.connect(self)
        elif failure is not None:
            self.failed(Disconnected(f"{self._pool.target.url}: {failure}"))
        else:
            sink, self._sink = self._sink, None
            self._pool.active.discard(self)
            if sink is not None:
                sink.on_end()

    def failed(self, error: DynamoError) -> None:
        """End the request with ``error``."""
        sink, self._sink = self._sink, None
        self._pool.active.discard(self)
        if sink is not None:
            sink.on_failure(error)

    def time_out(self) -> None:
        """End the request: the server is silent for too long."""
        sink, seconds = self._sink, self._pool.response_timeout_s
        self.cancel()
        if sink is not None:
            url = self._pool.target.url
            sink.on_failure(ConnectionTimeout(f"{url} sent nothing for {seconds:g} s"))
