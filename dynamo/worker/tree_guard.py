"""Kills a worker's process tree after the worker was killed.

Engines start processes that survive their parent: after ``kill -9`` they would
keep the GPU. A guard process holds the read end of a pipe. When the worker dies, however it dies,
the kernel closes the other end, and the guard kills the processes that the worker named and removes
their shared memory, which Python's own cleaner cannot: it is killed with them. This file is also
the guard's program: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_STATE, _PPID, _UTIME, _STIME, _START = 0, 1, 11, 12, 19
"""Places in /proc/PID/stat, counted after the command name."""

_SHARED_MEMORY = Path("/dev/shm")
_PYTHON_NAMES = ("psm_", "sem.mp-")
"""How ``multiprocessing`` begins the random names of shared memory and semaphores."""

Process = tuple[int, int]
"""(pid, start time in clock ticks since boot): a pid alone may be reused."""


class TreeGuard:
    """Starts the guard process. Call :meth:`update` after each start of a process."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-SE", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals to the worker's group must not end it
        )
        self._sent: list[Process] = []
        # What exists now belongs to other programs.
        self._others = _shared_memory()
        self._memory: set[str] = set()

    def update(self) -> None:
        """Name all descendants of this process to the guard, and the shared memory of them all."""
        processes = [
            process for process in descendants(os.getpid()) if process[0] != self._guard.pid
        ]
        memory = self._memory | self._new_memory(processes)
        if (processes, memory) != (self._sent, self._memory) and self._guard.stdin is not None:
            self._sent, self._memory = processes, memory
            line = " ".join([*(f"{pid}:{start}" for pid, start in processes), *sorted(memory)])
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(f"{line}\n".encode())
                self._guard.stdin.flush()

    def _new_memory(self, processes: list[Process]) -> set[str]:
        """Return the names that these processes or this one have mapped, and that are new."""
        new = _shared_memory() - self._memory - self._others
        if not new:
            return new
        maps = [_maps(pid) for pid in (os.getpid(), *(pid for pid, _ in processes))]
        return {name for name in new if any(f"/{name}\n" in text for text in maps)}

    def kill(self) -> None:
        """Kill all descendants of this process except the guard."""
        self.update()
        _kill(self._sent)

    def close(self) -> None:
        """End the guard, which kills the processes named last that still run."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()


def descendants(root: int) -> list[Process]:
    """Return the processes below ``root``, parents first. O(processes of the machine)."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None:
                process = (int(entry.name), int(fields[_START]))
                children.setdefault(int(fields[_PPID]), []).append(process)
    processes, next_parents = [], [root]
    while next_parents:
        below = [process for parent in next_parents for process in children.get(parent, ())]
        processes += below
        next_parents = [pid for pid, _ in below]
    return processes


def process_state(process: Process) -> str:
    """Return the letter of proc(5), "" if the process has ended."""
    fields = _stat(process[0])
    if fields is None or int(fields[_START]) != process[1]:
        return ""
    return fields[_STATE]


def cpu_ticks(root: int) -> tuple[int, bool]:
    """Return the CPU time of the processes below ``root``, and whether one could use it now."""
    ticks, runnable = 0, False
    for pid, _ in descendants(root):
        fields = _stat(pid)
        if fields is not None:
            ticks += int(fields[_UTIME]) + int(fields[_STIME])
            runnable = runnable or fields[_STATE] == "R"
    return ticks, runnable


def _shared_memory() -> set[str]:
    try:
        names = (path.name for path in _SHARED_MEMORY.iterdir())
        return {name for name in names if name.startswith(_PYTHON_NAMES)}
    except OSError:
        return set()


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The command name before it, in parentheses, may itself have spaces and parentheses.
        return text.rpartition(")")[2].split()
    except OSError:
        return None


def _kill(processes: list[Process]) -> None:
    """Kill ``processes`` and what they started since."""
    for pid, start in processes:
        fields = _stat(pid)
        if fields is None or int(fields[_START]) != start:
            continue
        for child, _ in [*descendants(pid), (pid, start)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)


def _main() -> None:
    """Read the newest names until the worker closes the pipe, then remove what has them."""
    newest = ""
    for line in sys.stdin:
        newest = line
    processes, memory = [], []
    for word in newest.split():
        pid, colon, start = word.partition(":")
        if colon:
            processes.append((int(pid), int(start)))
        else:
            memory.append(word)
    # First, as it takes less time: a supervisor kills this process, too.
    for name in memory:
        with contextlib.suppress(OSError):
            (_SHARED_MEMORY / name).unlink()
    _kill(processes)


if __name__ == "__main__":
    _main()
