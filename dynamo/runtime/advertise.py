"""Under which address others reach a listener of this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from dynamo.config import from_env
from dynamo.config.etcd import EtcdSettings
from dynamo.config.nats import NatsSettings
from dynamo.config.runtime import RuntimeSettings

__all__ = ["advertised_host", "bracketed"]

_ANY = {"": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
_TEST_NETS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def advertised_host(host: str, settings: RuntimeSettings) -> str:
    """``host``, or for a wildcard the address that this box has towards the others.

    That is the one it has towards etcd or NATS, where the others are too; else the one of the
    default route; else the first of any interface that is up; else loopback.
    """
    family = _ANY.get(host)
    if family is None:
        return host
    for other in (*_meeting_points(settings), _TEST_NETS[family]):
        address = _towards(family, other)
        if address is not None and not _is_loopback(address):
            return address
    return next(_interfaces(family), _LOOPBACK[family])


def bracketed(host: str) -> str:
    """As it is written before a port."""
    return f"[{host}]" if ":" in host else host


def _meeting_points(settings: RuntimeSettings) -> Iterator[str]:
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


def _towards(family: socket.AddressFamily, host: str) -> str | None:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # a datagram socket: picks the way, sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces(family: socket.AddressFamily) -> Iterator[str]:
    import psutil  # only for workers on several networks: `dynamo serve` looks at graphs without

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name in up and address.family == family and not _is_local(address.address):
                yield address.address


def _is_local(address: str) -> bool:
    return _is_loopback(address) or address.startswith("fe80:")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
