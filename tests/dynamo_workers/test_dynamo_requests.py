"""Requests and contexts as handlers and callers of Dynamo use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dynamo._core import Context as CoreContext
from dynamo.llm import LLMUnaryClient
from dynamo.runtime import Client, Context, DistributedRuntime, UnaryClient, serve_unary_endpoint

Serve = Callable[..., Awaitable[Client]]
MakeRuntime = Callable[[], DistributedRuntime]


class UntilStopped:
    """A handler that counts until its context is stopped, and then raises CancelledError."""

    def __init__(self) -> None:
        self.states: list[tuple[bool, bool]] = []
        self.ended = asyncio.Event()

    async def generate(self, request: Any, context: Context) -> AsyncIterator[int]:
        try:
            for number in range(10_000):
                if context.is_stopped():
                    raise asyncio.CancelledError
                await asyncio.sleep(0.01)
                yield number
        finally:
            self.states.append((context.is_stopped(), context.is_killed()))
            self.ended.set()


async def test_a_stop_by_the_caller_reaches_the_handler(serve: Serve) -> None:
    handler = UntilStopped()
    client = await serve(handler.generate)
    context = Context()
    received = []
    async with asyncio.timeout(20):
        async for item in await client.generate("x", context=context):
            received.append(item.data())
            if len(received) == 3:
                context.stop_generating()
        await handler.ended.wait()
    assert received[:3] == [0, 1, 2] and handler.states == [(True, False)]


async def test_a_handler_can_end_in_its_own_way_after_its_caller_left(serve: Serve) -> None:
    ends: list[str] = []
    ended = asyncio.Event()

    async def generate(request: str, context: Context) -> AsyncIterator[int]:
        try:
            for number in range(10_000):
                if request == "checks" and context.is_stopped():
                    ends.append("stopped")
                    return
                await asyncio.sleep(0.01)
                yield number
        except GeneratorExit:
            ends.append("closed")
            raise
        finally:
            ended.set()

    client = await serve(generate)
    async with asyncio.timeout(20):
        for request in ("checks", "ignores"):
            stream = await client.generate(request)
            await stream.__anext__()
            await stream.aclose()
            await ended.wait()
            ended.clear()
    assert ends == ["stopped", "closed"]


@pytest.mark.parametrize("awaited_first", [False, True])
async def test_a_context_stopped_before_the_call_gives_no_items(
    serve: Serve, awaited_first: bool
) -> None:
    handler = UntilStopped()
    client = await serve(handler.generate)
    context = Context()
    if not awaited_first:
        context.stop_generating()
    call = client.generate("x", context=context)
    context.stop_generating()
    async with asyncio.timeout(20):
        assert [item async for item in await call] == []
        await handler.ended.wait()
    assert handler.states == [(True, False)]


async def test_metadata_is_exactly_that_of_the_caller(serve: Serve) -> None:
    async def show(request: Any, context: Context) -> AsyncIterator[Any]:
        yield {"metadata": dict(context.metadata.items()), "id": context.id()}

    client = await serve(show)
    context = Context("r-1", {"tenant": "alpha"})
    [shown] = [item.data() async for item in await client.generate({}, context=context)]
    assert shown == {"metadata": {"tenant": "alpha"}, "id": "r-1"}
    [shown] = [item.data() async for item in await client.generate({})]
    assert shown["metadata"] == {} and shown["id"]


def test_metadata_is_a_live_mapping() -> None:
    context = CoreContext(id="r", metadata={"tenant": "alpha", "region": "west"})
    assert context.metadata.pop("tenant", None) == "alpha"
    assert dict(context.metadata.items()) == {"region": "west"}
    context.metadata["region"] = "east"
    assert context.metadata.get("region") == "east" and "tenant" not in context.metadata
    context.metadata = {"new": "1"}
    assert dict(context.metadata.items()) == {"new": "1"}


async def test_trace_headers_and_spans() -> None:
    assert Context().trace_headers() is None and Context().parent_span_id is None
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    context = Context("r", {"traceparent": parent, "tracestate": "a=b", "other": "x"})
    assert context.trace_headers() == {"traceparent": parent, "tracestate": "a=b"}
    context.notify_first_token()
    with context.start_span("step", {"size": 1}) as span:
        span.set_attribute("a", 1)
        span.add_event("done")
        span.set_status("ok")
    context.current_span().close()
    assert isinstance(context.async_killed_or_stopped(), asyncio.Future)


def test_a_detached_context_outlives_its_origin() -> None:
    context = Context("r", {"a": "b"})
    apart = context.detached("other")
    context.stop_generating()
    assert (apart.id(), apart.metadata, apart.is_stopped()) == ("other", {"a": "b"}, False)


async def test_values_survive_the_round_trip(serve: Serve) -> None:
    async def echo(request: Any, context: Context) -> AsyncIterator[Any]:
        yield request

    client = await serve(echo)
    sent = {"img": b"\xde\xad\xbe\xef", "n": 7, "text": "hello 中", "nothing": None, "f": 0.25}
    [received] = [item.data() async for item in await client.generate(sent)]
    assert received == sent and isinstance(received["img"], bytes)


async def test_envelopes_and_reused_items(serve: Serve) -> None:
    async def annotate(request: Any, context: Context) -> AsyncIterator[Any]:
        yield {"_dynamo_annotated": True, "data": {"a": 1}, "id": None, "comment": None}
        yield {"_dynamo_annotated": True, "data": 2, "id": "i", "event": "e", "comment": ["c"]}
        shared = {"number": 0}
        for number in range(3):
            shared["number"] = number
            yield shared

    client = await serve(annotate)
    plain, noted, *rest = [item async for item in await client.generate({})]
    assert (plain.data(), plain.id(), plain.event(), plain.comments()) == ({"a": 1}, *[None] * 3)
    assert (noted.data(), noted.id(), noted.event(), noted.comments()) == (2, "i", "e", ["c"])
    assert [item.data() for item in rest] == [{"number": number} for number in range(3)]
    raw = [item async for item in await client.generate({}, annotated=False)]
    assert raw[:2] == [{"a": 1}, 2]


FRAMES: list[Any] = [
    {"token_ids": [5], "index": 0},
    {"token_ids": [], "index": 0},
    {"token_ids": [0, 127, 128, 65536, 2**32 - 1], "index": 2},
    {"token_ids": [True], "index": 0},
    {"token_ids": [-1], "index": True},
    {"token_ids": [1, "two", None, 2.5], "index": 0},
    {"index": 0, "token_ids": [1], "finish_reason": "stop"},
    "text",
    [1, 2, 3],
]


@pytest.mark.parametrize("closes", [False, True])
async def test_a_handler_may_push_its_items(serve: Serve, closes: bool) -> None:
    async def push(
        request: Any, context: Context, response_sender: Any = None
    ) -> AsyncIterator[Any]:
        for frame in FRAMES:
            response_sender.send(frame)
        response_sender.send({"token_ids": (1, 2), "wide": [2**64, -(2**64)]})
        response_sender.send({"_dynamo_annotated": True, "data": "inner"})
        if closes:
            response_sender.close()
        return
        yield

    client = await serve(push)
    received = [item.data() async for item in await client.generate({})]
    wide = [(2**64).to_bytes(16, "big"), (-(2**64)).to_bytes(16, "big", signed=True)]
    assert received == [*FRAMES, {"token_ids": [1, 2], "wide": wide}, "inner"]
    assert received[3]["token_ids"][0] is True


async def test_an_integer_beyond_128_bits_is_an_error(serve: Serve) -> None:
    async def huge(request: Any) -> AsyncIterator[Any]:
        yield {"n": 2**128}

    client = await serve(huge)
    with pytest.raises(ValueError, match="more than 128 bits"):
        _ = [item async for item in await client.generate({})]


async def test_a_pushing_handler_may_close_with_an_error(serve: Serve) -> None:
    async def push(request: Any, context: Any, response_sender: Any) -> AsyncIterator[Any]:
        response_sender.close_with_error("no more")
        response_sender.send(1)
        return
        yield

    client = await serve(push)
    with pytest.raises(ValueError, match="no more"):
        _ = [item async for item in await client.generate({})]


async def test_an_instance_names_its_transport(serve: Serve) -> None:
    async def empty(request: Any) -> AsyncIterator[int]:
        return
        yield 1

    client = await serve(empty, "ns.backend.other")
    [instance] = client.instances()
    path = f"ns/{instance.component}/{instance.endpoint}"
    assert (instance.namespace, path) == ("ns", "ns/backend/other")
    assert instance.instance_id in client.instance_ids()
    assert instance.transport.kind == "tcp"
    assert instance.transport.address.startswith("127.0.0.1:")
    assert instance.transport.address.endswith(path)
    assert str(instance.instance_id) in repr(instance)


async def test_unary_calls(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    inner, outer = runtime.endpoint("ns.inner.do"), runtime.endpoint("ns.outer.do")
    started, stopped = asyncio.Event(), asyncio.Event()

    async def answer(request: Any, *, context: Context) -> Any:
        if request == "wait":
            started.set()
            await context.async_killed_or_stopped()
            stopped.set()
            raise asyncio.CancelledError
        return {"value": request, "id": context.id()}

    async def relay(request: Any, *, context: Context) -> Any:
        return await UnaryClient(await inner.client()).complete(request, context=context)

    for endpoint, handler in ((inner, answer), (outer, relay)):
        runtime.tasks.spawn(serve_unary_endpoint(endpoint, handler))
    client = await outer.client()
    async with asyncio.timeout(20):
        await client.wait_for_instances()
        await (await inner.client()).wait_for_instances()
        answered = await UnaryClient(client).complete("x", context=Context("r-9"))
        assert answered == {"value": "x", "id": "r-9"}
        context = Context()
        call = asyncio.ensure_future(UnaryClient(client).complete("wait", context=context))
        await started.wait()
        context.stop_generating()
        await stopped.wait()
        with pytest.raises((RuntimeError, ValueError)):
            await call


async def test_a_completion_is_collected(serve: Serve) -> None:
    async def generate(request: Any, *, context: Context) -> AsyncIterator[Any]:
        yield {"token_ids": [7], "index": 0}
        yield {"token_ids": [8, 9], "index": 0, "finish_reason": "stop"}

    client = await serve(generate)
    request = {"token_ids": [1], "sampling_options": {"n": 1}, "output_options": {}}
    completion = await LLMUnaryClient(client).complete(request)
    assert completion == {"token_ids": [7, 8, 9], "index": 0, "finish_reason": "stop"}


async def test_a_path_may_have_slashes_in_its_namespace(serve: Serve) -> None:
    async def one(request: Any) -> AsyncIterator[int]:
        yield 1

    client = await serve(one, "examples/pipeline.x.y")
    assert [item.data() async for item in await client.generate({})] == [1]
    assert client.instances()[0].namespace == "examples/pipeline"
