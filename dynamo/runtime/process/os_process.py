"""The processes that hold leases: their host and start time."""

from __future__ import annotations

from pathlib import Path

__all__ = ["host_id", "is_running", "start_ticks"]

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
