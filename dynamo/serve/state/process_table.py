"""Which recorded processes live (/proc), and which of them change workers now."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo.runtime.process.os_process import host_id
from dynamo.serve.gpus.gpus import GpuLedger
from dynamo.serve.state.document import Arbiter, Document, Entry, OperationOwner
from dynamo.serve.state.entries import delete_entry, is_void


def reservation(operation: str) -> OperationOwner:
    """Return the reservation of a worker for an operation of this process, begun now."""
    me = stat(os.getpid())
    return OperationOwner(
        pid=os.getpid(),
        start_ticks=me.start_ticks if me else 0,
        host=host_id(),
        operation=operation,
        since=time.time(),
    )


def is_reserved(entry: Entry, active: Collection[str]) -> bool:
    """Whether a living process changes this worker now; ``active``: those of this one."""
    owner = entry.reserved_by
    if owner is None or not runs_here(owner):
        return False
    return owner.pid != os.getpid() or entry.name in active


def runs_here(owner: OperationOwner | Arbiter) -> bool:
    """Whether the process of a reservation, or an arbiter, still runs on this machine."""
    return owner.host == host_id() and same_process(owner.pid, owner.start_ticks)


def reclaim(document: Document) -> list[str]:
    """Delete the entries of workers whose start was interrupted too early; return their names."""
    void = [name for name, entry in document.components.items() if is_void(entry, runs_here)]
    for name in void:
        delete_entry(document, name)
    return void


def ledger_of(document: Document, ids: Sequence[str] | None = None) -> GpuLedger:
    """Return the GPU ledger of ``document``; reservations of processes that exited are void."""
    return GpuLedger(document, runs_here, ids)


class ProcessStat(NamedTuple):
    """The fields of /proc/<pid>/stat (proc(5)); ``start_ticks`` detects a reused pid."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def stat(pid: int) -> ProcessStat | None:
    """Return the state of ``pid``, or None if no such process exists."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in parentheses, which may itself contain spaces and ")".
    fields = text[text.rindex(b")") + 2 :].split()
    parent, group, session = (int(word) for word in fields[1:4])
    return ProcessStat(pid, fields[0].decode(), parent, group, session, int(fields[19]))


def snapshot() -> list[ProcessStat]:
    """Return all visible processes of this machine. Takes about a millisecond for some hundred."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - many names
    return [found for found in map(stat, pids) if found is not None]


def children(pid: int) -> list[ProcessStat]:
    """Return the direct children of ``pid``, zombies included."""
    return [process for process in snapshot() if process.parent == pid]


def same_process(pid: int, start_ticks: int) -> bool:
    """Whether ``pid`` is still the process with this start time, and not a zombie."""
    found = stat(pid)
    return found is not None and found.start_ticks == start_ticks and found.state != "Z"


def environment(pid: int) -> dict[str, str]:
    """Return the environment ``pid`` was started with; empty if it ended or is another user's."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}
