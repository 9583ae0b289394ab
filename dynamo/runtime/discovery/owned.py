"""A lease of this process: kept alive by touching its file, lost when any process unlinks it.

With each touch the lease file and its keys are compared with what this process wrote. Missing or
damaged keys and a damaged lease file are written again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from asyncinotify import Mask

from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_stored,
    read_file,
    remove_if_lease,
    shown,
    write_atomic,
)
from dynamo.runtime.process.inotify import Inotify

__all__ = ["OwnedLease"]

_MASK = Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF
_TOUCHES_PER_TTL = 3
log = logging.getLogger(__name__)


class OwnedLease:
    """Touches ``path``, which contains ``record``, every ``ttl_s`` / 3. ``keys`` maps the key files
    that this process wrote under the lease to their content.

    A missing lease file is never written again: unlinking it is how any process revokes the lease,
    even while this process is stopped. The lease is then ``lost``.
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
            os.utime(self._path)
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
            os.truncate(descriptor, os.pwrite(descriptor, self._record, 0))
        finally:
            os.close(descriptor)
        log.warning("lease %x was damaged: written again", self.id)

    def _restore(self, path: Path, data: bytes) -> None:
        """Write a missing or damaged key again; keep a valid one, which may be of a newer lease."""
        try:
            found = read_file(path)
            if found is not None:
                decode_stored(found)
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
        self.lost.set()
