"""Workers that hang, die, flap or cannot be reached: out of routing, and back by themselves.

Times are short through the environment (a ping may stay unanswered for 1 s instead of 2 s), so
that a test takes seconds. No test asserts how fast; ``benchmarks/hang_notice.py`` measures that.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from until import Changes

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.errors import Disconnected, DynamoError, WorkerSilent, WorkerUnavailable
from dynamo.protocols import codec
from dynamo.protocols.control import INSTANCES, EndpointRecord, instance_key
from dynamo.runtime import Client, DistributedRuntime
from dynamo.runtime.requests import RequestServer, ServerStream

WORKER = Path(__file__).parent / "faulty_worker.py"
PATH = "faults.worker.generate"
TIMEOUT_S = 60.0


class Recording:
    """The sink of one stream."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.ended = asyncio.Event()
        self.error: DynamoError | None = None
        self.received = asyncio.Event()

    def on_data(self, payload: bytes) -> None:
        assert not self.ended.is_set(), "an item after the end"
        self.items.append(codec.plain_decode(payload))
        self.received.set()

    def on_end(self) -> None:
        self.ended.set()

    def on_error(self, error: DynamoError) -> None:
        self.error = error
        self.ended.set()


class Site:
    """A client of the endpoint and worker processes, which the test stops and kills."""

    client: Client

    def __init__(self, path: Path, **env: str) -> None:
        self.path = path
        self.env = {**os.environ, "DYN_LOCAL_STATE_DIR": str(path / "state"), **env}
        self.settings = RuntimeSettings(state_dir=str(path / "state"))
        self.system = SystemSettings(inhibited_duration_s=0.5, grace_period_s=0)
        self.runtime = DistributedRuntime(None, self.settings, system=self.system)
        self.workers: dict[int, asyncio.subprocess.Process] = {}
        self.changes = Changes()
        self.events: list[tuple[int, bool]] = []

    async def __aenter__(self) -> Site:
        self.client = await self.runtime.endpoint(PATH).client()
        self.client.on_change(self.changes.changed)
        self.client.on_inhibited(self._on_inhibited)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers.values():
            if worker.returncode is None:
                worker.kill()
        for worker in self.workers.values():
            await worker.wait()
        await self.runtime.close()

    def _on_inhibited(self, instance_id: int, out: bool) -> None:
        self.events.append((instance_id, out))
        self.changes.changed()

    async def start(self, **env: str) -> int:
        """Start a worker; return its instance id."""
        before = set(self.client.instance_ids())
        log = (self.path / f"{len(self.workers)}.log").open("wb")
        with log:
            worker = await asyncio.create_subprocess_exec(
                sys.executable, str(WORKER), env={**self.env, **env}, stdout=log, stderr=log
            )
        await self.until(lambda: len(self.client.instance_ids()) > len(before))
        [instance_id] = set(self.client.instance_ids()) - before
        self.workers[instance_id] = worker
        return instance_id

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition`` of instances and outages."""
        await self.changes.until(condition)

    def avoided(self) -> list[int]:
        """The instances that get no requests."""
        return [one for one in self.client.instance_ids() if self.client.is_inhibited(one)]

    async def out(self, instance_id: int) -> None:
        await self.until(lambda: self.client.is_inhibited(instance_id))

    async def back(self, instance_id: int) -> None:
        await self.until(lambda: not self.client.is_inhibited(instance_id))

    def signal(self, instance_id: int, number: int) -> None:
        self.workers[instance_id].send_signal(number)

    def open(self, instance_id: int, **request: Any) -> Recording:
        sink = Recording()
        self.client.open(instance_id, codec.encode(request), sink)
        return sink

    async def call(self, instance_id: int, **request: Any) -> dict[str, Any]:
        """The first item of a request to this instance."""
        async with asyncio.timeout(TIMEOUT_S):
            stream = await self.client.direct(request, instance_id, annotated=False)
            return dict(await anext(aiter(stream)))

    async def ended(self, sink: Recording) -> Recording:
        async with asyncio.timeout(TIMEOUT_S):
            await sink.ended.wait()
        return sink

    async def register(self, instance_id: int, transport: dict[str, str]) -> None:
        """Register an instance at ``transport``, which is not a worker of ours."""
        lease = await self.runtime.granted()
        namespace, component, endpoint = PATH.split(".")
        record = EndpointRecord(
            namespace=namespace,
            component=component,
            endpoint=endpoint,
            instance_id=instance_id,
            lease_id=lease.id,
            transport=transport,
        )
        key = INSTANCES + instance_key(namespace, component, endpoint, instance_id)
        await self.runtime.discovery.put(key, msgspec.json.encode(record), lease.id)
        await self.until(lambda: instance_id in self.client.instance_ids())


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setenv("DYN_REQUEST_PLANE_SILENCE_TIMEOUT", "1")
    monkeypatch.setenv("DYN_TCP_REQUEST_TIMEOUT", "4")
    async with Site(tmp_path) as made:
        yield made


async def test_a_stopped_worker_loses_its_streams_and_drops_them_when_it_resumes(
    site: Site,
) -> None:
    stopped, other = await site.start(), await site.start()
    sinks = [site.open(stopped, how="tokens", tokens=100_000) for _ in range(5)]
    for sink in sinks:
        async with asyncio.timeout(TIMEOUT_S):
            await sink.received.wait()
    site.signal(stopped, signal.SIGSTOP)
    for sink in sinks:
        assert isinstance((await site.ended(sink)).error, WorkerSilent)
    assert site.client.outages()[stopped].reason == "silent"
    for _ in range(10):
        assert await anext(aiter(await site.client.random({}, annotated=False)))
    seen = [len(sink.items) for sink in sinks]
    site.signal(stopped, signal.SIGCONT)
    await site.back(stopped)
    assert site.events == [(stopped, True), (stopped, False)]
    assert await site.call(stopped, how="dropped", streams=5)  # its handlers were killed
    assert [len(sink.items) for sink in sinks] == seen  # late items were dropped
    assert not site.client.is_inhibited(other)


async def test_a_blocked_loop_counts_as_silent_until_it_answers(site: Site) -> None:
    blocked = await site.start()
    await site.start()
    sink = site.open(blocked, how="block", seconds=3.0)
    assert isinstance((await site.ended(sink)).error, WorkerSilent)
    assert site.client.is_inhibited(blocked)
    await site.back(blocked)
    assert (await site.call(blocked))["worker"] == "alive"


async def test_a_long_prefill_of_a_live_worker_is_not_silence(site: Site) -> None:
    worker = await site.start()
    await site.start()
    sink = site.open(worker, how="prefill", seconds=3.0)
    assert (await site.ended(sink)).error is None and len(sink.items) == 1
    assert site.events == []


async def test_the_only_worker_keeps_its_streams_while_it_may_resume(site: Site) -> None:
    only = await site.start()
    sink = site.open(only, how="tokens", tokens=50)
    async with asyncio.timeout(TIMEOUT_S):
        await sink.received.wait()
    site.signal(only, signal.SIGSTOP)
    await site.out(only)
    late = site.open(only)  # with no other worker it is tried all the same
    site.signal(only, signal.SIGCONT)
    assert (await site.ended(sink)).error is None
    assert [one["token"] for one in sink.items[1:]] == list(range(50))
    assert (await site.ended(late)).error is None


async def test_a_worker_that_stays_stopped_loses_everything_and_recovers(site: Site) -> None:
    only = await site.start(ETCD_LEASE_TTL="600")
    sink = site.open(only, how="tokens", tokens=100_000)
    async with asyncio.timeout(TIMEOUT_S):
        await sink.received.wait()
    site.signal(only, signal.SIGSTOP)
    assert isinstance((await site.ended(sink)).error, WorkerSilent)
    site.signal(only, signal.SIGCONT)
    await site.back(only)
    assert (await site.call(only))["worker"] == "alive"


@pytest.mark.parametrize("kind", ["uds", "tcp"])
async def test_a_listener_that_says_nothing(site: Site, tmp_path: Path, kind: str) -> None:
    await site.start()
    held = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await held.wait()
        writer.close()

    if kind == "uds":
        server = await asyncio.start_unix_server(mute, tmp_path / "mute")
        await site.register(7, {"uds": str(tmp_path / "mute")})
    else:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await site.register(7, {"tcp": f"127.0.0.1:{port}"})
    assert isinstance((await site.ended(site.open(7))).error, WorkerSilent)
    assert site.avoided() == [7]
    held.set()
    server.close()


class Proxy:
    """Forwards TCP to ``port``, or drops everything while ``drops``: a network that lost a path."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.drops = False
        self.accepted = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.set()
        there, out = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers += [writer, out]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, out))
            group.create_task(self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self.drops:
                    writer.write(data)
        except ConnectionError:
            pass
        writer.close()


async def test_a_path_that_drops_packets_is_left_and_found_again(
    site: Site, tmp_path: Path
) -> None:
    await site.start()
    server = RequestServer()
    server.register(PATH.replace(".", "/"), _answer)
    address = await server.start("tcp:127.0.0.1:0")
    proxy = Proxy(int(address.rpartition(":")[2]))
    await site.register(7, {"tcp": f"127.0.0.1:{await proxy.start()}"})
    assert (await site.call(7))["worker"] == "here"
    proxy.drops = True
    assert isinstance((await site.ended(site.open(7))).error, WorkerSilent)
    assert site.client.is_inhibited(7)
    proxy.accepted.clear()
    async with asyncio.timeout(TIMEOUT_S):  # given up, and tried again on another connection
        await proxy.accepted.wait()
    proxy.drops = False
    await site.back(7)
    assert (await site.call(7))["worker"] == "here"
    proxy.close()
    await server.close()


def _answer(stream: ServerStream, payload: bytes) -> None:
    stream.send(codec.encode({"worker": "here"}))
    stream.end()


async def test_a_flapping_worker_is_probed_without_requests(site: Site, tmp_path: Path) -> None:
    """It accepts and closes; the pauses between the probes grow; then it answers."""
    await site.start()
    accepted: list[float] = []
    loop = asyncio.get_running_loop()
    enough = asyncio.Event()

    async def flap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(loop.time())
        writer.close()
        if len(accepted) == 6:
            enough.set()

    path = tmp_path / "flap"
    flapping = await asyncio.start_unix_server(flap, path)
    await site.register(7, {"uds": str(path)})
    assert isinstance((await site.ended(site.open(7))).error, Disconnected)
    async with asyncio.timeout(TIMEOUT_S):
        await enough.wait()
    assert site.events == [(7, True)]
    pauses = [after - before for before, after in itertools.pairwise(accepted)]
    assert pauses[-1] > pauses[0]
    flapping.close()
    path.unlink(missing_ok=True)
    server = RequestServer()
    server.register(PATH.replace(".", "/"), _answer)
    await server.start(f"uds:{path}")
    await site.back(7)
    assert (await site.call(7))["worker"] == "here"
    await server.close()


async def test_all_workers_die_and_new_ones_serve_without_a_restart(site: Site) -> None:
    first = [await site.start(), await site.start()]
    for instance_id in first:
        site.signal(instance_id, signal.SIGKILL)
    await site.until(lambda: not site.client.instance_ids())
    with pytest.raises(DynamoError, match="No workers available"):
        await site.client.random({})
    again = await site.start()
    assert (await site.call(again))["worker"] == "alive"
    assert site.client.outages() == {}


DEATHS = {
    "killed": {"how": "die", "signal": int(signal.SIGKILL)},
    "segfault": {"how": "die", "signal": int(signal.SIGSEGV)},
    "abort": {"how": "die", "signal": int(signal.SIGABRT)},
    "exit 0": {"how": "exit", "status": 0},
    "exit 1": {"how": "exit", "status": 1},
}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_death_ends_streams_and_instance_at_once(site: Site, death: str) -> None:
    worker = await site.start(ETCD_LEASE_TTL="600")  # nothing here waits for the lease
    sink = site.open(worker, how="tokens", tokens=100_000)
    async with asyncio.timeout(TIMEOUT_S):
        await sink.received.wait()
    site.open(worker, **DEATHS[death])
    error = (await site.ended(sink)).error
    assert isinstance(error, Disconnected | WorkerUnavailable) and error.retryable
    await site.until(lambda: worker not in site.client.instance_ids())


async def test_a_hung_engine_in_a_live_process_fails_its_health_checks(site: Site) -> None:
    checks = {
        "DYN_HEALTH_CHECK_ENABLED": "true",
        "DYN_CANARY_WAIT_TIME": "0.3",
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "0.3",
    }
    hung, _ = await site.start(**checks), await site.start(**checks)
    sink = site.open(hung, how="hang")
    await site.out(hung)
    outage = site.client.outages()[hung]
    assert outage.reason == "unhealthy" and "no answer to a health check" in outage.text
    assert not sink.ended.is_set()  # it may be a long prompt: the request is not touched
    assert site.avoided() == [hung]
    site.open(hung, how="recover")
    await site.back(hung)
    assert (await site.ended(sink)).error is None
