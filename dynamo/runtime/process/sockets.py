"""Addresses of the request plane, and the host under which other boxes reach this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from dynamo.config import from_env
from dynamo.config.etcd import EtcdSettings
from dynamo.config.nats import NatsSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument

__all__ = ["RequestAddress", "advertised_host", "bracketed", "parse_address"]

_ANY = {"": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
_TEST_NETS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


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
    return _is_loopback(address) or address.startswith("fe80:")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
