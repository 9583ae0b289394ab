"""A worker's connection to one client: it turns frames into streams and handler calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo.config.requests import RequestPlaneSettings
from dynamo.errors import DynamoError, InvalidArgument
from dynamo.runtime.requests.connection import FramedConnection
from dynamo.runtime.requests.frames import (
    KILL,
    OPEN,
    OVERSIZE,
    PAUSE,
    PING,
    PONG,
    RESUME,
    STOP,
    FrameError,
    pack,
    pack_error,
    parse_open,
)
from dynamo.runtime.requests.stream import ServedEndpoint, ServerStream

__all__ = ["ServerConnection"]

log = logging.getLogger(__name__)


class ServerConnection(FramedConnection):
    """``streams`` maps numbers to streams in flight; ``waiting`` are those in ``drained()``."""

    def __init__(
        self,
        settings: RequestPlaneSettings,
        loop: asyncio.AbstractEventLoop,
        admit: Callable[[str], ServedEndpoint],
        connections: set[ServerConnection],
    ) -> None:
        super().__init__(settings, loop)
        self.streams: dict[int, ServerStream] = {}
        self.waiting: set[ServerStream] = set()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._admit = admit
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add this connection to the server's."""
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Kill the streams of the client."""
        super().connection_lost(error)
        self._connections.discard(self)
        for stream in list(self.streams.values()):
            stream.cancel("kill")
        if not self.lost.done():
            self.lost.set_result(None)

    def resume_writing(self) -> None:
        """Wake the handlers that wait in ``drained()``."""
        super().resume_writing()
        waiting, self.waiting = self.waiting, set()
        for stream in waiting:
            stream.wake()

    def on_full(self) -> None:
        """Close the connection of a client that stopped reading while handlers keep sending."""
        cap = self.settings.hard_cap_bytes
        # Handlers that wait in drained() stop at the high-water mark; only others get this far.
        if self.unsent_bytes() > cap:
            self.fail(f"more than {cap} bytes are queued for a client that does not read")

    def on_frames(self, frames: list[tuple[int, int, bytes]]) -> None:
        """Open, stop, pause and kill streams."""
        for kind, number, payload in frames:
            if kind == OPEN:
                self._open(number, payload)
            elif kind in (STOP, KILL):
                stream = self.streams.get(number)
                if stream is not None:
                    stream.cancel("kill" if kind == KILL else "stop")
            elif kind in (PAUSE, RESUME):
                stream = self.streams.get(number)
                if stream is not None:
                    stream.pause(kind == PAUSE)
            elif kind == PING:
                self.write(pack(PONG, 0, payload))
            elif kind == OVERSIZE:
                self._refuse_size(number, payload)
            else:
                raise FrameError(f"a client may not send frame kind {kind}")

    def _open(self, number: int, body: bytes) -> None:
        if number in self.streams:
            raise FrameError(f"stream {number} is opened twice")
        name, headers, payload = parse_open(body)
        try:
            served = self._admit(name)
        except DynamoError as error:
            self.write(pack_error(number, error, self.settings.max_message_size_bytes))
            return
        served.stats.request_bytes.value += len(payload)
        stream = self.streams[number] = ServerStream(self, number, served, headers)
        try:
            served.handler(stream, payload)
        except BaseException as error:  # it becomes the stream's error
            stream.raised(error)
            if isinstance(error, KeyboardInterrupt):
                raise

    def _refuse_size(self, number: int, size: bytes) -> None:
        limit = self.settings.max_message_size_bytes
        text = f"request of {size.decode()} bytes exceeds DYN_TCP_MAX_MESSAGE_SIZE={limit}"
        self.write(pack_error(number, InvalidArgument(text), limit))
