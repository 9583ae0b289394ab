"""The leases and models that the processes of a deployment hold in file discovery."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncinotify import Mask

from dynamo.errors import ConfigError
from dynamo.protocols.card import ModelCard, decode_card
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_lease,
    decode_stored,
    ensure_directories,
    join_key,
    names,
    read_file,
)
from dynamo.runtime.process.inotify import Inotify
from dynamo.runtime.process.os_process import host_id, is_running

# A renewal only touches the file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR
_GONE = int(Mask.IGNORED)
log = logging.getLogger(__name__)


class Leases:
    """The leases in ``store``; calls ``on_change`` when a lease or a model card comes or goes.

    ``served`` has the sessions of all processes that ever registered a model card.
    """

    def __init__(self, store: Path, on_change: Callable[[], None]) -> None:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        ensure_directories(store)
        self._directory = store / "leases"
        self._cards = store / "v1" / "mdc"
        self._on_demand = store / "v1" / "on_demand"
        self.served: set[int] = set()
        self._on_change = on_change
        self._inotify = Inotify(on_change)
        self._watching = False
        self._host = host_id()
        self._known: dict[tuple[str, int], LeaseRecord] = {}

    def by_session(self) -> dict[int, int]:
        """Return the lease of each living process of this host, by the process's session id.

        Of several leases in one session it is the one with the lowest id.
        """
        found: dict[int, int] = {}
        for lease, session in self._sessions().items():
            found[session] = min(lease, found.get(session, lease))
        return found

    def with_model(self) -> set[int]:
        """Return the sessions whose processes have a model card registered now."""
        found = {session for session, _ in self._registered()}
        self.served |= found
        return found

    def models(self) -> set[str]:
        """Return the names of the models that are registered now, adapters included."""
        return {card.display_name for _, card in self._served()}

    def different(self) -> dict[str, set[int]]:
        """Return the sessions that serve a model, by its name, where their models differ."""
        sessions: dict[str, set[int]] = {}
        files: dict[str, set[str]] = {}
        for session, card in self._served():
            sessions.setdefault(card.display_name, set()).add(session)
            files.setdefault(card.display_name, set()).add(card.checksum)
        return {name: sessions[name] for name, found in files.items() if len(found) > 1}

    def _served(self) -> Iterator[tuple[int, ModelCard]]:
        """Yield each model card but those of prefill workers, with the session of its process."""
        for session, record in self._registered():
            with contextlib.suppress(ValueError):  # reported by the frontend
                card = decode_card(record)
                if card.worker_type != "Prefill" and "Prefill" not in card.model_type:
                    yield session, card

    def _registered(self) -> Iterator[tuple[int, bytes]]:
        """Yield each model card with the session of its process."""
        sessions = self._sessions()
        try:
            listed = names(self._cards)
        except OSError:
            return  # the store was removed
        for name in listed:
            try:
                stored = decode_stored(read_file(self._cards / name) or b"")
            except (BadRecord, OSError):
                continue  # reported by the processes that use the store
            if stored.lease_id in sessions:
                yield sessions[stored.lease_id], stored.value

    def on_demand(self) -> set[str]:
        """Return the services whose workers a planner starts on demand, as it has announced."""
        try:
            keys = [join_key("on_demand", name) for name in names(self._on_demand)]
        except (BadRecord, OSError):
            return set()  # the store was removed
        return {key.split("/")[3] for key in keys if key.count("/") > 3}

    def _sessions(self) -> dict[int, int]:
        """Return the session of each lease of a living process of this host."""
        self._watch()
        found: dict[int, int] = {}
        for lease in self._read_leases():
            if lease.host == self._host and is_running(lease.pid, lease.pid_start):
                with contextlib.suppress(OSError):  # it has just exited
                    found[lease.lease_id] = os.getsid(lease.pid)
        return found

    def _read_leases(self) -> list[LeaseRecord]:
        """Return all leases. Reads new files only: a shared store may have thousands."""
        before, self._known = self._known, {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    key = (entry.name, entry.inode())  # a changed lease is another file
                    with contextlib.suppress(BadRecord):  # reported by those that use the store
                        self._known[key] = before.get(key) or decode_lease(
                            entry.name, read_file(self._directory / entry.name) or b""
                        )
        except OSError:
            log.debug("%s was removed", self._directory)
        return list(self._known.values())

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._inotify.close()

    def _watch(self) -> None:
        if not self._watching:
            try:
                self._inotify.add(self._directory, _MASK, self._on_event)
                self._inotify.add(self._cards, _MASK, self._on_card)
            except (OSError, ConfigError):
                return  # the store was removed: the next call tries again
            self._watching = True

    def _on_event(self, name: str, mask: int) -> None:
        if mask & _GONE:
            self._watching = False
        if not name.startswith("."):  # not the temporary file of an atomic write
            self._on_change()

    def _on_card(self, name: str, mask: int) -> None:
        self.with_model()
        self._on_event(name, mask)
