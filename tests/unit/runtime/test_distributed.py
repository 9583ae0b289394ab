"""Serving and calling in one process over real sockets, on memory and on file discovery."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from until import Changes

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.errors import (
    Cancelled,
    CannotConnect,
    ConfigError,
    DynamoError,
    EngineDied,
    EngineFailure,
    EngineKilled,
    EngineShutdown,
    HttpError,
    HttpFailure,
    NoInstances,
    WorkerAtCapacity,
    WorkerLeaving,
    WorkerSilent,
    WorkerUnavailable,
)
from dynamo.protocols import codec
from dynamo.protocols.control import EndpointRecord
from dynamo.protocols.engine import (
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo.runtime import Annotated, Client, Context, DistributedRuntime, dynamo_endpoint
from dynamo.runtime.process.tasks import Tasks


class Deployment:
    """Any number of runtimes that share one store."""

    def __init__(self, root: Path, backend: str, plane: str) -> None:
        self.settings = RuntimeSettings(
            state_dir=str(root), discovery_backend=backend, request_plane=plane
        )
        self.tasks = Tasks("test")
        self._runtimes: list[DistributedRuntime] = []

    def runtime(self, **system: Any) -> DistributedRuntime:
        given = {"grace_period_s": 0.0, "shutdown_timeout_s": 5.0, **system}
        runtime = DistributedRuntime(None, self.settings, system=SystemSettings(**given))
        self._runtimes.append(runtime)
        return runtime

    def serve(
        self, runtime: DistributedRuntime, path: str, handler: Any, **options: Any
    ) -> asyncio.Task[None]:
        return self.tasks.spawn(runtime.endpoint(path).serve_endpoint(handler, **options))

    async def client(self, path: str) -> Client:
        client = await self.runtime().endpoint(path).client()
        async with asyncio.timeout(20):
            await client.wait_for_instances()
        return client

    async def close(self) -> None:
        for runtime in reversed(self._runtimes):
            await runtime.close()
        await self.tasks.close()


@pytest.fixture(params=["file-uds", "file-tcp", "mem-uds"])
async def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Deployment]:
    backend, plane = request.param.split("-")
    made = Deployment(tmp_path, backend, plane)
    yield made
    await made.close()


async def until_count(client: Client, count: int) -> None:
    """Wait until the client sees ``count`` instances."""
    changes = Changes()
    client.on_change(changes.changed)
    await changes.until(lambda: len(client.instance_ids()) == count)


async def echo(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    for word in request["text"].split():
        yield {"word": word, "id": context.id(), "user": context.metadata.get("user")}


async def test_what_is_closed_before_its_runtime_is_not_kept(deployment: Deployment) -> None:
    """A frontend opens them for each model that comes, a planner for each command to an engine."""
    runtime = deployment.runtime()
    client = await runtime.endpoint("test.backend.generate").client()
    subscription = runtime.subscribe("test", "backend", "load", lambda *event: None)
    await subscription.ready()
    kept: list[weakref.ref[object]] = [weakref.ref(client), weakref.ref(subscription)]
    client.close()
    subscription.close()
    del client, subscription
    gc.collect()
    assert [one() for one in kept] == [None, None]


async def test_tasks_that_ask_for_a_publisher_at_once_share_one(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the lease; a second socket would take the address of the first."""
    worker = deployment.runtime()
    grant = worker.discovery.grant

    async def slowly(*arguments: Any) -> Any:
        await asyncio.sleep(0)  # as from etcd
        return await grant(*arguments)

    monkeypatch.setattr(worker.discovery, "grant", slowly)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        asked = [group.create_task(worker.publisher("ns", "comp", "kv-events")) for _ in range(3)]
    first, *others = [one.result() for one in asked]
    assert all(one is first for one in others)


async def test_stream_round_trip(deployment: Deployment) -> None:
    worker = deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", echo)
    client = await deployment.client("dyn://ns.comp.gen")
    assert client.instance_ids() == [worker.instance_id]
    assert client.instances()[0].namespace == "ns"

    context = Context("req-7", {"user": "ann"})
    items = [item async for item in await client.random({"text": "a b"}, context=context)]
    assert [type(item) for item in items] == [Annotated, Annotated]
    assert items[0].data() == {"word": "a", "id": "req-7", "user": "ann"}
    assert (items[0].id(), items[0].event(), items[0].comments()) == (None, None, None)
    assert not items[0].is_error()
    for way in (client.generate, client.round_robin):
        raw = [item async for item in await way({"text": "x"}, annotated=False)]
        assert raw[0]["word"] == "x"
    stream = await client.direct({"text": "d"}, worker.instance_id, annotated=False)
    assert [item["word"] async for item in stream] == ["d"]


async def test_errors_arrive_as_they_are_named(deployment: Deployment) -> None:
    async def fail(request: dict[str, Any]) -> AsyncIterator[int]:
        yield 1
        if request["how"] == "value":
            raise ValueError("boom")
        if request["how"] == "cancel":
            raise asyncio.CancelledError
        if request["how"] == "status":
            raise HttpError(418, "short and stout")
        if request["how"] == "exit":
            raise SystemExit(3)
        if request["how"] == "base":
            raise BaseException("lost")
        if request["how"] == "mute":
            raise Mute
        raise KeyError("lost")

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    worker = deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", fail)
    client = await deployment.client("ns.comp.gen")

    async def call(how: str) -> list[Any]:
        return [item async for item in await client.random({"how": how}, annotated=False)]

    with pytest.raises(ValueError, match=r"^InvalidRequest: ValueError: boom$"):
        await call("value")
    with pytest.raises(Cancelled):
        await call("cancel")
    with pytest.raises(EngineFailure, match=r"^Internal: KeyError: 'lost'$"):
        await call("other")
    with pytest.raises(EngineFailure, match="SystemExit: 3"):
        await call("exit")
    with pytest.raises(EngineFailure, match="BaseException: lost"):
        await call("base")
    with pytest.raises(EngineFailure, match="Mute"):
        await call("mute")
    with pytest.raises(HttpFailure, match="short and stout") as status:
        await call("status")
    assert status.value.status == 418 and isinstance(status.value, ValueError)
    assert str(status.value) == 'InvalidRequest: {"message":"short and stout","code":418}'
    assert not client.is_inhibited(worker.instance_id)
    with pytest.raises(WorkerUnavailable) as found:
        await client.direct({}, 12345)
    assert str(found.value) == "Unavailable: instance_id=12345 not found for endpoint ns/comp/gen"
    absent = await deployment.runtime().endpoint("ns.comp.nope").client()
    with pytest.raises(NoInstances) as none:
        await absent.round_robin({})
    assert str(none.value) == "Unavailable: No workers available for endpoint ns/comp/nope"


@pytest.mark.parametrize("error", [EngineShutdown("gone"), GeneratorExit("gone")])
async def test_an_instance_whose_engine_shut_down_is_withdrawn_until_it_registers_again(
    deployment: Deployment, error: BaseException
) -> None:
    async def fail_once(request: Any) -> AsyncIterator[str]:
        if failing:
            raise failing.pop()
        yield "well"

    failing = [error]
    worker = deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", fail_once)
    client = await deployment.client("ns.comp.gen")
    with pytest.raises(EngineShutdown, match="gone"):
        async for _ in await client.random({}):
            raise AssertionError
    await until_count(client, 0)
    assert not worker.serving.health.is_ready()
    await worker.endpoint("ns.comp.gen").register_endpoint_instance()
    await until_count(client, 1)
    assert [item async for item in await client.random({}, annotated=False)] == ["well"]


async def test_an_engine_shutdown_that_is_passed_on_leaves_the_relay_in_routing(
    deployment: Deployment,
) -> None:
    async def down(request: Any) -> AsyncIterator[str]:
        raise EngineShutdown("gone")
        yield ""

    deployment.serve(deployment.runtime(), "ns.comp.inner", down)
    inner = await deployment.client("ns.comp.inner")

    async def relay(request: Any) -> AsyncIterator[Any]:
        async for item in await inner.random(request):
            yield item

    middle = deployment.runtime()
    deployment.serve(middle, "ns.comp.outer", relay)
    outer = await deployment.client("ns.comp.outer")
    with pytest.raises(EngineShutdown, match="gone"):
        async for _ in await outer.random({}):
            raise AssertionError
    await until_count(inner, 0)
    assert middle.serving.health.is_ready() and len(outer.instance_ids()) == 1


class Endless:
    """Yields until it is stopped, and records how it ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.context: Context | None = None

    async def __call__(self, request: Any, context: Context) -> AsyncIterator[int]:
        self.context = context
        try:
            for number in range(10**9):
                if context.is_stopped():
                    return
                yield number
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def seen(self) -> tuple[bool, bool]:
        async with asyncio.timeout(20):
            await self.ended.wait()
        assert self.context is not None
        return self.context.is_stopped(), self.context.is_killed()


async def test_stop_is_orderly_and_dropping_kills(deployment: Deployment) -> None:
    first, second = Endless(), Endless()
    deployment.serve(deployment.runtime(), "ns.comp.one", first.__call__)
    deployment.serve(deployment.runtime(), "ns.comp.two", second.__call__)
    context = Context()
    client = await deployment.client("ns.comp.one")
    read = 0
    async for _ in await client.random({}, context=context):
        read += 1
        if read == 3:
            context.stop_generating()
    assert await first.seen() == (True, False)
    assert read >= 3

    client = await deployment.client("ns.comp.two")
    stream = await client.random({})
    await stream.__anext__()
    del stream
    gc.collect()
    assert await second.seen() == (True, True)


@pytest.mark.parametrize("ended", [True, False])
async def test_a_kill_drops_items_that_had_arrived_and_a_stop_does_not(
    deployment: Deployment, ended: bool
) -> None:
    async def five(request: Any) -> AsyncIterator[int]:
        for number in range(5):
            yield number
        if not ended:
            await asyncio.Event().wait()

    deployment.serve(deployment.runtime(), "ns.comp.five", five)
    client = await deployment.client("ns.comp.five")
    for kind in ("stop", "kill"):
        context = Context()
        stream = await client.random({}, annotated=False, context=context)
        sink = stream._stream.sink
        assert await anext(stream) == 0
        async with asyncio.timeout(20):
            while len(sink._items) < 4 or sink._ended != ended:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
        getattr(context, kind)()
        if kind == "stop":
            assert [await anext(stream) for _ in range(4)] == [1, 2, 3, 4]
        else:
            with pytest.raises(Cancelled):
                await anext(stream)


async def test_an_incoming_context_links_the_outgoing_call(deployment: Deployment) -> None:
    inner = Endless()
    deployment.serve(deployment.runtime(), "ns.comp.inner", inner.__call__)
    middle = deployment.runtime()

    async def relay(request: Any, context: Context) -> AsyncIterator[Any]:
        client = await middle.endpoint("ns.comp.inner").client()
        await client.wait_for_instances()
        async for item in await client.random(request, annotated=False, context=context):
            yield item

    deployment.serve(middle, "ns.comp.outer", relay)
    client = await deployment.client("ns.comp.outer")
    context = Context("outer-1")
    stream = await client.random({}, context=context)
    assert (await stream.__anext__()).data() == 0
    context.kill()
    assert await inner.seen() == (True, True)
    assert inner.context is not None
    assert inner.context.id() == "outer-1"


async def test_a_handler_that_yields_the_items_of_another_endpoint(deployment: Deployment) -> None:
    """The example of Dynamo's page on cancellation, with notes and errors of the inner worker."""
    notes = {"_dynamo_annotated": True, "data": 2, "event": "tick", "comment": ["a"], "id": "7"}

    async def inner(request: Any, context: Context) -> AsyncIterator[Any]:
        yield {"token_ids": [request]}
        yield notes
        yield None
        if request:
            raise RuntimeError("inner failed")

    middle = deployment.runtime()

    class Outer:
        def __init__(self) -> None:
            self.client = middle.endpoint("ns.comp.inner").client()

        async def generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
            stream = await self.client.generate(request, context=context)
            async for response in stream:
                yield response

    deployment.serve(deployment.runtime(), "ns.comp.inner", inner)
    async with asyncio.timeout(20):
        await middle.endpoint("ns.comp.inner").client().wait_for_instances()
    deployment.serve(middle, "ns.comp.outer", Outer().generate)
    client = await deployment.client("ns.comp.outer")
    items = [item async for item in await client.random(0)]
    assert [one.data() for one in items] == [{"token_ids": [0]}, 2, None]
    assert [one.event() for one in items] == [None, "tick", None]
    assert (items[1].comments(), items[1].id()) == (["a"], "7")
    with pytest.raises(EngineFailure, match="inner failed"):
        async for _ in await client.random(1):
            pass


async def test_a_client_that_is_not_awaited(deployment: Deployment) -> None:
    """The example of Dynamo's page on routing: usable at once, and awaitable more than once."""

    async def echo(request: Any) -> AsyncIterator[Any]:
        yield request

    worker = deployment.runtime()
    deployment.serve(worker, "dynamo.VllmWorker.generate", echo)
    await deployment.client("dynamo.VllmWorker.generate")
    runtime = deployment.runtime()
    client = runtime.endpoint("dynamo.VllmWorker.generate").client()
    for call in (client.generate, client.random, client.round_robin):
        assert [item.data() async for item in await call("x")] == ["x"]
        client = runtime.endpoint("dynamo.VllmWorker.generate").client()
    stream = await client.direct("y", worker.instance_id)
    assert [item.data() async for item in stream] == ["y"]
    assert await client is client and await client is client
    client = runtime.endpoint("dynamo.VllmWorker.generate").client()
    async with asyncio.timeout(20):
        while not client.instance_ids():  # noqa: ASYNC110 - as a user waits
            await asyncio.sleep(0.01)
    client = runtime.endpoint("dynamo.VllmWorker.generate").client()
    client.close()
    with pytest.raises(DynamoError, match="was closed before it was ready"):
        await client.random("x")
    absent = runtime.endpoint("dynamo.VllmWorker.none").client()
    with pytest.raises(NoInstances):
        await absent.random("x")


def test_a_client_that_is_made_before_the_loop_runs(tmp_path: Path) -> None:
    settings = RuntimeSettings(state_dir=str(tmp_path), discovery_backend="mem")
    runtime = DistributedRuntime(None, settings)
    client = runtime.endpoint("ns.comp.gen").client()

    async def run() -> list[int]:
        try:
            return (await client).instance_ids()
        finally:
            await runtime.close()

    assert asyncio.run(run()) == []


async def test_round_robin_takes_turns_and_push_handlers_serve(deployment: Deployment) -> None:
    workers = [deployment.runtime() for _ in range(3)]
    for worker in workers:

        def answer(stream: Any, payload: bytes, own: int = worker.instance_id) -> None:
            stream.send(codec.encode(own))
            stream.end()

        deployment.tasks.spawn(worker.endpoint("ns.comp.gen").serve_push(answer))
    client = await deployment.client("ns.comp.gen")
    await until_count(client, 3)
    seen = []
    for _ in range(6):
        seen += [item async for item in await client.round_robin(None, annotated=False)]
    assert sorted(seen) == sorted([worker.instance_id for worker in workers] * 2)
    assert set(seen[:3]) == set(seen[3:])


async def test_shutdown_finishes_streams_and_refuses_new_ones(deployment: Deployment) -> None:
    worker = deployment.runtime()
    go = asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[str]:
        yield "begun"
        await go.wait()
        yield "done"

    served = deployment.serve(worker, "ns.comp.gen", slow)
    client = await deployment.client("ns.comp.gen")
    changes: list[tuple[list[int], list[int]]] = []
    gone = asyncio.Event()

    def on_change(added: list[EndpointRecord], removed: list[int]) -> None:
        changes.append(([record.instance_id for record in added], removed))
        if removed:
            gone.set()

    client.on_change(on_change)
    stream = await client.random({}, annotated=False)
    assert await stream.__anext__() == "begun"
    worker.shutdown()
    async with asyncio.timeout(20):
        await gone.wait()
    assert changes == [([worker.instance_id], []), ([], [worker.instance_id])]
    assert not served.done()
    with pytest.raises(NoInstances):
        await client.random({})
    with pytest.raises(EngineShutdown):
        await worker.endpoint("ns.comp.other").serve_endpoint(slow)
    go.set()
    assert [item async for item in stream] == ["done"]
    async with asyncio.timeout(20):
        await served


async def test_a_revoked_lease_is_the_same_walk(deployment: Deployment) -> None:
    worker = deployment.runtime()
    served = deployment.serve(worker, "ns.comp.gen", echo)
    client = await deployment.client("ns.comp.gen")
    planner = deployment.runtime()
    await planner.start()
    await planner.discovery.revoke(client.records()[0].lease_id)
    async with asyncio.timeout(20):
        await served
    assert worker.serving.stopped.is_set()


async def test_an_ungraceful_endpoint_and_the_deadline_abort_streams(
    deployment: Deployment,
) -> None:
    async def hang(request: Any) -> AsyncIterator[str]:
        yield "begun"
        await asyncio.Event().wait()

    for options, system in (
        ({"graceful_shutdown": False}, {}),
        ({"graceful_shutdown": True}, {"shutdown_timeout_s": 0.05}),
    ):
        worker = deployment.runtime(**system)
        served = deployment.serve(worker, "ns.comp.gen", hang, **options)
        client = await deployment.client("ns.comp.gen")
        stream = await client.random({}, annotated=False)
        assert await stream.__anext__() == "begun"
        worker.shutdown()
        with pytest.raises(DynamoError) as found:
            await stream.__anext__()
        assert found.value.retryable
        async with asyncio.timeout(20):
            await served
        await worker.close()


async def test_unregister_and_register_again(deployment: Deployment) -> None:
    worker = deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", echo)
    client = await deployment.client("ns.comp.gen")
    endpoint = worker.endpoint("ns.comp.gen")
    assert endpoint.connection_id() == worker.instance_id
    events: asyncio.Queue[str] = asyncio.Queue()
    client.on_change(lambda added, removed: events.put_nowait("+" if added else "-"))
    async with asyncio.timeout(20):
        assert await events.get() == "+"
        await endpoint.unregister_endpoint_instance()
        assert await events.get() == "-"
        await endpoint.register_endpoint_instance()
        assert await events.get() == "+"
    assert [item async for item in await client.random({"text": "x"})]


@pytest.mark.parametrize("asleep", [False, True])
async def test_an_instance_that_sleeps_rejects_those_who_have_its_address(
    deployment: Deployment, asleep: bool
) -> None:
    """It would keep their requests until it wakes; the stream that runs ends before it sleeps."""
    worker, go = deployment.runtime(), asyncio.Event()

    async def slow(request: Any) -> AsyncIterator[str]:
        yield "begun"
        await go.wait()
        yield "done"

    deployment.serve(worker, "ns.comp.gen", slow)
    client = await deployment.client("ns.comp.gen")
    endpoint = worker.endpoint("ns.comp.gen")
    running = await client.random({}, annotated=False)
    assert await running.__anext__() == "begun"
    stale = client._instances.copy()
    leaves = asyncio.create_task(endpoint.unregister_endpoint_instance(asleep))
    await until_count(client, 0)
    if not asleep:
        await leaves
    assert leaves.done() != asleep, "what waits for its turn would come to an engine that sleeps"
    client._instances.update(stale)  # as if it had not noticed it yet
    go.set()
    assert [item async for item in running] == ["done"]
    await leaves
    call = await client.direct({}, worker.instance_id, annotated=False)
    if asleep:
        with pytest.raises(WorkerLeaving, match="sleeps"):
            await call.__anext__()
        await endpoint.register_endpoint_instance()
        call = await client.direct({}, worker.instance_id, annotated=False)
    assert [item async for item in call] == ["begun", "done"]


async def test_cancelling_serve_endpoint_removes_the_endpoint(deployment: Deployment) -> None:
    worker = deployment.runtime()
    served = deployment.serve(worker, "ns.comp.gen", echo)
    client = await deployment.client("ns.comp.gen")
    served.cancel()
    await asyncio.wait([served])
    assert not worker.serving.is_serving()
    await until_count(client, 0)
    again = deployment.serve(worker, "ns.comp.gen", echo)
    async with asyncio.timeout(20):
        await client.wait_for_instances()
    with pytest.raises(ValueError, match="already served"):
        await worker.endpoint("ns.comp.gen").serve_endpoint(echo)
    again.cancel()


async def hanging(request: Any) -> AsyncIterator[str]:
    yield "begun"
    await asyncio.Event().wait()


@pytest.mark.parametrize("kind", [EngineDied, EngineKilled])
async def test_streams_of_an_engine_that_died_end_before_its_worker(
    deployment: Deployment, kind: type[EngineDied]
) -> None:
    worker = deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", hanging)
    client = await deployment.client("ns.comp.gen")
    stream = await client.random({}, annotated=False)
    assert await stream.__anext__() == "begun"
    worker.serving.abort(kind)
    async with asyncio.timeout(20):
        with pytest.raises(kind) as found:
            await stream.__anext__()
    assert found.value.code == kind.code
    await until_count(client, 0)  # the worker has not exited, and is no longer chosen


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_cancelled_worker_task_waits_for_no_stream(
    deployment: Deployment, leaving: bool
) -> None:
    worker = deployment.runtime(shutdown_timeout_s=900.0)
    served = deployment.serve(worker, "ns.comp.gen", hanging)
    client = await deployment.client("ns.comp.gen")
    stream = await client.random({}, annotated=False)
    assert await stream.__anext__() == "begun"
    if leaving:
        worker.shutdown()
        await until_count(client, 0)
    async with asyncio.timeout(20):
        served.cancel()
        await asyncio.wait([served])
        assert served.cancelled()
        with pytest.raises(EngineShutdown):
            await stream.__anext__()
        await until_count(client, 0)
        await worker.close()


async def test_a_close_that_is_cancelled_still_closes(deployment: Deployment) -> None:
    worker = deployment.runtime(shutdown_timeout_s=900.0)
    deployment.serve(worker, "ns.comp.gen", hanging)
    client = await deployment.client("ns.comp.gen")
    address = client.records()[0].transport.get("uds")
    stream = await client.random({}, annotated=False)
    assert await stream.__anext__() == "begun"
    lease = worker.lease
    assert lease is not None
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await worker.close()
        with pytest.raises(EngineShutdown):
            await stream.__anext__()
    assert lease.lost.is_set() and len(worker.tasks) == 0
    assert address is None or not Path(address).exists()
    with pytest.raises(RuntimeError, match="closed"):
        worker.tasks.spawn(asyncio.sleep(0))


async def test_a_close_cancelled_before_its_first_step(deployment: Deployment) -> None:
    worker = deployment.runtime(grace_period_s=900.0)
    deployment.serve(worker, "ns.comp.gen", echo)
    await deployment.client("ns.comp.gen")
    lease = worker.lease
    assert lease is not None
    closing = deployment.tasks.spawn(worker.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([closing])
        await lease.lost.wait()
    assert closing.cancelled()


async def test_a_failed_connection_inhibits(deployment: Deployment) -> None:
    bad, good = deployment.runtime(), deployment.runtime()
    for worker in (bad, good):
        deployment.serve(worker, "ns.comp.gen", echo)
    client = await deployment.client("ns.comp.gen")
    await until_count(client, 2)
    await bad.server.close()
    stream = await client.direct({"text": "x"}, bad.instance_id)
    with pytest.raises(CannotConnect):
        await stream.__anext__()
    assert client.is_inhibited(bad.instance_id)
    assert not client.is_inhibited(good.instance_id)
    for _ in range(10):
        assert [item async for item in await client.random({"text": "x"})]
    client.inhibit(good.instance_id)  # now each of them is tried in turn
    answered = 0
    for _ in range(2):
        with contextlib.suppress(CannotConnect):
            answered += len([item async for item in await client.round_robin({"text": "x"})])
    assert answered == 1


async def test_an_unhealthy_endpoint_is_avoided_and_not_ready(deployment: Deployment) -> None:
    sick, well = deployment.runtime(), deployment.runtime()
    for worker in (sick, well):
        deployment.serve(worker, "ns.comp.gen", echo)
    client = await deployment.client("ns.comp.gen")
    await until_count(client, 2)
    changed = asyncio.Event()
    client.on_inhibited(lambda instance_id, out: changed.set())
    for problem in ("no answer to a health check", ""):
        changed.clear()
        await sick.serving.set_health(("ns", "comp", "gen"), problem)
        async with asyncio.timeout(20):
            await changed.wait()
        assert client.is_inhibited(sick.instance_id) is bool(problem)
        assert sick.serving.health.is_ready() is not bool(problem)
        assert [one.text for one in client.outages().values()] == [problem] * bool(problem)
    changed.clear()
    await sick.serving.set_health(("ns", "comp", "gen"), "again")
    async with asyncio.timeout(20):
        await changed.wait()
    seen: list[tuple[int, bool]] = []
    client.on_inhibited(lambda instance_id, out: seen.append((instance_id, out)))
    assert seen == [(sick.instance_id, True)]
    sick.serving.begin_shutdown()
    await sick.serving.set_health(("ns", "comp", "gen"), "")  # not registered again


async def test_requests_of_a_stalled_engine_fail_once_another_can_take_them(
    deployment: Deployment,
) -> None:
    async def hang(request: dict[str, Any]) -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    stalled = deployment.runtime()
    deployment.serve(stalled, "ns.comp.gen", hang)
    client = await deployment.client("ns.comp.gen")
    stream = await client.random({}, annotated=False)
    assert await anext(stream) == 1
    path = ("ns", "comp", "gen")
    await stalled.serving.set_health(path, "no answer to a health check")
    deployment.serve(deployment.runtime(), "ns.comp.gen", hang)
    await until_count(client, 2)
    other = await client.random({}, annotated=False)
    assert await anext(other) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()  # it may be a long prompt
    await stalled.serving.set_health(path, "it is stopped", stalled=True)
    with pytest.raises(WorkerSilent, match="computes nothing: it is stopped"):
        await asyncio.wait_for(waiting, 5)
    assert client.outages()[stalled.instance_id].reason == "unhealthy"
    await stalled.serving.set_health(path, "")
    async with asyncio.timeout(5):
        while client.is_inhibited(stalled.instance_id):  # noqa: ASYNC110 - two events may do it
            await asyncio.sleep(0.01)


async def test_events_reach_subscribers_through_discovery(deployment: Deployment) -> None:
    one, two, listener = (deployment.runtime() for _ in range(3))
    got: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    publishers: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
    first = await one.publisher("ns", "comp", "kv-events")
    assert await one.publisher("ns", "comp", "kv-events") is first
    await one.publisher("ns", "comp", "kv_metrics")
    await listener.start()
    subscription = listener.subscribe(
        "ns",
        "comp",
        "kv-events",
        lambda publisher, sequence, payload: got.put_nowait((publisher, payload)),
        on_publisher=lambda publisher, up: publishers.put_nowait((publisher, up)),
    )
    await subscription.ready()
    assert subscription.publishers() == [one.instance_id]
    second = await two.publisher("ns", "comp", "kv-events")
    async with asyncio.timeout(20):
        assert await publishers.get() == (one.instance_id, True)
        assert await publishers.get() == (two.instance_id, True)
        seen: set[Any] = set()
        while seen != {(publisher.publisher_id, b"x") for publisher in (first, second)}:
            first.publish(b"x")
            second.publish(b"x")
            await asyncio.sleep(0.01)
            while not got.empty():
                seen.add(got.get_nowait())
        await two.close()
        assert await publishers.get() == (two.instance_id, False)
    assert subscription.publishers() == [one.instance_id]
    subscription.close()


async def test_a_removed_event_socket_comes_back(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.runtime.events.channels.SOCKET_CHECK_S", 0.01)
    worker = deployment.runtime()
    publishers = [await worker.publisher("ns", "comp", topic) for topic in ("kv-events", "x")]
    files = [
        Path(one.address.removeprefix("ipc://"))
        for one in publishers
        if one.address.startswith("ipc://")
    ]
    for file in files:
        file.unlink()
    async with asyncio.timeout(5):
        while not all(file.is_socket() for file in files):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await worker.close()
    assert not any(file.exists() for file in files)


async def test_counters_count_what_was_served(deployment: Deployment) -> None:
    worker, caller = deployment.runtime(), deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", echo)
    client = await caller.endpoint("ns.comp.gen").client()
    await client.wait_for_instances()
    for _ in range(2):
        assert [item async for item in await client.random({"text": "a"})]
    text = worker.metrics.render().decode().replace(".0\n", "\n")
    labels = (
        f'dynamo_component="comp",dynamo_endpoint="gen",dynamo_namespace="ns",'
        f'worker_id="{worker.instance_id:x}"'
    )
    assert f"dynamo_component_requests_total{{{labels}}} 2\n" in text
    assert f"dynamo_component_inflight_requests{{{labels}}} 0\n" in text
    assert f"dynamo_component_request_duration_seconds_count{{{labels}}} 2\n" in text
    assert f'dynamo_component_uptime_seconds{{worker_id="{worker.instance_id:x}"}}' in text
    assert "dynamo_work_handler_time_to_first_response_seconds_count 2\n" in text
    assert "dynamo_work_handler_pool_active_tasks 0\n" in text
    assert "dynamo_component_errors_total" not in text
    assert "work_handler" not in caller.metrics.render().decode()


async def test_labels_of_ones_own_and_failures_are_counted(deployment: Deployment) -> None:
    async def fail(request: Any) -> AsyncIterator[int]:
        raise KeyError(request)
        yield 0

    worker = deployment.runtime()
    deployment.serve(worker, "ns.comp.gen", fail, metrics_labels=[("model", 'a"b'), ("gpu", "0")])
    deployment.serve(worker, "ns.comp.plain", echo)
    client = await deployment.client("ns.comp.gen")
    with pytest.raises(EngineFailure):
        await (await client.random("x")).__anext__()
    text = worker.metrics.render().decode()
    ours = f'worker_id="{worker.instance_id:x}"'
    extra = 'model="a\\"b",gpu="0"'
    assert f'dynamo_endpoint="gen",dynamo_namespace="ns",{ours},{extra}}} 1\n' in text
    assert f'{ours},error_type="generate",{extra}}} 1\n' in text
    assert f'{ours},{extra},le="600"}} 1\n' in text
    assert f'dynamo_endpoint="plain",dynamo_namespace="ns",{ours}}} 0\n' in text
    assert list(text_string_to_metric_families(text))


@pytest.mark.parametrize(
    "labels", [[("a-b", "x")], [("le", "x")], [("worker_id", "x")], [("a", "x"), ("a", "y")]]
)
async def test_what_is_no_label_is_refused(labels: list[tuple[str, str]]) -> None:
    runtime = DistributedRuntime(None, RuntimeSettings(discovery_backend="mem"))
    with pytest.raises(ValueError, match="metrics_labels"):
        await runtime.endpoint("ns.comp.gen").serve_endpoint(echo, metrics_labels=labels)
    await runtime.close()


@pytest.mark.parametrize(
    "path", ["bad", "a.b", "a.b.c.d", "a..c", "", "dyn://a.b", "a/.b.c", "a.b/x.c"]
)
async def test_a_bad_path_is_a_value_error(tmp_path: Path, path: str) -> None:
    runtime = DistributedRuntime(None, RuntimeSettings(discovery_backend="mem"))
    with pytest.raises(ValueError) as found:
        runtime.endpoint(path)
    assert str(found.value) == (
        f"Invalid endpoint path '{path}'. Expected format: 'namespace.component.endpoint' "
        "or 'dyn://namespace.component.endpoint'"
    )
    with pytest.raises(ValueError, match="Invalid endpoint path"):
        runtime.namespace("a.b").component("c").endpoint("d")
    await runtime.close()


async def test_the_public_constructor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "mem")
    loop = asyncio.get_running_loop()
    with pytest.warns(DeprecationWarning, match="enable_nats"):
        one = DistributedRuntime(loop, "file", "tcp", True, event_plane="zmq")
    assert (one.settings.discovery_backend, one.settings.request_plane) == ("file", "tcp")
    two = DistributedRuntime.detached()
    assert two.settings.discovery_backend == "mem"
    assert two.namespace("a").component("b").endpoint("c").path == ("a", "b", "c")
    await two.namespace("a").component("b").create_service()
    with pytest.raises(ConfigError, match="must be one of file, mem, etcd, got 'kubernetes'"):
        DistributedRuntime(loop, "kubernetes")
    for runtime in (one, two):
        await runtime.close()
        await runtime.close()


class _Model:
    """A stand-in for a pydantic model."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    @classmethod
    def model_validate(cls, value: dict[str, Any]) -> "_Model":
        if "text" not in value:
            raise ValueError("text: field required")
        return cls(**value)

    @classmethod
    def model_validate_json(cls, value: str) -> "_Model":
        import json

        return cls.model_validate(json.loads(value))

    def model_dump(self) -> dict[str, Any]:
        return self.fields


async def test_dynamo_endpoint_of_other_types_checks_nothing(deployment: Deployment) -> None:
    class Service:
        @dynamo_endpoint(str, str)
        async def generate(self, request: str) -> AsyncIterator[Any]:
            yield request
            yield {"any": 1}

    deployment.serve(deployment.runtime(), "ns.comp.gen", Service().generate)
    client = await deployment.client("ns.comp.gen")
    items = [item async for item in await client.random("plain text", annotated=False)]
    assert items == ["plain text", {"any": 1}]


async def test_a_preprocessed_request_has_every_key(deployment: Deployment) -> None:
    seen: list[Any] = []

    async def remember(request: Any) -> AsyncIterator[int]:
        seen.append(request)
        yield 1

    deployment.serve(deployment.runtime(), "ns.comp.gen", remember)
    client = await deployment.client("ns.comp.gen")
    sampling = SamplingOptions(top_p=0.5)
    engine_request = PreprocessedRequest("m", codec.tokens([1, 2]), sampling_options=sampling)
    for request in (engine_request, {"token_ids": [1]}, {"text": "x"}, None):
        async for _ in await client.random(request):
            pass
    full = seen[0]
    assert full["token_ids"] == [1, 2] and full["sampling_options"]["top_p"] == 0.5
    assert full["sampling_options"]["temperature"] is None
    assert full["stop_conditions"]["max_tokens"] is full["output_options"]["logprobs"] is None
    assert (full["annotations"], full["eos_token_ids"], full["routing"]) == ([], [], {})
    assert set(full) == set(PreprocessedRequest.__struct_fields__)
    for section, kind in (("stop_conditions", StopConditions), ("output_options", OutputOptions)):
        assert set(full[section]) >= set(kind.__struct_fields__)
    assert msgspec.convert(full, PreprocessedRequest, dec_hook=lambda _, ids: codec.tokens(ids))
    assert seen[1:] == [{"token_ids": [1]}, {"text": "x"}, None]


async def test_dynamo_endpoint_validates(deployment: Deployment) -> None:
    class Handler:
        @dynamo_endpoint(_Model, _Model)
        async def generate(self, request: _Model) -> AsyncIterator[Any]:
            yield _Model(text=request.fields["text"].upper())
            yield {"text": "plain"}

    deployment.serve(deployment.runtime(), "ns.comp.gen", Handler().generate)
    client = await deployment.client("ns.comp.gen")
    for request in ({"text": "a"}, '{"text": "a"}'):
        items = [item async for item in await client.random(request, annotated=False)]
        assert items == [{"text": "A"}, {"text": "plain"}]
    with pytest.raises(ValueError, match="text: field required"):
        async for _ in await client.random({}):
            pass


class Held:
    """A handler that holds each request until the test lets it go, whatever its context says."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.free = asyncio.Event()

    async def __call__(self, request: Any) -> AsyncIterator[Any]:
        self.started.append(request)
        yield request
        await self.free.wait()
        yield request


async def test_handlers_share_the_limit_of_the_process(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ENGINE_REQUEST_LIMIT", "1")
    monkeypatch.setenv("DYN_DYNAMO_REQUEST_QUEUE_LIMIT", "2")
    worker, held = deployment.runtime(), Held()
    deployment.serve(worker, "ns.comp.gen", held.__call__)
    deployment.serve(worker, "ns.comp.other", held.__call__)
    client, other = await deployment.client("ns.comp.gen"), await deployment.client("ns.comp.other")
    context = Context()
    first = await client.random(1, annotated=False)
    assert await anext(first) == 1
    second = await other.random(2, annotated=False, context=context)
    third = await client.random(3, annotated=False)
    with pytest.raises(WorkerAtCapacity, match="Server overloaded: worker at capacity"):
        await anext(await other.random(4, annotated=False))
    page = worker.metrics.render().decode().replace(".0\n", "\n")
    for line in (
        "dynamo_engine_request 1",
        "dynamo_request_queue 2",
        "dynamo_rejection_request_total 1",
        "dynamo_work_handler_pool_capacity 1",
    ):
        assert line in page
    context.kill()  # it leaves the queue
    fifth = await client.random(5, annotated=False)
    await first.aclose()  # its handler has not ended: it still counts
    with pytest.raises(WorkerAtCapacity):
        await anext(await client.random(6, annotated=False))
    assert held.started == [1]
    held.free.set()
    assert [item async for item in third] == [3, 3]
    assert [item async for item in fifth] == [5, 5]
    assert held.started == [1, 3, 5]
    with pytest.raises(Cancelled):
        await anext(second)
    assert worker.admission is not None
    assert (worker.admission.running, worker.admission.waiting) == (0, 0)


async def test_without_a_limit_nothing_is_counted(deployment: Deployment) -> None:
    worker = deployment.runtime()
    assert worker.admission is None
    assert "dynamo_engine_request" not in worker.metrics.render().decode()


@pytest.mark.parametrize("known", [False, True])
def test_a_shutdown_after_the_end_of_the_loop_waits_for_nothing(
    known: bool, tmp_path: Path
) -> None:
    """By a handler of a signal, or in a thread that outlives the loop."""
    settings = RuntimeSettings(discovery_backend="mem", state_dir=str(tmp_path))

    async def started() -> DistributedRuntime:
        loop = asyncio.get_running_loop() if known else None
        runtime = DistributedRuntime(loop, settings)
        await runtime.start_serving()
        return runtime

    runtime = asyncio.run(started())
    assert not runtime.serving.stopped.is_set()
    runtime.shutdown()
    assert runtime.serving.stopped.is_set()
