"""TLS between a socket and an :class:`HttpConnection`, without a task per handshake.

asyncio's own TLS creates the protocol of a client only after the handshake, so that clients in
their handshake would escape the limit on connections and the deadlines. Here the HttpConnection
exists from the start: it counts, its deadline for a head covers the handshake, and it refuses
clients that speak plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any, cast

from dynamo.http.connection import HttpConnection
from dynamo.http.errors import HttpStatusError
from dynamo.http.head import HeadReader
from dynamo.http.tls import ServerTls

log = logging.getLogger(__name__)
_RECORD_BYTES = 16 * 1024


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """The protocol of the socket, and the transport of ``inner``.

    ``uncertified`` reads the heads of a client that sends no certificate though one is wanted.
    ``decode_later`` calls :meth:`decode` in a later loop turn.

    Its states: handshake, established, plain (the client speaks HTTP, for the refusal), ended
    (everything was written: input is discarded).
    """

    def __init__(
        self,
        tls: ServerTls,
        inner: HttpConnection,
        uncertified: HeadReader,
        decode_later: Callable[[TlsConnection], None],
    ) -> None:
        super().__init__()
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = tls.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._wants_client = tls.wants_client
        self._inner = inner
        self._uncertified = uncertified
        self._decode_later = decode_later
        self._socket: asyncio.Transport
        self._unsent: list[bytes] = []  # written before the end of the handshake: one refusal
        self._started = False
        self._established = False
        self._plain = False
        self._ended = False
        self._paused = False
        self._queued = False

    # -- called by the transport of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a client; it counts and its time runs from here on."""
        self._socket = cast(asyncio.Transport, transport)
        self._inner.connection_made(self)

    def data_received(self, data: bytes) -> None:
        """Decrypt what a client has sent, or continue its handshake."""
        if self._ended:
            return
        if self._plain:
            self._inner.data_received(data)
            return
        if not self._started:
            self._started = True
            if data[:1].isalpha():  # a TLS client begins with the byte 22
                self._refuse_plain()
                return
        self._incoming.write(data)
        if self._established:
            self._read()
        elif not self._queued:
            self._queued = True
            self._decode_later(self)
        elif not self._paused:
            self.pause_reading()

    def eof_received(self) -> bool:
        """Let the transport close: a client that ends its output counts as disconnected."""
        if not self._ended:
            self._inner.eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the end of the connection on."""
        self._ended = True
        self._unsent.clear()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._inner.resume_writing()

    # -- called by the server

    def decode(self) -> None:
        """Continue the handshake: up to some milliseconds, so that others get turns between."""
        self._queued = False
        if self._ended:
            return
        if self._paused:  # more arrived while it was queued
            self.resume_reading()
        if self._handshake():
            self._read()

    # -- called by the HttpConnection

    def write(self, data: Any) -> None:
        """Encrypt and send ``data``; during the handshake, keep it for its end."""
        if self._plain:
            self._socket.write(data)
        elif not self._established:
            self._unsent.append(data)
        elif not self._ended:
            view = memoryview(data)
            try:
                while view:  # a call may write one record of many
                    view = view[self._tls.write(view) :]
            except ssl.SSLError as error:
                self._fail(error)
            else:
                self._flush()

    def write_eof(self) -> None:
        """Send the end of the output; input is discarded from now on."""
        if self._plain:
            self._socket.write_eof()
        elif self._established and not self._ended:
            self._end()
            self._socket.write_eof()

    def close(self) -> None:
        """Close after what was written has been sent."""
        if self._established and not self._ended:
            self._end()
        self._ended = True
        self._socket.close()

    def abort(self) -> None:
        """Close at once."""
        self._ended = True
        self._socket.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._socket.is_closing()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the socket has not taken yet."""
        return self._socket.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        """TLS ends its output with a message of its own."""
        return True

    def pause_reading(self) -> None:
        """Stop reading."""
        self._paused = True
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Read again, beginning with what was received before the pause."""
        self._paused = False
        self._socket.resume_reading()
        asyncio.get_running_loop().call_soon(self._read)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of the socket's transport, but not the socket itself: bytes written there would not
        be encrypted."""
        return default if name == "socket" else self._socket.get_extra_info(name, default)

    def _handshake(self) -> bool:
        """Continue the handshake; return whether it is complete."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._established = True
        if self._wants_client and self._tls.getpeercert(binary_form=True) is None:
            self._inner.reader = self._uncertified
        self._flush()
        if self._unsent:  # refused before its first byte: one connection too many
            self.write(b"".join(self._unsent))
            self._unsent.clear()
            self.write_eof()
        return True

    def _read(self) -> None:
        """Pass on what can be decrypted."""
        if self._ended or not self._established:
            return
        try:
            # OpenSSL may hold decrypted bytes, for which the socket never becomes readable again.
            while (self._incoming.pending or self._tls.pending()) and not self._paused:
                data = self._tls.read(_RECORD_BYTES)
                if not data:  # the client has ended its output
                    self._inner.eof_received()
                    self.close()
                    return
                self._inner.data_received(data)
                if self._ended:
                    return
        except ssl.SSLWantReadError:
            pass  # a part of a record
        except ssl.SSLError as error:
            self._fail(error)
        self._flush()  # an answer to a message of TLS itself, such as a new key

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    def _end(self) -> None:
        """Send the message that ends the output, so that the client can tell it from a cut."""
        self._ended = True
        with contextlib.suppress(ssl.SSLError):  # raised because the other side's is not awaited
            self._tls.unwrap()
        self._flush()

    def _refuse_plain(self) -> None:
        self._plain = True
        text = "This port speaks TLS: use https:// in the URL"
        self._inner.refuse(HttpStatusError(400, text))

    def _fail(self, error: ssl.SSLError) -> None:
        """Send the alert that OpenSSL has written, then close."""
        peer = self._socket.get_extra_info("peername")
        log.debug("TLS with %s failed: %s", peer, error.reason or error)
        self._ended = True
        self._flush()
        self._socket.close()
