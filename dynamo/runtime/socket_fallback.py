"""Shared directories for sockets whose usual path is too long, removed with their last user.

Each user holds a shared lock on the directory, which the kernel drops even after SIGKILL. Removal
needs an exclusive lock, so it never happens between the check and the bind of another user.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["hold", "release"]

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_held: dict[Path, int] = {}
"""The open descriptor of each directory that this process uses."""


def hold(directory: Path) -> os.stat_result:
    """Create ``directory`` (mode 0700) if need be, protect it from removal, return its status.

    Its parent may be writable by other users, so a symbolic link in its place is an OSError.
    Idempotent; O(1).
    """
    before = _held.pop(directory, None)
    if before is not None:
        if _is_same(before, directory):
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
        # Another user may have removed and recreated it before we had the lock: try again then.
        if _is_same(descriptor, directory):
            _held[directory] = descriptor
            return os.fstat(descriptor)
        os.close(descriptor)


def release(directory: Path, record: Path) -> None:
    """Stop using ``directory``; remove it, and the file ``record`` that names it, if it is empty
    and has no other user. Idempotent."""
    before = _held.pop(directory, None)
    if before is not None:
        os.close(before)
    try:
        descriptor = os.open(directory, _OPEN_FLAGS)
    except OSError:
        return  # removed already, or not ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not any(directory.iterdir()):
            record.unlink(missing_ok=True)
            directory.rmdir()
    except OSError:
        return  # the last of its other users removes it
    finally:
        os.close(descriptor)


def _is_same(descriptor: int, directory: Path) -> bool:
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)
