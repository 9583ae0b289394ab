"""Discovery inside one process, for tests and for graphs of one process."""

from __future__ import annotations

import asyncio
import secrets
from typing import ClassVar
from weakref import WeakKeyDictionary

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.runtime.discovery.base import KeyCache, OnKeyEvent, PrefixWatch
from dynamo.runtime.discovery.layout import check_value, split_key


class MemoryStore:
    """The store that the memory discoveries of one event loop share."""

    def __init__(self) -> None:
        self.cache = KeyCache()
        self.leases: dict[int, MemoryLease] = {}
        self.lease_of: dict[str, int] = {}

    def put(self, key: str, value: bytes, lease_id: int) -> None:
        """See :class:`Discovery`."""
        split_key(key)
        check_value(key, value)
        if lease_id not in self.leases:
            raise WorkerUnavailable(f"lease {lease_id:x} has ended")
        self.lease_of[key] = lease_id
        self.cache.set(key, value)

    def delete(self, key: str) -> None:
        """See :class:`Discovery`."""
        self.lease_of.pop(key, None)
        self.cache.set(key, None)

    def revoke(self, lease_id: int) -> None:
        """End the lease, its keys first."""
        lease = self.leases.pop(lease_id, None)
        for key in [key for key, owner in self.lease_of.items() if owner == lease_id]:
            self.delete(key)
        if lease is not None:
            lease.lost.set()


class MemoryLease:
    """A lease that never expires: its process cannot die before the store."""

    def __init__(self, store: MemoryStore, lease_id: int) -> None:
        self.id = lease_id
        self.lost = asyncio.Event()
        self._store = store

    async def revoke(self) -> None:
        """End the lease and remove its keys."""
        self._store.revoke(self.id)


class MemoryDiscovery:
    """A :class:`Discovery` over ``store``; by default the one of the running loop."""

    _stores: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, MemoryStore]] = (
        WeakKeyDictionary()
    )

    def __init__(self, store: MemoryStore | None = None) -> None:
        self._given = store
        self._granted: set[int] = set()
        self._watches: list[PrefixWatch] = []

    @property
    def store(self) -> MemoryStore:
        """The shared state."""
        if self._given is None:
            self._given = self._stores.setdefault(asyncio.get_running_loop(), MemoryStore())
        return self._given

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Revoke the leases granted here and close the watches."""
        for watch in self._watches:
            watch.close()
        for lease_id in self._granted:
            self.store.revoke(lease_id)
        self._granted.clear()

    async def grant(self, ttl_s: float, lease_id: int | None = None) -> MemoryLease:
        """See :class:`Discovery`; ``ttl_s`` has no meaning here."""
        lease = MemoryLease(self.store, lease_id or secrets.randbits(62) + 1)
        if lease.id in self.store.leases:
            raise InvalidArgument(f"lease {lease.id:x} exists")
        self.store.leases[lease.id] = lease
        self._granted.add(lease.id)
        return lease

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """See :class:`Discovery`."""
        self.store.put(key, value, lease_id)

    async def delete(self, key: str) -> None:
        """See :class:`Discovery`."""
        self.store.delete(key)

    async def list(self, prefix: str) -> dict[str, bytes]:
        """See :class:`Discovery`."""
        return self.store.cache.list(prefix)

    async def revoke(self, lease_id: int) -> None:
        """See :class:`Discovery`."""
        self.store.revoke(lease_id)

    def watch(self, prefix: str, on_event: OnKeyEvent) -> PrefixWatch:
        """See :class:`Discovery`."""
        watch = self.store.cache.watch(prefix, on_event)
        self._watches.append(watch)
        return watch
