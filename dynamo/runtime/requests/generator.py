"""Handlers and responses for user code: async generators and senders of items."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from dynamo.errors import (
    DynamoError,
    EngineFailure,
    EngineShutdown,
    HandlerCancelled,
    Overloaded,
    StreamIncomplete,
)
from dynamo.protocols import codec
from dynamo.protocols.engine import with_every_key
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.client_connection import ClientStream
from dynamo.runtime.requests.stream import PushHandler, ServerStream, is_interrupt

PAUSE_BYTES = 1024 * 1024
PAUSE_ITEMS = 1024
HARD_CAP_FACTOR = 16
ENVELOPE = "_dynamo_annotated"
"""Key of an item that wraps the value in ``data``, with ``id``, ``event`` and ``comment``."""
_NOTES = ("id", "event", "comment")
_ENCODE_ERRORS = (TypeError, ValueError, msgspec.MsgspecError, RecursionError)


class Annotated:
    """One response item; ``id``, ``event`` and ``comments`` if the handler yielded an envelope."""

    __slots__ = ("_data", "_envelope")

    def __init__(self, data: Any, envelope: dict[str, Any] | None = None) -> None:
        self._data = data
        self._envelope = envelope or {}

    def data(self) -> Any:
        """Return the value that the handler yielded."""
        return self._data

    def id(self) -> str | None:
        """Return the id of the item, if any."""
        return self._envelope.get("id")

    def event(self) -> str | None:
        """Return the name of the event, if any."""
        return self._envelope.get("event")

    def comments(self) -> list[str] | None:
        """Return the comments, if any."""
        return self._envelope.get("comment")

    def item(self) -> Any:
        """Return what a handler yields to send this item on: its envelope, or its plain value."""
        return self._envelope or self._data

    def is_error(self) -> bool:
        """Return False: the iteration raises errors."""
        return False

    def __repr__(self) -> str:
        rest = f"event={self.event()!r}, comment={self.comments() or []!r}, id={self.id()!r}"
        return f"Annotated(data={self._data!r}, {rest})"


class ResponseSender:
    """Sends the items of one response from a handler that has a parameter ``response_sender``.

    The handler's generator is run to its end, which ends the response unless :meth:`close` did.
    Call it on the loop of the runtime.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: ServerStream) -> None:
        self._stream = stream

    def send(self, item: Any) -> None:
        """Send one item; never blocks. Dropped after the end. EngineFailure: it has no encoding."""
        self._stream.send(encode_item(item))

    def close(self) -> None:
        """End the response. Idempotent."""
        self._stream.end()

    def close_with_error(self, message: str) -> None:
        """End the response with an error. Idempotent."""
        self._stream.error(EngineFailure(message))


def encode_item(item: Any) -> bytes:
    """Encode an item of a handler. EngineFailure: it cannot be encoded, or it is an error event.

    An envelope without notes is sent as its plain value, so that every caller can read it; an
    :class:`Annotated` item of another worker as that worker sent it.
    """
    if type(item) is Annotated:
        item = item.item()
    if type(item) is dict and ENVELOPE in item:
        item = _unwrapped(item)
    try:
        return codec.encode(item)
    except OverflowError:
        return codec.encode(_with_wide_integers(item))
    except _ENCODE_ERRORS as error:
        raise EngineFailure(
            f"critical error: failed serializing Python response as msgpack: {error}"
        ) from error


def _with_wide_integers(item: Any) -> Any:
    """Return ``item`` with integers beyond 64 bits as 16 bytes, big-endian, as Dynamo sends them.

    EngineFailure for integers beyond 128 bits.
    """
    if isinstance(item, dict):
        return {key: _with_wide_integers(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_with_wide_integers(value) for value in item]
    if not isinstance(item, int) or -(2**63) <= item < 2**64:
        return item
    try:
        return item.to_bytes(16, "big", signed=item < 0)
    except OverflowError as error:
        raise EngineFailure("an integer in a response has more than 128 bits") from error


def _unwrapped(item: dict[str, Any]) -> Any:
    if item.get("event") == "error":
        comments = item.get("comment") or ["the engine sent an error event"]
        raise EngineFailure(" ".join(map(str, comments)))
    return item.get("data") if all(item.get(name) is None for name in _NOTES) else item


def generator_handler(
    generate: Callable[..., Any], tasks: Tasks, admission: AdmissionQueue | None = None
) -> PushHandler:
    """Serve ``async def generate(request[, context])``, an async generator, as a push handler.

    One task of ``tasks`` per request. The request is decoded to plain values, a preprocessed one
    with all its keys (:func:`with_every_key`); each item is encoded as MessagePack. ``context`` may
    be keyword-only. A parameter ``response_sender`` gets a :class:`ResponseSender`.

    asyncio.CancelledError raised by the generator means HandlerCancelled;
    :meth:`ServerStream.raised` maps other exceptions. After a kill the generator is closed at its
    second item, so that it can check its context before. A handler that stops its own context and
    returns ends the stream as incomplete. With ``admission`` requests may wait or be rejected; a
    generator counts until it has ended, also after a cancellation that it ignores.
    """
    call = _caller(generate)

    def handle(stream: ServerStream, payload: bytes) -> None:
        tasks.spawn(_serve(call, stream, payload), name=stream.endpoint)

    if admission is None:
        return handle
    limit = admission

    def admit(stream: ServerStream, payload: bytes) -> None:
        def start() -> None:
            task = tasks.spawn(_serve(call, stream, payload), name=stream.endpoint)
            task.add_done_callback(lambda _: limit.release())

        try:
            limit.enter(stream, start)
        except Overloaded as error:
            stream.error(error)

    return admit


class ResponseStream:
    """``async for item in stream``: the decoded items of one response.

    A reader that is behind pauses the worker's handler (above ``PAUSE_BYTES`` or ``PAUSE_ITEMS``
    buffered, until half of it is read); a handler that ignores the pause is killed past
    ``HARD_CAP_FACTOR`` times that, and the reader gets Overloaded after the buffered items. Errors
    of the stream are raised by the iteration. Dropping the iterator early kills the request.
    """

    def __init__(self, decode: Callable[[bytes], Any] = codec.plain_decode) -> None:
        self.sink = BufferSink()
        self._decode = decode
        self._loop = asyncio.get_running_loop()

    def attach(self, stream: ClientStream) -> ResponseStream:
        """Set the stream that was opened with ``self.sink``."""
        self.sink.stream = stream
        return self

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return self."""
        return self

    async def __anext__(self) -> Any:
        """Return the next item. Raises the stream's DynamoError in place of the end."""
        return self._decode(await self.sink.next())

    async def aclose(self) -> None:
        """Kill the request unless it has ended. Idempotent."""
        if self.sink.stream is not None:
            self.sink.stream.kill()

    def __del__(self) -> None:
        """Kill on the loop: the garbage collector may run in any thread."""
        stream = self.sink.stream
        if stream is not None and not stream.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(stream.kill)


class BufferSink:
    """A sink with a bounded buffer and one reader."""

    __slots__ = ("_bytes", "_ended", "_error", "_items", "_paused", "_reader", "stream")

    def __init__(self) -> None:
        self.stream: ClientStream | None = None
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._error: DynamoError | None = None
        self._ended = False
        self._paused = False
        self._reader: asyncio.Future[None] | None = None

    def on_data(self, payload: bytes) -> None:
        """Buffer one item and wake the reader."""
        self._items.append(payload)
        self._bytes += len(payload)
        self._wake()
        if self._fill() >= 1 and self.stream is not None:
            self._throttle(self.stream)

    def on_end(self) -> None:
        """End the iteration after the buffered items."""
        self._ended = True
        self._wake()

    def on_error(self, error: DynamoError) -> None:
        """Raise in the iteration after the buffered items."""
        self._error = error
        self.on_end()

    async def next(self) -> bytes:
        """Return the next payload. Raises StopAsyncIteration or the stream's error at the end."""
        while not self._items:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended or (self.stream is not None and self.stream.closed):
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        payload = self._items.popleft()
        self._bytes -= len(payload)
        if self._paused and self.stream is not None and self._fill() < 0.5:
            self._paused = False
            self.stream.resume()
        return payload

    def _fill(self) -> float:
        return max(self._bytes / PAUSE_BYTES, len(self._items) / PAUSE_ITEMS)

    def _throttle(self, stream: ClientStream) -> None:
        if not self._paused:
            self._paused = True
            stream.pause()
        elif self._fill() > HARD_CAP_FACTOR:
            stream.kill()
            self.on_error(Overloaded(f"the reader is {self._bytes} bytes behind; request killed"))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


async def _serve(
    call: Callable[[Any, ServerStream], Any], stream: ServerStream, payload: bytes
) -> None:
    try:
        items = call(with_every_key(codec.plain_decode(payload)), stream)
        try:
            await _send_all(items, stream)
        finally:
            # A handler may return any asynchronous iterator; only a generator has aclose().
            if hasattr(items, "aclose"):
                await items.aclose()
        if stream.stopped_by_handler():
            stream.error(StreamIncomplete("Stream ended before generation completed"))
        else:
            stream.end()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        # The runtime cancels this task. Otherwise the handler itself has raised CancelledError.
        if task is not None and task.cancelling():
            stream.abort(EngineShutdown("the worker shut down"))
            raise
        stream.error(HandlerCancelled("Request cancelled"))
    except BaseException as error:  # it becomes the stream's error
        stream.raised(error)
        if is_interrupt(error):
            raise


async def _send_all(items: AsyncIterator[Any], stream: ServerStream) -> None:
    resumed = False
    async for item in items:
        if stream.closed:
            if resumed:
                return
            resumed = True  # once more: a handler that checks its context ends in its own way
            continue
        stream.send(encode_item(item))
        if stream.above_high_water:
            await stream.drained()


def _caller(generate: Callable[..., Any]) -> Callable[[Any, ServerStream], Any]:
    """Return ``call(request, stream)`` that passes the arguments which ``generate`` accepts."""
    try:
        parameters = inspect.signature(generate).parameters
    except (TypeError, ValueError):
        return lambda request, stream: generate(request)
    kinds = [parameter.kind for parameter in parameters.values()]
    by_position = [kind for kind in kinds if kind in _BY_POSITION]
    named = parameters.get("context")
    if "response_sender" in parameters:
        return lambda request, stream: generate(
            request, context=stream.context, response_sender=ResponseSender(stream)
        )
    if named is not None and named.kind is named.KEYWORD_ONLY:
        return lambda request, stream: generate(request, context=stream.context)
    if len(by_position) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return lambda request, stream: generate(request, stream.context)
    return lambda request, stream: generate(request)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
