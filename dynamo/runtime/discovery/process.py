"""Processes as leases know them: on which host, since when, and the moment of their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["ProcessEnd", "host_id", "is_running", "start_ticks"]

_STAT_START = 19
"""Index of field 22 of /proc/<pid>/stat, counted from the state field (proc(5))."""


def host_id() -> str:
    """Which processes this one can name by pid: boot id of the kernel and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def start_ticks(pid: int) -> int | None:
    """Start of the process in clock ticks since boot; None if there is none (any more)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[_STAT_START])


def is_running(pid: int, ticks: int) -> bool:
    """Whether the process that started at ``ticks`` still exists (a zombie does)."""
    return start_ticks(pid) == ticks


class ProcessEnd:
    """Calls ``on_end`` on the loop as soon as the process has ended, through a pidfd.

    Raises ProcessLookupError if it has ended already (or its pid is another's by now), OSError if
    the system has no descriptor left.
    """

    def __init__(self, pid: int, ticks: int, on_end: Callable[[], None]) -> None:
        self._fd = os.pidfd_open(pid)
        if not is_running(pid, ticks):
            os.close(self._fd)
            raise ProcessLookupError(f"process {pid} of that start time has ended")
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended)

    def close(self) -> None:
        """Forget the process; may be called again."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.close()
        self._on_end()
