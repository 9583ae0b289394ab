"""The guard kills a worker's processes, whatever ends the worker."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from dynamo.worker.tree_guard import TreeGuard, descendants

# A worker with a child and a grandchild, both of which ignore signals that can be ignored.
WORKER = """
import subprocess, sys
from dynamo.worker.tree_guard import TreeGuard
child = (
    "import subprocess; p = subprocess.Popen(['sleep', '600']); "
    "print(p.pid, flush=True); p.wait()"
)
guard = TreeGuard()
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
grandchild = process.stdout.readline().strip()
guard.update()
print(process.pid, grandchild, flush=True)
sys.stdin.read()
guard.close()
"""


def started_worker() -> tuple[subprocess.Popen[str], list[int]]:
    """Return a worker and pidfds of its child and grandchild."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    return worker, [os.pidfd_open(pid) for pid in pids]


def assert_dead(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 10)[0], "the process still runs"
        os.close(pidfd)


def closed(worker: subprocess.Popen[str]) -> int:
    with worker:
        return worker.wait()


def test_a_killed_worker_leaves_no_process() -> None:
    worker, pidfds = started_worker()
    worker.send_signal(signal.SIGKILL)
    assert_dead(pidfds)
    assert closed(worker) == -signal.SIGKILL


SHARER = """
import multiprocessing.shared_memory as memory, sys
from dynamo.worker.tree_guard import TreeGuard
earlier = memory.SharedMemory(create=True, size=10)
guard = TreeGuard()
ours = memory.SharedMemory(create=True, size=10)
guard.update()
print(earlier.name, ours.name, flush=True)
sys.stdin.read()
"""


def test_a_killed_group_leaves_no_shared_memory_of_its_own() -> None:
    """The group has Python's cleaner, too: a supervisor kills it as a whole."""
    with subprocess.Popen(
        [sys.executable, "-c", SHARER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as sharer:
        assert sharer.stdout is not None
        earlier, ours = (Path("/dev/shm", name) for name in sharer.stdout.readline().split())
        assert earlier.exists() and ours.exists()
        os.killpg(sharer.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while ours.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert not ours.exists()
    earlier.unlink()


def test_closing_the_guard_kills_what_is_left() -> None:
    worker, pidfds = started_worker()
    assert worker.stdin is not None
    worker.stdin.close()
    assert_dead(pidfds)
    assert closed(worker) == 0


def test_a_process_with_a_reused_pid_survives() -> None:
    other = subprocess.Popen(["sleep", "600"])
    guard = TreeGuard()
    try:
        guard._sent = [(other.pid, 1)]  # the pid of a process that started at another time
        guard._guard.stdin.write(f"{other.pid}:1\n".encode())  # type: ignore[union-attr]
        guard.close()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_descendants_are_listed_parents_first() -> None:
    worker, pidfds = started_worker()
    try:
        found = descendants(worker.pid)
        assert len(found) == 3  # the guard, the child, its child
        parent = {pid: _parent(pid) for pid, _ in found}
        assert parent[found[-1][0]] in parent
    finally:
        worker.kill()
        assert_dead(pidfds)
        closed(worker)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
