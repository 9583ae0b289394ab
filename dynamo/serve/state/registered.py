"""What the processes of this machine hold in file discovery: leases, models, sleep modes.

Records that cannot be read are skipped: the processes that use the store report them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dynamo.errors import ConfigError
from dynamo.protocols.control import ENGINE_CONTROL, LeaseRecord, ModelCard, decode_card
from dynamo.runtime.discovery.layout import (
    BadRecord,
    StoredRecord,
    decode_lease,
    decode_stored,
    ensure_directories,
    join_key,
    lease_path,
    names,
    read_file,
    untouched_s,
)
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.os_process import host_id, is_running

# A renewal only touches the file, which causes none of these events.
_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.DELETE | Mask.ONLYDIR
_GONE = int(Mask.IGNORED)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """What the process ``pid`` has registered: its leases, and its model once it can serve.

    ``adapters`` are further names that it serves. ``can_sleep``: its engine has a sleep mode.
    ``silent``: it does not renew its leases, because it is stopped or hangs.
    """

    pid: int
    leases: tuple[int, ...]
    worker_id: int | None = None
    model: str | None = None
    adapters: tuple[str, ...] = ()
    can_sleep: bool = False
    silent: bool = False


def registered_workers(store: Path) -> Mapping[int, RegisteredWorker]:
    """Return what is registered in ``store``, by the pid of the process that the arbiter started.

    Each of those leads a session of its own, so the session of a lease's process names it.
    """
    records, host = list(_leases(store)), host_id()
    silent = {lease.lease_id for lease in records if _is_silent(store, lease, host)}
    leases: dict[int, list[int]] = {}
    for lease_id, session in _sessions(records):
        leases.setdefault(session, []).append(lease_id)
    cards: dict[int, list[ModelCard]] = {}
    for lease_id, card in _cards(store):
        cards.setdefault(lease_id, []).append(card)
    sleepers = set(_sleepers(store))
    return {
        session: _registered(session, tuple(sorted(own)), cards, sleepers, silent)
        for session, own in leases.items()
    }


class Leases:
    """The leases in ``store``; calls ``on_change`` when a lease or a model card comes or goes.

    ``served`` has the sessions of the processes that ever registered a model card, until
    :meth:`keep` drops them.
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
        self._known: dict[tuple[str, int], LeaseRecord] = {}

    def by_session(self) -> dict[int, int]:
        """Return the lease of each living process of this host, by the process's session id.

        Of several leases in one session it is the one with the lowest id.
        """
        leases: dict[int, int] = {}
        for lease, session in self._sessions().items():
            leases[session] = min(lease, leases.get(session, lease))
        return leases

    def with_model(self) -> set[int]:
        """Return the sessions whose processes have a model card registered now."""
        sessions = {session for session, _ in self._registered()}
        self.served |= sessions
        return sessions

    def keep(self, sessions: Collection[int]) -> None:
        """Drop all other sessions from ``served``: the numbers of ended processes are used again.

        Workers that are no children of the arbiter, such as those started by hand, are among them.
        """
        self.served.intersection_update(sessions)

    def model_of(self) -> dict[int, str]:
        """Return the name of the model that each session serves, of its first card."""
        models: dict[int, str] = {}
        for session, record in self._registered():
            with contextlib.suppress(ValueError):  # reported by the frontend
                models.setdefault(session, decode_card(record).display_name)
        return models

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
        return {name: sessions[name] for name, checksums in files.items() if len(checksums) > 1}

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
        for stored in stored_records(self._cards):
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
        # Before the read: a change between the two then causes an event.
        self._watch()
        return dict(_sessions(self._read_leases()))

    def _read_leases(self) -> list[LeaseRecord]:
        """Return all leases. Reads new files only: a shared store may have thousands."""
        before, self._known = self._known, {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    key = (entry.name, entry.inode())  # a changed lease is another file
                    with contextlib.suppress(BadRecord):
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


def _registered(
    pid: int,
    leases: tuple[int, ...],
    cards: Mapping[int, Sequence[ModelCard]],
    sleepers: Container[int],
    silent: Container[int],
) -> RegisteredWorker:
    own = [card for lease in leases for card in cards.get(lease, ())]
    # An adapter's card has another name for the same worker.
    card = next((card for card in own if card.lora_name is None), None)
    return RegisteredWorker(
        pid=pid,
        leases=leases,
        worker_id=card.instance_id if card else None,
        model=card.display_name if card else None,
        adapters=tuple(card.display_name for card in own if card.lora_name is not None),
        can_sleep=any(lease in sleepers for lease in leases),
        silent=all(lease in silent for lease in leases),
    )


def stored_records(directory: Path, part: str = "") -> Iterator[StoredRecord]:
    """Yield the records of a bucket whose file names contain ``part``."""
    for _, data in _files(directory, part):
        with contextlib.suppress(BadRecord):
            yield decode_stored(data)


def _leases(store: Path) -> Iterator[LeaseRecord]:
    for name, data in _files(store / "leases"):
        with contextlib.suppress(BadRecord):
            yield decode_lease(name, data)


def _is_silent(store: Path, lease: LeaseRecord, host: str) -> bool:
    """Whether a lease was not renewed for its TTL. A renewal touches its file."""
    try:
        status = lease_path(store, lease.lease_id).stat()
        return untouched_s(status, lease.host == host) > lease.ttl_s
    except OSError:  # it has just ended
        return False


def _sessions(leases: Iterable[LeaseRecord]) -> Iterator[tuple[int, int]]:
    """Yield each lease of a living process of this host, with the process's session id."""
    host = host_id()
    for lease in leases:
        if lease.host == host and is_running(lease.pid, lease.pid_start):
            with contextlib.suppress(OSError):  # it has just exited
                yield lease.lease_id, os.getsid(lease.pid)


def _cards(store: Path) -> Iterator[tuple[int, ModelCard]]:
    for stored in stored_records(store / "v1/mdc"):
        with contextlib.suppress(ValueError):  # reported by the frontend
            yield stored.lease_id, decode_card(stored.value)


def _sleepers(store: Path) -> Iterator[int]:
    """Yield the leases of engines that take commands to sleep."""
    part = quote(f"/{ENGINE_CONTROL}/", safe="")
    return (stored.lease_id for stored in stored_records(store / "v1/instances", part))


def _files(directory: Path, part: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files whose names contain ``part``."""
    try:
        listed = [name for name in names(directory) if part in name]
    except OSError:
        return  # the store was removed
    for name in listed:
        try:
            data = read_file(directory / name)
        except (BadRecord, OSError):
            continue
        if data is not None:
            yield name, data
