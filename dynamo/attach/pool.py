"""A pool of keep-alive connections to one server: responses are pushed while they arrive."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    ConnectTimeout,
    Disconnected,
    DynamoError,
)
from dynamo.http.client import HttpClient, Target
from dynamo.runtime.process.tasks import Tasks

if TYPE_CHECKING:
    from dynamo.attach.service import RelayedRequest

_MAX_IDLE = 256
_SWEEP_S = 1.0
Headers = list[tuple[str, str]]
"""(name in lower case, value) of each header, in the order of the wire."""
_HEAD_BYTES = 64 * 1024
_HEADER_COUNT = 200


class PooledConnection(HttpClient):
    """A connection that pushes its response to a ClientRequest, one part of the body per read."""

    def __init__(
        self,
        on_free: Callable[[PooledConnection], None],
        on_lost: Callable[[PooledConnection], None],
    ) -> None:
        # The body is forwarded part by part: nothing of it is collected, so 0 bytes.
        super().__init__(0)
        self._on_free = on_free
        self._on_lost = on_lost
        self._request: ClientRequest | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._received = False
        self._ended = False
        self._failure: str | None = None

    def send(self, request: ClientRequest, message: bytes) -> None:
        """Send ``message`` for ``request``."""
        self._request = request
        self._received = self._ended = False
        self._head_bytes = 0
        self.start(message, self._on_end)

    def abort(self) -> None:
        """Close the connection without a call of its request."""
        self._request = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes arrived."""
        self._received = True
        super().data_received(data)
        if self.status < 200 and self.receiving:  # the parser keeps an unfinished header
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self.fail("the head of the response is too large")
        self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: disconnected."""
        super().connection_lost(exc)
        self._deliver()
        self._on_lost(self)

    def on_message_begin(self) -> None:
        """httptools: a response begins."""
        super().on_message_begin()
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header, or a trailer, which is dropped."""
        super().on_header(name, value)
        if self.status >= 200 or not self.receiving:
            return
        self._headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))
        if len(self._headers) > _HEADER_COUNT:
            self.fail("the response has too many headers")

    def on_headers_complete(self) -> None:
        """httptools: the head is complete."""
        super().on_headers_complete()
        if self.receiving and self.status >= 200 and self._request is not None:
            self._request.head(self.status, self._headers)

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body. All pieces of one read are one part."""
        if self.receiving:
            self._parts.append(data)

    def _on_end(self, failure: str | None) -> None:
        # Only noted: the request that comes next must not start inside the parser of this one.
        self._ended, self._failure = True, failure

    def _deliver(self) -> None:
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            if self._request is not None:
                self._request.body(data)
        if self._ended:
            request, self._request, self._ended = self._request, None, False
            if request is not None:
                if self._failure is None:
                    # The last part may have paused reading: for its request, not for the next one.
                    self.resume()
                    self._on_free(self)
                request.complete(self._failure, self._received)


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

    def send(self, message: bytes, sink: RelayedRequest) -> ClientRequest:
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
            # A paused request waits for its client, not for the server.
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

    def __init__(self, pool: ConnectionPool, message: bytes, sink: RelayedRequest) -> None:
        self.active_s = asyncio.get_running_loop().time()
        self.paused = False
        self._pool = pool
        self._message = message
        self._sink: RelayedRequest | None = sink
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
        # What ends a new connection is no idle timeout: such a request is not sent again.
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
        # Before cancel(), which forgets the sink.
        sink, seconds = self._sink, self._pool.response_timeout_s
        self.cancel()
        if sink is not None:
            url = self._pool.target.url
            sink.on_failure(ConnectionTimeout(f"{url} sent nothing for {seconds:g} s"))
