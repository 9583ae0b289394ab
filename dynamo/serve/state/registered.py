"""What the workers of this machine have registered in file discovery."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dynamo.protocols.card import ModelCard, decode_card
from dynamo.protocols.control import ENGINE_CONTROL
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_lease,
    decode_stored,
    names,
    read_file,
)
from dynamo.runtime.process.os_process import host_id, is_running


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """What the process ``pid`` has registered: its leases, and its model once it can serve.

    ``can_sleep``: its engine has a sleep mode.
    """

    pid: int
    leases: tuple[int, ...]
    worker_id: int | None = None
    model: str | None = None
    can_sleep: bool = False


def registered_workers(store: Path) -> Mapping[int, RegisteredWorker]:
    """Return what is registered in ``store``, by the pid of the process that the arbiter started.

    Each of those leads a session of its own, so the session of a lease's process names it.
    """
    leases: dict[int, list[int]] = {}
    for lease, session in _leases(store):
        leases.setdefault(session, []).append(lease)
    cards, sleepers = dict(_cards(store)), set(_sleepers(store))
    return {
        session: _registered(session, tuple(sorted(found)), cards, sleepers)
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


def _sleepers(store: Path) -> Iterator[int]:
    """Yield the leases of engines that take commands to sleep."""
    part = quote(f"/{ENGINE_CONTROL}/", safe="")
    for _, data in _files(store / "v1/instances", part):
        try:
            yield decode_stored(data).lease_id
        except ValueError:
            continue  # reported by the processes that call it


def _registered(
    pid: int, leases: tuple[int, ...], cards: Mapping[int, ModelCard], sleepers: Container[int]
) -> RegisteredWorker:
    card = next((cards[lease] for lease in leases if lease in cards), None)
    return RegisteredWorker(
        pid=pid,
        leases=leases,
        worker_id=card.instance_id if card else None,
        model=card.display_name if card else None,
        can_sleep=any(lease in sleepers for lease in leases),
    )


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
