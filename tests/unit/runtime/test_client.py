"""The client's view of an endpoint: bad records, failing listeners, changed addresses."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.errors import CannotConnect, Disconnected, DynamoError, EngineFailure, EngineShutdown
from dynamo.protocols.control import EndpointRecord
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.requests import RequestServer

PREFIX = "v1/instances/ns/comp/gen/"


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    made = DistributedRuntime(None, RuntimeSettings(discovery_backend="mem"))
    yield made
    await made.close()


@pytest.fixture
async def client(runtime: DistributedRuntime) -> Client:
    return await runtime.endpoint("ns.comp.gen").client()


async def put(runtime: DistributedRuntime, instance_id: int, transport: dict[str, str]) -> None:
    lease = await runtime.granted()
    record = EndpointRecord(
        namespace="ns",
        component="comp",
        endpoint="gen",
        instance_id=instance_id,
        lease_id=lease.id,
        transport=transport,
    )
    await runtime.discovery.put(f"{PREFIX}{instance_id:x}", msgspec.json.encode(record), lease.id)


async def test_changes_are_pushed_and_a_new_address_replaces(
    runtime: DistributedRuntime, client: Client
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    client.on_change(lambda added, gone: seen.append(([one.instance_id for one in added], gone)))
    await put(runtime, 1, {"uds": "/a"})
    await put(runtime, 2, {"tcp": "127.0.0.1:1"})
    await put(runtime, 1, {"uds": "/b"})
    await runtime.discovery.delete(PREFIX + "2")
    assert seen == [([1], []), ([2], []), ([], [1]), ([1], []), ([], [2])]
    late: list[int] = []
    client.on_change(lambda added, gone: late.extend(one.instance_id for one in added))
    assert late == [1]
    client.close()
    await put(runtime, 3, {"uds": "/c"})
    assert client.instance_ids() == [1]


async def test_a_bad_record_is_skipped(
    runtime: DistributedRuntime, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await runtime.granted()
    with caplog.at_level(logging.WARNING):
        await runtime.discovery.put(PREFIX + "1", b"{}", lease.id)
        await put(runtime, 2, {"carrier": "pigeon"})
        await put(runtime, 4, {"tcp": "127.0.0.1"})
        await put(runtime, 3, {"uds": "/c"})
        stored = (await runtime.discovery.list(PREFIX + "3"))[PREFIX + "3"]
        await runtime.discovery.put(PREFIX + "5", stored, lease.id)
        await runtime.discovery.put(
            PREFIX + "zz", stored.replace(b":3,", b":%d," % 2**70), lease.id
        )
    assert client.instance_ids() == [3]
    assert caplog.text.count("skipping the instance") == 5
    for tail in ("1", "5", "zz"):
        await runtime.discovery.delete(PREFIX + tail)
    assert client.instance_ids() == [3] and "failed" not in caplog.text


async def test_a_failing_listener_does_not_stop_the_next(
    runtime: DistributedRuntime, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(added: list[EndpointRecord], removed: list[int]) -> None:
        raise RuntimeError("listener")

    seen: list[int] = []
    client.on_change(fail)
    client.on_change(lambda added, removed: seen.append(len(added)))
    await put(runtime, 1, {"uds": "/a"})
    assert seen == [1]
    assert "listener" in caplog.text


class Sink:
    """A sink that records its error."""

    def __init__(self) -> None:
        self.error: DynamoError | None = None
        self.ended = False

    def on_data(self, payload: bytes) -> None:
        raise AssertionError

    def on_end(self) -> None:
        self.ended = True

    def on_error(self, error: DynamoError) -> None:
        self.error = error


@pytest.mark.parametrize(
    ("error", "inhibits"),
    [
        (CannotConnect("x"), True),
        (Disconnected("x"), True),
        (EngineShutdown("x"), True),
        (EngineFailure("x"), False),
    ],
)
async def test_which_errors_inhibit(
    runtime: DistributedRuntime, client: Client, error: DynamoError, inhibits: bool
) -> None:
    await put(runtime, 1, {"uds": "/a"})
    await put(runtime, 2, {"uds": "/b"})
    sink = Sink()
    events: list[tuple[int, bool]] = []
    client.on_inhibited(lambda instance_id, avoided: events.append((instance_id, avoided)))
    for _ in range(2):
        client.open(1, b"", sink).fail(error)
    assert sink.error is error
    assert client.is_inhibited(1) is inhibits
    assert not client.is_inhibited(2)
    assert events == ([(1, True)] if inhibits else [])
    await put(runtime, 1, {"uds": "/c"})
    assert not client.is_inhibited(1)
    assert events == ([(1, True), (1, False)] if inhibits else [])


async def test_a_silent_instance_is_the_last_that_is_tried(
    runtime: DistributedRuntime, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MagicMock()
    monkeypatch.setattr(client, "open", opened)

    async def tried() -> set[int]:
        opened.reset_mock()
        for _ in range(4):
            await client.round_robin({})
        return {call.args[0] for call in opened.call_args_list}

    await put(runtime, 1, {"uds": "/a"})
    await put(runtime, 2, {"uds": "/b"})
    client.availability.begin(1, "connection", "silent", "x")
    assert await tried() == {2}
    client.availability.begin(2, "connection", "unreachable", "x")
    assert await tried() == {2}
    client.availability.begin(2, "record", "silent", "x")
    assert await tried() == {1, 2}


async def test_an_inhibition_ends_by_itself_and_with_the_instance() -> None:
    settings = RuntimeSettings(discovery_backend="mem")
    runtime = DistributedRuntime(None, settings, system=SystemSettings(inhibited_duration_s=0.01))
    client = await runtime.endpoint("ns.comp.gen").client()
    events: list[bool] = []
    over = asyncio.Event()

    def on_inhibited(instance_id: int, avoided: bool) -> None:
        events.append(avoided)
        if not avoided:
            over.set()

    client.on_inhibited(on_inhibited)
    client.inhibit(1)
    assert events == []
    await put(runtime, 1, {"uds": "/a"})
    client.inhibit(1)
    async with asyncio.timeout(20):
        await over.wait()
    assert events == [True, False] and not client.is_inhibited(1)
    client.inhibit(1)
    await runtime.discovery.delete(PREFIX + "1")
    assert events == [True, False, True, False] and not client.is_inhibited(1)
    await runtime.close()


async def test_a_removal_is_reported_before_the_inhibition_ends(
    runtime: DistributedRuntime, client: Client
) -> None:
    """Otherwise a router would send to a dead worker what it finds waiting in that moment."""
    events: list[tuple[str, object]] = []
    await put(runtime, 1, {"uds": "/a"})
    client.on_change(lambda _added, gone: events.append(("gone", gone)))
    client.on_inhibited(lambda _instance_id, avoided: events.append(("avoided", avoided)))
    client.inhibit(1)
    await runtime.discovery.delete(PREFIX + "1")
    assert events[-3:] == [("avoided", True), ("gone", [1]), ("avoided", False)]


async def test_a_worker_that_cannot_be_reached_is_out_until_it_answers(
    runtime: DistributedRuntime, client: Client, tmp_path: Path
) -> None:
    """Also without a request that fails with it: the next one would."""
    server, address = RequestServer(), f"uds:{tmp_path / 'worker.sock'}"
    server.register(client.path, lambda stream, payload: stream.end())
    await server.start(address)
    await put(runtime, 1, {"uds": address.removeprefix("uds:")})
    sink = Sink()
    client.open(1, b"", sink)
    await until(lambda: sink.ended)
    events: list[tuple[int, bool]] = []
    client.on_inhibited(lambda instance_id, avoided: events.append((instance_id, avoided)))
    await server.close()
    await until(lambda: events)
    assert client.availability.outages()[1].reason == "unreachable"
    again = RequestServer()
    await again.start(address)
    await until(lambda: len(events) == 2)
    assert events == [(1, True), (1, False)]
    await again.close()


async def test_a_removed_instance_is_not_out_when_its_worker_dies(
    runtime: DistributedRuntime, client: Client, tmp_path: Path
) -> None:
    """Its last request has kept the connection open."""
    connected = asyncio.Queue[asyncio.StreamWriter]()
    path = str(tmp_path / "worker.sock")
    async with await asyncio.start_unix_server(lambda _, out: connected.put_nowait(out), path):
        await put(runtime, 1, {"uds": path})
        sink = Sink()
        client.open(1, b"", sink)
        worker = await connected.get()
        await runtime.discovery.delete(PREFIX + "1")
        worker.transport.abort()
        await until(lambda: sink.error)
    assert len(client.availability) == 0


async def test_waiting_ends_with_the_first_instance(
    runtime: DistributedRuntime, client: Client
) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(client.wait_for_instances())
        await asyncio.sleep(0)
        assert not waiting.done()
        await put(runtime, 1, {"uds": "/a"})
    assert waiting.result() == [1]
