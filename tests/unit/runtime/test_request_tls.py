"""TLS of the request plane: who is served, who is refused, and settings that cannot be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, needs_openssl
from request_kit import ENDPOINT, Pair, Recorder

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import CannotConnect, ConfigError, Disconnected
from dynamo.runtime.requests import RequestClient, RequestServer
from dynamo.runtime.requests.tls import request_tls

pytestmark = needs_openssl


class Certificates:
    """Those of a worker and of a client, each of an authority of its own."""

    def __init__(self, directory: Path) -> None:
        (directory / "workers").mkdir()
        (directory / "clients").mkdir()
        workers, clients = (
            Authority(directory / "workers", "workers"),
            Authority(directory / "clients", "clients"),
        )
        self.workers, self.clients = workers.ca, clients.ca
        self.worker = workers.sign("worker")
        self.client = clients.sign("client")

    def served(self, **more: Any) -> RuntimeSettings:
        cert, key = self.worker
        return settings(tcp_tls_cert_path=cert, tcp_tls_key_path=key, **more)

    def mutual(self) -> RuntimeSettings:
        return self.served(tcp_tls_client_ca_cert_path=self.clients)

    def client_settings(self, own: tuple[str, str] | None = None, **more: Any) -> RuntimeSettings:
        shown: dict[str, Any] = {}
        if own is not None:
            shown = {"tcp_tls_client_cert_path": own[0], "tcp_tls_client_key_path": own[1]}
        return settings(**{"tcp_tls_ca_cert_path": self.workers, **shown, **more})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """One set for all tests."""
    return Certificates(tmp_path_factory.mktemp("tls"))


def settings(**given: Any) -> RuntimeSettings:
    return RuntimeSettings(request_plane="tcp", **given)


@asynccontextmanager
async def connected(server: RuntimeSettings, client: RuntimeSettings) -> AsyncIterator[Pair]:
    served = RequestServer(None, request_tls(server))
    calls = RequestClient(None, tls=request_tls(client))
    address = await served.start("tcp:127.0.0.1:0")
    try:
        yield Pair(served, calls, address)
    finally:
        await calls.close()
        await served.close()


async def answer(pair: Pair) -> Recorder:
    """Send a request to an endpoint that answers twice; return what came back."""

    def twice(stream: Any, payload: bytes) -> None:
        stream.send(payload)
        stream.send(payload * 100_000)
        stream.end()

    pair.server.register(ENDPOINT, twice)
    _, sink = pair.open(b"hello")
    await sink.finish()
    return sink


async def test_mutual_tls(certificates: Certificates) -> None:
    client = certificates.client_settings(certificates.client)
    async with connected(certificates.mutual(), client) as pair:
        sink = await answer(pair)
        assert sink.items == [b"hello", b"hello" * 100_000] and sink.errors == []


async def test_tls_of_the_server_alone(certificates: Certificates) -> None:
    named = certificates.client_settings(tcp_tls_server_name="localhost")
    unverified = settings(tcp_tls_insecure=True)
    for client in (certificates.client_settings(), named, unverified):
        async with connected(certificates.served(), client) as pair:
            assert (await answer(pair)).errors == []


async def test_who_is_refused(certificates: Certificates) -> None:
    mutual, served = certificates.mutual(), certificates.served()
    stranger = settings(tcp_tls_ca_cert_path=certificates.clients)
    for server, client, text in (
        (mutual, certificates.client_settings(), ""),  # shows no certificate
        (mutual, certificates.client_settings(certificates.worker), ""),  # one of others
        (mutual, settings(), ""),  # plain TCP
        (served, stranger, "certificate verify failed"),
        (served, certificates.client_settings(tcp_tls_server_name="other"), "mismatch"),
        (settings(), certificates.client_settings(), ""),  # a worker without TLS
    ):
        async with connected(server, client) as pair:
            (error,) = (await answer(pair)).errors
            assert isinstance(error, CannotConnect | Disconnected), (text, error)
            assert text in error.message


def test_settings_that_cannot_be(certificates: Certificates, tmp_path: Path) -> None:
    cert, key = certificates.worker
    for given, text in (
        ({"tcp_tls_cert_path": cert}, "--tcp-tls-key-path is missing"),
        ({"tcp_tls_client_key_path": key}, "--tcp-tls-client-cert-path is missing"),
        ({"tcp_tls_client_ca_cert_path": cert}, "needs --tcp-tls-cert-path and"),
        (
            {"tcp_tls_client_cert_path": cert, "tcp_tls_client_key_path": key},
            "needs --tcp-tls-ca-cert-path: without it, requests are sent in plain text",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            settings(**given)
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for given, text in (
        ({"tcp_tls_cert_path": str(empty), "tcp_tls_key_path": key}, "--tcp-tls-cert-path .*PEM"),
        ({"tcp_tls_cert_path": cert, "tcp_tls_key_path": "/gone"}, "can't be used"),
        ({"tcp_tls_ca_cert_path": str(empty)}, "--tcp-tls-ca-cert-path .*no PEM certificate"),
    ):
        with pytest.raises(ConfigError, match=text):
            request_tls(settings(**given))
    plain = RuntimeSettings(request_plane="uds", tcp_tls_cert_path=cert, tcp_tls_key_path=key)
    assert request_tls(plain).server is None


def test_flags_of_nats_win_over_nothing() -> None:
    given = RuntimeSettings(nats_tls_ca_cert_path="/ca", nats_tls_insecure=True)
    assert given.nats_tls == {"ca": "/ca", "insecure": True}
    assert RuntimeSettings().nats_tls == {}
