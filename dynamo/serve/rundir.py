"""The run directory of a namespace: who owns it, what a crash left in it, how it is left clean."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dynamo.errors import StatefileError
from dynamo.runtime.discovery.layout import (
    BUCKETS,
    BadRecord,
    decode_lease,
    decode_stored,
    names,
    read_file,
    remove_if_lease,
)
from dynamo.runtime.discovery.process import host_id, is_running
from dynamo.runtime.paths import fallback_dir
from dynamo.runtime.stop_order import STOP_STAGE
from dynamo.serve.processes import ProcessStat, environment, same_process, snapshot
from dynamo.serve.statefile import FileLock, Statefile

__all__ = ["RunDirectory"]

_END_TIMEOUT_S = 5.0
_ABANDONED_AFTER_S = 60.0
_FALLBACK_RECORD = "sockets.path"
log = logging.getLogger(__name__)


class RunDirectory:
    """``{state}/{namespace}/`` of a deployment, its statefile, its sockets and its leases.

    ``store`` is the directory of file discovery, which may be shared with others.
    """

    def __init__(self, path: Path, store: Path, statefile: Statefile) -> None:
        self.path = path
        self.store = store
        self.statefile = statefile
        self._owner = FileLock(path / "serve.lock")

    @property
    def logs(self) -> Path:
        """Where the output of the processes goes; kept after the end."""
        return self.path / "logs"

    def own(self) -> None:
        """Become the one deployment of this namespace; children made by fork share it.

        Raises StatefileError that names the other and how to stop it, or the file that cannot be
        written.
        """
        if not self._owner.try_acquire():
            pid = (read_file(self._owner.path) or b"?").decode(errors="replace").strip()
            raise StatefileError(
                f"namespace {self.statefile.namespace!r} is already served by process {pid} "
                f"(statefile {self.statefile.path}); stop it with: kill {pid}"
            )
        try:
            self._owner.note(f"{os.getpid()}\n")
        except StatefileError:
            self.disown()
            raise

    def reconcile(self) -> list[str]:
        """End and remove what a crashed deployment left; one line for each thing worth telling.

        Only for the owner. Processes are ended only if boot and pid namespace are those of the
        statefile and it names them with their start time, or they were started by one of its
        watchers, as their environment says. Raises StatefileError if the recorded arbiter lives.
        """
        told = []
        try:
            document = self.statefile.read()
        except StatefileError as error:
            told.append(f"replacing a bad statefile: {error.message}")
            document = None
        if document is not None:
            ended = sum(_end_session(*left) for left in _left_behind(document))
            ended += _end_escaped(document, self.statefile.path.parent)
            told.append(
                f"an earlier deployment of {self.statefile.namespace!r} was killed; "
                f"ended {ended} of its processes and removed its statefile"
            )
        self.clear()
        return told

    def clear(self) -> None:
        """Remove statefile, sockets and dead leases; the store too, unless others live in it.

        Only for the owner, after its processes have ended; may be called again.
        """
        try:
            self.statefile.remove()
        except (StatefileError, OSError) as error:
            log.error("the statefile stays: %s", error)
        (self.path / STOP_STAGE).unlink(missing_ok=True)
        if self._sweep_store():
            return  # a worker that was started by hand still uses the store and its sockets
        if self.store == self.path / "store":
            shutil.rmtree(self.store, ignore_errors=True)
        fallback = fallback_dir(self.path)
        if fallback is not None:
            shutil.rmtree(fallback, ignore_errors=True)
        (self.path / _FALLBACK_RECORD).unlink(missing_ok=True)
        for path in list(_sockets(self.path)):
            path.unlink(missing_ok=True)

    def disown(self) -> None:
        """Let another deployment have the namespace; may be called again."""
        self._owner.release(remove=True)

    def _sweep_store(self) -> bool:
        """Remove the leases of dead processes and their keys; whether living ones remain."""
        leases = self.store / "leases"
        host = host_id()
        living, dead = False, set()
        for name in _names(leases):
            data = read_file(leases / name)
            try:
                lease = decode_lease(name, data or b"")
            except BadRecord:
                continue
            if lease.host == host:
                ended = not is_running(lease.pid, lease.pid_start)
            else:
                ended = _age_s(leases / name) > max(_ABANDONED_AFTER_S, 3 * lease.ttl_s)
            if ended:
                dead.add(lease.lease_id)
                (leases / name).unlink(missing_ok=True)
            else:
                living = True
        for bucket in BUCKETS if dead else ():
            for name in _names(self.store / "v1" / bucket):
                _remove_key(self.store / "v1" / bucket / name, dead)
        return living


def _age_s(path: Path) -> float:
    """Seconds since a lease was last renewed."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _names(directory: Path) -> list[str]:
    try:
        return list(names(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_key(path: Path, dead: set[int]) -> None:
    try:
        lease_id = decode_stored(read_file(path) or b"").lease_id
    except BadRecord:
        return
    if lease_id in dead:
        remove_if_lease(path, lease_id)


def _sockets(root: Path) -> Iterator[Path]:
    for directory, _, files in os.walk(root):
        for name in files:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    yield path


def _left_behind(document: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(watcher, pid, start) of what a dead deployment named. StatefileError if it lives."""
    arbiter = document.get("arbiter")
    if not isinstance(arbiter, dict) or arbiter.get("host") != host_id():
        return []  # before a reboot, in another container, or written by another program
    pid, ticks = _identity(arbiter)
    if pid != os.getpid() and same_process(pid, ticks):
        raise StatefileError(
            f"namespace {document['namespace']!r} is served by arbiter {pid}, "
            f"though its lock is gone; stop it with: kill {pid}"
        )
    return [
        (name, *_identity(process))
        for name, entry in document["components"].items()
        if isinstance(entry, dict)
        for process in entry.get("processes") or ()
        if isinstance(process, dict)
    ]


def _identity(record: dict[str, Any]) -> tuple[int, int]:
    pid, ticks = record.get("pid"), record.get("start_ticks")
    return (pid, ticks) if isinstance(pid, int) and isinstance(ticks, int) and pid > 1 else (-1, -1)


def _end_session(watcher: str, leader: int, ticks: int) -> int:
    """Kill a recorded process and what it started in its session; how many there were.

    The leader is known by its start time, the others by the session, which keeps the number from
    being given out again, and by the watcher's name in their environment.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    ended: set[int] = set()
    while time.monotonic() < deadline:
        members = [p for p in snapshot() if p.session == leader and p.state != "Z"]
        if any(p.pid == leader and p.start_ticks != ticks for p in members):
            break
        ours = [p for p in members if p.pid == leader or _is_of(p.pid, watcher)]
        if not ours:
            break
        for process in ours:
            _kill(process)
            ended.add(process.pid)
    return len(ended)


def _end_escaped(document: dict[str, Any], state_dir: Path) -> int:
    """Kill what left the session of its worker, with whatever that starts; how many there were.

    Such a process is known by the variables that it inherited from the worker, and by having
    started after the dead arbiter. Those of our own session and our ancestors are left alone.
    """
    arbiter = document.get("arbiter")
    if not isinstance(arbiter, dict) or arbiter.get("host") != host_id():
        return 0
    since = _identity(arbiter)[1]
    deadline = time.monotonic() + _END_TIMEOUT_S
    ended: set[int] = set()
    while since > 0 and time.monotonic() < deadline:
        everyone = snapshot()
        ours = _ancestors(everyone)
        left = [
            process
            for process in everyone
            if process.start_ticks >= since
            and process.state != "Z"
            and process.session != os.getsid(0)
            and process.pid not in ours
            and _is_of_deployment(process.pid, document, state_dir)
        ]
        if not left:
            break
        for process in left:
            _kill(process)
            ended.add(process.pid)
    return len(ended)


def _ancestors(everyone: Iterable[ProcessStat]) -> set[int]:
    parents = {process.pid: process.parent for process in everyone}
    found, pid = set[int](), os.getpid()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def _is_of_deployment(pid: int, document: dict[str, Any], state_dir: Path) -> bool:
    env = environment(pid)
    return (
        env.get("DYN_WATCHER_NAME", "") in document["components"]
        and env.get("DYN_NAMESPACE") == document["namespace"]
        and env.get("DYN_LOCAL_STATE_DIR") == str(state_dir)
    )


def _is_of(pid: int, watcher: str) -> bool:
    return environment(pid).get("DYN_WATCHER_NAME") == watcher


def _kill(process: ProcessStat) -> None:
    """SIGKILL exactly this process, not one that got its pid since, and wait until it is gone."""
    try:
        watch = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if same_process(process.pid, process.start_ticks):
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            select.select([watch], [], [], _END_TIMEOUT_S)
    except (ProcessLookupError, PermissionError) as error:
        log.warning("cannot end process %d of an earlier deployment: %s", process.pid, error)
    finally:
        os.close(watch)
