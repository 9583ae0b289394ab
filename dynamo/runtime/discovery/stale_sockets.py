"""The socket files of killed processes: their names, and their removal.

An engine has a directory for those that it names itself.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = [
    "StaleSockets",
    "engine_directory_name",
    "engine_socket_name",
    "event_socket_name",
    "remove_sockets",
    "request_socket_name",
    "socket_owner",
]

_DIRECTORY = re.compile(r"([0-9a-f]{1,16})\.engine")
_SOCKET = re.compile(r"([0-9a-f]{1,16})(?:(?:\.\d+\.events)?\.sock|\.engine-tcp:\d+)")
_ABANDONED_AFTER_S = 60.0
log = logging.getLogger(__name__)


def request_socket_name(instance_id: int) -> str:
    """Return the file name of the request plane socket of an instance."""
    return f"{instance_id:x}.sock"


def event_socket_name(instance_id: int, number: int) -> str:
    """Return the file name of the ``number``-th event socket of an instance."""
    return f"{instance_id:x}.{number}.events.sock"


def engine_socket_name(instance_id: int) -> str:
    """Return the file name of the socket on which rank 0 of an engine publishes its KV events.

    vLLM numbers the ranks in the name as if it were a port: it adds the rank to the digits after
    the last colon, if the endpoint contains "tcp".
    """
    return f"{instance_id:x}.engine-tcp:1"


def engine_directory_name(instance_id: int) -> str:
    """Return the name of the directory for sockets that the engine of an instance names itself."""
    return f"{instance_id:x}.engine"


def socket_owner(path: Path) -> int | None:
    """Return the instance whose socket, or directory of sockets, ``path`` is; None for another."""
    found = _SOCKET.fullmatch(path.name) or _DIRECTORY.fullmatch(path.name)
    return None if found is None else int(found[1], 16)


class StaleSockets:
    """Removes sockets of dead instances from ``directories()``, and no other files.

    A lease has the id of its instance, so a dead lease names the sockets to remove.
    """

    def __init__(self, directories: Callable[[], Sequence[Path]]) -> None:
        self._directories = directories

    def remove(self, instance_id: int) -> None:
        """Unlink the sockets of a dead instance. O(files in the directories)."""
        for path, owner in self._sockets():
            if owner == instance_id:
                remove_sockets(path)

    def sweep(self, is_known: Callable[[int], bool]) -> None:
        """Unlink sockets without a lease and without a listener that are at least a minute old.

        Their processes were killed after their lease was revoked, or while no process watched.
        """
        for path, owner in self._sockets():
            if not is_known(owner) and _is_abandoned(path):
                log.info("removing stale socket %s: no process listens on it", path)
                remove_sockets(path)

    def _sockets(self) -> Iterator[tuple[Path, int]]:
        for directory in self._directories():
            try:
                paths = list(directory.iterdir())
            except FileNotFoundError:
                continue
            for path in paths:
                found = _SOCKET.fullmatch(path.name)
                if found is not None and path.is_socket():
                    yield path, int(found[1], 16)
                    continue
                found = _DIRECTORY.fullmatch(path.name)
                if found is not None and path.is_dir() and not path.is_symlink():
                    yield path, int(found[1], 16)


def remove_sockets(path: Path) -> None:
    """Remove a socket, or a directory with its sockets, unless something else is in it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):  # another process removes it, too, or a file is left in it
        for inner in path.iterdir():
            if inner.is_socket():
                inner.unlink(missing_ok=True)
        path.rmdir()


def _is_abandoned(path: Path) -> bool:
    try:
        if time.time() - path.lstat().st_mtime < _ABANDONED_AFTER_S:
            return False  # it may be bound but not listening yet
        if path.is_dir():
            return all(map(_is_abandoned, path.iterdir()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError as error:
        log.debug("keeping %s: %s", path, error)
    return False
