"""The processes that change workers now, as the statefile names them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynamo.runtime.process.os_process import host_id
from dynamo.serve.gpus.ledger import GpuLedger
from dynamo.serve.state.entries import Entry, delete_entry, is_void
from dynamo.serve.state.process_table import same_process, stat
from dynamo.serve.state.statefile import Document


def owner_mark(operation: str) -> dict[str, Any]:
    """Return the record of an operation of this process on a worker, begun now."""
    me = stat(os.getpid())
    return {
        "pid": os.getpid(),
        "start_ticks": me.start_ticks if me else 0,
        "host": host_id(),
        "operation": operation,
        "since": time.time(),
    }


def is_reserved(entry: Entry, active: Collection[str]) -> bool:
    """Whether a living process changes this worker now; ``active``: those of this one."""
    mark = entry.reserved_by
    if mark is None or not owner_lives(mark):
        return False
    return mark.get("pid") != os.getpid() or entry.name in active


def owner_lives(mark: Mapping[str, Any]) -> bool:
    """Whether the process of a ``reserved_by`` still runs on this machine."""
    pid, ticks = mark.get("pid"), mark.get("start_ticks")
    if mark.get("host") != host_id() or not isinstance(pid, int) or not isinstance(ticks, int):
        return False
    return same_process(pid, ticks)


def reclaim(document: Document) -> list[str]:
    """Delete the entries of workers whose start was interrupted too early; return their names."""
    components = document["components"]
    void = [
        n for n, one in components.items() if isinstance(one, dict) and is_void(one, owner_lives)
    ]
    for name in void:
        delete_entry(document, name)
    return void


def ledger_of(document: Document, ids: Sequence[str] | None = None) -> GpuLedger:
    """Return the GPU ledger of ``document``; reservations of processes that exited are void."""
    return GpuLedger(document, owner_lives, ids)
