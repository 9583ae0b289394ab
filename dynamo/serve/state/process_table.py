"""Which recorded processes live (/proc), which of them change workers now, and the end of a tree.

No process of a deployment may survive it, so the arbiter and its guard are *subreapers*: an orphan
anywhere below them becomes their child, where they find and kill it (prctl(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamo.errors import StatefileError
from dynamo.runtime.process.os_process import host_id
from dynamo.serve.state.document import Arbiter, Document, Entry, OperationOwner
from dynamo.serve.state.entries import delete_entry, is_void
from dynamo.serve.state.ledger import GpuLedger
from dynamo.serve.state.statefile import Statefile

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005
_libc = ctypes.CDLL(None, use_errno=True)


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
    """Return the GPU ledger of the box, for ``document``.

    Reads the statefiles beside it. Reservations of processes that exited are void.
    """
    return GpuLedger(document, runs_here, ids, neighbours(document))


def neighbours(document: Document) -> list[Document]:
    """Return the statefiles of the other deployments that run in the directory of ``document``."""
    directory = Path(document.directory or os.devnull)
    others = []
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(StatefileError):  # damaged, or of another program
            other = None
            if path.stem != document.namespace:
                other = Statefile(directory, path.stem).read()
            if other is not None and runs_here(other.arbiter):
                others.append(other)
    return others


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
    # Behind the name, field 3 of proc(5) is index 0: the start time, field 22, is index 19.
    parent, group, session = (int(word) for word in fields[1:4])
    return ProcessStat(pid, fields[0].decode(), parent, group, session, int(fields[19]))


def snapshot() -> list[ProcessStat]:
    """Return all visible processes of this machine. Takes about a millisecond for some hundred."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - many names
    return [process for process in map(stat, pids) if process is not None]


def children(pid: int) -> list[ProcessStat]:
    """Return the direct children of ``pid``, zombies included."""
    return [process for process in snapshot() if process.parent == pid]


def same_process(pid: int, start_ticks: int) -> bool:
    """Whether ``pid`` is still the process with this start time, and not a zombie."""
    process = stat(pid)
    return process is not None and process.start_ticks == start_ticks and process.state != "Z"


def is_halted(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger keeps the process from running."""
    process = stat(pid)
    return process is not None and process.state in ("T", "t")


def environment(pid: int) -> dict[str, str]:
    """Return the environment ``pid`` was started with; empty if it ended or is another user's."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def die_with_parent(signum: int, parent: int) -> bool:
    """Request ``signum`` for when ``parent`` dies. Return False if it is already dead.

    The kernel watches the *thread* that forked us. Kept across execve, not across fork.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    # Checked after the request: a parent that died before it causes no signal.
    return os.getppid() == parent


def become_subreaper() -> None:
    """Adopt every orphan among our descendants, however deep and in whatever session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_group(leader: int) -> None:
    """Kill the process group of ``leader``, which must not be reaped yet: its pid is reserved."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # no member left, or one that changed its user
        return


def end_descendants(
    timeout_s: float, spare: Collection[int] = (), on_end: Callable[[int], None] | None = None
) -> list[int]:
    """Kill and reap all children, and their orphans as this process adopts them.

    Blocking. Returns the pids that remain after ``timeout_s`` (in uninterruptible sleep). The
    caller must be a subreaper.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # The kernel gives the children of a killed process to this one: look until none is left.
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


def reap(child: int) -> int | None:
    """Reap all zombies; return the exit status of ``child`` if it is one of them."""
    exit_status = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_status
        if pid == 0:
            return exit_status
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            # As a shell reports a signal: 128 plus its number.
            exit_status = code if code >= 0 else 128 - code
