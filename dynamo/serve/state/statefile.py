"""Reads and writes the statefile: the processes, their GPUs and their arbiter.

A write is atomic (temporary file, fsync, rename), so readers need no lock and never see a partial
file. An update reads, changes and writes back while it holds the lock, so no change of another
writer is lost. Unknown keys are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dynamo.errors import StatefileError
from dynamo.runtime.process.paths import open_private
from dynamo.serve.state.document import VERSION, Arbiter, Document, Environment

_LOCK_TIMEOUT_S = 5.0
_LOCK_RETRY_S = 0.01
_GPU_LOCK = ".gpus.lock"
_PARTS: dict[str, type] = {
    "namespace": str,
    "circus_endpoint": str,
    "components": dict,
    "environment": dict,
}


class FileLock:
    """An exclusive flock(2) on a file that its holder may remove.

    The kernel frees it when the last process that inherited it by fork has exited.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free. Creates the file (0600). Raises StatefileError."""
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise StatefileError(f"cannot write {self.path}: {error.strerror}") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            if self._is_current(fd):
                self._fd = fd
                return True
            os.close(fd)  # its last holder removed the file between our open and our lock

    def acquire(self, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        """Acquire the lock; raises StatefileError after ``timeout_s``. Blocks: holds are short."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() > deadline:
                raise StatefileError(f"another process has held {self.path} for {timeout_s:g} s")
            time.sleep(_LOCK_RETRY_S)  # flock(2) has no timeout

    def release(self, remove: bool = False) -> None:
        """Release the lock; ``remove`` unlinks the file first, if possible. Idempotent."""
        if self._fd < 0:
            return
        try:
            if remove and self._is_current(self._fd):
                with contextlib.suppress(OSError):  # a remaining file locks nothing
                    self.path.unlink()
        finally:
            os.close(self._fd)
            self._fd = -1

    def note(self, text: str) -> None:
        """Write ``text`` into the file, for processes that find it locked. StatefileError."""
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError as error:
            raise StatefileError(f"cannot write {self.path}: {error.strerror}") from None

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return False


class Statefile:
    """``{directory}/{namespace}.json`` under ``{namespace}.lock``. All calls are blocking.

    With an ``arbiter``, that of another deployment is an error: one that was started since.
    """

    def __init__(self, directory: Path, namespace: str, arbiter: Arbiter | None = None) -> None:
        self.namespace = namespace
        self._arbiter = arbiter
        self.path = directory / f"{namespace}.json"
        self.lock_path = directory / f"{namespace}.lock"

    def read(self) -> Document | None:
        """Read the document; None without a statefile. Needs no lock.

        Raises StatefileError if it is damaged or not a statefile of this namespace.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StatefileError(f"cannot read {self.path}: {error.strerror}") from None
        document = Document.decoded(text)
        # The fast decoder refuses unknown keys; the slow one keeps them, or names what is wrong.
        if document is None or not _is_complete(document):
            document = self._parsed(text)
        if document.version > VERSION:
            raise self._bad(f"has version {document.version}; this dynamo reads {VERSION}")
        if document.namespace != self.namespace:
            raise self._bad(f"belongs to namespace {document.namespace!r}")
        if self._arbiter is not None and _identity(document.arbiter) != _identity(self._arbiter):
            raise StatefileError(
                f"the deployment in namespace {self.namespace!r} has ended and was started again "
                "while this command ran: repeat the command"
            )
        document.directory = str(self.path.parent)
        return document

    def _parsed(self, text: bytes) -> Document:
        """Parse a statefile with keys or values that this version does not know, or a bad one."""
        try:
            written = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"is damaged: {error}") from None
        if not isinstance(written, dict):
            raise self._bad("is not a JSON object")
        for key, kind in _PARTS.items():
            if not isinstance(written.get(key), kind):
                raise self._bad(f"has no {key!r} of type {kind.__name__}")
        return Document.of(written)

    def create(
        self, document: Document, change: Callable[[Document], object] = lambda document: None
    ) -> None:
        """Write ``document`` as the statefile and replace an old one. Raises StatefileError.

        ``change`` may assign GPUs, see :meth:`update`.
        """
        document.directory = str(self.path.parent)
        # In this order here and in update(): two processes must not hold one lock each and wait.
        with self._locked(), self._gpus_locked():
            change(document)
            self._write(document)

    def update(self, change: Callable[[Document], object], assigns: bool = False) -> Document:
        """Apply ``change`` to the document in place and write it back, all under the lock.

        With ``assigns``, no other deployment of the box assigns GPUs at the same time. Raises
        StatefileError if it is missing or damaged. If ``change`` raises, nothing is written.
        """
        with self._locked(), self._gpus_locked() if assigns else contextlib.nullcontext():
            document = self.read()
            if document is None:
                raise StatefileError(f"no statefile {self.path}")
            change(document)
            self._write(document)
        return document

    def remove(self) -> None:
        """Remove the statefile and its lock. Idempotent.

        Raises StatefileError if the lock is held, OSError if a file cannot be removed.
        """
        lock = FileLock(self.lock_path)
        lock.acquire()
        try:
            self.path.unlink(missing_ok=True)
            for left in self.path.parent.glob(f".{self.path.name}.*"):
                left.unlink(missing_ok=True)
        finally:
            lock.release(remove=True)
        gpus = self._gpu_lock()
        if gpus.path.exists() and gpus.try_acquire():  # of a process that was killed with it
            gpus.release(remove=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.lock_path)
        lock.acquire()
        try:
            yield
        finally:
            lock.release(remove=not self.path.exists())  # a deployment that has ended leaves none

    @contextlib.contextmanager
    def _gpus_locked(self) -> Iterator[None]:
        lock = self._gpu_lock()
        lock.acquire()
        try:
            yield
        finally:
            lock.release(remove=True)

    def _gpu_lock(self) -> FileLock:
        # A file of no namespace: their names begin with a letter or a digit.
        return FileLock(self.path.with_name(_GPU_LOCK))

    def _write(self, document: Document) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        # json indents in Python, ten times as slowly; msgspec alone refuses integers over 64 bits.
        text = json.dumps(document.written(), ensure_ascii=False)
        data = msgspec.json.format(text.encode(), indent=2) + b"\n"
        try:
            with open(temporary, "wb", opener=open_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # before the rename: a power loss must not leave it empty
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise StatefileError(f"cannot write {self.path}: {error.strerror}") from None

    def _bad(self, problem: str) -> StatefileError:
        return StatefileError(
            f"{self.path} {problem}. If no deployment runs in namespace {self.namespace!r}, "
            "`dynamo serve` replaces it; else stop the deployment first"
        )


def _identity(arbiter: Arbiter) -> tuple[str, int, int]:
    return arbiter.host, arbiter.pid, arbiter.start_ticks


def _is_complete(document: Document) -> bool:
    """Whether each required part was surely written: a missing one has its default value."""
    parts = (document.namespace, document.circus_endpoint, document.components)
    return all(parts) and document.environment != Environment()
