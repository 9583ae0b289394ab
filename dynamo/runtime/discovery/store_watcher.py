"""A live copy of the file store: it reads files and leases and updates a :class:`KeyCache`.

Every file event causes that one file to be read again. So merged or repeated events do no harm, and
after lost ones (an overflow of the inotify queue) all files are read again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from dynamo.errors import ConfigError
from dynamo.runtime.discovery.base import KeyCache
from dynamo.runtime.discovery.layout import (
    BUCKETS,
    BadRecord,
    StoredRecord,
    decode_stored,
    ensure_directories,
    join_key,
    key_path,
    names,
    read_file,
    remove_if_lease,
    shown,
    sweep,
)
from dynamo.runtime.discovery.leases import SLICE_S, LeaseTable
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.paths import private_dir
from dynamo.runtime.process.sockets import StaleSockets

_FILE_MASK = (
    Mask.MOVED_TO
    | Mask.MOVED_FROM
    | Mask.CREATE
    | Mask.CLOSE_WRITE
    | Mask.DELETE
    | Mask.MOVE_SELF
    | Mask.ONLYDIR
)
_LEASE_MASK = _FILE_MASK | Mask.ATTRIB
_ATTRIB = int(Mask.ATTRIB)
_GONE = int(Mask.IGNORED | Mask.MOVE_SELF)
_SELF_MASK = Mask.MOVE_SELF | Mask.DELETE_SELF | Mask.ONLYDIR
_REBUILD_S = 0.25
log = logging.getLogger(__name__)


class StoreWatcher:
    """Keeps ``cache`` equal to the live keys under ``root``; cleans up after dead processes."""

    def __init__(
        self,
        root: Path,
        inotify: Inotify,
        cache: KeyCache,
        stale_sockets: StaleSockets | None = None,
    ) -> None:
        self._root = root
        self._inotify = inotify
        self._cache = cache
        self._stale_sockets = stale_sockets
        self._leases = LeaseTable(root / "leases", self, inotify.drain)
        self._entries: dict[str, StoredRecord] = {}
        self._keys_of: dict[int, set[str]] = {}
        self._bad: dict[Path, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._rebuild_timer: asyncio.TimerHandle | None = None
        self._reading: Iterator[None] = iter(())
        self._next_slice: asyncio.Handle | None = None
        self._loaded = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Watch, then read everything once: in this order no change is missed."""
        try:
            self._watch_directories()
            for directory in ("leases", *(f"v1/{bucket}" for bucket in BUCKETS)):
                sweep(self._root / directory)
            self._read_all()
        except FileNotFoundError:  # an earlier deployment removes its store at this moment
            self._directory_lost()

    async def loaded(self) -> None:
        """Wait until everything has been read once; at once for a store of usual size."""
        await self._loaded.wait()

    def close(self) -> None:
        """Stop following the store; the cache keeps its keys."""
        self._closed = True
        self._stop_reading()
        self._leases.close()
        if self._rebuild_timer is not None:
            self._rebuild_timer.cancel()
        self._unwatch()

    def rescan(self) -> None:
        """Read every lease and every key, known or new."""
        try:
            self._read_all()
        except OSError:
            self._directory_lost()

    def _read_all(self) -> None:
        """Read every file: the first slice now, the rest on the next turns of the loop."""
        self._stop_reading()
        self._reading = self._files()
        self._read_slice()

    def _stop_reading(self) -> None:
        if self._next_slice is not None:
            self._next_slice.cancel()
            self._next_slice = None

    def _read_more(self) -> None:
        self._next_slice = None
        try:
            self._read_slice()
        except OSError:
            self._directory_lost()

    def _read_slice(self) -> None:
        until_s = time.perf_counter() + SLICE_S
        for _ in self._reading:
            if time.perf_counter() > until_s:
                self._next_slice = self._loop.call_soon(self._read_more)
                return
        if not self._loaded.is_set():
            self._loaded.set()
            self._cache.open()
            if self._stale_sockets is not None:
                # Only now: before all leases were read, sockets of live processes would look stale.
                self._stale_sockets.sweep(self._leases.is_known)

    def _files(self) -> Iterator[None]:
        """Read every lease and every key, one with each step."""
        yield from self._leases.rescan()
        for bucket in BUCKETS:
            for name in names(self._root / "v1" / bucket):
                self._observe(bucket, name)
                yield
        # Without inotify, a file that was added after the first scan of its directory, read here,
        # and removed before the next scan would be in neither.
        self._inotify.scan()
        for key in [key for key in self._entries if not key_path(self._root, key).exists()]:
            self._replace(key, None)

    def lease_alive(self, lease_id: int) -> None:
        """Show the keys of the lease."""
        for key in tuple(self._keys_of.get(lease_id, ())):
            self._cache.set(key, self._entries[key].value)

    def lease_silent(self, lease_id: int) -> None:
        """Hide the keys of the lease."""
        for key in tuple(self._keys_of.get(lease_id, ())):
            self._cache.set(key, None)

    def lease_ended(self, lease_id: int) -> None:
        """Hide the keys of the lease at once, then remove their files."""
        # Hide all keys before the slower file operations, so that no request is routed to them.
        keys = list(self._keys_of.get(lease_id, ()))
        for key in keys:
            self._replace(key, None)
        for key in keys:
            remove_if_lease(key_path(self._root, key), lease_id)

    def holder_died(self, lease_id: int) -> None:
        """Remove the sockets of the dead process."""
        if self._stale_sockets is not None:
            self._stale_sockets.remove(lease_id)

    def bad_file(self, path: Path, problem: str) -> None:
        """Log a bad file once until it changes."""
        try:
            status = path.lstat()
        except OSError:
            self.no_file(path)
            return
        identity = (status.st_ino, status.st_mtime_ns)
        if self._bad.get(path) != identity:
            self._bad[path] = identity
            log.warning("skipping %s: %s", shown(path), problem)

    def no_file(self, path: Path) -> None:
        """Forget the report of a file that was removed or repaired."""
        self._bad.pop(path, None)

    def _watch_directories(self) -> None:
        private_dir(self._root)
        ensure_directories(self._root)
        for directory in (self._root, self._root / "v1"):
            self._descriptors.append(self._inotify.add(directory, _SELF_MASK, self._on_directory))
        self._descriptors.append(
            self._inotify.add(self._root / "leases", _LEASE_MASK, self._on_lease_file)
        )
        for bucket in BUCKETS:
            self._descriptors.append(
                self._inotify.add(
                    self._root / "v1" / bucket,
                    _FILE_MASK,
                    functools.partial(self._on_key_file, bucket),
                )
            )

    def _unwatch(self) -> None:
        for descriptor in self._descriptors:
            self._inotify.remove(descriptor)
        self._descriptors.clear()

    def _on_directory(self, name: str, mask: int) -> None:
        if mask & _GONE:
            self._directory_lost()

    def _on_lease_file(self, name: str, mask: int) -> None:
        if mask & _GONE:
            self._directory_lost()
        elif not name.startswith(".") and name:
            if mask & _ATTRIB:
                self._leases.touched(name)
            else:
                self._leases.observe(name)

    def _on_key_file(self, bucket: str, name: str, mask: int) -> None:
        if mask & _GONE:
            self._directory_lost()
        elif not name.startswith(".") and name:
            self._observe(bucket, name)

    def _directory_lost(self) -> None:
        # Each watched directory reports its own end: one rebuild is enough.
        if self._closed or self._rebuild_timer is not None:
            return
        log.error("a directory of the store %s was removed, creating it again", self._root)
        self._rebuild()

    def _rebuild(self) -> None:
        """Create the directories and watch them; retry later if they are removed again."""
        self._rebuild_timer = None
        self._unwatch()
        try:
            self._watch_directories()
            self._read_all()
        except (OSError, ConfigError) as error:
            log.warning("cannot watch %s: %s; retrying", self._root, error)
            self._unwatch()
            self._rebuild_timer = self._loop.call_later(_REBUILD_S, self._rebuild)

    def _observe(self, bucket: str, name: str) -> None:
        path = self._root / "v1" / bucket / name
        try:
            key = join_key(bucket, name)
        except BadRecord as error:
            self.bad_file(path, str(error))
            return
        try:
            data = read_file(path)
            stored = None if data is None else decode_stored(data)
        except BadRecord as error:
            self.bad_file(path, str(error))
            self._replace(key, None)
            return
        if stored is None:
            self.no_file(path)
        self._replace(key, stored)

    def _replace(self, key: str, stored: StoredRecord | None) -> None:
        before = self._entries.pop(key, None)
        if before is not None:
            keys = self._keys_of[before.lease_id]
            keys.discard(key)
            if not keys:
                del self._keys_of[before.lease_id]
        if stored is not None and not self._leases.is_known(stored.lease_id):
            # Its lease has ended, or its file is not readable: either way the key is not live.
            self._remove_orphan(key, stored.lease_id)
            stored = None
        if stored is not None:
            self._entries[key] = stored
            self._keys_of.setdefault(stored.lease_id, set()).add(key)
        visible = stored is not None and self._leases.is_alive(stored.lease_id)
        self._cache.set(key, stored.value if stored is not None and visible else None)

    def _remove_orphan(self, key: str, lease_id: int) -> None:
        # A lease file that exists but cannot be read may be repaired by its owner: keep its keys.
        if not (self._root / "leases" / f"{lease_id:x}").exists():
            remove_if_lease(key_path(self._root, key), lease_id)
