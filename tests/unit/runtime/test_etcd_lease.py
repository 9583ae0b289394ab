"""A lease in etcd over a store that the test breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from until import Changes

from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.etcd_lease import EtcdLease, marker_key
from dynamo.runtime.discovery.etcd_link import NoLease


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
