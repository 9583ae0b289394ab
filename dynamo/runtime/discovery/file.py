"""Discovery in a directory: a lease is a file, its end an inotify event. No server, no polling."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import msgspec

from dynamo.errors import InvalidArgument, Unavailable, WorkerUnavailable
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.base import OnKeyEvent
from dynamo.runtime.discovery.key_cache import KeyCache, PrefixWatch
from dynamo.runtime.discovery.layout import (
    BUCKETS,
    check_value,
    encode_stored,
    ensure_directories,
    key_path,
    lease_path,
    names,
    remove_if_lease,
    shown,
    write_atomic,
)
from dynamo.runtime.discovery.owned import OwnedLease
from dynamo.runtime.discovery.stale_sockets import StaleSockets
from dynamo.runtime.discovery.store_watcher import StoreWatcher
from dynamo.runtime.process.inotify import Inotify
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.runtime.process.paths import private_dir

__all__ = ["FileDiscovery"]

log = logging.getLogger(__name__)


class FileDiscovery:
    """A :class:`Discovery` over the directory ``root``, shared by all processes of a deployment.

    A process that only registers itself maintains its own lease file; it starts to follow the store
    with its first ``watch`` or ``list``. Files are small and local, so they are read and written on
    the loop. ``stale_sockets`` removes the sockets of dead processes.
    """

    def __init__(self, root: Path, stale_sockets: StaleSockets | None = None) -> None:
        self._root = root
        self._stale_sockets = stale_sockets
        self._cache = KeyCache(opened=False)
        self._inotify: Inotify | None = None
        self._watcher: StoreWatcher | None = None
        self._owned: dict[int, OwnedLease] = {}

    async def start(self) -> None:
        """Create the directories. Raises ConfigError if that is impossible."""
        self._open()

    async def close(self) -> None:
        """See :class:`Discovery`."""
        self._cache.close()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        for lease in list(self._owned.values()):
            await lease.revoke()
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    async def grant(self, ttl_s: float, lease_id: int | None = None) -> OwnedLease:
        """Write a lease file of this process and touch it every ``ttl_s`` / 3."""
        inotify = self._open()
        chosen = lease_id or secrets.randbits(62) + 1
        path = lease_path(self._root, chosen)
        if path.exists():
            raise InvalidArgument(f"lease {chosen:x} exists")
        pid = os.getpid()
        record = LeaseRecord(chosen, pid, start_ticks(pid) or 0, ttl_s, host_id())
        self._write(path, msgspec.json.encode(record))
        lease = OwnedLease(path, record, inotify, self._forget)
        self._owned[chosen] = lease
        return lease

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """Write ``key`` under the lease of any live process."""
        check_value(key, value)
        path = key_path(self._root, key)
        lease_file = lease_path(self._root, lease_id)
        owned = self._owned.get(lease_id)
        if lease_file.exists():
            data = encode_stored(lease_id, value)
            self._disown(path)
            self._write(path, data)
            if owned is not None:
                owned.keys[path] = data
            if lease_file.exists():
                return
            # The lease was revoked while the key was written: its keys were already removed.
            remove_if_lease(path, lease_id)
        raise WorkerUnavailable(f"lease {lease_id:x} has ended")

    async def delete(self, key: str) -> None:
        """See :class:`Discovery`."""
        path = key_path(self._root, key)
        self._disown(path)
        path.unlink(missing_ok=True)

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return all live keys that start with ``prefix``, those just written included."""
        await self._ensure_watching().loaded()
        self._open().drain()
        return self._cache.list(prefix)

    async def revoke(self, lease_id: int) -> None:
        """Unlink the lease of any process, then its keys. O(keys in the store)."""
        self._open()
        # The lease first: it makes a concurrent put under it fail, so that no key remains.
        lease_path(self._root, lease_id).unlink(missing_ok=True)
        for bucket in BUCKETS:
            for name in names(self._root / "v1" / bucket):
                remove_if_lease(self._root / "v1" / bucket / name, lease_id)

    def watch(self, prefix: str, on_event: OnKeyEvent) -> PrefixWatch:
        """Deliver the existing keys on the next turn of the loop, then every change."""
        self._ensure_watching()
        return self._cache.watch(prefix, on_event)

    def _write(self, path: Path, data: bytes) -> None:
        """Write ``path``. Unavailable: the disk is full, or the like."""
        try:
            write_atomic(path, data)
        except OSError as error:
            raise Unavailable(
                f"cannot register in {shown(self._root)}: {error.strerror or error}; "
                "check the space and the permissions of DYN_LOCAL_STATE_DIR"
            ) from error

    def _open(self) -> Inotify:
        if self._inotify is None:
            private_dir(self._root)
            ensure_directories(self._root)
            self._inotify = Inotify(self._overflowed)
        return self._inotify

    def _ensure_watching(self) -> StoreWatcher:
        if self._watcher is None:
            inotify = self._open()
            self._watcher = StoreWatcher(self._root, inotify, self._cache, self._stale_sockets)
            self._watcher.start()
        return self._watcher

    def _overflowed(self) -> None:
        log.warning("inotify queue overflow: reading %s again", self._root)
        for lease in list(self._owned.values()):
            lease.check()
        if self._watcher is not None:
            self._watcher.rescan()

    def _disown(self, path: Path) -> None:
        for lease in self._owned.values():
            lease.keys.pop(path, None)

    def _forget(self, lease: OwnedLease) -> None:
        self._owned.pop(lease.id, None)
