"""One request and its response, as a route handles them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import parse_qs

from dynamo._fast.http_chunk import http_chunk
from dynamo.http.api_keys import ApiKey
from dynamo.http.errors import error_body, reason_phrase
from dynamo.http.head import Head

JSON = "application/json"
NEVER = float("inf")

# Bits of a framing.
LENGTH = 0  # the caller appends the digits of the length, then CRLF
CHUNKS = 1
UNTIL_CLOSE = 2  # a stream to an HTTP/1.0 client, which does not support chunks
CLOSE = 4
OLD_KEEP_ALIVE = 8  # an HTTP/1.0 client asked to keep the connection

_BREAKS = str.maketrans({"\r": " ", "\n": " ", "\0": " "})

log = logging.getLogger(__name__)


class Transport(Protocol):
    """The connection, as its exchange uses it."""

    heads: ResponseHeads
    above_high_water: bool
    closing: bool
    deadline: float

    @property
    def peer(self) -> str | None:
        """The address of the client."""

    def send(self, data: bytes) -> None:
        """Write to the socket at the end of the loop turn."""

    def finish(self, exchange: Exchange, data: bytes) -> None:
        """Write the last bytes of the response; the exchange is complete."""

    def abort(self) -> None:
        """Close the connection at once; unsent bytes are lost."""

    def error_body(self, path: str, status: int, message: str) -> bytes | None:
        """The error body of the API of ``path``; None for the usual one."""


class CopyingTransport:
    """The connection of an exchange whose response is copied to ``owner``, by ``copy``."""

    def __init__(self, transport: Transport, owner: object, copy: Callable[[bytes], None]) -> None:
        self._transport = transport
        self._copy = copy
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, data: bytes) -> None:
        """See :class:`Transport`."""
        self._copy(data)
        self._transport.send(data)

    def finish(self, exchange: Exchange, data: bytes) -> None:
        """See :class:`Transport`."""
        self._copy(data)
        self._transport.finish(exchange, data)


class ResponseHeads:
    """Heads of responses, built once a second for each kind instead of once a response."""

    def __init__(self) -> None:
        self._heads: dict[tuple[int, str, int], bytes] = {}
        self._date = b""
        self.renew()

    def renew(self) -> None:
        """Drop the heads of an earlier second, whose Date header is outdated."""
        date = formatdate(usegmt=True).encode("ascii")
        if date != self._date:
            self._date = date
            self._heads.clear()

    def get(self, status: int, content_type: str, framing: int) -> bytes:
        """Status line and fixed headers.

        The head of a stream ends in the CRLF of its last header, any other in ``content-length: ``.
        """
        key = (status, content_type, framing)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._build(status, content_type, framing)
        return head

    def _build(self, status: int, content_type: str, framing: int) -> bytes:
        lines = [f"HTTP/1.1 {status} {reason_phrase(status)}", f"date: {self._date.decode()}"]
        if content_type:
            lines.append(f"content-type: {content_type}")
        if content_type.startswith("text/event-stream"):  # nginx, by default, keeps events back
            lines.append("x-accel-buffering: no")
        if framing & CLOSE:
            lines.append("connection: close")
        elif framing & OLD_KEEP_ALIVE:
            lines.append("connection: keep-alive")
        if framing & CHUNKS:
            lines.append("transfer-encoding: chunked")
        lines.append("" if framing & (CHUNKS | UNTIL_CLOSE) else "content-length: ")
        return "\r\n".join(lines).encode("latin-1")


def encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """``name: value`` lines with CRLF; line breaks inside a value can't split the response."""
    return b"".join(
        f"{name}: {value.translate(_BREAKS)}\r\n".encode("latin-1", "replace")
        for name, value in headers
    )


def query_fields(query: str, most: int | None = None) -> dict[str, str]:
    """The fields of a query, the last of each name. Raises ValueError for more than ``most``."""
    return {name: values[-1] for name, values in parse_qs(query, max_num_fields=most).items()}


def _with_id(headers: Sequence[tuple[str, str]], request_id: str) -> Sequence[tuple[str, str]]:
    """Return the headers of an error, with the id that the client gave to its request."""
    if any(name == "x-request-id" for name, _ in headers):
        return headers
    return (*headers, ("x-request-id", request_id))


class Exchange:
    """Respond with one :meth:`respond`, or with :meth:`start`, any :meth:`write`, :meth:`end`.

    ``on_disconnect`` is called once if the client disconnects before the end; after that (``gone``)
    everything written is discarded. While ``above_high_water`` the client reads too slowly;
    ``on_drain`` is called when it has caught up. ``received_at`` is time.monotonic(), and so is
    ``resumed_at``: when it no longer had to wait for a worker; 0 if it never had to.

    Every exchange has a ``deadline`` (monotonic seconds), so that it ends even if its route never
    responds. A route with its own timeouts sets it to ``NEVER``. At the deadline ``on_expired`` is
    called and must respond. The default is a 504, or an abort once the response has started, and
    then ``on_disconnect``.
    """

    __slots__ = (
        "_bodiless",
        "_raw",
        "_transport",
        "api_key",
        "body",
        "cors",
        "deadline",
        "done",
        "gone",
        "headers",
        "keep_alive",
        "method",
        "minor",
        "on_disconnect",
        "on_drain",
        "on_expired",
        "path",
        "query",
        "received_at",
        "resumed_at",
        "started",
    )

    def __init__(self, transport: Transport, head: Head, body: bytes, received_at: float) -> None:
        self._transport = transport
        self._bodiless = head.method == "HEAD"
        self._raw = False
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.minor = head.minor
        self.keep_alive = head.keep_alive
        self.api_key: ApiKey | None = head.api_key
        self.cors = head.cors
        self.body = body
        self.received_at = received_at
        self.resumed_at = 0.0
        self.on_disconnect: Callable[[], object] | None = None
        self.on_drain: Callable[[], None] | None = None
        self.on_expired: Callable[[], None] | None = None
        self.deadline = NEVER
        self.started = False
        self.done = False
        self.gone = False

    @property
    def above_high_water(self) -> bool:
        """Whether the client reads too slowly."""
        return self._transport.above_high_water

    @property
    def peer(self) -> str | None:
        """The address of the client, which may be that of a proxy; None if it is unknown."""
        return self._transport.peer

    def copy_to(self, owner: object, copy: Callable[[bytes], None]) -> None:
        """Pass what is sent, head and framing included, to ``copy`` of ``owner``, too."""
        transport: Any = CopyingTransport(self._transport, owner, copy)
        self._transport = transport

    @property
    def copied(self) -> object:
        """The owner of the copy; None without one."""
        transport: object = self._transport
        return transport.owner if isinstance(transport, CopyingTransport) else None

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = JSON,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Send the whole response in one write. An error has the id that its client gave."""
        if self.started and not self.gone:
            raise RuntimeError("the response has been started already")
        self.started = True
        if self.gone:
            return
        if status >= 400 and "x-request-id" in self.headers:
            headers = _with_id(headers, self.headers["x-request-id"])
        transport = self._transport
        # The common case: HTTP/1.1 and a connection that stays need no call.
        plain = self.keep_alive and self.minor and not transport.closing
        framing = LENGTH if plain else self._framing(LENGTH)
        head = transport.heads.get(status, content_type, framing)
        extra = self.cors + encode_headers(headers) if headers else self.cors
        sent = b"" if self._bodiless else body
        self.done = True
        # The callbacks refer to the request, and it to this exchange: a cycle costs a collection.
        self.on_disconnect = self.on_drain = self.on_expired = None
        transport.finish(self, b"%b%d\r\n%b\r\n%b" % (head, len(body), extra, sent))

    def respond_unchanged(
        self, body: bytes, content_type: str, headers: Sequence[tuple[str, str]]
    ) -> None:
        """Respond 304: the client has ``body``; only its length is sent. RFC 9110 15.4.5."""
        self._bodiless = True
        self.respond(304, body, content_type, headers)

    def refuse(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Respond with an error body."""
        body = self._transport.error_body(self.path, status, message)
        self.respond(status, body or error_body(status, message, kind), headers=headers)

    def start(
        self, status: int, content_type: str, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Begin a streamed response: chunks, or until close for an HTTP/1.0 client."""
        if self.started and not self.gone:
            raise RuntimeError("the response has been started already")
        self.started = True
        if self.gone:
            return
        # HTTP/1.0 has no chunks: the end of the connection ends the body.
        if self.minor == 0:
            self.keep_alive = False
            self._raw = True
        framing = self._framing(UNTIL_CLOSE if self._raw else CHUNKS)
        extra = self.cors + encode_headers(headers) if headers else self.cors
        self._transport.send(
            b"%b%b\r\n" % (self._transport.heads.get(status, content_type, framing), extra)
        )

    def write(self, data: bytes) -> None:
        """Send a piece of a streamed response."""
        if self.gone or not data or self._bodiless:
            return
        self._transport.send(data if self._raw else http_chunk(data))

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and end the streamed response. Ending twice does nothing."""
        if self.gone or self.done:
            self.done = True
            return
        # A HEAD gets the head of the GET's response and no body (RFC 9110 9.3.2).
        if self._bodiless:
            data = b""
        elif not self._raw:
            data = http_chunk(data) + b"0\r\n\r\n" if data else b"0\r\n\r\n"
        self.done = True
        self.on_disconnect = self.on_drain = self.on_expired = None
        self._transport.finish(self, data)

    def abort(self) -> None:
        """Close the connection in mid-response, so that it can't look complete to the client.

        ``on_disconnect`` is not called.
        """
        self.on_disconnect = None
        self._transport.abort()

    def crashed(self, error: BaseException) -> None:
        """Respond 500 after an unexpected ``error``, or abort if the response has started.

        Raises KeyboardInterrupt and SystemExit again.
        """
        self._fail(500, "Internal server error")
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error

    def expire(self) -> None:
        """Called by the connection when the deadline has passed."""
        if self.on_expired is not None:
            self.on_expired()
            return
        log.error("%s %s: no response in time", self.method, self.path)
        self._fail(504, "No response in time")

    def lost(self) -> None:
        """Called by the connection when the client has disconnected."""
        if self.gone or self.done:
            return
        self.gone = True
        callback = self.on_disconnect
        self.on_disconnect = self.on_drain = self.on_expired = None
        if callback is not None:
            callback()

    def _fail(self, status: int, message: str) -> None:
        """End the exchange in place of its route, whose ``on_disconnect`` cleans up."""
        if self.done or self.gone:
            return
        callback = self.on_disconnect
        if self.started:
            self.abort()
        else:
            self.refuse(status, message)
        self.gone = True
        if callback is not None:
            callback()

    def _framing(self, framing: int) -> int:
        if self._transport.closing:
            self.keep_alive = False
        if not self.keep_alive:
            return framing | CLOSE
        return framing | OLD_KEEP_ALIVE if self.minor == 0 else framing
