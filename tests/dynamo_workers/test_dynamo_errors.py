"""Errors of a handler as a Python caller receives them; the texts are those of Dynamo 1.6.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dynamo.errors import DynamoError
from dynamo.llm import HttpError
from dynamo.llm.exceptions import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
    WorkerUnavailable,
)
from dynamo.runtime import Client, Context, DistributedRuntime

MakeRuntime = Callable[[], DistributedRuntime]
Serve = Callable[..., Awaitable[Client]]


class StatusError(Exception):
    """An error with the two attributes of ``dynamo.common.http.HttpStatusError``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


async def collect(client: Client, request: Any = None, **options: Any) -> list[Any]:
    async with asyncio.timeout(20):
        stream = await client.generate(request, **options)
        return [item.data() async for item in stream]


EXPECTED: list[tuple[BaseException, str]] = [
    (ValueError("boom"), "InvalidRequest: ValueError: boom"),
    (TypeError("boom"), "InvalidRequest: TypeError: boom"),
    (RuntimeError("boom"), "Internal: RuntimeError: boom"),
    (KeyError("boom"), "Internal: KeyError: 'boom'"),
    (BaseException("boom"), "Internal: BaseException: boom"),
    (TimeoutError("boom"), "DeadlineExceeded: TimeoutError: boom"),
    (ConnectionError("boom"), "Unavailable: ConnectionError: boom"),
    (GeneratorExit(), "Unavailable: engine shutting down"),
    (asyncio.CancelledError(), "Cancelled: CancelledError: "),
    (HttpError(400, "boom"), 'InvalidRequest: {"message":"boom","code":400}'),
    (HttpError(404, "boom"), 'NotFound: {"message":"boom","code":404}'),
    (HttpError(415, "boom"), 'UnsupportedMedia: {"message":"boom","code":415}'),
    (HttpError(418, "boom"), 'InvalidRequest: {"message":"boom","code":418}'),
    (HttpError(429, "boom"), 'RateLimited: {"message":"boom","code":429}'),
    (HttpError(500, "boom"), 'Internal: {"message":"boom","code":500}'),
    (HttpError(503, "boom"), 'Unavailable: {"message":"boom","code":503}'),
    (HttpError(504, "boom"), 'DeadlineExceeded: {"message":"boom","code":504}'),
    (StatusError(415, "boom"), 'UnsupportedMedia: {"message":"boom","code":415}'),
    (Cancelled("boom"), "Cancelled: boom"),
    (CannotConnect("boom"), "Unavailable: boom"),
    (ConnectionTimeout("boom"), "DeadlineExceeded: boom"),
    (Disconnected("boom"), "Unavailable: boom"),
    (EngineShutdown("boom"), "Unavailable: boom"),
    (StreamIncomplete("boom"), "Unavailable: boom"),
    (Unknown("boom"), "Internal: boom"),
    (WorkerUnavailable("boom"), "Unavailable: boom"),
]


@pytest.mark.parametrize("begun", [False, True], ids=["at once", "after an item"])
@pytest.mark.parametrize(("error", "text"), EXPECTED, ids=lambda one: repr(one)[:40])
async def test_an_error_is_a_value_error_with_its_kind(
    serve: Serve, error: BaseException, text: str, begun: bool
) -> None:
    async def fail(request: Any, context: Context) -> AsyncIterator[int]:
        if begun:
            yield 1
        raise error

    client = await serve(fail)
    with pytest.raises(ValueError) as found:
        await collect(client)
    assert str(found.value) == text


@pytest.mark.parametrize(
    ("error", "is_traced"),
    [
        (HttpError(418, "boom"), False),
        (StatusError(415, "boom"), False),
        (InvalidArgument("boom"), False),
        (HttpError(503, "boom"), True),
        (ValueError("boom"), True),
    ],
)
async def test_a_refused_request_is_one_line_in_the_log(
    serve: Serve, error: BaseException, is_traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's mistake, often repeated, is no failure of the handler: no traceback."""

    async def refuse(request: Any) -> AsyncIterator[int]:
        raise error
        yield 1

    client = await serve(refuse)
    with pytest.raises((ValueError, InvalidArgument)):
        await collect(client)
    (record,) = (one for one in caplog.records if one.name == "dynamo.runtime.requests.stream")
    assert bool(record.exc_info) == is_traced
    assert ("refused: " in record.getMessage()) != is_traced


async def test_an_error_keeps_its_own_class_too(serve: Serve) -> None:
    async def fail(request: Any) -> AsyncIterator[int]:
        yield 1
        raise Disconnected("gone")

    client = await serve(fail)
    with pytest.raises(Disconnected) as found:
        await collect(client)
    assert isinstance(found.value, ValueError) and isinstance(found.value, DynamoError)
    assert found.value.message == "gone"


async def test_an_invalid_argument_keeps_its_class_and_text(serve: Serve) -> None:
    async def fail(request: Any) -> AsyncIterator[int]:
        raise InvalidArgument("boom")
        yield 1

    client = await serve(fail)
    with pytest.raises(InvalidArgument) as found:
        await collect(client)
    assert type(found.value) is InvalidArgument and str(found.value) == "boom"


async def test_an_item_without_an_encoding_is_an_error(serve: Serve) -> None:
    async def yield_object(request: Any) -> AsyncIterator[Any]:
        yield 1
        yield object()

    client = await serve(yield_object)
    with pytest.raises(ValueError, match="failed serializing Python response"):
        await collect(client)


async def test_an_error_event_is_an_error(serve: Serve) -> None:
    async def annotate(request: Any) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "event": "error", "comment": ["bad", "luck"]}

    client = await serve(annotate)
    with pytest.raises(ValueError, match=r"^Internal: bad luck$"):
        await collect(client)


async def test_a_handler_that_stops_itself_leaves_an_incomplete_stream(serve: Serve) -> None:
    states = []

    async def stop(request: Any, context: Context) -> AsyncIterator[int]:
        yield 0
        yield 1
        context.stop_generating()
        states.append((context.is_stopped(), context.is_killed()))

    client = await serve(stop)
    stream = await client.generate(None)
    received = []
    with pytest.raises(ValueError, match="Stream ended before generation completed"):
        async for item in stream:
            received.append(item.data())
    assert received == [0, 1] and states == [(True, False)]


async def test_a_shut_down_engine_leaves_routing_until_it_registers_again(
    serve: Serve, make_runtime: MakeRuntime
) -> None:
    down = [EngineShutdown("down")]

    async def fail_once(request: Any) -> AsyncIterator[str]:
        if down:
            raise down.pop()
        yield "well"

    runtime = make_runtime()
    client = await serve(fail_once, runtime=runtime)
    gone, back = asyncio.Event(), asyncio.Event()
    client.on_change(lambda added, removed: (gone if removed else back).set())
    back.clear()
    with pytest.raises(ValueError, match="Unavailable: down"):
        await collect(client)
    async with asyncio.timeout(20):
        await gone.wait()
    assert client.instance_ids() == []
    await runtime.endpoint("ns.backend.generate").register_endpoint_instance()
    async with asyncio.timeout(20):
        await back.wait()
    assert await collect(client) == ["well"]


async def test_calls_without_a_worker_fail_with_dynamos_texts(serve: Serve) -> None:
    async def empty(request: Any) -> AsyncIterator[int]:
        return
        yield 1

    client = await serve(empty)
    with pytest.raises(Exception, match="instance_id=12345 not found for endpoint ns/backend/gen"):
        await client.direct({}, 12345)
