"""The worker's end of one request: response items out, cancellation in."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from dynamo._fast.histogram import Histogram
from dynamo.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    EngineFailure,
    EngineShutdown,
    HttpError,
    HttpFailure,
    InvalidArgument,
    InvalidRequest,
    Overloaded,
    Unavailable,
    shorten,
    text_of,
)
from dynamo.observability.metrics import Counter, Gauge
from dynamo.runtime.requests.context import CancelKind, Context
from dynamo.runtime.requests.frames import DATA, END, pack, pack_error

if TYPE_CHECKING:
    from dynamo.runtime.requests.server import ServerConnection

_NO_FAILURE = (Cancelled, EngineShutdown, Overloaded)
log = logging.getLogger(__name__)
REQUEST_ID = "request-id"
"""The header that carries ``Context.id()``."""


def _durations() -> Histogram:
    return Histogram((0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600))


@dataclass(slots=True)
class EndpointStats:
    """The metrics of one endpoint: children of metric families, by default unregistered ones."""

    requests: Counter = field(default_factory=Counter)
    inflight: Gauge = field(default_factory=Gauge)
    request_bytes: Counter = field(default_factory=Counter)
    response_bytes: Counter = field(default_factory=Counter)
    cancellations: Counter = field(default_factory=Counter)
    duration_s: Histogram = field(default_factory=_durations)
    first_response_s: Histogram = field(default_factory=_durations)
    failed: Callable[[str], None] = lambda error_type: None


PushHandler = Callable[["ServerStream", bytes], None]
"""Starts to serve one request, now or later through its stream. Called from the socket's read, so
it must not block; an exception becomes the stream's error."""


@dataclass(slots=True, eq=False)
class ServedEndpoint:
    """One registered endpoint: its handler, its metrics, its streams in flight.

    ``on_engine_shutdown`` is called when a handler raises EngineShutdown. ``asleep``: its engine
    computes nothing until the worker registers again.
    """

    name: str
    handler: PushHandler
    stats: EndpointStats
    graceful: bool
    on_ended: Callable[[], None]
    on_engine_shutdown: Callable[[], None] | None = None
    draining: bool = False
    asleep: bool = False
    active: set[ServerStream] = field(default_factory=set)


class ServerStream:
    """One request in flight. Safe to use after its end: items are then dropped.

    ``on_pause`` is called when the client pauses the stream, ``on_finished`` once at its end, with
    its error if it failed.

    ``send`` never blocks; a handler that can wait should ``await drained()`` between items. A kill,
    a lost connection and an abort at shutdown end the stream and kill its ``context``.
    """

    __slots__ = (
        "_answered",
        "_cancelled",
        "_connection",
        "_context",
        "_level",
        "_number",
        "_paused",
        "_served",
        "_started",
        "_writable",
        "closed",
        "headers",
        "on_finished",
        "on_pause",
    )

    def __init__(
        self,
        connection: ServerConnection,
        number: int,
        served: ServedEndpoint,
        headers: dict[str, str],
    ) -> None:
        self.headers = headers
        self.closed = False
        self.on_pause: Callable[[], None] | None = None
        self.on_finished: Callable[[DynamoError | None], None] | None = None
        self._connection = connection
        self._number = number
        self._served = served
        self._context: Context | None = None
        self._writable: asyncio.Event | None = None
        self._level: CancelKind | None = None
        self._answered = False
        self._cancelled = False
        self._paused = False
        self._started = perf_counter()
        served.active.add(self)
        served.stats.requests.value += 1
        served.stats.inflight.value += 1

    @property
    def endpoint(self) -> str:
        """``ns/component/endpoint``."""
        return self._served.name

    @property
    def context(self) -> Context:
        """Cancellation and metadata (headers) of this request, created on first use."""
        context = self._context
        if context is None:
            headers = self.headers
            metadata = dict(headers)
            context = self._context = Context(metadata.pop(REQUEST_ID, None), metadata)
            # The client may have cancelled before the handler asked for the context.
            if self._level == "kill":
                context.kill()
            elif self._level == "stop":
                context.stop_generating()
        return context

    @property
    def above_high_water(self) -> bool:
        """Whether the connection is full or the client paused this stream."""
        return self._paused or self._connection.above_high_water

    def route(self) -> tuple[ServerConnection, int, EndpointStats]:
        """Return connection, number there and metrics, for an engine that builds the frames of
        many streams at once. It sends the first item by :meth:`send`, and none after the end."""
        return self._connection, self._number, self._served.stats

    def send(self, payload: bytes) -> None:
        """Send one response item. An oversized one ends the stream with an error."""
        if self.closed:
            return
        connection = self._connection
        limit = connection.settings.max_message_size_bytes
        if len(payload) > limit:
            text = f"response item of {len(payload)} bytes exceeds"
            self.error(EngineFailure(f"{text} DYN_TCP_MAX_MESSAGE_SIZE={limit}"))
            return
        stats = self._served.stats
        stats.response_bytes.value += len(payload)
        if not self._answered:
            self._answered = True
            stats.first_response_s.observe(perf_counter() - self._started)
        connection.write(pack(DATA, self._number, payload))

    def end(self) -> None:
        """End a complete response. Idempotent."""
        if not self.closed:
            self._connection.write(pack(END, self._number, b""))
            self._finish()

    def error(self, error: DynamoError) -> None:
        """End the response with ``error``. Idempotent."""
        if not self.closed:
            if not isinstance(error, _NO_FAILURE):
                self._served.stats.failed("generate")
            limit = self._connection.settings.max_message_size_bytes
            self._connection.write(pack_error(self._number, error, limit))
            self._finish(error)

    def raised(self, error: BaseException) -> None:
        """End the response with the exception that its handler raised. Idempotent.

        EngineShutdown (GeneratorExit means the same) also reports that the engine is down, unless
        the handler forwards the error of another process.
        """
        if self.closed:
            return
        failure = _as_error(error)
        refused = isinstance(failure, HttpFailure) and failure.status < 500
        if refused or isinstance(error, InvalidArgument):  # the client's mistake, no failure
            log.warning("%s: refused: %s", self.endpoint, shorten(error, 500))
        else:
            log.warning("%s: the handler failed", self.endpoint, exc_info=error)
        report = self._served.on_engine_shutdown
        if report is not None and isinstance(failure, EngineShutdown) and not failure.relayed:
            report()
        self.error(failure)

    async def drained(self) -> None:
        """Wait until the next item does not grow a buffer, or until the stream ends."""
        while self.above_high_water and not self.closed:
            if self._writable is None:
                self._writable = asyncio.Event()
            self._writable.clear()
            self._connection.waiting.add(self)
            await self._writable.wait()

    def stopped_by_handler(self) -> bool:
        """Return whether the handler, not the client, stopped the request's context."""
        return self._level is None and self._context is not None and self._context.is_stopped()

    def cancel(self, kind: CancelKind) -> None:
        """Cancel for the client ("kill": it dropped the stream); counted once."""
        if self.closed:
            return
        if not self._cancelled:
            self._cancelled = True
            self._served.stats.cancellations.value += 1
        self._cancel_context(kind)

    def abort(self, error: DynamoError) -> None:
        """End the stream with ``error`` and kill its context."""
        if not self.closed:
            self.error(error)
            # After the error: a kill alone would end the stream as cancelled.
            self._cancel_context("kill")

    def pause(self, paused: bool) -> None:
        """Pause or resume for a client whose reader is behind."""
        self._paused = paused
        if not paused:
            self.wake()
        elif self.on_pause is not None:
            self.on_pause()

    def wake(self) -> None:
        """Wake :meth:`drained` to check again."""
        if self._writable is not None:
            self._writable.set()

    def _cancel_context(self, kind: CancelKind) -> None:
        self._level = kind
        if kind == "kill":
            # Before the context is killed: its listeners then find the stream ended.
            self._finish(Cancelled())
        if self._context is None:
            return
        if kind == "kill":
            self._context.kill()
        else:
            self._context.stop_generating()

    def _finish(self, error: DynamoError | None = None) -> None:
        if self.closed:
            return
        self.closed = True  # first: the callbacks below must not end the stream again
        self._connection.streams.pop(self._number, None)
        self._connection.waiting.discard(self)
        served = self._served
        served.active.discard(self)
        served.stats.inflight.value -= 1
        served.stats.duration_s.observe(perf_counter() - self._started)
        self.wake()
        served.on_ended()
        if self.on_finished is not None:
            self.on_finished(error)


def is_interrupt(error: BaseException) -> bool:
    """Return whether ``error`` is Ctrl-C, in a program that handles SIGINT by this exception.

    In others a handler has raised it: then it is the error of its request alone.
    """
    by_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return by_default and isinstance(error, KeyboardInterrupt)


def _as_error(error: BaseException) -> DynamoError:
    """Map an exception of a handler to the error that its caller receives.

    ValueError and TypeError mean an invalid request, TimeoutError an exceeded deadline and
    ConnectionError an unavailable engine, as in Dynamo. HttpError and other exceptions with a
    ``status`` and a ``message`` choose the HTTP status.
    """
    if isinstance(error, DynamoError):
        return error
    if isinstance(error, HttpError):
        return HttpFailure(error.message, error.code)
    try:
        status, message = getattr(error, "status", None), getattr(error, "message", None)
    except BaseException:  # noqa: BLE001 - users' code, too, and the caller needs an end frame
        status = message = None
    if type(status) is int and isinstance(message, str):
        return HttpFailure(message, status)
    text = text_of(error)
    if isinstance(error, (ValueError, TypeError)):
        return InvalidRequest(text, shorten(type(error).__name__, 40))
    text_with_type = f"{type(error).__name__}: {text}"
    for raised, received in _BY_TYPE:
        if isinstance(error, raised):
            return received(text_with_type)
    if isinstance(error, GeneratorExit):
        return EngineShutdown(text or "engine shutting down")
    return EngineFailure(text_with_type)


_BY_TYPE: tuple[tuple[type[BaseException], type[DynamoError]], ...] = (
    (TimeoutError, DeadlineExceeded),
    (ConnectionError, Unavailable),
)
