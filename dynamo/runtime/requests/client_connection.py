"""A client's connection to one worker: requests out, response frames straight into sinks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from dynamo.config.requests import RequestPlaneSettings
from dynamo.errors import (
    Cancelled,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineFailure,
    InvalidArgument,
    Overloaded,
)
from dynamo.runtime.context import CancelKind, Context
from dynamo.runtime.requests.connection import FramedConnection
from dynamo.runtime.requests.frames import (
    DATA,
    END,
    ERROR,
    HEADER_SIZE_BYTES,
    KILL,
    OVERSIZE,
    PAUSE,
    PING,
    PONG,
    RESUME,
    STOP,
    FrameError,
    pack,
    pack_open,
    parse_error,
)
from dynamo.runtime.requests.stream import REQUEST_ID

__all__ = ["ClientConnection", "ClientStream", "StreamSink"]

_TICKS_PER_TIMEOUT = 4
_SILENT_TICKS = 1 + _TICKS_PER_TIMEOUT  # the first one sends the ping
_SILENT_TICKS_WHEN_RELEASED = 1 + _TICKS_PER_TIMEOUT // 2
log = logging.getLogger(__name__)


class StreamSink(Protocol):
    """Takes what a stream brings, called straight from the read; it must not block.

    Any number of ``on_data``, then exactly one of ``on_end`` and ``on_error``, unless the owner
    killed the stream: then nothing more. All streams of a worker share a connection, so a
    sink that can't keep up buffers within its own bounds and calls ``ClientStream.pause()``.
    """

    def on_data(self, payload: bytes) -> None:
        """One response item."""

    def on_end(self) -> None:
        """The response is complete."""

    def on_error(self, error: DynamoError) -> None:
        """The response will not be completed."""


class ClientStream:
    """The caller's handle of one request. Every method is idempotent, a no-op after the end."""

    __slots__ = ("_connection", "_context", "_number", "closed", "heard", "on_data", "sink")

    def __init__(
        self,
        connection: ClientConnection,
        number: int,
        sink: StreamSink,
        context: Context | None,
    ) -> None:
        self.closed = False
        self.heard = False
        self.sink = sink
        self.on_data = sink.on_data
        self._connection = connection
        self._number = number
        self._context = context

    @property
    def address(self) -> str:
        """The worker's address."""
        return self._connection.address

    def stop(self) -> None:
        """Ask the worker to end early; what it still sends reaches the sink."""
        self._tell(STOP)

    def pause(self) -> None:
        """Ask the worker's handler to wait; what is under way still reaches the sink."""
        self._tell(PAUSE)

    def resume(self) -> None:
        """Let the worker's handler go on after :meth:`pause`."""
        self._tell(RESUME)

    def kill(self) -> None:
        """Forget the stream on both sides. The sink hears nothing more."""
        self._tell(KILL)
        self.finish()

    def fail(self, error: DynamoError) -> None:
        """End the stream on this side and give its sink ``error``."""
        if not self.closed:
            self.finish()
            try:
                self.sink.on_error(error)
            except Exception:  # a sink must not end the connection
                log.exception("the sink of a stream from %s failed", self.address)

    def complete(self) -> None:
        """The end frame is here."""
        self.finish()
        try:
            self.sink.on_end()
        except Exception:  # a sink must not end the connection
            log.exception("the sink of a stream from %s failed", self.address)

    def finish(self) -> None:
        """Leave the connection's table and the context."""
        if self.closed:
            return
        self.closed = True
        self._connection.forget(self._number)
        if self._context is not None:
            self._context.off_cancel(self.on_cancel)

    def on_cancel(self, kind: CancelKind) -> None:
        """The context was cancelled: pass it on. After a kill the sink gets Cancelled."""
        if kind == "stop":
            self.stop()
        else:
            self._tell(KILL)
            self.fail(Cancelled("the request was cancelled"))

    def _tell(self, kind: int) -> None:
        if not self.closed:
            self._connection.write(pack(kind, self._number, b""))


class ClientConnection(FramedConnection):
    """Numbers the streams, feeds their sinks, and notices a worker that no longer answers.

    There is no acknowledgement per request. While streams are open and nothing has been received
    for a quarter of ``request_timeout_s`` a ping is sent; unanswered for the whole of it, the
    worker counts as gone. Half of it is enough once discovery has dropped the worker: one that
    leaves in peace still answers, one that hangs does not.
    """

    def __init__(
        self,
        settings: RequestPlaneSettings,
        loop: asyncio.AbstractEventLoop,
        address: str,
        on_lost: Callable[[ClientConnection], None],
    ) -> None:
        super().__init__(settings, loop)
        self.address = address
        self.streams: dict[int, ClientStream] = {}
        self._on_lost = on_lost
        self._number = 0
        self._early_bytes = 0
        self._close_when_idle = False
        self._heard = False
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self,
        endpoint: str,
        headers: dict[str, str],
        payload: bytes,
        sink: StreamSink,
        context: Context | None,
    ) -> ClientStream:
        """See ``RequestClient.open``."""
        self._close_when_idle = False  # whoever opens a stream found the worker in discovery again
        number = self._next_number()
        stream = ClientStream(self, number, sink, context)
        if context is not None and REQUEST_ID not in headers:
            headers = {**headers, REQUEST_ID: context.id()}
        frame = pack_open(number, endpoint, headers, payload)
        refusal = self._refusal(len(frame) - HEADER_SIZE_BYTES, context)
        self.streams[number] = stream
        if refusal is not None:
            self._loop.call_soon(stream.fail, refusal)
            return stream
        self.write(frame)
        if context is not None:
            context.on_cancel(stream.on_cancel)
        if self._timer is None:
            self._watch()
        return stream

    def forget(self, number: int) -> None:
        """The stream is over on this side."""
        self.streams.pop(number, None)
        if self._close_when_idle and not self.streams:
            self.lose(Disconnected(f"the connection to {self.address} was released"))

    def close_when_idle(self) -> None:
        """Close once no stream is left; at once if there is none."""
        self._close_when_idle = True
        if not self.streams:
            self.lose(Disconnected(f"the connection to {self.address} was released"))

    def lose(self, error: DynamoError) -> None:
        """Give up the connection: every stream fails with ``error``. Idempotent."""
        self._on_lost(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        streams = list(self.streams.values())
        self.streams.clear()
        if not self.closed:
            self.abort()
        for stream in streams:
            stream.fail(type(error)(error.message))

    def connection_lost(self, error: Exception | None) -> None:
        """A stream that has not seen its end frame is disconnected, never finished."""
        super().connection_lost(error)
        why = f": {error}" if error is not None else ""
        self.lose(Disconnected(f"Stream ended before generation completed ({self.address}{why})"))

    def on_frames(self, frames: list[tuple[int, int, bytes]]) -> None:
        """Feed the sinks. Frames of streams that are over on this side are dropped."""
        self._heard = True
        streams = self.streams
        for kind, number, payload in frames:
            stream = streams.get(number)
            if kind == DATA:
                if stream is not None:
                    stream.heard = True
                    try:
                        stream.on_data(payload)
                    except Exception as error:  # noqa: BLE001 - it ends its own stream
                        self._sink_failed(stream, error)
            elif kind == PONG:
                continue
            elif kind not in (END, ERROR, OVERSIZE):
                raise FrameError(f"a worker may not send frame kind {kind}")
            elif stream is not None:
                self._end(stream, kind, payload)

    def _end(self, stream: ClientStream, kind: int, payload: bytes) -> None:
        if kind == END:
            stream.complete()
        elif kind == ERROR:
            stream.fail(parse_error(payload))
        else:
            stream._tell(KILL)
            limit = self.settings.max_message_size_bytes
            text = f"response item of {payload.decode()} bytes exceeds"
            stream.fail(EngineFailure(f"{text} DYN_TCP_MAX_MESSAGE_SIZE={limit}"))

    def _sink_failed(self, stream: ClientStream, error: Exception) -> None:
        log.error("the sink of a stream from %s failed", self.address, exc_info=error)
        stream._tell(KILL)
        stream.fail(DynamoError(f"{type(error).__name__}: {error}"))

    def _next_number(self) -> int:
        number = self._number
        while True:
            number = number % 0xFFFFFFFF + 1
            if number not in self.streams:
                self._number = number
                return number

    def _refusal(self, size_bytes: int, context: Context | None) -> DynamoError | None:
        settings = self.settings
        if size_bytes > settings.max_message_size_bytes:
            limit = settings.max_message_size_bytes
            return InvalidArgument(
                f"request of {size_bytes} bytes exceeds DYN_TCP_MAX_MESSAGE_SIZE={limit}"
            )
        if context is not None and context.is_killed():
            return Cancelled("the request was cancelled before it was sent")
        if self._transport is None:
            self._early_bytes += size_bytes
            unsent = self._early_bytes
        else:
            unsent = self.unsent_bytes() + size_bytes if self.above_high_water else 0
        if unsent > settings.hard_cap_bytes:
            return Overloaded(f"{unsent} unsent bytes wait for the worker at {self.address}")
        return None

    def _watch(self) -> None:
        self._heard = False
        self._silent_ticks = 0
        self._tick_later()

    def _tick_later(self) -> None:
        interval_s = self.settings.request_timeout_s / _TICKS_PER_TIMEOUT
        self._timer = self._loop.call_later(interval_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.streams:
            return
        if self._heard or self._transport is None:
            self._watch()
            return
        self._silent_ticks += 1
        allowed = _SILENT_TICKS_WHEN_RELEASED if self._close_when_idle else _SILENT_TICKS
        if self._silent_ticks >= allowed:
            self._give_up((allowed - 1) * self.settings.request_timeout_s / _TICKS_PER_TIMEOUT)
            return
        self.write(pack(PING, 0, b""))
        self._tick_later()

    def _give_up(self, timeout_s: float) -> None:
        text = f"the worker at {self.address} has not answered for {timeout_s:g} s"
        log.warning("request plane: %s", text)
        unheard = [stream for stream in self.streams.values() if not stream.heard]
        for stream in unheard:
            stream.fail(ConnectionTimeout(text))
        self.lose(Disconnected(text))
