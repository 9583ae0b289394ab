"""The processes that hold leases: host, start time, and a callback at their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["ProcessEnd", "host_id", "is_running", "start_ticks"]

_STAT_START = 19
"""Index of field 22 of /proc/<pid>/stat, counted from the state field (proc(5))."""


def host_id() -> str:
    """Return the scope in which a pid is unique: boot id of the kernel and pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def start_ticks(pid: int) -> int | None:
    """Return the start of the process in clock ticks since boot, None without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[_STAT_START])


def is_running(pid: int, ticks: int) -> bool:
    """Return whether the process that started at ``ticks`` still exists (a zombie does)."""
    return start_ticks(pid) == ticks


class ProcessEnd:
    """Calls ``on_end`` on the loop as soon as the process ends, through a pidfd.

    ProcessLookupError: it has ended already, or its pid belongs to another process. OSError: the
    system has no descriptor left.
    """

    def __init__(self, pid: int, ticks: int, on_end: Callable[[], None]) -> None:
        self._fd = os.pidfd_open(pid)
        # After opening: the pidfd pins one process, and the start time proves that it is ours.
        if not is_running(pid, ticks):
            os.close(self._fd)
            raise ProcessLookupError(f"process {pid} of that start time has ended")
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended)

    def close(self) -> None:
        """Stop watching the process. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.close()
        self._on_end()
