"""One client connection: bytes in, requests out in order, one at a time, within the limits.

State is grouped by lifetime: :class:`HttpServer` is shared by all connections, a connection
lasts as long as its socket, and an :class:`Exchange` as long as one request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from dynamo.http.body import ChunkedBody, SizedBody
from dynamo.http.errors import HttpStatusError
from dynamo.http.exchange import CLOSE, NEVER, Exchange, encode_headers
from dynamo.http.head import CHUNKED, Head

if TYPE_CHECKING:
    from dynamo.http.server import HttpServer

TOO_MANY_CONNECTIONS = "Too many connections"

log = logging.getLogger(__name__)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REQUESTS_PER_TURN = 32  # of one pipelining client, before other connections are served
_FREE_BODY_BYTES = 64 * 1024  # of each body; not in the budget, so a full one admits short bodies


class WriteBatch:
    """Writes the output of a loop turn at its end, in one callback.

    Tokens of one stream that arrived in one read become one event, and everything written to a
    connection leaves in one system call, which costs more than all the rest of a token. Producers
    are flushed first, because they write to connections. Nothing may be added a second time before
    it was flushed.
    """

    __slots__ = ("_connections", "_producers", "_scheduled")

    def __init__(self) -> None:
        self._producers: list[Callable[[], None]] = []
        self._connections: list[Callable[[], None]] = []
        self._scheduled = False

    def defer(self, flush: Callable[[], None]) -> None:
        """Call ``flush`` of a producer at the end of this turn."""
        self._producers.append(flush)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Call ``flush`` of a connection at the end of this turn, after the producers."""
        self._connections.append(flush)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Flush each; an exception of one must not keep back the output of the others."""
        producers, self._producers = self._producers, []
        for flush in producers:
            try:
                flush()
            except Exception:
                log.exception("writing output failed")
        # Reset between the loops: a write of a producer needs no other callback, a write of the
        # next turn does.
        self._scheduled = False
        connections, self._connections = self._connections, []
        for flush in connections:
            try:
                flush()
            except Exception:
                log.exception("writing output failed")


class HttpConnection(asyncio.Protocol):
    """Reads heads and bodies, dispatches exchanges, enforces deadlines when swept.

    Its states: reading a head, reading a body (``_head`` set), busy (``_exchange``
    set), lingering (refused, discarding further input), closed (no transport).

    Reading is never paused while an exchange runs, because only reading detects that the client has
    disconnected. Pipelined bytes beyond ``header_bytes`` are discarded instead, and the connection
    is closed after the response: the client must send those requests again (RFC 9112 9.3.2).
    """

    __slots__ = (
        "_advancing",
        "_body",
        "_buffer",
        "_counted_bytes",
        "_discards",
        "_exchange",
        "_head",
        "_lingering",
        "_out",
        "_paused",
        "_server",
        "_skipped_line",
        "_timing_head",
        "_transport",
        "above_high_water",
        "closing",
        "deadline",
        "heads",
        "reader",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.heads = server.heads
        self.reader = server.reader
        self._transport: asyncio.Transport | None = None
        self.deadline = NEVER
        self.above_high_water = False
        self.closing = False
        self._buffer = b""
        self._counted_bytes = 0
        self._discards = False
        self._out: list[bytes] = []
        self._head: Head | None = None
        self._body: SizedBody | ChunkedBody | None = None
        self._exchange: Exchange | None = None
        self._paused = False
        self._advancing = False
        self._lingering = False
        self._timing_head = False
        self._skipped_line = False

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a client; reply 503 above the connection limit."""
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        self.closing = server.draining
        if server.admit(self):
            self.deadline = server.clock + server.limits.header_timeout_s
        else:
            self.refuse(HttpStatusError(503, TOO_MANY_CONNECTIONS, retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client."""
        if self._exchange is not None:
            self._pipeline(data)
        elif self._lingering or self._transport is None:
            return
        elif self._body is not None:
            self.decode(data)
        else:
            self._buffer = self._buffer + data if self._buffer else data
            self.advance()
            if self.above_high_water and len(self._buffer) > self._server.limits.header_bytes:
                self._pause()  # until the client reads its responses

    def eof_received(self) -> bool:
        """Treat a client that ends its output as disconnected, at once, and close.

        A client that has exited looks the same as one that has only shut down its sending side, and
        an engine must not compute for the former. Complete responses are still sent.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()
        # Not connection_lost alone: it waits until a slow client has read what is buffered.
        if not self._lingering:
            self.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Discard all state; fail the exchange in progress."""
        self._transport = None
        self.deadline = NEVER
        self.above_high_water = False
        self._buffer = b""
        self._forget_body()
        self._server.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.above_high_water = True
        self.deadline = self._server.clock + self._server.limits.stall_timeout_s

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.above_high_water = False
        if self._lingering:
            return
        exchange = self._exchange
        idle_s = self._server.clock + self._server.limits.idle_timeout_s
        self.deadline = idle_s if exchange is None else exchange.deadline
        if exchange is not None and exchange.on_drain is not None:
            exchange.on_drain()
        self.advance()

    # -- called by the exchange

    def send(self, data: bytes) -> None:
        """Write at the end of this loop turn, together with its other output."""
        out = self._out
        out.append(data)
        if len(out) == 1 and not self._advancing:
            self._server.write_batch.flush_later(self.flush)

    def finish(self, exchange: Exchange, data: bytes) -> None:
        """Write the last bytes of a response, then close, or read the next request."""
        if data:
            self.send(data)
        if exchange is not self._exchange:
            return
        self._exchange = None
        if self._discards:
            self.flush()
            self._linger()
            return
        # While draining, a response that was begun before does not announce the end: its connection
        # stays, so that a request that is already on its way gets a response.
        if not exchange.keep_alive:
            self.close()
            return
        if not self.above_high_water:
            self.deadline = self._server.clock + self._server.limits.idle_timeout_s
        if not self._advancing and (self._buffer or self._paused):
            self.advance()

    def abort(self) -> None:
        """Close without sending the buffered output."""
        if self._transport is not None:
            self._transport.abort()

    def error_body(self, path: str, status: int, message: str) -> bytes | None:
        """The error body of the API of ``path``; None for the usual one."""
        bodies = self._server.error_bodies
        return None if bodies is None else bodies(path, status, message)

    @property
    def peer(self) -> str | None:
        """The address of the client; None without one."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return name[0] if isinstance(name, tuple) else None

    # -- called by the server

    def flush(self) -> None:
        """Write the buffered output to the socket, in one system call."""
        out = self._out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            if self._transport is not None:
                self._transport.write(data)

    def advance(self) -> None:
        """Serve the requests that are complete in the buffer, in order."""
        if self._advancing:
            return
        self._advancing = True
        try:
            for _ in range(_REQUESTS_PER_TURN):
                if self._exchange is not None or self._head is not None or not self._buffer:
                    break
                if self.above_high_water or self._lingering or self._transport is None:
                    break
                if not self._step():
                    break
            else:
                self._pause()
                self._server.advance_later(self)
                return
        except HttpStatusError as refusal:
            self.refuse(refusal)
        except Exception:
            log.exception("reading a request head failed")
            self.refuse(HttpStatusError(500, "Internal server error"))
        finally:
            self._advancing = False
            if self._out:
                self.flush()
        if self._paused and self._body is None and not self.above_high_water:
            self._resume()

    def decode(self, data: bytes = b"") -> None:
        """Decode ``data`` and the backlog of earlier calls, then serve the requests behind it."""
        if self._body is None:
            return
        try:
            self._feed(data)
        except HttpStatusError as refusal:
            self.refuse(refusal)
        except Exception:
            log.exception("reading a request body failed")
            self.refuse(HttpStatusError(500, "Internal server error"))
        else:
            if self._body is None:
                self.advance()

    def sweep(self) -> None:
        """Act on the passed deadline."""
        self.deadline = NEVER
        if self._transport is None:
            return
        if self._lingering or self.above_high_water:
            self._transport.abort()
        elif self._exchange is not None:
            if self._exchange.deadline <= self._server.clock:  # else its route has removed it
                self._exchange.expire()
        elif self._head is not None:
            self.refuse(HttpStatusError(408, "Request body did not arrive in time"))
        elif self._buffer:
            self.refuse(HttpStatusError(408, "Request head did not arrive in time"))
        else:
            self.close()

    @property
    def subscription(self) -> Exchange | None:
        """The GET whose response is being streamed, if any."""
        exchange = self._exchange
        if exchange is None or not exchange.started or exchange.method != "GET":
            return None
        return exchange

    @property
    def waiting(self) -> bool:
        """Whether no request is in progress (a partial head is none) and all output is sent."""
        if self._transport is None or self._exchange is not None or self._head is not None:
            return False
        return not (self._out or self._transport.get_write_buffer_size())

    def close(self) -> None:
        """Send the buffered output, then close; the deadline ends a client that reads nothing."""
        self.flush()
        self._lingering = True
        self._buffer = b""
        self.deadline = self._server.clock + self._server.limits.stall_timeout_s
        if self._transport is not None:
            self._transport.close()

    def close_when_idle(self) -> None:
        """Close unless a request is in progress."""
        if self._exchange is None and self._head is None and not self._buffer:
            self.close()

    def refuse(self, refusal: HttpStatusError) -> None:
        """Reply with the error and read no more requests.

        The socket stays open for a moment, reading and discarding: closing it with unread bytes
        resets it, and the client would not receive the reply.
        """
        self._server.refused(refusal.status)
        if self._head is not None:
            refusal.set_request(self._head)
        elif refusal.cors is None and self._server.cors is not None:
            refusal.cors = self._server.cors.of_unparsed(self._buffer)
        self._forget_body()
        body = self.error_body(refusal.path, refusal.status, refusal.message) or refusal.body
        head = self.heads.get(refusal.status, "application/json", CLOSE)
        extra = (refusal.cors or b"") + encode_headers(refusal.headers)
        sent = b"" if refusal.bodiless else body
        self.send(b"%b%d\r\n%b\r\n%b" % (head, len(body), extra, sent))
        self.flush()
        self._linger()

    def _step(self) -> bool:
        """Read one head and the available part of its body. False when more bytes are needed."""
        server = self._server
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end <= 0 or buffer.startswith(b"\r\n"):
            return self._wait_for_head()
        head = self.reader.read(buffer, end)
        self._skipped_line = False
        start = end + 4
        size_bytes = head.body_bytes
        if 0 <= size_bytes <= len(buffer) - start and size_bytes <= server.limits.body_bytes:
            stop = start + size_bytes
            self._buffer = buffer[stop:]
            self._dispatch(head, buffer[start:stop])
            return True
        self._open_body(head, buffer[start:])
        return self._head is None

    def _wait_for_head(self) -> bool:
        """No complete head yet. An empty line before it is skipped (RFC 9112 2.2), but only one."""
        if self._buffer.startswith(b"\r\n"):
            if self._skipped_line:
                raise HttpStatusError(400, "Empty lines instead of a request")
            self._skipped_line = True
            self._buffer = self._buffer[2:]
            return True
        self.reader.check_partial(self._buffer)
        if not self._timing_head:
            self._timing_head = True  # set once: a byte now and then does not extend the deadline
            self.deadline = self._server.clock + self._server.limits.header_timeout_s
        return False

    def _open_body(self, head: Head, first: bytes) -> None:
        limits = self._server.limits
        self._head = head
        if head.body_bytes > limits.body_bytes:
            raise HttpStatusError(413, f"Request body exceeds {limits.body_bytes} bytes")
        self._check_budget(head.body_bytes - _FREE_BODY_BYTES)
        self._timing_head = False
        self._buffer = b""
        if head.body_bytes == CHUNKED:
            self._body = ChunkedBody(limits.body_bytes)
        else:
            self._body = SizedBody(head.body_bytes)
        self.deadline = self._server.clock + limits.body_timeout_s
        self._feed(first)
        if head.expects_continue and not first and self._body is not None:
            self.send(_CONTINUE)

    def _feed(self, data: bytes) -> None:
        """Feed the body; dispatch the request when it is complete."""
        body = cast(SizedBody | ChunkedBody, self._body)
        rest = body.feed(data)
        if rest is not None:
            self._buffer = rest
            head = cast(Head, self._head)
            self._forget_body()
            self._dispatch(head, body.take())
            return
        grown_bytes = body.held_bytes - _FREE_BODY_BYTES - self._counted_bytes
        if grown_bytes > 0:
            self._check_budget(grown_bytes)
            self._counted_bytes += grown_bytes
            self._server.bodies_bytes += grown_bytes
        if body.backlog:
            self._pause()
            self._server.decode_later(self)
        elif self._paused:
            self._resume()

    def _check_budget(self, more_bytes: int) -> None:
        limits = self._server.limits
        limit_bytes = max(limits.bodies_bytes, limits.body_bytes)
        if more_bytes > 0 and self._server.bodies_bytes + more_bytes > limit_bytes:
            text = f"Unfinished request bodies exceed {limit_bytes} bytes in total, retry later"
            raise HttpStatusError(503, text, retry_after_s=1)

    def _forget_body(self) -> None:
        self._head = self._body = None
        self._server.bodies_bytes -= self._counted_bytes
        self._counted_bytes = 0

    def _pipeline(self, data: bytes) -> None:
        """Keep requests that arrive while another is in progress, up to a bound."""
        if self._discards:
            return
        self._buffer += data
        if len(self._buffer) > self._server.limits.header_bytes:
            self._buffer = b""
            self._discards = self.closing = True

    def _dispatch(self, head: Head, body: bytes) -> None:
        """Call the handler; its exception costs one response, not the state of the connection."""
        server = self._server
        self._timing_head = False
        if head.api_key is not None:
            head.api_key.requests += 1
        exchange = self._exchange = Exchange(self, head, body, time.monotonic())
        self.deadline = exchange.deadline = server.clock + server.limits.response_timeout_s
        try:
            server.handler(exchange)
        except BaseException as error:  # also a panic in Rust, which is not an Exception
            log.exception("%s %s failed", exchange.method, exchange.path)
            exchange.crashed(error)

    def _linger(self) -> None:
        """Send the buffered output, then only read and discard for a moment."""
        limits = self._server.limits
        self._buffer = b""
        self._lingering = True
        wait_s = limits.stall_timeout_s if self.above_high_water else limits.linger_s
        self.deadline = self._server.clock + wait_s
        if self._transport is not None:
            # Half closed: the client reads the reply and its end, while its input is discarded.
            self._transport.write_eof()
        if self._paused:
            self._resume()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._transport.resume_reading()
