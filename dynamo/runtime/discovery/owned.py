"""A lease of this process: kept alive by touching its file, lost when anyone unlinks it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from asyncinotify import Mask

from dynamo.runtime.discovery.inotify import Inotify
from dynamo.runtime.discovery.layout import remove_if_lease

__all__ = ["OwnedLease"]

_MASK = Mask.ATTRIB | Mask.DELETE_SELF | Mask.MOVE_SELF
_TOUCHES_PER_TTL = 3
_log = logging.getLogger(__name__)


class OwnedLease:
    """Touches ``path`` every ``ttl_s`` / 3. ``keys`` are the files put under it by this process.

    The file is never written again: once it is gone, the lease is over (``lost``), however long
    this process was stopped in between.
    """

    def __init__(
        self,
        path: Path,
        lease_id: int,
        ttl_s: float,
        inotify: Inotify,
        on_end: Callable[[OwnedLease], None],
    ) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self.keys: set[Path] = set()
        self._path = path
        self._inotify = inotify
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptor = inotify.add(path, _MASK, self._on_file)
        self._timer = self._loop.call_later(ttl_s / _TOUCHES_PER_TTL, self._touch)

    async def revoke(self) -> None:
        """Unlink the lease and its keys; harmless when it is gone already."""
        self._path.unlink(missing_ok=True)
        self._end()

    def look(self) -> None:
        """Notice that the file is gone."""
        if not self._path.exists():
            self._end()

    def _on_file(self, name: str, mask: int) -> None:
        self.look()

    def _touch(self) -> None:
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self._end()
            return
        except OSError as error:
            _log.error("cannot touch the lease %s: %s", self._path, error)
        self._timer = self._loop.call_later(self.ttl_s / _TOUCHES_PER_TTL, self._touch)

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
