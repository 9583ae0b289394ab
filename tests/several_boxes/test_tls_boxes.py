"""etcd and NATS behind TLS: with the authority's certificate, without, and with one of our own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from boxes import Etcd, Nats, needs_etcd, needs_nats

from dynamo.config.runtime import EtcdSettings, NatsSettings
from dynamo.errors import ConfigError
from dynamo.runtime.discovery.etcd.discovery import EtcdDiscovery
from dynamo.runtime.events.nats.plane import NatsPlane

pytestmark = [
    needs_etcd,
    needs_nats,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here"),
]
KEY = "v1/instances/ns/comp/ep/1f"


class Papers:
    """An authority in ``directory``, and a certificate of 127.0.0.1 that it signed."""

    def __init__(self, directory: Path) -> None:
        self._at = directory
        self.ca, self.cert, self.key = (
            str(directory / name) for name in ("ca.pem", "cert.pem", "key.pem")
        )
        new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
        self._run(*new, "/CN=test authority", "-x509", "-keyout", "ca.key", "-out", "ca.pem")
        self._run(*new, "/CN=127.0.0.1", "-keyout", "key.pem", "-out", "request.pem")
        (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        self._run("x509", "-req", "-in", "request.pem", *signed, "-out", "cert.pem")

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self._at, check=True, capture_output=True)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """One set for all tests."""
    return Papers(tmp_path_factory.mktemp("papers"))


async def test_etcd_that_wants_a_certificate(tmp_path: Path, papers: Papers) -> None:
    trust = ("--trusted-ca-file", papers.ca, "--client-cert-auth")
    own = ("--cert-file", papers.cert, "--key-file", papers.key)
    server = Etcd(tmp_path, "127.0.0.1", *own, *trust)
    server.command = [
        word.replace("http://", "https://") if word == server.url else word
        for word in server.command
    ]
    server.url = server.url.replace("http://", "https://")
    server.start()
    try:
        given: Callable[..., EtcdSettings] = lambda **more: EtcdSettings(  # noqa: E731
            endpoints=server.url, start_timeout_s=1.0, **more
        )
        for refused in (given(), given(ca=papers.ca)):
            one = EtcdDiscovery(refused)
            with pytest.raises(ConfigError, match="cannot reach etcd at https"):
                await one.start()
            await one.close()
        one = EtcdDiscovery(given(ca=papers.ca, client_cert=papers.cert, client_key=papers.key))
        await one.start()
        lease = await one.grant(5)
        await one.put(KEY, b"1", lease.id)
        assert await one.list("v1/") == {KEY: b"1"}
        await one.close()
    finally:
        server.kill()


async def test_nats_behind_tls(tmp_path: Path, papers: Papers) -> None:
    own = ("--tls", "--tlscert", papers.cert, "--tlskey", papers.key)
    server = Nats(tmp_path, "127.0.0.1", *own)
    server.start()
    try:
        url = server.url.replace("nats://", "tls://")
        stranger = NatsPlane(NatsSettings(servers=url, start_timeout_s=1.0))
        with pytest.raises(ConfigError, match="cannot use NATS"):
            await stranger.start()
        await stranger.close()
        for settings in (
            NatsSettings(servers=url, ca=papers.ca),
            NatsSettings(servers=url, insecure=True),
        ):
            plane = NatsPlane(settings)
            await plane.start()
            assert plane.link.send("subject", b"data")
            await plane.close()
    finally:
        server.kill()
