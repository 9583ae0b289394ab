"""What the workers of this machine registered in file discovery, and the end of their leases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from asyncinotify import Mask

from dynamo.runtime.discovery.layout import ensure_directories, lease_path
from dynamo.runtime.process.inotify import Inotify
from dynamo.runtime.process.paths import private_dir
from dynamo.serve.state.registered import RegisteredWorker, registered_workers

__all__ = ["FileRegistrations"]

# A renewal only touches the lease file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR


class FileRegistrations:
    """The :class:`Registrations` of the store ``store``; also reports writes of ``statefile``.

    Close it after use.
    """

    def __init__(self, store: Path, statefile: Path) -> None:
        private_dir(store)
        ensure_directories(store)
        self._store = store
        self._change = asyncio.Event()
        self._inotify = Inotify(self._changed)
        for directory in (store / "leases", store / "v1/mdc"):
            self._inotify.add(directory, _MASK, lambda name, mask: self._changed())
        self._statefile = statefile.name
        self._inotify.add(statefile.parent, Mask.MOVED_TO | Mask.ONLYDIR, self._on_state_dir)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._inotify.close()

    def workers(self) -> Mapping[int, RegisteredWorker]:
        """See :class:`Registrations`."""
        return registered_workers(self._store)

    async def revoke(self, lease_id: int) -> None:
        """Unlink the lease: every client drops its records, and its worker drains."""
        lease_path(self._store, lease_id).unlink(missing_ok=True)

    def next_change(self) -> asyncio.Event:
        """See :class:`Registrations`."""
        return self._change

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()  # a waiter holds the one that is set now

    def _on_state_dir(self, name: str, mask: int) -> None:
        if name == self._statefile:
            self._changed()
