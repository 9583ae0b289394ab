"""A lease in etcd and the watch of its keys, over a store that the test breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from until import Changes

from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.base import KeyCache
from dynamo.runtime.discovery.etcd import discovery as etcd
from dynamo.runtime.discovery.etcd.lease import EtcdLease, marker_key
from dynamo.runtime.discovery.etcd.link import Change, Listing, NoLease, Step, Unreachable


class Link:
    """A store with one lease, which may expire."""

    def __init__(self) -> None:
        self.breaks = 0
        self.store: dict[str, bytes] = {}
        self.granted = True
        self._changes: asyncio.Queue[Any] = asyncio.Queue()
        self.writes = Changes()

    def expire(self) -> None:
        """Lose the connection for longer than the lease lasts."""
        self.breaks += 1
        self.granted = False
        self.store.clear()
        self._changes.put_nowait(SimpleNamespace(changes=()))

    async def keep_alive(self, lease_id: int, timeout_s: float) -> None:
        if not self.granted:
            raise NoLease

    async def grant(self, lease_id: int, ttl_s: float) -> None:
        self.granted = True

    async def revoke(self, lease_id: int) -> None:
        self.granted = False

    async def write(self, values: dict[str, bytes | None], lease_id: int) -> None:
        if not self.granted:
            raise NoLease
        self.store |= {key: value for key, value in values.items() if value is not None}
        self.writes.changed()

    async def exists(self, key: str) -> bool:
        return False

    async def watch(self, key: str, prefix: bool) -> AsyncIterator[Any]:
        while True:
            yield await self._changes.get()


async def test_all_keys_are_written_again_after_the_lease_has_expired() -> None:
    link: Any = Link()
    lease = EtcdLease(link, LeaseRecord(7, 1, 1, 10.0, "here"), lambda lease: None)
    await lease.put("v1/instances/a", b"1")
    await lease.put("v1/mdc/a", b"2")
    keys = {marker_key(7), "v1/instances/a", "v1/mdc/a"}
    assert link.store.keys() == keys
    link.expire()
    await link.writes.until(lambda: link.store.keys() == keys)
    assert lease.grants == 2 and not lease.lost.is_set()
    await lease.revoke()
    assert lease.lost.is_set()


async def test_no_renewal_grants_a_lease_again_while_it_is_revoked() -> None:
    class SlowLink(Link):
        async def revoke(self, lease_id: int) -> None:
            self.expire()  # what a watch shows then makes the lease look whether it still is
            for _ in range(50):
                await asyncio.sleep(0)

    link: Any = SlowLink()
    lease = EtcdLease(link, LeaseRecord(7, 1, 1, 10.0, "here"), lambda lease: None)
    await lease.put("v1/instances/a", b"1")
    await lease.revoke()
    assert lease.lost.is_set() and not link.granted and link.store == {}


class BrokenWatch:
    """A store that can be listed, and whose watches fail ``failures`` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.watches = Changes()
        self.begun = 0

    async def list(self, prefix: str) -> Listing:
        return Listing(1, {"v1/mdc/a": b"1"})

    async def watch(self, key: str, prefix: bool, after: int = 0) -> AsyncIterator[Step]:
        self.begun += 1
        self.watches.changed()
        await asyncio.sleep(0)
        if self.begun <= self.failures:
            raise Unreachable("gone")
        yield Step(2, [Change("v1/mdc/b", b"2")], (1, 1))
        await asyncio.Event().wait()


@pytest.mark.parametrize("pause_s", [0.01, 3600])
async def test_a_watch_that_fails_begins_again_after_a_pause(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "RETRY_S", pause_s)
    link: Any = BrokenWatch(3)
    cache, changes = KeyCache(opened=False), Changes()
    cache.watch("v1/", changes.changed)
    following = asyncio.create_task(etcd.EtcdWatcher(link, cache).follow())
    if pause_s < 1:
        await changes.until(lambda: len(cache.list("v1/")) == 2)
    else:
        await link.watches.until(lambda: link.begun)
        for _ in range(20):
            await asyncio.sleep(0)
        assert link.begun == 1 and cache.list("v1/") == {"v1/mdc/a": b"1"}
    following.cancel()
    await asyncio.wait([following])
