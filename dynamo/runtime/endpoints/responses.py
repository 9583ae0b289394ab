"""Responses as Dynamo's callers read them: items, errors, and endpoints with one value."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dynamo.errors import (
    Cancelled,
    ConnectionTimeout,
    DeadlineExceeded,
    DynamoError,
    HandlerCancelled,
    HttpFailure,
    InvalidArgument,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from dynamo.runtime.requests import ENVELOPE, Annotated, ResponseStream
from dynamo.runtime.requests.context import Context

# Subclasses before their bases: the first that matches counts.
_KINDS: tuple[tuple[type[DynamoError], str], ...] = (
    (InvalidArgument, "InvalidRequest"),
    (ModelNotFound, "NotFound"),
    (Cancelled, "Cancelled"),
    (ConnectionTimeout, "DeadlineExceeded"),
    (DeadlineExceeded, "DeadlineExceeded"),
    (Unavailable, "Unavailable"),
    (DynamoError, "Internal"),
)
_KIND_OF_STATUS = {
    404: "NotFound",
    415: "UnsupportedMedia",
    429: "RateLimited",
    499: "Cancelled",
    503: "Unavailable",
    504: "DeadlineExceeded",
}


async def serve_unary_endpoint(endpoint: Any, handler: Callable[..., Awaitable[Any]]) -> None:
    """Serve ``async def handler(request, *, context)``, whose value is the only item."""

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield await handler(request, context=context)

    await endpoint.serve_endpoint(generate)


class UnaryClient:
    """Calls the instances of a client in turn, for responses of one item."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def complete(self, request: Any, context: Any = None) -> Any:
        """Return the item. RuntimeError for a response of none or several."""
        stream = await self._client.round_robin(request, annotated=False, context=context)
        try:
            items = [item async for item in _first_two(stream)]
        finally:
            await stream.aclose()
        if len(items) != 1:
            count = "no item" if not items else "several items"
            raise RuntimeError(f"a unary response has {count} instead of one")
        return items[0]


async def _first_two(stream: Any) -> AsyncIterator[Any]:
    """Yield at most two items: enough to detect a response that is too long."""
    count = 0
    async for item in stream:
        yield item
        count += 1
        if count == 2:
            return


class Responses:
    """``async for`` over one response. Dropping it before the end kills the request.

    After its caller stopped ``context``, the iteration ends where the worker ends the request.
    After a kill it raises Cancelled, and items that had arrived are dropped.
    """

    def __init__(
        self, stream: ResponseStream, annotated: bool, context: Context | None = None
    ) -> None:
        self._stream = stream
        self._annotated = annotated
        self._context = context

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        """Return the next item. Raises the error of :func:`at_caller`."""
        if self._context is not None and self._context.is_killed():
            await self._stream.aclose()  # no effect on the worker, which has the kill already
            raise at_caller(Cancelled("the request was cancelled"))
        try:
            item = await self._stream.__anext__()
        except Cancelled as error:
            context = self._context
            if context is not None and context.is_stopped() and not context.is_killed():
                raise StopAsyncIteration from None
            raise at_caller(error) from None
        except DynamoError as error:
            raise at_caller(error) from None
        envelope = None
        if type(item) is dict and ENVELOPE in item:
            envelope, item = item, item.get("data")
        return Annotated(item, envelope) if self._annotated else item

    async def aclose(self) -> None:
        """Kill the request unless it has ended. Idempotent."""
        await self._stream.aclose()


class NoResponses(Responses):
    """The response to a caller that had stopped its context before the call: no items."""

    def __init__(self) -> None:
        super().__init__(ResponseStream(), False)

    async def __anext__(self) -> Any:
        raise StopAsyncIteration


def at_caller(error: DynamoError) -> DynamoError:
    """Return ``error`` as Dynamo's Python callers expect it.

    It is a ValueError with the text ``<Kind>: <Type>: <message>``, and still of its own class, so
    that either ``except`` clause works. An InvalidArgument that the handler raised stays as it is.
    """
    if type(error) is InvalidArgument or isinstance(error, _CallerError):
        return error
    # Not by the constructor: those of the errors take different arguments.
    caller_class = _caller_class(type(error))
    converted = caller_class.__new__(caller_class)
    converted.__dict__.update(error.__dict__)
    converted.args = (f"{_kind(error)}: {_text(error)}",)
    return converted


class _CallerError(ValueError):
    """The base of the classes that :func:`at_caller` makes."""


_CALLER_CLASSES: dict[type[DynamoError], type[DynamoError]] = {}


def _caller_class(kind: type[DynamoError]) -> type[DynamoError]:
    caller_class = _CALLER_CLASSES.get(kind)
    if caller_class is None:
        caller_class = type(kind.__name__, (kind, _CallerError), {"__module__": __name__})
        _CALLER_CLASSES[kind] = caller_class
    return caller_class


def _kind(error: DynamoError) -> str:
    if isinstance(error, HttpFailure):
        fallback = "InvalidRequest" if error.status < 500 else "Internal"
        return _KIND_OF_STATUS.get(error.status, fallback)
    return next(name for kind, name in _KINDS if isinstance(error, kind))


def _text(error: DynamoError) -> str:
    if isinstance(error, HttpFailure):
        body = {"message": error.message, "code": error.status}
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    if isinstance(error, HandlerCancelled):
        return "CancelledError: "
    if isinstance(error, InvalidRequest):
        return f"{error.cause}: {error.message}"
    return error.message
