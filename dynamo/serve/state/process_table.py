"""Reads /proc: parents, sessions, start times and environments of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


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
