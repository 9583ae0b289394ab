"""Writes what happens to a deployment to a file of JSON lines, which outlives the deployment.

Several processes write: the arbiter (processes, reloads), the planner, frontends (keys), and
programs of operators. Each line is one write to the end of the file, so a crash costs the last line
at most: the next writer ends that, and readers skip it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pwd
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dynamo.errors import shorten
from dynamo.protocols.status import BoxEvent
from dynamo.serve.graph.watchers import WatcherSpec
from dynamo.serve.state.registered import Leases

EVENTS_FILE = "logs/events.log"
"""Path of the file in the run directory of a deployment."""
OLDER_SUFFIX = ".log.1"
LIMIT_BYTES = 1 << 20
"""A file of this size becomes the older one; both have at most 2 MiB, some 10,000 events."""
_TEXT_CHARACTERS = 400
_NAME_CHARACTERS = 200
_TAIL_BYTES = 4096
_REPEATED_S = 30.0
_LOCK_TRIES = 5
_LOCK_S = 0.002
_decode = msgspec.json.Decoder(BoxEvent).decode
log = logging.getLogger(__name__)


class BoxEventLog:
    """The events of the deployment whose run directory is ``run_directory``."""

    def __init__(self, run_directory: Path) -> None:
        self.path = run_directory / EVENTS_FILE
        self._failed = False

    def add(
        self,
        kind: str,
        name: str = "",
        text: str = "",
        *,
        model: str = "",
        by: str = "",
        alert: str = "",
        once: bool = False,
    ) -> None:
        """Append an event. A failure is logged once: it must not stop what happens.

        ``once``: not if the last event is the same, as when several frontends see one change.
        """
        event = BoxEvent(
            kind=kind,
            at_s=round(time.time(), 3),
            name=shorten(name, _NAME_CHARACTERS),
            model=shorten(model, _NAME_CHARACTERS),
            text=shorten(" ".join(text.split()), _TEXT_CHARACTERS),
            by=shorten(by, _NAME_CHARACTERS),
            alert=alert,
        )
        try:
            self._append(event, once)
        except FileNotFoundError:
            return  # no `dynamo serve` has made a directory for logs
        except OSError as error:
            if not self._failed:
                log.warning("cannot write events to %s: %s", self.path, error.strerror)
            self._failed = True

    def _append(self, event: BoxEvent, once: bool) -> None:
        with self._locked() as file:
            end = _end(file)
            if once and _is_repeated(end, event):
                return
            start = b"" if not end or end.endswith(b"\n") else b"\n"  # the writer before crashed
            os.write(file, start + msgspec.json.encode(event) + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file for one event, with room for it.

        The lock keeps others from rotating it. A process that is stopped may hold it: then the file
        only grows a little longer.
        """
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if not _lock(file):
                    yield file
                    return
                if not _is_at(file, self.path):
                    continue  # it has just been rotated
                if os.fstat(file).st_size < LIMIT_BYTES:
                    yield file
                    return
                # The next turn of the loop creates the new file.
                self.path.replace(self.path.with_suffix(OLDER_SUFFIX))
            finally:
                os.close(file)


class ProcessEvents:
    """Adds what an arbiter sees to ``events``; remembers the model of each worker."""

    def __init__(self, events: BoxEventLog) -> None:
        self._events = events
        self._names: dict[int, str] = {}
        self._models: dict[str, str] = {}
        self._served: set[int] = set()

    def add(self, kind: str, name: str, text: str, by: str = "") -> None:
        """Add an event of a process, or of the deployment."""
        self._events.add(kind, name, text, model=self._models.get(name, ""), by=by)

    def started(self, name: str, pid: int) -> None:
        """Add that a process was started."""
        self._names[pid] = name
        self.add("started", name, f"pid {pid}")

    def died(self, name: str, pid: int, text: str) -> None:
        """Add that a process ended by itself."""
        self.add("died", name, f"pid {pid} {text}")

    def exited(self, pid: int) -> None:
        """Forget a process: its number may become another's."""
        self._names.pop(pid, None)
        self._served.discard(pid)

    def forget(self, names: Iterable[str]) -> None:
        """Forget watchers that were removed."""
        for name in names:
            self._models.pop(name, None)

    def served(self, leases: Leases) -> None:
        """Add the processes that have loaded their model since the last call."""
        new = leases.served - self._served
        self._served = set(leases.served)
        if not new:
            return
        models = leases.model_of()
        for pid in sorted(new):
            name = self._names.get(pid, "")
            model = models.get(pid, "")
            if name and model:
                self._models[name] = model
                self.add("serving", name, f"{model} is loaded and takes requests")

    def reloaded(
        self, added: Iterable[WatcherSpec], removed: Iterable[str], summary: str, by: str
    ) -> None:
        """Add that a changed graph was applied."""
        self.add("reload", "graph", summary, by)
        for spec in added:
            self.add("added", spec.name, "by the changed graph", by)
        for name in removed:
            self.add("removed", name, "by the changed graph", by)


def actor() -> str:
    """Return who runs this program: user and pid."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = f"user {os.geteuid()}"
    return f"{user} (pid {os.getpid()})"


def _lock(file: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_S)
        else:
            return True
    return False


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _end(file: int) -> bytes:
    size = os.fstat(file).st_size
    return os.pread(file, _TAIL_BYTES, max(0, size - _TAIL_BYTES))


def _is_repeated(end: bytes, event: BoxEvent) -> bool:
    try:
        last = _decode(end.rstrip(b"\n").rpartition(b"\n")[2])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    soon = 0 <= event.at_s - last.at_s < _REPEATED_S
    return soon and msgspec.structs.replace(last, at_s=event.at_s) == event
