"""One keep-alive connection to the attached server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynamo.http.client import HttpClient

__all__ = ["Headers", "PooledConnection", "ResponseReader"]

Headers = list[tuple[str, str]]
"""(name in lower case, value) of each header, in the order of the wire."""

_HEAD_BYTES = 64 * 1024
_HEADER_COUNT = 200


class ResponseReader(Protocol):
    """Receives the response of one request; :meth:`complete` is the last call."""

    def head(self, status: int, headers: Headers) -> None:
        """Status and headers arrived."""

    def body(self, data: bytes) -> None:
        """A part of the body arrived, never empty."""

    def complete(self, failure: str | None, received: bool) -> None:
        """The response is complete, or failed; ``received``: at least one byte arrived."""


class PooledConnection(HttpClient):
    """A connection that pushes its response to a ResponseReader, one part of the body per read."""

    def __init__(
        self,
        on_free: Callable[[PooledConnection], None],
        on_lost: Callable[[PooledConnection], None],
    ) -> None:
        super().__init__(0)
        self._on_free = on_free
        self._on_lost = on_lost
        self._request: ResponseReader | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._received = False
        self._ended = False
        self._failure: str | None = None

    def send(self, request: ResponseReader, message: bytes) -> None:
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
