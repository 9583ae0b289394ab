"""The run directory of a namespace: ownership, recovery after a crash, removal at the end."""

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

from dynamo.errors import StatefileError
from dynamo.http.api_keys import new_key
from dynamo.runtime.discovery.layout import (
    BUCKETS,
    BadRecord,
    decode_lease,
    decode_stored,
    lease_path,
    names,
    read_file,
    remove_if_lease,
)
from dynamo.runtime.process.os_process import host_id, is_running
from dynamo.runtime.process.paths import fallback_dir, owner_only, write_atomic
from dynamo.runtime.process.sockets import socket_owner
from dynamo.runtime.process.stop_order import STOP_STAGE
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import LOCAL_KEY
from dynamo.serve.state.process_table import (
    ProcessStat,
    environment,
    runs_here,
    same_process,
    snapshot,
)
from dynamo.serve.state.statefile import FileLock, Statefile

_END_TIMEOUT_S = 5.0
_ABANDONED_AFTER_S = 60.0
OWNER_LOCK = "serve.lock"
"""Held by a deployment from before its statefile is written, with the pid of its guard."""
PLANNER_CONTROL = "planner-control.json"
"""Changes of an operator to the planner, which end with the deployment."""
PLANNER_FILE = "planner.json"
"""What the planner does. It removes this and its lock at its end."""
PLANNER_LOCK = "planner.lock"
GRAPH_COPY = "graph.yaml"
"""The graph of a deployment that was started without a file, while it runs."""
_FALLBACK_RECORD = "sockets.path"
log = logging.getLogger(__name__)


class RunDirectory:
    """``{state}/{namespace}/`` of a deployment, its statefile, its sockets and its leases.

    ``store`` is the directory of file discovery, which other deployments may share.
    """

    def __init__(self, path: Path, store: Path, statefile: Statefile) -> None:
        self.path = path
        self.store = store
        self.statefile = statefile
        self._owner = FileLock(path / OWNER_LOCK)

    @property
    def logs(self) -> Path:
        """The directory of the log files; kept after the end."""
        return self.path / "logs"

    def acquire(self, remedy: str = "") -> None:
        """Lock the namespace for this process and its forked children.

        Raises StatefileError that names the running deployment, the ``remedy`` and how to stop it,
        or the file that cannot be written.
        """
        if not self._owner.try_acquire():
            remedy = remedy or "change it with dynamo reload GRAPH"
            pid = (read_file(self._owner.path) or b"?").decode(errors="replace").strip()
            raise StatefileError(
                f"namespace {self.statefile.namespace!r} is already served by process {pid} "
                f"(statefile {self.statefile.path}); {remedy}, choose another --namespace, or: "
                f"dynamo stop --namespace {self.statefile.namespace}"
            )
        try:
            self._owner.note(f"{os.getpid()}\n")
        except StatefileError:
            self.release()
            raise

    def reconcile(self) -> list[str]:
        """Kill and remove what a crashed deployment left behind; return messages for the user.

        Requires the lock. Kills a process only on the boot and in the pid namespace of the
        statefile, and only if the statefile names it with its start time, or its environment names
        one of the statefile's watchers. Raises StatefileError if the recorded arbiter is alive.
        """
        messages = []
        try:
            document = self.statefile.read()
        except StatefileError as error:
            messages.append(f"replacing a bad statefile: {error.message}")
            document = None
        if document is not None:
            # Before clear(): these processes use the store and the sockets.
            ended = sum(_end_session(*left) for left in _left_behind(document))
            ended += _end_escaped(document, self.statefile.path.parent)
            messages.append(
                f"an earlier deployment of {self.statefile.namespace!r} ended without clean-up: "
                f"killed {ended} of its processes, removed its statefile"
            )
        self.clear(ends=False)
        return messages

    def clear(self, ends: bool = True) -> None:
        """Remove statefile, sockets and dead leases; the store too, unless other processes use it.

        The sockets of living workers stay: some may have been started by hand. The directories of
        the store stay unless the deployment ``ends``: a process may open them at this moment.

        Requires the lock, after all processes of the deployment have exited. Idempotent.
        """
        try:
            self.statefile.remove()
        except (StatefileError, OSError) as error:
            log.error("cannot remove the statefile: %s; delete it by hand", error)
        for name in (STOP_STAGE, PLANNER_CONTROL, GRAPH_COPY, LOCAL_KEY):
            (self.path / name).unlink(missing_ok=True)
        self._remove_planner()
        living = self._sweep_store()
        fallback = fallback_dir(self.path)
        for directory in (self.path, *([fallback] if fallback else [])):
            for path in list(_sockets(directory)):
                if not {socket_owner(owned) for owned in (path, path.parent)} & living:
                    path.unlink(missing_ok=True)
        if living:
            return  # a manually started worker, or another deployment, still uses the store
        if self.store == self.path / "store":
            if ends:
                shutil.rmtree(self.store, ignore_errors=True)
            else:
                self._empty_store()
        if fallback is not None:
            shutil.rmtree(fallback, ignore_errors=True)
        self._remove_unfinished()
        (self.path / _FALLBACK_RECORD).unlink(missing_ok=True)

    def make_key(self) -> None:
        """Write a new key of the deployment, which its frontends admit."""
        with owner_only():
            write_atomic(self.path / LOCAL_KEY, new_key().encode())

    def keep_graph(self, text: str) -> Path:
        """Write the graph of a deployment that has no file of its own; return the file."""
        path = self.path / GRAPH_COPY
        note = "# The graph of a running deployment. It goes when that ends: copy it to keep it."
        write_atomic(path, f"{note}\n{text}".encode())
        return path

    def _remove_planner(self) -> None:
        """Remove the files of a planner that was killed, not of one that a person has started."""
        lock = FileLock(self.path / PLANNER_LOCK)
        if lock.path.exists() and lock.try_acquire():
            (self.path / PLANNER_FILE).unlink(missing_ok=True)
            lock.release(remove=True)

    def _remove_unfinished(self) -> None:
        """Remove the files of processes that were killed while they wrote."""
        for path in self.path.glob(".*"):
            if not path.is_dir():
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Unlock the namespace. Idempotent."""
        self._owner.release(remove=True)

    def _sweep_store(self) -> set[int]:
        """Remove leases and keys of dead processes; return the living leases."""
        leases = self.store / "leases"
        host = host_id()
        living, dead = set[int](), set[int]()
        for name in _names(leases):
            data = read_file(leases / name)
            try:
                lease = decode_lease(name, data or b"")
            except BadRecord:
                continue
            if lease.host == host:
                ended = not is_running(lease.pid, lease.pid_start)
            else:  # another host or container: only the age of the lease shows its death
                ended = _age_s(leases / name) > max(_ABANDONED_AFTER_S, 3 * lease.ttl_s)
            if ended:
                dead.add(lease.lease_id)
                (leases / name).unlink(missing_ok=True)
            else:
                living.add(lease.lease_id)
        for bucket in BUCKETS if dead else ():
            for name in _names(self.store / "v1" / bucket):
                _remove_key(self.store / "v1" / bucket / name, dead)
        return living

    def _empty_store(self) -> None:
        """Remove damaged files and the keys without a lease."""
        leases = self.store / "leases"
        for name in _names(leases):
            try:
                decode_lease(name, read_file(leases / name) or b"")
            except BadRecord:
                (leases / name).unlink(missing_ok=True)
        for bucket in BUCKETS:
            for name in _names(self.store / "v1" / bucket):
                path = self.store / "v1" / bucket / name
                try:
                    lease_id = decode_stored(read_file(path) or b"").lease_id
                    if lease_path(self.store, lease_id).exists():
                        continue
                except BadRecord:
                    pass
                path.unlink(missing_ok=True)


def _age_s(path: Path) -> float:
    """Return the seconds since a lease was last renewed."""
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


def _left_behind(document: Document) -> list[tuple[str, int, int]]:
    """Return (watcher, pid, start) of a dead deployment. Raises StatefileError if it is alive."""
    arbiter = document.arbiter
    if arbiter.host != host_id():
        return []  # from before a reboot, another container, or another program
    if arbiter.pid != os.getpid() and runs_here(arbiter):
        raise StatefileError(
            f"namespace {document.namespace!r} is served by arbiter {arbiter.pid}, "
            f"which has lost its lock; stop it with: kill {arbiter.pid}"
        )
    return [
        (name, process.pid, process.start_ticks)
        for name, entry in document.components.items()
        for process in entry.processes
        if process.pid > 1
    ]


def _end_session(watcher: str, leader: int, ticks: int) -> int:
    """Kill a recorded process and its session; return the number of killed processes.

    The start time identifies the leader. The others are identified by their session, whose number
    the kernel does not reuse while it has members, and by the watcher's name in their environment.
    """
    deadline = time.monotonic() + _END_TIMEOUT_S
    ended: set[int] = set()
    while time.monotonic() < deadline:
        members = [p for p in snapshot() if p.session == leader and p.state != "Z"]
        # The number of the leader was given to another process: the session has ended.
        if any(p.pid == leader and p.start_ticks != ticks for p in members):
            break
        ours = [p for p in members if p.pid == leader or _is_of_watcher(p.pid, watcher)]
        if not ours:
            break
        # Then look again: a process may have forked before it was killed.
        for process in ours:
            _kill(process)
            ended.add(process.pid)
    return len(ended)


def _end_escaped(document: Document, state_dir: Path) -> int:
    """Kill processes outside the session of their worker; return their number.

    They are identified by the variables inherited from the worker, and by a start after that of the
    dead arbiter. Processes of our own session and our ancestors are spared:
    a process of the dead deployment may have started this ``dynamo serve``.
    """
    if document.arbiter.host != host_id():
        return 0
    since = document.arbiter.start_ticks
    deadline = time.monotonic() + _END_TIMEOUT_S
    ended: set[int] = set()
    while since > 0 and time.monotonic() < deadline:
        processes = snapshot()
        ours = _ancestors(processes)
        left = [
            process
            for process in processes
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


def _ancestors(processes: Iterable[ProcessStat]) -> set[int]:
    parents = {process.pid: process.parent for process in processes}
    ancestors, pid = set[int](), os.getpid()
    while pid in parents and pid not in ancestors:
        ancestors.add(pid)
        pid = parents[pid]
    return ancestors


def _is_of_deployment(pid: int, document: Document, state_dir: Path) -> bool:
    env = environment(pid)
    return (
        env.get("DYN_WATCHER_NAME", "") in document.components
        and env.get("DYN_NAMESPACE") == document.namespace
        and env.get("DYN_LOCAL_STATE_DIR") == str(state_dir)
    )


def _is_of_watcher(pid: int, watcher: str) -> bool:
    return environment(pid).get("DYN_WATCHER_NAME") == watcher


def _kill(process: ProcessStat) -> None:
    """SIGKILL this process, not a later one with its pid, and wait until it has exited."""
    try:
        watch = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # With the pidfd open, the number cannot pass to another process between check and signal.
        if same_process(process.pid, process.start_ticks):
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            select.select([watch], [], [], _END_TIMEOUT_S)
    except (ProcessLookupError, PermissionError) as error:
        log.warning("cannot kill process %d of an earlier deployment: %s", process.pid, error)
    finally:
        os.close(watch)
