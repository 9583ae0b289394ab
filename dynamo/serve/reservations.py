"""The process that adds or removes a worker, as the statefile names it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from dynamo.runtime.discovery.process import host_id
from dynamo.serve.entries import Entry
from dynamo.serve.process_table import same_process, stat

__all__ = ["is_reserved", "owner_mark"]


def owner_mark() -> dict[str, Any]:
    """Return this process, as the one that adds or removes a worker."""
    me = stat(os.getpid())
    return {"pid": os.getpid(), "start_ticks": me.start_ticks if me else 0, "host": host_id()}


def is_reserved(entry: Entry, active: Collection[str]) -> bool:
    """Whether a living process adds or removes this worker now; ``active``: those of this one."""
    mark = entry.reserved_by
    if mark is None or mark.get("host") != host_id():
        return False
    pid, ticks = mark.get("pid"), mark.get("start_ticks")
    if pid == os.getpid():
        return entry.name in active
    return isinstance(pid, int) and isinstance(ticks, int) and same_process(pid, ticks)
