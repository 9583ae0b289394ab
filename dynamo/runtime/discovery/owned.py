"""A lease of this process: kept alive by touching its file, lost when anyone unlinks it.

With each touch the lease and the keys under it are compared with what this process wrote: a key
that was deleted, or either that was damaged, is written again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from asyncinotify import Mask

from dynamo.runtime.discovery.inotify import Inotify
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_stored,
    read_file,
    remove_if_lease,
    shown,
    write_atomic,
)

__all__ = ["OwnedLease"]

_MASK = Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF
_TOUCHES_PER_TTL = 3
_log = logging.getLogger(__name__)


class OwnedLease:
    """Touches ``path``, which holds ``record``, every ``ttl_s`` / 3. ``keys`` are the files put
    under it by this process, with their content.

    The file is never made again: once it is gone, the lease is over (``lost``), however long
    this process was stopped in between.
    """

    def __init__(
        self,
        path: Path,
        lease_id: int,
        ttl_s: float,
        record: bytes,
        inotify: Inotify,
        on_end: Callable[[OwnedLease], None],
    ) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self.keys: dict[Path, bytes] = {}
        self._path = path
        self._record = record
        self._inotify = inotify
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptor = inotify.add(path, _MASK, self._on_file)
        self._timer = self._loop.call_later(ttl_s / _TOUCHES_PER_TTL, self._touch)

    async def revoke(self) -> None:
        """Unlink the lease and its keys; harmless when it is gone already."""
        self._path.unlink(missing_ok=True)
        self._end()

    def check(self) -> None:
        """Notice that the file is gone."""
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
            _log.error("cannot touch the lease %s: %s", self._path, error)
        for path, data in self.keys.items():
            self._restore(path, data)
        self._timer = self._loop.call_later(self.ttl_s / _TOUCHES_PER_TTL, self._touch)

    def _repair(self) -> None:
        """Write a damaged lease file over, in place: a missing one must stay missing."""
        try:
            if read_file(self._path) == self._record:
                return
        except BadRecord as error:
            _log.warning("the lease %s is damaged: %s", self._path, error)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.truncate(descriptor, os.pwrite(descriptor, self._record, 0))
        finally:
            os.close(descriptor)
        _log.warning("lease %x was damaged: written again", self.id)

    def _restore(self, path: Path, data: bytes) -> None:
        """Write a key again that is missing or damaged; a whole one may be another's by now."""
        try:
            found = read_file(path)
            if found is not None:
                decode_stored(found)
                return
        except BadRecord as error:
            _log.warning("the record %s is damaged: %s", shown(path), error)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, data)
        except OSError as error:
            _log.error("cannot write %s again: %s", shown(path), error)
            return
        _log.warning("%s was deleted or damaged: written again", shown(path))
        if not self._path.exists():
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
