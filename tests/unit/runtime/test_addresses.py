"""The address that a listener on all interfaces advertises."""

from __future__ import annotations

import socket

import psutil
import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.runtime.process import sockets as addresses
from dynamo.runtime.process.sockets import advertised_host, bracketed


def test_an_explicit_address_is_advertised_unchanged() -> None:
    settings = RuntimeSettings(discovery_backend="etcd")
    assert advertised_host("192.0.2.7", settings) == "192.0.2.7"
    assert advertised_host("127.0.0.1", settings) == "127.0.0.1"
    assert bracketed("fe80::1") == "[fe80::1]" and bracketed("192.0.2.7") == "192.0.2.7"


def test_a_wildcard_becomes_the_source_address_of_the_route_to_etcd_or_nats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def source_address(family: socket.AddressFamily, host: str) -> str | None:
        asked.append(host)
        return {"etcd-2": "10.9.9.9", "nats-1": "10.8.8.8"}.get(host)

    monkeypatch.setattr(addresses, "_source_address", source_address)
    monkeypatch.setenv("ETCD_ENDPOINTS", "https://etcd-1:2379, etcd-2:2379")
    monkeypatch.setenv("NATS_SERVER", "nats://user:secret@nats-1:4222")
    both = RuntimeSettings(discovery_backend="etcd", event_plane="nats")
    assert advertised_host("0.0.0.0", both) == "10.9.9.9" and asked == ["etcd-1", "etcd-2"]
    assert advertised_host("0.0.0.0", RuntimeSettings(event_plane="nats")) == "10.8.8.8"


def test_without_servers_and_without_a_route_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_source_address", lambda family, host: None)
    found = advertised_host("0.0.0.0", RuntimeSettings())
    known = [one.address for group in psutil.net_if_addrs().values() for one in group]
    assert found in known or found == "127.0.0.1"
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert advertised_host("0.0.0.0", RuntimeSettings()) == "127.0.0.1"
    assert advertised_host("::", RuntimeSettings()) == "::1"


def test_a_server_on_this_box_does_not_decide_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "127.0.0.1:2379")
    routes = {"127.0.0.1": "127.0.0.1", "192.0.2.1": "10.7.7.7"}
    monkeypatch.setattr(addresses, "_source_address", lambda family, host: routes[host])
    assert advertised_host("0.0.0.0", RuntimeSettings(discovery_backend="etcd")) == "10.7.7.7"
