"""The statefile: what runs, on which GPUs, under which arbiter. Spec 3; schema in statefiles/.

Written in one step (temporary file, fsync, rename), changed only under its lock and only by
reading, changing and writing back within one hold of it. Keys that we do not know stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dynamo.errors import StatefileError

__all__ = ["FileLock", "Statefile"]

_LOCK_TIMEOUT_S = 5.0
_LOCK_RETRY_S = 0.01
_PARTS: dict[str, type] = {
    "namespace": str,
    "circus_endpoint": str,
    "components": dict,
    "environment": dict,
}

Document = dict[str, Any]


class FileLock:
    """An exclusive flock(2) on a file that may be removed by its holder.

    The kernel frees it when the last process that inherited it by fork is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Creates the file (0600). Raises StatefileError."""
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
        """Take the lock within ``timeout_s``; raises StatefileError. Blocking: holds are short."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire():
            if time.monotonic() > deadline:
                raise StatefileError(f"{self.path} has been held for {timeout_s:g} s by another")
            time.sleep(_LOCK_RETRY_S)  # flock(2) itself cannot be given a time limit

    def release(self, remove: bool = False) -> None:
        """Free the lock; ``remove`` unlinks the file first, if it can. May be called again."""
        if self._fd < 0:
            return
        try:
            if remove and self._is_current(self._fd):
                with contextlib.suppress(OSError):  # a file that stays locks nothing
                    self.path.unlink()
        finally:
            os.close(self._fd)
            self._fd = -1

    def note(self, text: str) -> None:
        """Write ``text`` into the lock's file, for those who find it held. StatefileError."""
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
    """``{directory}/{namespace}.json`` under ``{namespace}.lock``. All calls are blocking."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self.namespace = namespace
        self.path = directory / f"{namespace}.json"
        self.lock_path = directory / f"{namespace}.lock"

    def read(self) -> Document | None:
        """The document, or None if there is no statefile.

        Raises StatefileError if it is torn or not a statefile of this namespace. Needs no lock.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StatefileError(f"cannot read {self.path}: {error.strerror}") from None
        try:
            document = json.loads(text)
        except ValueError as error:
            raise self._bad(f"is torn: {error}") from None
        if not isinstance(document, dict):
            raise self._bad("is no JSON object")
        for key, kind in _PARTS.items():
            if not isinstance(document.get(key), kind):
                raise self._bad(f"has no {key!r} of type {kind.__name__}")
        if document["namespace"] != self.namespace:
            raise self._bad(f"belongs to namespace {document['namespace']!r}")
        return document

    def create(self, document: Document) -> None:
        """Write ``document`` as the whole statefile, over what was there. Raises StatefileError."""
        with self._locked():
            self._write(document)

    def update(self, change: Callable[[Document], None]) -> Document:
        """Apply ``change`` to the document in place and write it back, under one hold of the lock.

        Raises StatefileError if there is none or it is torn. Nothing is written if ``change``
        raises.
        """
        with self._locked():
            document = self.read()
            if document is None:
                raise StatefileError(f"there is no statefile {self.path}")
            change(document)
            self._write(document)
        return document

    def remove(self) -> None:
        """Remove the statefile and its lock; may be called again.

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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.lock_path)
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _write(self, document: Document) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        try:
            with open(temporary, "wb", opener=_open_private) as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise StatefileError(f"cannot write {self.path}: {error.strerror}") from None

    def _bad(self, problem: str) -> StatefileError:
        return StatefileError(
            f"{self.path} {problem}. If nothing runs in namespace {self.namespace!r}, "
            "`dynamo serve` replaces it; else stop the deployment first"
        )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
