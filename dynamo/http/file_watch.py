"""Reload files that have changed, without a restart.

Shared by keys and certificates. It compares metadata in the sweep of the server: this also works
for symbolic links that are exchanged, for network file systems and after any editor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from dynamo.errors import ConfigError

__all__ = ["FileWatch"]

log = logging.getLogger(__name__)
_Signature = tuple[tuple[int, ...] | None, ...]


class FileWatch:
    """Calls ``reload`` after a change of ``paths``; create it before their first load.

    A change counts when two checks in a row find the same files, so that a certificate and its key
    may be replaced one after the other. If ``reload`` raises ConfigError, the error is logged and
    the earlier content stays in force until the next change.
    """

    def __init__(self, paths: Sequence[str], reload: Callable[[], None]) -> None:
        self._paths = paths
        self._reload = reload
        self._loaded = self._latest = self._signature()

    def check(self) -> bool:
        """Reload if needed; return whether it did. O(paths), a few microseconds each."""
        before, self._latest = self._latest, self._signature()
        if self._latest == self._loaded or self._latest != before:
            return False
        self._loaded = self._latest
        try:
            self._reload()
        except ConfigError as error:
            log.error("%s; keeping what was loaded before", error.message)
            return False
        log.info("reloaded %s", ", ".join(self._paths))
        return True

    def _signature(self) -> _Signature:
        return tuple(_stat(path) for path in self._paths)


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a third of the cost of Path.stat
    except OSError:
        return None
    # The time of the inode's change also shows a corrected mode or owner.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
