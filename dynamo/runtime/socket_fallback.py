"""Directories for sockets whose own place has too long a path: shared, and gone with the last user.

Whoever uses one holds a shared lock on it, which the kernel drops even after SIGKILL; it is removed
only under an exclusive one, so never between somebody's look and his bind.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["hold", "release"]

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_held: dict[Path, int] = {}
"""The open directory of each that this process uses."""


def hold(directory: Path) -> os.stat_result:
    """Create ``directory`` (mode 0700) if need be and keep it from being removed; its status.

    Its parent may be writable by others: a symbolic link in its place is refused, with OSError.
    Idempotent; O(1).
    """
    before = _held.pop(directory, None)
    if before is not None:
        if _is(before, directory):
            _held[directory] = before
            return os.fstat(before)
        os.close(before)
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(directory, _OPEN_FLAGS)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is(descriptor, directory):
            _held[directory] = descriptor
            return os.fstat(descriptor)
        os.close(descriptor)


def release(directory: Path, record: Path) -> None:
    """Use ``directory`` no more; remove it, and the file ``record`` that names it, if it is empty
    and nobody else holds it. Idempotent."""
    before = _held.pop(directory, None)
    if before is not None:
        os.close(before)
    try:
        descriptor = os.open(directory, _OPEN_FLAGS)
    except OSError:
        return  # gone, or never ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not any(directory.iterdir()):
            record.unlink(missing_ok=True)
            directory.rmdir()
    except OSError:
        return  # others use it, and the last of them removes it
    finally:
        os.close(descriptor)


def _is(descriptor: int, directory: Path) -> bool:
    try:
        there = directory.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
