"""Processes as the kernel shows them: parentage, sessions, start times, and how to end them all.

Nothing of a deployment may survive it, so the arbiter and its guard are *subreapers*: whoever loses
its parent anywhere below them becomes their child, and can be found and ended (prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "ProcessStat",
    "become_subreaper",
    "children",
    "die_with_parent",
    "end_descendants",
    "end_group",
    "environment",
    "same_process",
    "snapshot",
    "stat",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessStat(NamedTuple):
    """What /proc/<pid>/stat says (proc(5)); ``start_ticks`` tells two users of one pid apart."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def stat(pid: int) -> ProcessStat | None:
    """The process now, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    parent, group, session = (int(word) for word in fields[1:4])
    return ProcessStat(pid, fields[0].decode(), parent, group, session, int(fields[19]))


def snapshot() -> list[ProcessStat]:
    """All processes of this machine that we can see. A millisecond for some hundred."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - many names
    return [found for found in map(stat, pids) if found is not None]


def children(pid: int) -> list[ProcessStat]:
    """The direct children of ``pid``, zombies included."""
    return [process for process in snapshot() if process.parent == pid]


def same_process(pid: int, start_ticks: int) -> bool:
    """Whether ``pid`` is still the process that started then, and no zombie."""
    found = stat(pid)
    return found is not None and found.start_ticks == start_ticks and found.state != "Z"


def environment(pid: int) -> dict[str, str]:
    """The environment that ``pid`` was started with; empty if it is gone or another user's."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def die_with_parent(signum: int, parent: int) -> bool:
    """Ask for ``signum`` when ``parent`` dies. False if it has died already.

    The kernel watches the *thread* that forked us. Kept across execve, not across fork.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    return os.getppid() == parent


def become_subreaper() -> None:
    """Adopt every orphan among our descendants, however deep and in whatever session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_group(leader: int) -> None:
    """Kill what is left of the process group of ``leader``, which must not be reaped yet."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def end_descendants(
    timeout_s: float, spare: Collection[int] = (), on_end: Callable[[int], None] | None = None
) -> list[int]:
    """Kill and reap our children, and theirs as they come to us, until none is left.

    Blocking, for a process that has nothing else to do; returns the pids still there after
    ``timeout_s`` (in the kernel's uninterruptible sleep). The caller must be a subreaper.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = [child for child in children(os.getpid()) if child.pid not in spare]
        for child in left:
            if child.state != "Z":
                os.kill(child.pid, signal.SIGKILL)
        for child in left:
            if os.waitpid(child.pid, os.WNOHANG)[0] and on_end is not None:
                on_end(child.pid)
        if not left:
            return []
        if time.monotonic() > deadline:
            return [child.pid for child in left]
        time.sleep(_POLL_S)  # a killed process needs a moment to become a zombie


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
