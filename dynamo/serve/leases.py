"""The leases that the processes of a deployment hold in file discovery."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from asyncinotify import Mask

from dynamo.errors import ConfigError
from dynamo.runtime.discovery.inotify import Inotify
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_lease,
    ensure_directories,
    names,
    read_file,
)
from dynamo.runtime.discovery.process import host_id, is_running

__all__ = ["Leases"]

# A renewal only touches the file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR
_GONE = int(Mask.IGNORED)


class Leases:
    """The leases in ``store``; calls ``on_change`` when one is granted or revoked.

    Raises ConfigError if the system is out of inotify instances.
    """

    def __init__(self, store: Path, on_change: Callable[[], None]) -> None:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        ensure_directories(store)
        self._directory = store / "leases"
        self._on_change = on_change
        self._inotify = Inotify(on_change)
        self._watching = False
        self._host = host_id()

    def by_session(self) -> dict[int, int]:
        """Return the lease of each living process of this host, by the process's session id.

        Of several leases in one session it is the one with the lowest id.
        """
        self._watch()
        found: dict[int, int] = {}
        try:
            listed = names(self._directory)
        except OSError:
            return found  # the store was removed
        for name in listed:
            try:
                lease = decode_lease(name, read_file(self._directory / name) or b"")
                if lease.host == self._host and is_running(lease.pid, lease.pid_start):
                    session = os.getsid(lease.pid)
                    found[session] = min(lease.lease_id, found.get(session, lease.lease_id))
            except (BadRecord, OSError):
                continue  # reported by the processes that use the store
        return found

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._inotify.close()

    def _watch(self) -> None:
        if not self._watching:
            try:
                self._inotify.add(self._directory, _MASK, self._on_event)
            except (OSError, ConfigError):
                return  # the store was removed: the next call tries again
            self._watching = True

    def _on_event(self, name: str, mask: int) -> None:
        if mask & _GONE:
            self._watching = False
        if not name.startswith("."):  # not the temporary file of an atomic write
            self._on_change()
