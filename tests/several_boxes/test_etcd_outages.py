"""etcd that hangs, restarts, forgets, or loses its data; leases that run out or are revoked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from boxes import Etcd, needs_etcd
from deployment import free_port
from until import Changes, until

from dynamo.config.runtime import EtcdSettings, RuntimeSettings
from dynamo.errors import ConfigError, WorkerUnavailable
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import KeyEvent
from dynamo.runtime.discovery.etcd.discovery import EtcdDiscovery
from dynamo.runtime.discovery.etcd.lease import EtcdLease, tombstone_key

rpc = pytest.importorskip("aetcd.rpc")
grpc = pytest.importorskip("grpc")
pytestmark = needs_etcd

KEY = "v1/instances/ns/comp/ep/1f"
CARD = "v1/mdc/ns/comp/ep/1f"
TTL_S = 2.0
PATIENCE_S = 20.0
Make = Callable[..., EtcdDiscovery]


@pytest.fixture
async def make(etcd: Etcd) -> AsyncIterator[Make]:
    """Makes any number of discoveries on it, closed at the end."""
    opened: list[EtcdDiscovery] = []

    def build(endpoints: str = "") -> EtcdDiscovery:
        opened.append(EtcdDiscovery(EtcdSettings(endpoints=endpoints or etcd.url)))
        return opened[-1]

    yield build
    for one in opened:
        await one.close()


class Log:
    """The events of a watch, and the live keys that follow from them."""

    def __init__(self) -> None:
        self.events: list[KeyEvent] = []
        self.live: dict[str, bytes] = {}
        self._changes = Changes()

    def __call__(self, event: KeyEvent) -> None:
        self.events.append(event)
        if event.value is None:
            del self.live[event.key]
        else:
            self.live[event.key] = event.value
        self._changes.changed()

    async def until(self, condition: Callable[[], bool]) -> None:
        await self._changes.until(condition)


async def watched(discovery: EtcdDiscovery) -> Log:
    log = Log()
    await discovery.watch("v1/", log).ready()
    return log


async def registered(discovery: EtcdDiscovery, ttl_s: float = TTL_S) -> EtcdLease:
    lease = await discovery.grant(ttl_s, 0xABCDEF)
    await discovery.put(KEY, b"instance", lease.id)
    await discovery.put(CARD, b"card", lease.id)
    return lease


async def raw(etcd: Etcd, call: Callable[[object], object]) -> object:
    """Call etcd through a separate client, as an operator would."""
    async with grpc.aio.insecure_channel(etcd.url.removeprefix("http://")) as channel:
        return await call(channel)  # type: ignore[misc]


def end(log: Log) -> None:
    assert log.live == {KEY: b"instance", CARD: b"card"}


async def test_the_keys_of_a_dead_process_are_removed_after_its_ttl(etcd: Etcd, make: Make) -> None:
    one, two = make(), make()
    lease = await registered(one)
    log = await watched(two)
    end(log)
    started = asyncio.get_running_loop().time()
    await lease._tasks.close()  # its keep-alive has ended
    await log.until(lambda: log.live == {})
    assert asyncio.get_running_loop().time() - started > 0.5


async def test_a_lease_outlives_its_ttl_while_it_is_kept(etcd: Etcd, make: Make) -> None:
    one, two = make(), make()
    lease = await registered(one)
    log = await watched(two)
    await asyncio.sleep(TTL_S + 1.5)
    assert len(log.events) == 2 and lease.grants == 1 and not lease.lost.is_set()


@pytest.mark.parametrize("longer_than_the_lease", [False, True])
async def test_etcd_hangs(etcd: Etcd, make: Make, longer_than_the_lease: bool) -> None:
    one, two = make(), make()
    lease = await registered(one)
    log = await watched(two)
    etcd.freeze()
    await asyncio.sleep(TTL_S + 2 if longer_than_the_lease else TTL_S / 3)
    end(log)
    late = asyncio.ensure_future(one.put("v1/mdc/ns/comp/ep/2f", b"late", lease.id))
    await one.delete(CARD)
    etcd.thaw()
    async with asyncio.timeout(PATIENCE_S):
        await late
    await log.until(lambda: log.live == {KEY: b"instance", "v1/mdc/ns/comp/ep/2f": b"late"})
    assert not lease.lost.is_set() and lease.id == 0xABCDEF
    await asyncio.sleep(1)
    assert len(await two.list("v1/")) == 2 and len(log.live) == 2


@pytest.mark.parametrize("wiped", [False, True])
async def test_etcd_restarts(etcd: Etcd, make: Make, wiped: bool) -> None:
    """With its data or empty: workers register again, and routing never has a gap."""
    one, two = make(), make()
    lease = await registered(one)
    log = await watched(two)
    etcd.kill()
    end(log)
    assert await two.list("v1/instances/") == {KEY: b"instance"}, "known before is known still"
    if wiped:
        etcd.wipe()
    else:
        await asyncio.sleep(TTL_S + 1)
    etcd.start()
    await until(lambda: two._watcher is not None and not two._watcher._unavailable)
    await asyncio.sleep(TTL_S + 2.5)
    assert not lease.lost.is_set()
    assert await two.list("v1/") == log.live == {KEY: b"instance", CARD: b"card"}
    assert [event.kind for event in log.events] == ["put", "put"], "the instance never went away"
    assert lease.grants == (2 if wiped else lease.grants)


async def test_a_worker_that_died_in_the_outage_is_removed(etcd: Etcd, make: Make) -> None:
    one, two, three = make(), make(), make()
    lease = await registered(one)
    await three.put("v1/mdc/ns/comp/ep/3f", b"stays", (await three.grant(TTL_S)).id)
    log = await watched(two)
    etcd.kill()
    await lease._tasks.close()
    etcd.wipe()
    etcd.start()
    await log.until(lambda: log.live == {"v1/mdc/ns/comp/ep/3f": b"stays"})


async def test_after_a_compaction_only_differences_are_delivered(etcd: Etcd, make: Make) -> None:
    """A watch that resumes before a compaction lists again: no event twice, none missed."""
    one, two = make(), make()
    lease = await registered(one)
    log = await watched(two)
    mirror = two._watcher
    assert mirror is not None and mirror.relisted == 1
    await two._tasks.close()  # the watch is down; what follows happens behind its back
    await one.put(KEY, b"changed", lease.id)
    await one.delete(CARD)
    await one.put("v1/mdc/ns/comp/ep/2f", b"new", lease.id)
    revision = (await one._link.list("v1/")).revision
    compaction = rpc.CompactionRequest(revision=revision)
    await raw(etcd, lambda channel: rpc.KVStub(channel).Compact(compaction))
    assert len(log.events) == 2
    follow = asyncio.ensure_future(mirror.follow())
    await log.until(lambda: log.live == {KEY: b"changed", "v1/mdc/ns/comp/ep/2f": b"new"})
    assert mirror.relisted == 2
    assert sorted(event.kind for event in log.events[2:]) == ["delete", "put", "put"]
    follow.cancel()


async def test_a_watch_resumes_where_it_was(etcd: Etcd, make: Make) -> None:
    one, two = make(), make()
    lease = await registered(one)
    log = await watched(two)
    mirror = two._watcher
    assert mirror is not None
    await two._tasks.close()
    for value in (b"1", b"2", b"3"):
        await one.put(KEY, value, lease.id)
    follow = asyncio.ensure_future(mirror.follow())
    await log.until(lambda: log.live[KEY] == b"3")
    assert [event.value for event in log.events[2:]] == [b"1", b"2", b"3"]
    assert mirror.relisted == 1
    follow.cancel()


@pytest.mark.parametrize("by", ["us", "a foreign tool"])
async def test_a_revoked_lease_stays_revoked(etcd: Etcd, make: Make, by: str) -> None:
    one, two = make(), make()
    lease = await registered(one, 30.0)
    log = await watched(two)
    await asyncio.sleep(0.3)
    if by == "us":
        await two.revoke(lease.id)
    else:
        request = rpc.LeaseRevokeRequest(ID=lease.id)
        await raw(etcd, lambda channel: rpc.LeaseStub(channel).LeaseRevoke(request))
    async with asyncio.timeout(8):  # sooner than its next keep-alive
        await lease.lost.wait()
    await log.until(lambda: log.live == {})
    assert lease.grants == 1
    with pytest.raises(WorkerUnavailable, match="has ended"):
        await one.put(KEY, b"again", lease.id)


async def test_revoked_while_the_owner_was_cut_off(etcd: Etcd, make: Make) -> None:
    """Its lease expired in the meantime, but the tombstone marks it as revoked."""
    port = free_port()
    gate = await Gate.open(port, etcd.port)
    one, two = make(f"127.0.0.1:{port}"), make()
    lease = await registered(one)
    gate.cut()
    await two.revoke(lease.id)
    tombstone = rpc.RangeRequest(key=tombstone_key(lease.id).encode())
    found: Any = await raw(etcd, lambda channel: rpc.KVStub(channel).Range(tombstone))
    assert found.count == 1
    await asyncio.sleep(TTL_S + 0.5)
    assert not lease.lost.is_set(), "it cannot have noticed yet"
    gate.heal()
    async with asyncio.timeout(PATIENCE_S):
        await lease.lost.wait()
    assert await two.list("v1/") == {} and lease.grants == 1
    await gate.close()


async def test_cut_off_for_longer_than_the_lease(etcd: Etcd, make: Make) -> None:
    """Others see it go; healed, it is back under the same id without being started again."""
    port = free_port()
    gate = await Gate.open(port, etcd.port)
    one, two, three = make(f"127.0.0.1:{port}"), make(), make()
    lease = await registered(one)
    logs = [await watched(two), await watched(three)]
    gate.cut()
    for log in logs:
        await log.until(lambda log=log: log.live == {})  # type: ignore[misc]
    gate.heal()
    for log in logs:
        await log.until(lambda log=log: len(log.live) == 2)  # type: ignore[misc]
        end(log)
    assert not lease.lost.is_set() and lease.grants == 2
    await gate.close()


async def test_a_frontend_detects_a_silent_cut_and_catches_up(etcd: Etcd, make: Make) -> None:
    """Only an unanswered ping reveals the cut; the connections from before stay dead."""
    port = free_port()
    gate = await Gate.open(port, etcd.port)
    one, two = make(), make(f"127.0.0.1:{port}")
    lease = await registered(one, 10.0)
    log = await watched(two)
    mirror = two._watcher
    assert mirror is not None
    gate.cut(for_good=True)
    await one.put(KEY, b"changed", lease.id)
    started = asyncio.get_running_loop().time()
    await until(lambda: mirror._unavailable)
    assert asyncio.get_running_loop().time() - started < 10.0, "sooner than a lease runs out"
    assert log.live[KEY] == b"instance"
    gate.heal()
    await log.until(lambda: log.live[KEY] == b"changed")
    assert mirror.relisted == 1
    await gate.close()


async def test_the_second_endpoint_serves_when_the_first_is_away(etcd: Etcd, make: Make) -> None:
    port = free_port()
    one = make(f"http://127.0.0.1:{port},{etcd.url}")
    await one.start()
    await registered(one)
    assert len(await one.list("v1/")) == 2


async def test_a_user_and_its_password(etcd: Etcd) -> None:
    async def prepare(channel: object) -> None:
        auth = rpc.AuthStub(channel)
        await auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="secret"))
        await auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await auth.AuthEnable(rpc.AuthEnableRequest())

    await raw(etcd, prepare)
    for user, password in ((None, None), ("root", "wrong")):
        refused = EtcdDiscovery(EtcdSettings(endpoints=etcd.url, username=user, password=password))
        with pytest.raises(ConfigError, match=r"refuses.*ETCD_AUTH"):
            await refused.start()
        await refused.close()
    one = EtcdDiscovery(EtcdSettings(endpoints=etcd.url, username="root", password="secret"))
    await one.start()
    log = await watched(one)
    lease = await registered(one)
    await log.until(lambda: len(log.live) == 2)
    one._link._token = "expired"
    await one.put(KEY, b"with a new token", lease.id)
    await log.until(lambda: log.live[KEY] == b"with a new token")
    await one.close()


async def test_no_etcd_at_start_is_said_soon_and_clearly() -> None:
    port = free_port()
    settings = EtcdSettings(endpoints=f"127.0.0.1:{port}", start_timeout_s=0.6)
    one = EtcdDiscovery(settings)
    with pytest.raises(
        ConfigError, match=rf"cannot reach etcd at 127.0.0.1:{port}.*ETCD_ENDPOINTS"
    ):
        await one.start()
    await one.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"endpoints": " , "}, "ETCD_ENDPOINTS is empty"),
        ({"endpoints": "ftp://x:1"}, "is not host:port"),
        ({"endpoints": "host:port"}, "host:port"),
        ({"endpoints": "http://me:secret@host:1"}, "takes no user"),
        ({"username": "root"}, "go together"),
        ({"client_cert": "x"}, "go together"),
        ({"ca": "/nowhere/ca.pem"}, "nowhere"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EtcdDiscovery(EtcdSettings(**settings))


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "dynamo.runtime.discovery.etcd.discovery")
    monkeypatch.delitem(sys.modules, "dynamo.runtime.discovery.etcd.link")
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ConfigError, match=r"pip install 'dynamo-appliance\[etcd\]'"):
        DistributedRuntime(settings=RuntimeSettings(discovery_backend="etcd"))


class Gate:
    """A relay in front of etcd that swallows everything while it is cut: no reset, no end."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._through = asyncio.Event()
        self._through.set()
        self._generation = 0
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @classmethod
    async def open(cls, port: int, target: int) -> Gate:
        gate = cls(target)
        gate._server = await asyncio.start_server(gate._relay, "127.0.0.1", port)
        return gate

    def cut(self, for_good: bool = False) -> None:
        """Hold everything back; ``for_good``: what was connected stays dead after healing."""
        self._through.clear()
        self._generation += for_good

    def heal(self) -> None:
        self._through.set()

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._through.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, back), (there, writer)):
            pump = asyncio.ensure_future(self._pump(source, sink))
            self._pumps.add(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        generation = self._generation
        try:
            while data := await source.read(65536):
                await self._through.wait()
                if generation == self._generation:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()
