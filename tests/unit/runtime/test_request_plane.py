"""The request plane between a real client and a real server, over UNIX sockets and TCP."""

from __future__ import annotations

import asyncio
import gc
import socket
import stat
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from request_kit import ENDPOINT, Pair, Recorder, open_stream, pair, until

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import (
    Cancelled,
    CannotConnect,
    Disconnected,
    EngineFailure,
    EngineShutdown,
    InvalidArgument,
    InvalidRequest,
    Overloaded,
    UnknownEndpoint,
)
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests import (
    EndpointStats,
    RequestClient,
    RequestServer,
    ResponseStream,
    ServerStream,
    generator_handler,
)
from dynamo.runtime.requests.context import Context

SMALL = RequestPlaneSettings(max_message_size_bytes=4096)
CALLS = ("pause", "resume", "kill")


def echo(stream: ServerStream, payload: bytes) -> None:
    stream.send(payload)
    stream.end()


@pytest.mark.parametrize("kind", ["uds", "tcp"])
async def test_items_arrive_in_order_and_the_end_once(tmp_path: Path, kind: str) -> None:
    def count(stream: ServerStream, payload: bytes) -> None:
        for index in range(int(payload)):
            stream.send(b"%d" % index)
        stream.end()
        stream.end()
        stream.send(b"after the end")

    async with pair(tmp_path, kind) as plane:
        plane.server.register(ENDPOINT, count)
        sinks = [plane.open(b"%d" % n)[1] for n in (0, 1, 1000)]
        for sink, n in zip(sinks, (0, 1, 1000), strict=True):
            await sink.finish()
            assert sink.items == [b"%d" % i for i in range(n)] and sink.ends == 1
        assert plane.tables() == (0, 0, 0, 0)


async def test_endpoint_headers_and_request_id_reach_the_handler(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        plane.open(headers={"k": "v"}, context=Context("req-1"))
        stream = await plane.held()
        assert stream.endpoint == ENDPOINT
        assert stream.headers == {"k": "v", "request-id": "req-1"}
        assert stream.context.id() == "req-1" and stream.context.metadata["k"] == "v"


async def test_what_a_loop_turn_writes_leaves_in_one_write(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        sinks = [plane.open()[1] for _ in range(3)]
        await plane.held(3)
        [connection] = plane.server._connections
        writes: list[int] = []
        real, transport = connection._transport, Counting(connection._transport, writes)
        connection._transport = transport  # type: ignore[assignment]
        for stream in plane.streams:
            stream.send(b"a")
            stream.send(b"b")
            stream.end()
        for sink in sinks:
            assert (await sink.finish()).items == [b"a", b"b"]
        assert len(writes) == 1
        connection._transport = real


class Counting:
    """A transport that counts writes."""

    def __init__(self, inner: Any, writes: list[int]) -> None:
        self._inner, self._writes = inner, writes
        self.is_closing = inner.is_closing

    def write(self, data: bytes) -> None:
        self._writes.append(len(data))
        self._inner.write(data)


async def test_a_removed_socket_is_bound_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo.runtime.requests.server.SOCKET_CHECK_S", 0.01)
    directory = tmp_path / "sockets"
    directory.mkdir()
    async with pair(directory) as plane, asyncio.timeout(10):
        plane.server.register(ENDPOINT, plane.hold)
        _, early = plane.open()
        await plane.held()
        directory.rename(tmp_path / "away")
        while "new clients cannot connect" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        directory.mkdir()
        client = RequestClient()
        late = Recorder()
        while len(plane.streams) < 2:
            late = Recorder()
            client.open(plane.address, ENDPOINT, {}, b"", late)
            await asyncio.sleep(0.02)
        for stream in plane.streams:
            stream.end()
        assert (await early.finish()).ends == (await late.finish()).ends == 1
        assert caplog.text.count("new clients cannot connect") == 1
        await client.close()
    assert not list(directory.iterdir())


async def test_stop_reaches_the_handler_which_still_answers(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, plane.hold)
        call, sink = plane.open()
        stream = await plane.held()
        call.stop()
        await stream.context.async_killed_or_stopped()
        assert stream.context.is_stopped() and not stream.context.is_killed()
        stream.send(b"last")
        stream.end()
        assert (await sink.finish()).items == [b"last"]
        assert stats.cancellations.value == 1


async def test_kill_silences_the_sink_and_closes_the_stream(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, plane.hold)
        call, sink = plane.open()
        stream = await plane.held()
        call.kill()
        call.kill()
        await stream.context.async_killed_or_stopped()
        assert stream.context.is_killed() and stream.closed
        stream.send(b"dropped")
        stream.end()
        await plane.quiet()
        assert sink.items == [] and not sink.over
        assert stats.cancellations.value == 1 and stats.inflight.value == 0
        assert stats.response_bytes.value == 0
        assert plane.tables() == (0, 0, 0, 0)


async def test_what_a_killed_stream_still_sends_reaches_no_later_one(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        call, _ = plane.open()
        killed = await plane.held()
        call.kill()
        _, later = plane.open()
        killed.send(b"of the killed one")  # before the kill has arrived
        (await plane.held(2)).end()
        assert (await later.finish()).items == []


async def test_a_cancelled_context_cancels_the_call(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        context = Context("c")
        call, sink = plane.open(context=context)
        stream = await plane.held()
        context.stop_generating()
        await stream.context.async_killed_or_stopped()
        context.kill()
        assert isinstance(sink.errors[0], Cancelled)
        await plane.quiet()
        assert stream.context.is_killed()
        kept = weakref.ref(sink)
        del call, sink
        gc.collect()
        assert kept() is None, "the context still holds the call that it ended"
        _, late = plane.open(context=context)
        assert not late.over
        assert isinstance((await late.finish()).errors[0], Cancelled)
        assert len(plane.streams) == 1


async def test_cancellation_races_change_nothing_after_the_end(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, echo)
        context = Context()
        call, sink = plane.open(b"x", context=context)
        await sink.finish()
        for act in (call.stop, call.kill, call.pause, call.resume, context.kill):
            act()
            act()
        plane.server.register("ns/worker/hold", plane.hold)
        call, sink = plane.open(endpoint="ns/worker/hold")
        stream = await plane.held()
        stream.end()
        call.stop()
        call.kill()
        stream.cancel("kill")
        await plane.quiet()
        assert stats.cancellations.value == 0 and not sink.over
        assert plane.tables() == (0, 0, 0, 0)


async def test_a_disconnected_client_kills_its_streams_and_counts_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, plane.hold)
        call, _ = plane.open()
        plane.open()
        first, second = await plane.held(1), await plane.held(2)
        call.stop()
        await first.context.async_killed_or_stopped()
        await plane.client.close()
        await second.context.async_killed_or_stopped()
        assert first.context.is_killed() and second.context.is_killed()
        assert stats.cancellations.value == 2 and stats.inflight.value == 0


async def test_failures_have_their_own_errors(tmp_path: Path) -> None:
    def raise_value(stream: ServerStream, payload: bytes) -> None:
        raise ValueError("bad field")

    def raise_other(stream: ServerStream, payload: bytes) -> None:
        stream.send(b"one")
        raise KeyError("boom")

    async with pair(tmp_path) as plane:
        plane.server.register("a/b/value", raise_value)
        plane.server.register("a/b/other", raise_other)
        expected = {
            "a/b/value": (InvalidRequest, "bad field"),
            "a/b/other": (EngineFailure, "KeyError: 'boom'"),
            "a/b/none": (UnknownEndpoint, "Unknown endpoint: a/b/none"),
        }
        for endpoint, (kind, text) in expected.items():
            [error] = (await plane.open(endpoint=endpoint)[1].finish()).errors
            assert type(error) is kind and error.message == text
        with pytest.raises(ValueError, match="already served"):
            plane.server.register("a/b/value", echo)
        plane.server.unregister("a/b/value")
        plane.server.unregister("a/b/value")
        [error] = (await plane.open(endpoint="a/b/value")[1].finish()).errors
        assert isinstance(error, UnknownEndpoint) and error.retryable


async def test_messages_over_the_limit_fail_alone(tmp_path: Path) -> None:
    def answer_large(stream: ServerStream, payload: bytes) -> None:
        stream.send(bytes(5000))
        stream.send(b"never")

    async with pair(tmp_path, settings=SMALL) as plane:
        plane.server.register(ENDPOINT, echo)
        plane.server.register("a/b/large", answer_large)
        _, fine = plane.open(bytes(4000))
        _, large = plane.open(bytes(4096))
        _, answered = plane.open(endpoint="a/b/large")
        assert not large.over
        assert (await fine.finish()).items == [bytes(4000)]
        [error] = (await large.finish()).errors
        assert isinstance(error, InvalidArgument) and "DYN_TCP_MAX_MESSAGE_SIZE" in error.message
        [error] = (await answered.finish()).errors
        assert isinstance(error, EngineFailure) and "5000 bytes" in error.message
        assert answered.items == []


async def test_a_peer_with_a_smaller_limit_skips_and_answers(tmp_path: Path) -> None:
    async with pair(tmp_path, settings=SMALL) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        generous = RequestClient()
        kept, refused = Recorder(), Recorder()
        generous.open(plane.address, ENDPOINT, {}, b"small", kept)
        generous.open(plane.address, ENDPOINT, {}, bytes(1_000_000), refused)
        [error] = (await refused.finish()).errors
        assert isinstance(error, InvalidArgument) and "1000" in error.message
        (await plane.held()).end()
        assert (await kept.finish()).ends == 1
        await generous.close()


async def test_connect_failures(tmp_path: Path) -> None:
    client = RequestClient(RequestPlaneSettings(connect_timeout_s=0.2))
    for address in (f"uds:{tmp_path / 'none'}", "tcp:127.0.0.1:1", f"uds:/{'x' * 200}"):
        sinks = [Recorder() for _ in range(2)]
        for sink in sinks:
            client.open(address, ENDPOINT, {}, b"", sink)
            assert not sink.over
        for sink in sinks:
            assert isinstance((await sink.finish()).errors[0], CannotConnect)
    for bad in ("http://x", "tcp:nohost", "uds:", "tcp:h:99999"):
        with pytest.raises(InvalidArgument):
            client.open(bad, ENDPOINT, {}, b"", Recorder())
    assert len(client) == 0
    await client.close()


async def test_a_lost_connection_fails_its_streams_and_the_next_open_connects_again(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, sink = plane.open()
        stream = await plane.held()
        plane.client.connection(plane.address).lose(Disconnected("lost"))
        assert isinstance(sink.errors[0], Disconnected)
        _, again = plane.open()
        (await plane.held(2)).end()
        assert (await again.finish()).ends == 1
        await stream.context.async_killed_or_stopped()


async def test_release_waits_for_the_last_stream(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, sink = plane.open()
        stream = await plane.held()
        connection = plane.client.connection(plane.address)
        plane.client.release(plane.address)
        stream.send(b"still here")
        stream.end()
        assert (await sink.finish()).items == [b"still here"] and sink.ends == 1
        assert connection.closed and plane.client.connection(plane.address) is not connection


async def test_drain_lets_graceful_streams_finish_and_aborts_the_others(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        plane.server.register("ns/worker/cut", plane.hold, graceful_shutdown=False)
        _, kept = plane.open()
        stream = await plane.held()
        _, abort = plane.open(endpoint="ns/worker/cut")
        await plane.held(2)
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(plane.server.drain(30))
            [error] = (await abort.finish()).errors
            assert isinstance(error, EngineShutdown) and plane.streams[1].context.is_killed()
            [error] = (await plane.open()[1].finish()).errors
            assert isinstance(error, EngineShutdown) and error.retryable
            assert not draining.done()
            stream.send(b"done")
            stream.end()
            assert (await kept.finish()).items == [b"done"]
        assert draining.result() == 1


async def test_drain_aborts_at_its_deadline_unregistered_streams_included(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        plane.server.register("a/b/echo", echo)
        _, sink = plane.open()
        await plane.held()
        plane.server.unregister(ENDPOINT)
        assert await plane.server.drain(0.05, ENDPOINT) == 1
        assert isinstance((await sink.finish()).errors[0], EngineShutdown)
        assert (await plane.open(b"y", endpoint="a/b/echo")[1].finish()).items == [b"y"]
        assert await plane.server.drain(5) == 0


async def test_close_leaves_no_socket_and_ends_streams(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        path = tmp_path / "plane.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        plane.server.register(ENDPOINT, plane.hold)
        _, sink = plane.open()
        await plane.held()
        await plane.server.close()
        assert isinstance((await sink.finish()).errors[0], EngineShutdown)
        assert not path.exists()
        [error] = (await plane.open()[1].finish()).errors
        assert error.retryable
        assert isinstance((await plane.open()[1].finish()).errors[0], CannotConnect)


async def test_a_dead_socket_file_is_replaced_a_live_one_is_not(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "plane.sock"))
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, echo)
        with pytest.raises(CannotConnect, match="in use"):
            await RequestServer().start(plane.address)
        assert (await plane.open(b"alive")[1].finish()).items == [b"alive"]


async def test_a_successors_socket_is_left_alone(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        (tmp_path / "plane.sock").unlink()
        successor = RequestServer()
        successor.register(ENDPOINT, echo)
        await successor.start(plane.address)
        await plane.server.close()
        try:
            assert (await plane.open(b"new")[1].finish()).items == [b"new"]
        finally:
            await successor.close()
        assert not (tmp_path / "plane.sock").exists()


async def test_at_capacity_requests_are_refused(tmp_path: Path) -> None:
    async with pair(tmp_path, settings=RequestPlaneSettings(max_streams=2)) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        sinks = [plane.open()[1] for _ in range(3)]
        [error] = (await sinks[2].finish()).errors
        assert isinstance(error, Overloaded)
        assert error.message == "Server overloaded: worker at capacity"
        (await plane.held()).end()
        await sinks[0].finish()
        plane.open()
        await plane.held(3)


async def test_counters(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        stats = EndpointStats()
        assert plane.server.register(ENDPOINT, echo, stats=stats) is stats
        for _ in range(3):
            await plane.open(b"12345")[1].finish()
        assert (stats.requests.value, stats.inflight.value) == (3, 0)
        assert (stats.request_bytes.value, stats.response_bytes.value) == (15, 15)
        assert sum(stats.duration_s.counts) == 3 and stats.cancellations.value == 0


async def test_a_failing_sink_ends_its_own_stream_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        def on_data(self, payload: bytes) -> None:
            raise RuntimeError("cannot take it")

    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, broken = plane.open(sink=Broken())
        _, good = plane.open()
        await plane.held(2)
        for stream in plane.streams:
            stream.send(b"x")
        await good.have(1)
        assert "cannot take it" in broken.errors[0].message
        await plane.streams[0].context.async_killed_or_stopped()
        plane.streams[1].end()
        assert (await good.finish()).ends == 1


async def _numbers(request: dict[str, int], context: Context) -> Any:
    for index in range(request["n"]):
        yield {"i": index}


async def test_generators_on_both_ends(tmp_path: Path) -> None:
    tasks = Tasks("handlers")
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, generator_handler(_numbers, tasks))
        answer = open_stream(plane.client, plane.address, {"n": 3})
        assert [item async for item in answer] == [{"i": 0}, {"i": 1}, {"i": 2}]
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        await answer.aclose()
    await tasks.close()


async def test_what_generators_raise(tmp_path: Path) -> None:
    async def fail(request: str) -> Any:
        yield "first"
        if request == "value":
            raise ValueError("wrong")
        if request == "cancel":
            raise asyncio.CancelledError
        if request == "overload":
            raise Overloaded("full")
        raise ZeroDivisionError("oops")

    tasks = Tasks("handlers")
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, generator_handler(fail, tasks))
        for request, kind in {
            "value": InvalidArgument,
            "cancel": Cancelled,
            "overload": Overloaded,
            "else": EngineFailure,
        }.items():
            answer = open_stream(plane.client, plane.address, request)
            assert await anext(answer) == "first"
            with pytest.raises(kind):
                await anext(answer)
            with pytest.raises(StopAsyncIteration):
                await anext(answer)
        _, garbage = plane.open(b"\xc1")
        assert isinstance((await garbage.finish()).errors[0], InvalidArgument)
    await tasks.close()


async def test_a_dropped_iterator_kills_and_the_generator_is_closed(tmp_path: Path) -> None:
    closed, go = asyncio.Event(), asyncio.Event()
    contexts: list[Context] = []

    async def deaf(request: None, context: Context) -> Any:
        contexts.append(context)
        try:
            yield 1
            await go.wait()
            yield 2
            yield 3
        finally:
            closed.set()

    tasks = Tasks("handlers")
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, generator_handler(deaf, tasks))
        answer = open_stream(plane.client, plane.address, None)
        assert await anext(answer) == 1
        del answer
        gc.collect()
        await contexts[0].async_killed_or_stopped()
        assert contexts[0].is_killed()
        go.set()
        await until(closed)
    await tasks.close()


async def test_closing_the_handlers_hands_requests_back(tmp_path: Path) -> None:
    async def endless(request: None) -> Any:
        yield 1
        await asyncio.Event().wait()

    tasks = Tasks("handlers")
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, generator_handler(endless, tasks))
        answer = open_stream(plane.client, plane.address, None)
        assert await anext(answer) == 1
        await tasks.close()
        with pytest.raises(EngineShutdown):
            await anext(answer)


async def test_a_slow_reader_pauses_its_generator_and_no_other_stream(tmp_path: Path) -> None:
    made = 0

    async def flood(request: int) -> Any:
        nonlocal made
        for _ in range(request):
            made += 1
            yield b"x" * 100
            await asyncio.sleep(0)

    tasks = Tasks("handlers")
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, generator_handler(flood, tasks))
        plane.server.register("a/b/echo", echo)
        slow = open_stream(plane.client, plane.address, 20_000)
        assert await anext(slow) == b"x" * 100
        while not slow.sink._paused:
            await plane.quiet()
        await plane.quiet()
        stopped_at = made
        assert (await plane.open(b"fast", endpoint="a/b/echo")[1].finish()).items == [b"fast"]
        assert made == stopped_at < 10_000
        assert sum([1 async for _ in slow]) == 19_999
    await tasks.close()


@pytest.mark.parametrize(("count", "size"), [(1024, 1), (64, 16384)])
async def test_a_pause_ends_when_half_of_the_buffer_is_read(count: int, size: int) -> None:
    """Sooner, a reader that is slow would switch the handler on and off with each item."""
    calls: list[str] = []
    stream = SimpleNamespace(closed=True, **{name: partial(calls.append, name) for name in CALLS})
    answer = ResponseStream(bytes).attach(stream)  # type: ignore[arg-type]
    for _ in range(count):
        assert calls == []
        answer.sink.on_data(b"x" * size)
    for number in range(count // 2):
        assert calls == ["pause"], number
        await anext(answer)
    await anext(answer)
    assert calls == ["pause", "resume"]
    for _ in range(count):
        answer.sink.on_data(b"x" * size)
    assert calls == ["pause", "resume", "pause"]


async def test_a_handler_that_ignores_the_pause_is_killed_at_the_cap(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        answer = open_stream(plane.client, plane.address, None)
        stream = await plane.held()
        while not stream.closed:
            for _ in range(500):
                stream.send(b"\xa1x")
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="behind"):
            [item async for item in answer]
        assert stream.context.is_killed()
        await plane.quiet()
        assert plane.tables() == (0, 0, 0, 0)


async def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        sinks = [plane.open(b"%d" % i)[1] for i in range(1000)]
        await plane.held(1000)
        assert plane.tables()[:3] == (1000, 1000, 1000)
        assert len(plane.client.connection(plane.address).streams) == 1000
        for step in range(20):
            for stream in plane.streams:
                stream.send(b"%d" % step)
            await asyncio.sleep(0)
        for stream in plane.streams:
            stream.end()
        for sink in sinks:
            assert (await sink.finish()).items == [b"%d" % step for step in range(20)]
        assert plane.tables() == (0, 0, 0, 0)


async def test_thousands_of_streams_leave_nothing_behind(tmp_path: Path) -> None:
    def mixed(stream: ServerStream, payload: bytes) -> None:
        plane.streams.append(stream)
        stream.send(payload)
        if int(payload) % 3:
            stream.end()

    async with pair(tmp_path) as plane:
        stats = plane.server.register(ENDPOINT, mixed)
        for batch in range(30):
            calls = [plane.open(b"%d" % i, context=Context()) for i in range(100)]
            for call, sink in calls:
                await sink.have(1)
                (call.kill, call.stop)[batch % 2]()
            await plane.quiet()
            for stream in plane.streams:
                stream.end()
            plane.streams.clear()
        await plane.quiet()
        assert plane.tables() == (0, 0, 0, 0)
        assert stats.requests.value == 3000 and stats.inflight.value == 0
        assert stats.cancellations.value == 30 * 34


async def test_the_numbers_wrap_around_streams_that_are_still_open(tmp_path: Path) -> None:
    async with pair(tmp_path) as plane:
        plane.server.register(ENDPOINT, plane.hold)
        _, first = plane.open()
        await plane.held()
        plane.client._connections[plane.address]._number = 0xFFFF_FFFE
        sinks = [plane.open()[1] for _ in range(3)]
        await plane.held(4)
        for stream in plane.streams:
            stream.end()
        for sink in (first, *sinks):
            assert (await sink.finish()).ends == 1


async def test_address_of_a_pair(tmp_path: Path) -> None:
    async with pair(tmp_path, "tcp") as plane:
        assert isinstance(plane, Pair) and plane.address.startswith("tcp:127.0.0.1:")
        assert int(plane.address.rpartition(":")[2]) > 0


async def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_MAX_MESSAGE_SIZE", "2048")
    monkeypatch.setenv("DYN_TCP_CONNECT_TIMEOUT", "1.5")
    client, server = RequestClient(), RequestServer()
    assert server.settings.max_message_size_bytes == 2048
    assert client.settings.connect_timeout_s == 1.5
    await client.close()
    await server.close()
