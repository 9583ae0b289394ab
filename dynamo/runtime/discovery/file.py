"""Discovery in a directory: a lease is a file, its end an inotify event. No server, no polling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from dynamo.errors import InvalidArgument, Unavailable, WorkerUnavailable
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.base import KeyCache, OnKeyEvent, PrefixWatch
from dynamo.runtime.discovery.layout import (
    BUCKETS,
    BadRecord,
    check_value,
    decode_stored,
    encode_stored,
    ensure_directories,
    key_path,
    lease_path,
    names,
    read_file,
    remove_if_lease,
    shown,
    touch,
)
from dynamo.runtime.discovery.store_watcher import StoreWatcher
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.runtime.process.paths import private_dir, write_atomic
from dynamo.runtime.process.sockets import StaleSockets

log = logging.getLogger(__name__)
_MASK = Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF
_TOUCHES_PER_TTL = 3


class OwnedLease:
    """Touches ``path``, which contains ``record``, every ``ttl_s`` / 3. ``keys`` maps the key files
    that this process wrote under the lease to their content.

    A missing lease file is never written again: unlinking it is how any process revokes the lease,
    even while this process is stopped. The lease is then ``lost``.

    With each touch the lease file and its keys are compared with what this process wrote. Missing
    or damaged keys and a damaged lease file are written again.
    """

    def __init__(
        self,
        path: Path,
        record: LeaseRecord,
        inotify: Inotify,
        on_end: Callable[[OwnedLease], None],
    ) -> None:
        self.id = record.lease_id
        self.ttl_s = record.ttl_s
        self.lost = asyncio.Event()
        self.keys: dict[Path, bytes] = {}
        self._path = path
        self._record = msgspec.json.encode(record)
        self._inotify = inotify
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the next touch reports it
            touch(path)
        self._descriptor = inotify.add(path, _MASK, self._on_file)
        self._timer = self._loop.call_later(self.ttl_s / _TOUCHES_PER_TTL, self._touch)

    async def revoke(self) -> None:
        """Unlink the lease and its keys. Idempotent."""
        self._path.unlink(missing_ok=True)
        self._end()

    def check(self) -> None:
        """End the lease if its file is missing."""
        if not self._path.exists():
            self._end()

    def _on_file(self, name: str, mask: int) -> None:
        self.check()

    def _touch(self) -> None:
        try:
            touch(self._path)
            self._repair()
        except FileNotFoundError:
            self._end()
            return
        except OSError as error:
            log.error("cannot touch lease file %s: %s", self._path, error)
        for path, data in self.keys.items():
            self._restore(path, data)
        self._timer = self._loop.call_later(self.ttl_s / _TOUCHES_PER_TTL, self._touch)

    def _repair(self) -> None:
        """Overwrite a damaged lease file in place: to create it would undo a revocation."""
        try:
            if read_file(self._path) == self._record:
                return
        except BadRecord as error:
            log.warning("lease file %s is damaged: %s", self._path, error)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            # Write before the cut: a reader never sees an empty file.
            os.truncate(descriptor, os.pwrite(descriptor, self._record, 0))
        finally:
            os.close(descriptor)
        log.warning("lease %x was damaged: written again", self.id)

    def _restore(self, path: Path, data: bytes) -> None:
        """Write a missing or damaged key again; keep a valid one, which may be of a newer lease."""
        try:
            stored = read_file(path)
            if stored is not None:
                decode_stored(stored)
                return
        except BadRecord as error:
            log.warning("record %s is damaged: %s", shown(path), error)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, data)
        except OSError as error:
            log.error("cannot write %s again: %s", shown(path), error)
            return
        log.warning("%s was deleted or damaged: written again", shown(path))
        if not self._path.exists():  # revoked while the key was written
            remove_if_lease(path, self.id)

    def _end(self) -> None:
        if self.lost.is_set():
            return
        self._timer.cancel()
        self._inotify.remove(self._descriptor)
        for path in self.keys:
            remove_if_lease(path, self.id)
        self.keys.clear()
        self._on_end(self)
        # Last: what waits for it finds the keys removed.
        self.lost.set()


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
        chosen = secrets.randbits(62) + 1 if lease_id is None else lease_id
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
        lease = self._owned.get(lease_id)
        if lease_file.exists():
            data = encode_stored(lease_id, value)
            # Another lease of this process must not write its older record again.
            self._disown(path)
            self._write(path, data)
            if lease is not None:
                lease.keys[path] = data
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
            try:
                write_atomic(path, data)
            except FileNotFoundError:  # an earlier deployment has removed its store just now
                ensure_directories(self._root)
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
