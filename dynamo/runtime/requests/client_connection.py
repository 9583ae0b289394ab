"""A client's connection to one worker: it sends requests and passes response frames to sinks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import (
    Cancelled,
    ConnectTimeout,
    Disconnected,
    DynamoError,
    EngineFailure,
    InvalidArgument,
    WorkerAtCapacity,
    WorkerSilent,
)
from dynamo.runtime.requests.connection import FramedConnection
from dynamo.runtime.requests.context import CancelKind, Context
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
    TokenSink,
    encode_headers,
    pack,
    pack_open,
    parse_error,
)
from dynamo.runtime.requests.stream import REQUEST_ID

if TYPE_CHECKING:
    from dynamo.runtime.requests.client import RequestClient

_SILENT_TICKS = 4
log = logging.getLogger(__name__)


class StreamSink(Protocol):
    """The receiver of one response, called from the socket's read; it must not block.

    Receives any number of ``on_data``, then exactly one of ``on_end`` and ``on_error``; after the
    owner killed the stream, nothing. All streams of a worker share a connection, so a sink that
    cannot keep up buffers within its own bounds and calls ``ClientStream.pause()``.
    """

    def on_data(self, payload: bytes) -> None:
        """Accept one response item."""

    def on_end(self) -> None:
        """Accept the end of a complete response."""

    def on_error(self, error: DynamoError) -> None:
        """Accept the error that ends an incomplete response."""


class StreamOwner:
    """What a stream was opened by: it may know other workers for the request."""

    __slots__ = ()

    def failed(self, error: DynamoError) -> None:
        """Receive the error of the stream, before its sink does."""

    def may_move(self) -> bool:
        """Return whether the stream may fail because its worker is silent."""
        return True


_NO_OWNER = StreamOwner()
OnTokens = Callable[[list[int], int, float, float], None]
"""Receives the plain tokens of one read, whose texts a ``TokenSink`` has passed on: their ids, the
bytes of their items, when they came (monotonic seconds), and the seconds spent on their texts."""


class ClientStream:
    """The caller's handle of one request. Every method is idempotent, a no-op after the end."""

    __slots__ = (
        "_connection",
        "_context",
        "_number",
        "closed",
        "on_data",
        "on_tokens",
        "owner",
        "received_any",
        "sink",
        "token_sink",
    )

    def __init__(
        self,
        connection: ClientConnection,
        number: int,
        sink: StreamSink,
        context: Context | None,
        owner: StreamOwner = _NO_OWNER,
    ) -> None:
        self.closed = False
        self.received_any = False
        self.sink = sink
        self.on_data = sink.on_data  # bound once: it is called for every token
        self.on_tokens: OnTokens | None = None
        self.token_sink: TokenSink | None = None
        self.owner = owner
        self._connection = connection
        self._number = number
        self._context = context

    @property
    def address(self) -> str:
        """The address of the worker."""
        return self._connection.address

    def stop(self) -> None:
        """Ask the worker to end early; the sink still receives what it sends until then."""
        self._send_control(STOP)

    def pause(self) -> None:
        """Ask the worker's handler to pause; the sink still receives items already sent."""
        self._send_control(PAUSE)

    def resume(self) -> None:
        """Resume the worker's handler after :meth:`pause`."""
        self._send_control(RESUME)

    def pass_tokens(
        self,
        pieces: list[str | None],
        stop_ids: frozenset[int],
        texts: list[str],
        on_tokens: OnTokens,
    ) -> None:
        """Append the pieces of plain tokens to ``texts`` and call ``on_tokens``, not ``on_data``.

        Until the first item that is no plain token, which ``on_data`` gets: call it again then. The
        arguments of the first call count. See ``_fast/frames``.
        """
        if self.token_sink is not None:
            self.token_sink.active = True
        elif not self.closed:
            self.on_tokens = on_tokens
            self.token_sink = TokenSink(self, pieces, stop_ids, texts)
            self._connection.token_sinks[self._number] = self.token_sink

    def keep_tokens(self) -> None:
        """Pass all items to ``on_data`` until :meth:`pass_tokens` is called again."""
        if self.token_sink is not None:
            self.token_sink.active = False

    def kill(self) -> None:
        """Drop the stream on both sides. The sink is not called again."""
        # Before the end: afterwards nothing is sent on the stream.
        self._send_control(KILL)
        self.finish()

    def give_up(self, error: DynamoError) -> None:
        """Drop the stream on both sides, and pass ``error`` to its sink."""
        self._send_control(KILL)
        self.fail(error)

    def fail(self, error: DynamoError) -> None:
        """End the stream on this side and pass ``error`` to its sink."""
        if not self.closed:
            self.finish()
            try:
                self.owner.failed(error)
                self.sink.on_error(error)
            except Exception:
                log.exception("the sink of a stream from %s failed", self.address)

    def complete(self) -> None:
        """End the stream on this side after its end frame."""
        self.finish()
        try:
            self.sink.on_end()
        except Exception:
            log.exception("the sink of a stream from %s failed", self.address)

    def finish(self) -> None:
        """Remove the stream from its connection and its context."""
        if self.closed:
            return
        self.closed = True
        connection = self._connection
        connection.streams.pop(self._number, None)
        if self.token_sink is not None:
            del connection.token_sinks[self._number]
            self.token_sink = self.on_tokens = None
        if connection.released and not connection.streams:
            connection.close_when_idle()
        if self._context is not None:
            self._context.off_cancel(self.on_cancel)

    def on_cancel(self, kind: CancelKind) -> None:
        """Forward the cancellation of the context. After a kill the sink receives Cancelled."""
        if kind == "stop":
            self.stop()
        else:
            self._send_control(KILL)
            self.fail(Cancelled("the request was cancelled"))

    def _send_control(self, kind: int) -> None:
        if not self.closed:
            self._connection.write(pack(kind, self._number, b""))


class ClientConnection(FramedConnection):
    """Numbers the streams, passes frames to their sinks, and detects a worker that stops answering.

    Requests are not acknowledged one by one. While streams are open and nothing was received for a
    quarter of ``silence_timeout_s``, the client sends one ping, which the worker's loop answers
    however long its engine takes. After the whole of that time the connection is ``silent``:
    streams that another instance may take fail with WorkerSilent and are killed, so that the worker
    stops them when it resumes. The others keep waiting until ``request_timeout_s``, when the
    connection is lost. Any frame ends the silence.

    Silence is counted in ticks of a timer, not in time: after a stall of this process, one tick.

    ``released`` is set by :meth:`close_when_idle` and cleared by the next request.
    """

    def __init__(
        self,
        settings: RequestPlaneSettings,
        loop: asyncio.AbstractEventLoop,
        address: str,
        owner: RequestClient,
    ) -> None:
        super().__init__(settings, loop)
        self.address = address
        self.streams: dict[int, ClientStream] = {}
        self.token_sinks = self._splitter.sinks
        self.released = False
        self.silent = False
        self._owner = owner
        self._number = 0
        self._early_bytes = 0
        self._received_any = False
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self,
        endpoint: str,
        headers: dict[str, str],
        payload: bytes,
        sink: StreamSink,
        context: Context | None,
        owner: StreamOwner = _NO_OWNER,
    ) -> ClientStream:
        """Send one request of ``owner``; see ``RequestClient.open``."""
        # The worker is in discovery again: its caller found the address there.
        self.released = False
        number = self._number % 0xFFFFFFFF + 1  # stream 0 is the connection itself
        while number in self.streams:  # after 2³² requests, skip streams that are still open
            number = number % 0xFFFFFFFF + 1
        self._number = number
        stream = ClientStream(self, number, sink, context, owner)
        if context is not None and REQUEST_ID not in headers:
            headers = {**headers, REQUEST_ID: context.id()}
        encoded = encode_headers(headers) if headers else b""
        frame = pack_open(number, endpoint, encoded, payload)
        refusal = self._refusal(len(frame) - HEADER_SIZE_BYTES, context)
        self.streams[number] = stream
        if refusal is not None:
            # Later, because a sink is never called before the caller holds its stream.
            self._loop.call_soon(stream.fail, refusal)
            return stream
        self.write(frame)
        if context is not None:
            context.on_cancel(stream.on_cancel)
        if self._timer is None:
            self._watch()
        return stream

    def probe(self) -> None:
        """Count as silent from the start, until the worker answers a ping."""
        self.silent = True
        self.write(pack(PING, 0, b""))
        self._watch()

    def close_when_idle(self) -> None:
        """Close after the last stream; at once without streams."""
        self.released = True
        if not self.streams:
            error = Disconnected(f"the connection to {self.address} was released")
            self.lose(error, fault=False)

    def lose(self, error: DynamoError, fault: bool = True) -> None:
        """Close the connection and fail every stream with ``error``. Idempotent."""
        self._owner.lost(self, error if fault else None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Detach the streams first: a sink may open a new stream, on another connection, from here.
        streams = list(self.streams.values())
        self.streams.clear()
        if not self.closed:
            self.abort()
        for stream in streams:  # each gets its own error: a traceback belongs to one raise
            stream.fail(type(error)(error.message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what was queued; the time for an answer begins."""
        self._silent_ticks = 0
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the open streams: one without an end frame is disconnected, never complete."""
        super().connection_lost(error)
        why = f": {error}" if error is not None else ""
        self.lose(Disconnected(f"Stream ended before generation completed ({self.address}{why})"))

    def on_frames(self, frames: list[tuple[int, int, bytes]]) -> None:
        """Pass frames to the sinks. Drop those of streams that ended on this side."""
        self._received_any = True
        if self.silent and (frames or self._splitter.touched):
            self._end_silence()  # a preamble alone may come from a listener without a worker
        if self._splitter.touched:
            self._pass_tokens()
        streams = self.streams
        for kind, number, payload in frames:
            stream = streams.get(number)
            if kind == DATA:
                if stream is not None:
                    stream.received_any = True
                    try:
                        stream.on_data(payload)
                    except Exception as error:  # noqa: BLE001 - it ends its own stream
                        self._sink_failed(stream, error)
            else:
                self._on_control(stream, kind, payload)

    def _on_control(self, stream: ClientStream | None, kind: int, payload: bytes) -> None:
        if kind == END:
            if stream is not None:
                stream.complete()
        elif kind in (ERROR, OVERSIZE):
            if stream is not None:
                self._fail_stream(stream, kind, payload)
        elif kind != PONG:
            raise FrameError(f"a worker may not send frame kind {kind}")

    def _pass_tokens(self) -> None:
        """Report the tokens that the splitter has passed to sinks; frames come after them."""
        sinks, now_s = self._splitter.touched, time.monotonic()
        # The splitter measures the whole read: each stream gets an equal share.
        spent_s = self._splitter.fed_s / len(sinks)
        for sink in sinks:
            stream = sink.owner
            try:
                if stream.on_tokens is not None:  # an earlier one may have ended it
                    stream.on_tokens(*sink.take(), now_s, spent_s)
            except Exception as error:  # noqa: BLE001 - it ends its own stream
                self._sink_failed(stream, error)
        # Else a lost connection and the requests of its last read are a cycle until a collection.
        sinks.clear()

    def _fail_stream(self, stream: ClientStream, kind: int, payload: bytes) -> None:
        if kind == ERROR:
            stream.fail(parse_error(payload))
        else:
            stream._send_control(KILL)
            limit = self.settings.max_message_size_bytes
            text = f"response item of {payload.decode()} bytes exceeds"
            stream.fail(EngineFailure(f"{text} DYN_TCP_MAX_MESSAGE_SIZE={limit}"))

    def _sink_failed(self, stream: ClientStream, error: Exception) -> None:
        log.error("the sink of a stream from %s failed", self.address, exc_info=error)
        stream._send_control(KILL)
        stream.fail(DynamoError(f"{type(error).__name__}: {error}"))

    def _refusal(self, size_bytes: int, context: Context | None) -> DynamoError | None:
        """Return why the request cannot be sent, if so."""
        settings = self.settings
        if size_bytes > settings.max_message_size_bytes:
            limit = settings.max_message_size_bytes
            return InvalidArgument(
                f"request of {size_bytes} bytes exceeds DYN_TCP_MAX_MESSAGE_SIZE={limit}"
            )
        if context is not None and context.is_killed():
            return Cancelled("the request was cancelled before it was sent")
        if self._transport is None:  # still connecting: count what is queued for it
            self._early_bytes += size_bytes
            unsent = self._early_bytes
        else:  # below the high-water mark the sum over all buffers is not worth computing
            unsent = self.unsent_bytes() + size_bytes if self.above_high_water else 0
        if unsent > settings.hard_cap_bytes:
            text = f"{unsent} unsent bytes are queued for the worker at {self.address}"
            return WorkerAtCapacity(text)
        return None

    def _watch(self) -> None:
        self._received_any = False
        self._silent_ticks = 0
        self._tick_later()

    def _tick_later(self) -> None:
        self._timer = self._loop.call_later(self._tick_s(), self._tick)

    def _tick_s(self) -> float:
        settings = self.settings
        return min(settings.silence_timeout_s, settings.request_timeout_s) / _SILENT_TICKS

    def _tick(self) -> None:
        self._timer = None
        if not self.streams and not self.silent:
            return
        if self._received_any:
            self._watch()
            return
        ticks = self._silent_ticks = self._silent_ticks + 1
        if ticks == 1 and not self.silent:
            self.write(pack(PING, 0, b""))
        if ticks >= _SILENT_TICKS:
            if not self.silent:
                self._begin_silence()
            self._move_streams()
        if ticks * self._tick_s() >= self.settings.request_timeout_s:
            self.lose(self._silence())
        else:
            self._tick_later()

    def _begin_silence(self) -> None:
        self.silent = True
        self._owner.silent(self, self._silence().message)

    def _end_silence(self) -> None:
        self.silent = False
        self._owner.answered(self)

    def _move_streams(self) -> None:
        """Fail the streams that another instance can take; after a release, all streams."""
        for stream in tuple(self.streams.values()):
            if self.released or stream.owner.may_move():
                stream.give_up(self._silence())

    def _silence(self) -> DynamoError:
        seconds = self._silent_ticks * self._tick_s()
        if self._transport is None:
            return ConnectTimeout(f"no connection to {self.address} within {seconds:g} s")
        return WorkerSilent(f"the worker at {self.address} has not answered for {seconds:g} s")
