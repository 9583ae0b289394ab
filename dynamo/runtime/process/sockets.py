"""Addresses and socket files of a process, and the removal of stale socket files.

An engine has a directory for the sockets that it names itself.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from dynamo.config import from_env
from dynamo.config.runtime import EtcdSettings, NatsSettings, RuntimeSettings
from dynamo.errors import InvalidArgument

_ANY = {"": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
# For documentation (RFC 5737, RFC 3849): no machine has them, so their route is the default one.
_TEST_NETS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_DIRECTORY = re.compile(r"([0-9a-f]{1,16})\.engine")
_SOCKET = re.compile(r"([0-9a-f]{1,16})(?:(?:\.\d+\.events)?\.sock|\.(?:engine|replay)-tcp:\d+)")
_ABANDONED_AFTER_S = 60.0
log = logging.getLogger(__name__)


def request_socket_name(instance_id: int) -> str:
    """Return the file name of the request plane socket of an instance."""
    return f"{instance_id:x}.sock"


def event_socket_name(instance_id: int, number: int) -> str:
    """Return the file name of the ``number``-th event socket of an instance."""
    return f"{instance_id:x}.{number}.events.sock"


def engine_socket_name(instance_id: int, kind: str = "engine") -> str:
    """Return the file name of the socket on which rank 0 of an engine publishes its KV events.

    ``kind`` is ``replay`` for the socket that sends earlier ones again. vLLM numbers the ranks in
    the name as if it were a port: it adds the rank to the digits after the last colon, if the
    endpoint contains "tcp".
    """
    return f"{instance_id:x}.{kind}-tcp:1"


def engine_directory_name(instance_id: int) -> str:
    """Return the name of the directory for sockets that the engine of an instance names itself."""
    return f"{instance_id:x}.engine"


def socket_owner(path: Path) -> int | None:
    """Return the instance whose socket, or directory of sockets, ``path`` is; None for another."""
    match = _SOCKET.fullmatch(path.name) or _DIRECTORY.fullmatch(path.name)
    return None if match is None else int(match[1], 16)


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
                match = _SOCKET.fullmatch(path.name)
                if match is not None and path.is_socket():
                    yield path, int(match[1], 16)
                    continue
                match = _DIRECTORY.fullmatch(path.name)
                if match is not None and path.is_dir() and not path.is_symlink():
                    yield path, int(match[1], 16)


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
            # Only a refusal shows that no process listens: a full backlog raises BlockingIOError.
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError as error:
        log.debug("keeping %s: %s", path, error)
    return False


class RequestAddress(NamedTuple):
    """``path`` is set for a UNIX socket, ``host`` and ``port`` otherwise."""

    path: str | None
    host: str
    port: int

    def __str__(self) -> str:
        if self.path is not None:
            return f"uds:{self.path}"
        return f"tcp:{bracketed(self.host)}:{self.port}"


def parse_address(text: str) -> RequestAddress:
    """Parse ``uds:/path`` or ``tcp:host:port``. Raises InvalidArgument, which quotes the text."""
    kind, _, rest = text.partition(":")
    if kind == "uds" and rest:
        return RequestAddress(rest, "", 0)
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) <= 0xFFFF:
        return RequestAddress(None, host.strip("[]"), int(port))
    raise InvalidArgument(f"request plane address {text!r} is neither uds:/path nor tcp:host:port")


def advertised_host(host: str, settings: RuntimeSettings) -> str:
    """Return ``host``, or for a wildcard address the one under which other boxes reach this one.

    That is the source address of the route to etcd or NATS, which the other boxes use as well;
    else that of the default route; else the first of any interface that is up; else loopback.
    """
    family = _ANY.get(host)
    if family is None:
        return host
    for other in (*_shared_servers(settings), _TEST_NETS[family]):
        address = _source_address(family, other)
        if address is not None and not _is_loopback(address):
            return address
    return next(_interfaces(family), _LOOPBACK[family])


def bracketed(host: str) -> str:
    """Return ``host`` as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def _shared_servers(settings: RuntimeSettings) -> Iterator[str]:
    texts = []
    if settings.discovery_backend == "etcd":
        texts.append(from_env(EtcdSettings).endpoints)
    if settings.event_plane == "nats":
        texts.append(from_env(NatsSettings).servers)
    for text in texts:
        for part in text.split(","):
            host = urlsplit(part if "://" in part else f"//{part.strip()}").hostname
            if host:
                yield host


def _source_address(family: socket.AddressFamily, host: str) -> str | None:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # on a datagram socket this picks the route and sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces(family: socket.AddressFamily) -> Iterator[str]:
    import psutil  # imported late: only a wildcard host without a route needs it

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name in up and address.family == family and not _is_local(address.address):
                yield address.address


def _is_local(address: str) -> bool:
    # fe80: is link-local: other machines cannot use it without the name of an interface.
    return _is_loopback(address) or address.startswith("fe80:")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
