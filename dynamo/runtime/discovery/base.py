"""The interface of discovery backends, the cache of live keys, and the backend in memory."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.runtime.discovery.layout import check_value, split_key

log = logging.getLogger(__name__)


class KeyEvent(NamedTuple):
    """A key was created or changed (``put``, with its value) or removed (``delete``)."""

    kind: Literal["put", "delete"]
    key: str
    value: bytes | None


OnKeyEvent = Callable[[KeyEvent], None]
"""Called on the loop, synchronously, once per change, in order."""


class Lease(Protocol):
    """The liveness of one process: every key put under it exists as long as the lease."""

    @property
    def id(self) -> int:
        """A positive 63-bit integer."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease ends for any reason: its owner or anyone else revoked it."""

    async def revoke(self) -> None:
        """End the lease and remove its keys. Idempotent."""


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """Stop watching; no callback runs after this."""

    async def ready(self) -> None:
        """Wait until the keys that existed at the start have been delivered."""


class Discovery(Protocol):
    """A store of keys such as ``v1/instances/<ns>/<component>/<endpoint>/<instance hex>``."""

    async def start(self) -> None:
        """Open the store. Raises ConfigError if it cannot be used."""

    async def close(self) -> None:
        """Revoke the leases granted here and stop all watches. Idempotent."""

    async def grant(self, ttl_s: float, lease_id: int | None = None) -> Lease:
        """Grant a lease to this process; ``lease_id`` must be unused (default: random)."""

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """Write ``key``. WorkerUnavailable: the lease has ended. InvalidArgument: the store cannot
        hold the key."""

    async def delete(self, key: str) -> None:
        """Remove ``key``; ignore a missing one."""

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return all live keys that start with ``prefix``."""

    async def revoke(self, lease_id: int) -> None:
        """End the lease of any process; its owner finds ``lost`` set. Idempotent."""

    def watch(self, prefix: str, on_event: OnKeyEvent) -> Watch:
        """Pass the existing keys to ``on_event`` as puts, then every change."""


class PrefixWatch:
    """One ``on_event`` for one prefix. Receives nothing before it is primed."""

    __slots__ = ("_cache", "_on_event", "_ready", "prefix", "primed")

    def __init__(self, cache: KeyCache, prefix: str, on_event: OnKeyEvent) -> None:
        self.prefix = prefix
        self.primed = False
        self._cache = cache
        self._on_event: OnKeyEvent | None = on_event
        self._ready = asyncio.Event()

    def close(self) -> None:
        """Stop watching; no callback runs after this."""
        self._on_event = None
        self._cache.forget(self)

    async def ready(self) -> None:
        """Wait until the keys that existed at the start have been delivered."""
        await self._ready.wait()

    def prime(self, existing: dict[str, bytes]) -> None:
        """Deliver the existing keys, then every change."""
        # First: a callback below may change a key, and this watch must receive that, too.
        self.primed = True
        for key, value in existing.items():
            self.deliver(KeyEvent("put", key, value))
        self._ready.set()

    def deliver(self, event: KeyEvent) -> None:
        """Pass on one event; a failing callback is logged and stays subscribed."""
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("watch of %s failed on %s %s", self.prefix, event.kind, event.key)


class KeyCache:
    """Stores each live key once, so that every change is delivered exactly once.

    ``set`` is O(watches). With ``opened=False`` no watch is primed before :meth:`open`.
    """

    def __init__(self, opened: bool = True) -> None:
        self._opened = opened
        self._live: dict[str, bytes] = {}
        self._watches: list[PrefixWatch] = []

    def set(self, key: str, value: bytes | None) -> None:
        """Set ``key`` to ``value`` (None: remove it) and notify its watches."""
        if self._live.get(key) == value:
            return
        if value is None:
            del self._live[key]
            event = KeyEvent("delete", key, None)
        else:
            self._live[key] = value
            event = KeyEvent("put", key, value)
        # A copy: a callback may open or close a watch.
        for watch in tuple(self._watches):
            if watch.primed and key.startswith(watch.prefix):
                watch.deliver(event)

    def list(self, prefix: str) -> dict[str, bytes]:
        """Return the live keys under ``prefix``."""
        return {key: value for key, value in self._live.items() if key.startswith(prefix)}

    def watch(self, prefix: str, on_event: OnKeyEvent) -> PrefixWatch:
        """Create a watch; it is primed on the next turn of the loop."""
        watch = PrefixWatch(self, prefix, on_event)
        self._watches.append(watch)
        # On the next turn: the caller has its watch before the first event arrives.
        asyncio.get_running_loop().call_soon(self._prime, watch)
        return watch

    def open(self) -> None:
        """Prime the watches that waited for the first listing. Idempotent."""
        self._opened = True
        for watch in tuple(self._watches):
            self._prime(watch)

    def forget(self, watch: PrefixWatch) -> None:
        """Remove ``watch``."""
        if watch in self._watches:
            self._watches.remove(watch)

    def close(self) -> None:
        """Close every watch."""
        for watch in tuple(self._watches):
            watch.close()

    def _prime(self, watch: PrefixWatch) -> None:
        # Scheduled by watch() and called by open(): the first of both primes.
        if self._opened and not watch.primed and watch in self._watches:
            watch.prime(self.list(watch.prefix))


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
    """Discovery inside one process, over ``store``; by default the one of the running loop."""

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
        lease = MemoryLease(self.store, secrets.randbits(62) + 1 if lease_id is None else lease_id)
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
