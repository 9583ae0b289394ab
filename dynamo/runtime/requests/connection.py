"""The base of both ends of a request plane socket: frames, corked writes, high-water marks."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from typing import cast

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.protocols.engine import TOKEN_PREFIX
from dynamo.runtime.requests.frames import DATA, LAST_KIND, PREAMBLE, FrameError, Splitter

log = logging.getLogger(__name__)


class FramedConnection(asyncio.Protocol, ABC):
    """The base of client and server connections. Subclasses handle the frames.

    Everything written during one loop turn leaves in one ``transport.write``: writes made while a
    read is handled are flushed after it, others by one ``call_soon``. Writes made before the
    socket is connected are queued.
    """

    def __init__(self, settings: RequestPlaneSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.above_high_water = False
        self.closed = False
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter(
            settings.max_message_size_bytes, PREAMBLE, LAST_KIND, DATA, TOKEN_PREFIX
        )
        self._out: list[bytes] = [PREAMBLE]
        self._corked = True  # until connection_made flushes
        self._peer = "?"

    @abstractmethod
    def on_frames(self, frames: list[tuple[int, int, bytes]]) -> None:
        """Handle the frames of one read. May raise FrameError."""

    def on_full(self) -> None:
        """Called after a write that left the transport above the high-water mark."""

    def write(self, frame: bytes) -> None:
        """Queue one frame for the end of this loop turn. Never blocks; drops it when closed."""
        if self.closed:
            return
        self._out.append(frame)
        if not self._corked:
            self._corked = True
            # uvloop writes at once: one system call per token is most of a token's cost.
            self._loop.call_soon(self._flush)

    def unsent_bytes(self) -> int:
        """Return the bytes accepted by :meth:`write` that the kernel has not accepted yet."""
        unsent = sum(map(len, self._out))
        return unsent if self._transport is None else unsent + self._unwritten(self._transport)

    def fail(self, reason: str) -> None:
        """Close the connection at once, and log ``reason``: what the peer did wrong."""
        if not self.closed:
            log.warning("request plane: closing the connection with %s: %s", self._peer, reason)
            self.abort()

    def abort(self) -> None:
        """Close at once; unsent bytes are lost. ``connection_lost`` follows in a later turn."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None:
            self._flush()
            self.closed = True
            self._transport.close()
        self.closed = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Configure the socket and send what was queued."""
        self._transport = cast(asyncio.Transport, transport)
        if self.closed:  # given up while it was connecting
            self._transport.abort()
            return
        self._peer = str(transport.get_extra_info("peername") or transport)
        _tune(transport.get_extra_info("socket"), self.settings.tcp_user_timeout_s)
        high = self.settings.high_water_bytes
        # A low mark well below the high one: a slow peer would otherwise toggle with each write.
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Split and dispatch; send everything that the handlers wrote in one write."""
        # Already corked: a flush is scheduled for this turn and sends these frames too.
        was_corked, self._corked = self._corked, True
        try:
            splitter = self._splitter
            self.on_frames(splitter.feed(data))
            if splitter.fault is not None:
                self.fail(splitter.fault)
        except FrameError as error:
            self.fail(error.message)
        finally:
            if not was_corked:
                self._corked = False
                if self._out:
                    self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Drop what is queued: the socket is closed."""
        self.closed = True
        self.above_high_water = False
        self._out.clear()

    def pause_writing(self) -> None:
        """Note that the transport is above its high-water mark."""
        self.above_high_water = True

    def resume_writing(self) -> None:
        """Note that the transport is below its low-water mark again."""
        self.above_high_water = False

    def _flush(self) -> None:
        self._corked = False
        out, transport = self._out, self._transport
        if transport is None or not out:
            return
        if not (self.closed or transport.is_closing()):
            # A single frame needs no copy.
            transport.write(out[0] if len(out) == 1 else b"".join(out))
            if self.above_high_water:
                self.on_full()
        out.clear()

    @staticmethod
    def _unwritten(transport: asyncio.Transport) -> int:
        return 0 if transport.is_closing() else transport.get_write_buffer_size()


def _tune(sock: socket.socket | None, user_timeout_s: float) -> None:
    """Disable Nagle's delay and bound how long a dead TCP peer goes unnoticed.

    TCP_USER_TIMEOUT covers unacknowledged data; keepalive probes (after 5 s idle, then three 2 s
    apart) cover a connection with none.
    """
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    timeout_ms = int(user_timeout_s * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
