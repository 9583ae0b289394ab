"""Identity and listening ports of processes; stop signals and garbage collection of this one."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

_STAT_START = 19
"""Index of field 22 of /proc/<pid>/stat, counted from the state field (proc(5))."""
_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (proc(5))."""
_REPEATABLE = (signal.SIGINT, signal.SIGQUIT)
_COPY_WITHIN_S = 0.5
_NEW_OBJECTS = 50_000


def freeze_heap() -> None:
    """Exempt all existing objects from collection, and raise the threshold for new ones.

    For the whole process; call it after each large object was loaded. O(objects).

    Reference counts free the objects of a request when it ends, so the collector has nothing to
    find. It would still traverse the requests in flight, and sometimes vocabularies and templates,
    again and again.
    """
    # Collect first: what is garbage now would be frozen with the rest.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)


def heeded(*signals: signal.Signals) -> frozenset[signal.Signals]:
    """Return ``signals`` without a SIGHUP that this process ignores, as ``nohup`` has it.

    A handler would replace that, and a blocked signal is queued although it is ignored.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return frozenset(signals) - ({signal.SIGHUP} if ignored else set())


class StopSignals:
    """Counts stop requests: the first one drains, a second one ends at once.

    One request often arrives as several signals: systemd signals every process of a unit and the
    supervisor then stops its children, coreutils ``timeout`` signals its child and the child's
    group. So SIGTERM and SIGHUP may be repeated without effect. Only SIGINT and SIGQUIT, which a
    person sends from a terminal, count again, and only 0.5 s after the last one that counted.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last_s = 0.0

    def received(self, number: int, now_s: float) -> int:
        """The number of this request, 1 for the first; 0 if the signal is a copy of an earlier one.

        ``now_s`` is the time of any monotonic clock.
        """
        is_copy = number not in _REPEATABLE or now_s - self._last_s < _COPY_WITHIN_S
        if self._count and is_copy:
            return 0
        self._count += 1
        self._last_s = now_s
        return self._count


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
    # From the last parenthesis on: the program's name before it may contain any character.
    return int(stat[stat.rindex(b")") + 2 :].split()[_STAT_START])


def is_running(pid: int, ticks: int) -> bool:
    """Return whether the process that started at ``ticks`` still exists (a zombie does)."""
    return start_ticks(pid) == ticks


def listening_users(port: int) -> Iterator[int]:
    """Yield the user of each process that listens on the TCP ``port`` of this machine."""
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                yield int(words[7])
