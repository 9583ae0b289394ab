"""TLS of the request plane: who is served, who is refused, and settings that cannot be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, needs_openssl, replace_file
from request_kit import ENDPOINT, Pair, Recorder

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import CannotConnect, ConfigError, Disconnected
from dynamo.runtime.requests import RequestClient, RequestServer
from dynamo.runtime.requests.tls import RequestTls

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
    async with paired(RequestTls(server), RequestTls(client)) as pair:
        yield pair


@asynccontextmanager
async def paired(server: RequestTls, client: RequestTls) -> AsyncIterator[Pair]:
    served, calls = RequestServer(None, server), RequestClient(None, tls=client)
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


def check_twice(tls: RequestTls) -> bool:
    """Look at the files as :meth:`RequestTls.follow` does: a change counts the second time."""
    assert tls.watch is not None and not tls.watch.check()
    return tls.watch.check()


async def test_renewed_files_are_for_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "renewed").mkdir()
    old, new = Certificates(tmp_path), Certificates(tmp_path / "renewed")
    server, client = RequestTls(old.mutual()), RequestTls(old.client_settings(old.client))
    async with paired(server, client) as pair:
        assert (await answer(pair)).errors == []
        for before, after in zip(
            (*old.worker, old.clients), (*new.worker, new.clients), strict=True
        ):
            replace_file(before, Path(after).read_bytes())
        assert check_twice(server)
        pair.server.renew_certificate()
        _, sink = pair.open(b"on the connection of before")
        await sink.finish()
        assert sink.errors == []
        stranger = RequestClient(None, tls=client)
        try:
            with_old = Pair(pair.server, stranger, pair.address)
            _, sink = with_old.open(b"with the old authority")
            await sink.finish()
            assert isinstance(sink.errors[0], CannotConnect), sink.errors
            for before, after in zip(
                (*old.client, old.workers), (*new.client, new.workers), strict=True
            ):
                replace_file(before, Path(after).read_bytes())
            check_twice(client)
            _, sink = with_old.open(b"with all that is new")
            await sink.finish()
            assert sink.errors == []
        finally:
            await stranger.close()
    assert caplog.text.count("reloaded") == 2


async def test_a_broken_file_keeps_what_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Certificates(tmp_path)
    server, client = RequestTls(files.mutual()), RequestTls(files.client_settings(files.client))
    for tls, path in ((server, files.worker[0]), (client, files.workers)):
        good, context = Path(path).read_bytes(), (tls.server, tls.client)
        replace_file(path, b"half a certifi")
        check_twice(tls)
        assert (tls.server, tls.client) == context
        replace_file(path, good)
        check_twice(tls)
        assert (tls.server, tls.client) != context
    assert caplog.text.count("keeping what was loaded before") == 2
    async with paired(server, client) as pair:
        assert (await answer(pair)).errors == []


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
            RequestTls(settings(**given))
    plain = RuntimeSettings(request_plane="uds", tcp_tls_cert_path=cert, tcp_tls_key_path=key)
    assert RequestTls(plain).server is None


def test_flags_of_nats_win_over_nothing() -> None:
    given = RuntimeSettings(nats_tls_ca_cert_path="/ca", nats_tls_insecure=True)
    assert given.nats_tls == {"ca": "/ca", "insecure": True}
    assert RuntimeSettings().nats_tls == {}
