"""Killing a process tree.

No process of a deployment may survive it, so the arbiter and its guard are *subreapers*: an orphan
anywhere below them becomes their child, where they find and kill it (prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection

from dynamo.serve.state.process_table import children

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int, parent: int) -> bool:
    """Request ``signum`` for when ``parent`` dies. Return False if it is already dead.

    The kernel watches the *thread* that forked us. Kept across execve, not across fork.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
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
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code
