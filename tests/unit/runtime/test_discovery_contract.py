"""What every discovery backend promises, checked on each of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from boxes import Etcd
from until import Changes

from dynamo.config.runtime import EtcdSettings
from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.runtime.discovery import Discovery, FileDiscovery, KeyEvent, MemoryDiscovery
from dynamo.runtime.discovery.base import KeyCache, MemoryStore
from dynamo.runtime.discovery.etcd.discovery import EtcdDiscovery

Make = Callable[[], Discovery]
KEY = "v1/instances/ns/comp/ep/1f"


@pytest.fixture(params=["file", "mem", "etcd"])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes any number of views of one store, closed at the end."""
    opened: list[Discovery] = []
    memory = MemoryStore()

    def build() -> Discovery:
        one: Discovery
        if request.param == "mem":
            one = MemoryDiscovery(memory)
        elif request.param == "file":
            one = FileDiscovery(tmp_path / "s")
        else:
            server: Etcd = request.getfixturevalue("etcd_server")
            one = EtcdDiscovery(EtcdSettings(endpoints=server.url))
        opened.append(one)
        return one

    yield build
    for one in opened:
        await one.close()


class Log:
    """Collects events and lets a test wait for the n-th."""

    def __init__(self) -> None:
        self.events: list[KeyEvent] = []
        self._changes = Changes()

    def __call__(self, event: KeyEvent) -> None:
        self.events.append(event)
        self._changes.changed()

    async def until(self, count: int) -> list[KeyEvent]:
        await self._changes.until(lambda: len(self.events) >= count)
        return self.events


async def test_put_list_delete(make: Make) -> None:
    one, two = make(), make()
    await one.start()
    lease = await one.grant(10)
    await one.put(KEY, b"value", lease.id)
    await one.put("v1/mdc/ns/comp/ep/1f", b"", lease.id)
    assert await two.list("v1/instances/") == {KEY: b"value"}
    assert await two.list("v1/") == {KEY: b"value", "v1/mdc/ns/comp/ep/1f": b""}
    assert await two.list("v1/instances/ns/comp/ep2") == {}
    await one.put(KEY, b"other", lease.id)
    assert await two.list("v1/instances/") == {KEY: b"other"}
    await two.delete(KEY)
    await two.delete(KEY)
    assert await one.list("v1/instances/") == {}


async def test_a_watch_delivers_existing_then_live_keys_once(make: Make) -> None:
    one, two = make(), make()
    lease = await one.grant(10)
    await one.put(KEY, b"1", lease.id)
    log = Log()
    watch = two.watch("v1/instances/ns/", log)
    assert log.events == []
    await watch.ready()
    assert log.events == [KeyEvent("put", KEY, b"1")]
    await one.put("v1/instances/other/comp/ep/1", b"x", lease.id)
    await one.put(KEY, b"2", lease.id)
    await log.until(2)
    await one.delete(KEY)
    await log.until(3)
    assert log.events[1:] == [KeyEvent("put", KEY, b"2"), KeyEvent("delete", KEY, None)]
    watch.close()
    await one.put(KEY, b"3", lease.id)
    assert await two.list(KEY) == {KEY: b"3"}
    assert len(log.events) == 3


async def test_a_revocation_by_any_process_sets_lost_and_removes_keys(make: Make) -> None:
    one, two, three = make(), make(), make()
    lease = await one.grant(10)
    other = await one.grant(10)
    await one.put(KEY, b"1", lease.id)
    await one.put("v1/mdc/ns/comp/ep/1f", b"1", lease.id)
    await one.put("v1/mdc/ns/comp/ep/2f", b"1", other.id)
    log = Log()
    await three.watch("v1/", log).ready()
    await two.revoke(lease.id)
    async with asyncio.timeout(20):
        await lease.lost.wait()
    await log.until(5)
    assert {event.key for event in log.events[3:]} == {KEY, "v1/mdc/ns/comp/ep/1f"}
    assert {event.kind for event in log.events[3:]} == {"delete"}
    assert await three.list("v1/") == {"v1/mdc/ns/comp/ep/2f": b"1"}
    with pytest.raises(WorkerUnavailable, match="has ended"):
        await one.put(KEY, b"1", lease.id)
    await two.revoke(lease.id)
    await lease.revoke()
    assert not other.lost.is_set()


async def test_close_revokes_what_was_granted(make: Make) -> None:
    one, two = make(), make()
    lease = await one.grant(10)
    await one.put(KEY, b"1", lease.id)
    log = Log()
    await two.watch("v1/", log).ready()
    await one.close()
    await one.close()
    assert lease.lost.is_set()
    await log.until(2)
    assert log.events[1] == KeyEvent("delete", KEY, None)


@pytest.mark.parametrize(
    "key", ["", "v1", "v1/instances", "v1/instances/", "v2/instances/a", "v1/other/a", "a/b/c"]
)
async def test_a_key_that_is_none_is_refused(make: Make, key: str) -> None:
    one = make()
    lease = await one.grant(10)
    with pytest.raises(InvalidArgument):
        await one.put(key, b"", lease.id)


async def test_a_chosen_lease_id_must_be_unused(make: Make) -> None:
    one = make()
    lease = await one.grant(10, 0xABC)
    assert lease.id == 0xABC
    with pytest.raises(InvalidArgument, match="exists"):
        await one.grant(10, 0xABC)
    assert 0 < (await one.grant(10)).id < 2**63


async def test_one_failing_callback_does_not_starve_the_next(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    lease = await one.grant(10)

    def fail(event: KeyEvent) -> None:
        raise ValueError("bad subscriber")

    log = Log()
    one.watch("v1/", fail)
    await one.watch("v1/", log).ready()
    await one.put(KEY, b"1", lease.id)
    await log.until(1)
    assert "bad subscriber" in caplog.text


async def test_a_watch_that_closes_during_an_event_costs_no_other_the_event() -> None:
    cache = KeyCache()
    received: list[str] = []

    def closes(event: KeyEvent) -> None:
        received.append("first")
        first.close()

    first = cache.watch("v1/", closes)
    await cache.watch("v1/", lambda event: received.append("second")).ready()
    await cache.watch("v1/", lambda event: received.append("third")).ready()
    cache.set("v1/a", b"")
    cache.set("v1/b", b"")
    assert received == ["first", "second", "third", "second", "third"]


async def test_memory_is_shared_within_a_loop() -> None:
    one, two = MemoryDiscovery(), MemoryDiscovery()
    lease = await one.grant(10)
    await one.put(KEY, b"1", lease.id)
    assert await two.list("v1/") == {KEY: b"1"}
    await one.close()
    await two.close()
