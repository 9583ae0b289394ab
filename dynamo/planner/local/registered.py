"""What the workers of this machine registered in file discovery, and the end of their leases."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncinotify import Mask

from dynamo.planner.local.ports import RegisteredWorker
from dynamo.protocols.card import ModelCard, decode_card
from dynamo.runtime.discovery.inotify import Inotify
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_lease,
    decode_stored,
    ensure_directories,
    lease_path,
    names,
    read_file,
)
from dynamo.runtime.discovery.process import host_id, is_running
from dynamo.runtime.paths import private_dir

__all__ = ["FileRegistrations", "registered_workers"]

# A renewal only touches the lease file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR


class FileRegistrations:
    """The :class:`Registrations` of the store ``store``; also reports writes of ``statefile``.

    Raises ConfigError if the system is out of inotify instances. Close it after use.
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


def registered_workers(store: Path) -> Mapping[int, RegisteredWorker]:
    """Return what is registered in ``store``, by the pid of the process that the arbiter started.

    Each of those leads a session of its own, so the session of a lease's process names it.
    """
    leases: dict[int, list[int]] = {}
    for lease, session in _leases(store):
        leases.setdefault(session, []).append(lease)
    cards = dict(_cards(store))
    return {
        session: _registered(session, tuple(sorted(found)), cards)
        for session, found in leases.items()
    }


def _leases(store: Path) -> Iterator[tuple[int, int]]:
    host = host_id()
    for name, data in _files(store / "leases"):
        try:
            lease = decode_lease(name, data)
            if lease.host == host and is_running(lease.pid, lease.pid_start):
                yield lease.lease_id, os.getsid(lease.pid)
        except (BadRecord, OSError):
            continue  # reported by the processes that use the store


def _cards(store: Path) -> Iterator[tuple[int, ModelCard]]:
    for _, data in _files(store / "v1/mdc"):
        try:
            stored = decode_stored(data)
            card = decode_card(stored.value)
        except ValueError:
            continue  # reported by the frontend
        if card.lora_name is None:  # an adapter's card has another name for the same worker
            yield stored.lease_id, card


def _registered(
    pid: int, leases: tuple[int, ...], cards: Mapping[int, ModelCard]
) -> RegisteredWorker:
    card = next((cards[lease] for lease in leases if lease in cards), None)
    return RegisteredWorker(
        pid=pid,
        leases=leases,
        worker_id=card.instance_id if card else None,
        model=card.display_name if card else None,
    )


def _files(directory: Path) -> Iterator[tuple[str, bytes]]:
    try:
        listed = names(directory)
    except OSError:
        return  # the store was removed
    for name in listed:
        try:
            data = read_file(directory / name)
        except (BadRecord, OSError):
            continue
        if data is not None:
            yield name, data
