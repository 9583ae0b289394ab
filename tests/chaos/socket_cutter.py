"""Cuts a UNIX-socket connection of another process, as its peer's crash or the kernel would.

``pidfd_getfd`` duplicates the descriptor of the other process, and ``shutdown`` ends the connection
for both. It needs the right to trace that process: root, or an ancestor's under Yama's scope 1.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["cut_one"]

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut_one(pid: int, wanted: Callable[[str], bool], dice: random.Random) -> str:
    """Cut one connection of ``pid`` whose peer listens on a path that is ``wanted``.

    Returns the path, "" if there is none. Raises PermissionError.
    """
    found = []
    with _pidfd(pid) as pidfd:
        for number in _sockets(pid):
            with _duplicate(pidfd, number) as connection:
                path = _peer(connection)
                if path and wanted(path):
                    found.append((path, number))
        if not found:
            return ""
        path, number = dice.choice(sorted(found))
        with _duplicate(pidfd, number) as connection, suppress(OSError):
            if _peer(connection) == path:  # the number may be another socket's by now
                connection.shutdown(socket.SHUT_RDWR)
                return path
    return ""


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _sockets(pid: int) -> list[int]:
    numbers = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                numbers.append(int(link.name))
    return numbers


@contextmanager
def _duplicate(pidfd: int, number: int) -> Iterator[socket.socket]:
    copy = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    with socket.socket(fileno=copy) as connection:
        yield connection


def _peer(connection: socket.socket) -> str:
    try:
        name = connection.getpeername()
    except OSError:
        return ""
    return name if isinstance(name, str) else ""
