"""Requests outside of clients' requests, over TLS and to servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dynamo.attach.describe import ServerProbe, ServerUnreachable, describe
from dynamo.attach.pool import ConnectionPool
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.client import Target, parse_url

JSON = b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"data": [1]}'


@asynccontextmanager
async def answering(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Target]:
    """Answer each request of a connection with ``answer``; an empty one closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                if not answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with asyncio.timeout(20), server:
        port = server.sockets[0].getsockname()[1]
        yield parse_url(f"http{'s' if tls else ''}://127.0.0.1:{port}")


class Sink:
    """Collects one response."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.error: DynamoError | None = None
        self.ended = asyncio.Event()

    def on_head(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ended.set()

    def on_failure(self, error: DynamoError) -> None:
        self.error = error
        self.ended.set()


async def response(target: Target, answer_s: float = 10.0) -> Sink:
    """The response to one request of a pool."""
    pool, sink = ConnectionPool(target, 5.0), Sink()
    pool.send(target.head("GET", "/x", 0), cast(Any, sink))
    async with asyncio.timeout(answer_s):
        await sink.ended.wait()
    await pool.close()
    return sink


async def test_names_that_cannot_be_printed_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"data": [{"id": "a\nb"}, {"id": "good"}, {"id": "c\x1b[2J"}]}).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with answering(head + body) as target:
        probe = ServerProbe(target, 5.0)
        found = await describe(probe, "openai")
        assert [model.name for model in found.models] == ["good"]
    assert r"its name 'a\nb' has a line break" in caplog.text


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000])
async def test_answers_that_are_no_http(answer: bytes) -> None:
    async with answering(answer) as target:
        sink = await response(target)
        assert sink.error is not None and sink.error.code == "disconnected"
        if len(answer) < 100:
            with pytest.raises(ServerUnreachable):
                await ServerProbe(target, 5.0).get("/x")


async def test_an_interim_response_is_skipped() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with answering(early + JSON) as target:
        sink = await response(target)
        assert (sink.status, sink.body) == (200, b'{"data": [1]}')


async def test_a_slow_answer_is_slow_and_not_a_failure() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n") as target:
        with pytest.raises(ServerUnreachable) as raised:
            await ServerProbe(target, 0.2).get("/x")
        assert raised.value.slow


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (JSON, ServerUnreachable, "lists no model"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", ServerUnreachable, "answers 503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", ServerUnreachable, "answers 200"),
        (b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n", ConfigError, "--api-key"),
        (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", ConfigError, "correct --url"),
    ],
)
async def test_model_lists(answer: bytes, error: type[Exception], reason: str) -> None:
    async with answering(answer) as target:
        probe = ServerProbe(target, 5.0)
        with pytest.raises(error, match=reason):
            await describe(probe)
        probe.close()


def write_certificate(directory: Path) -> None:
    """Write a certificate of 127.0.0.1, signed by itself."""
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(
        ["openssl", *words.split(), *names], cwd=directory, check=True, capture_output=True
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
async def test_tls_checks_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.to_thread(write_certificate, tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with answering(JSON, tls) as target:
        sink = await response(target)
        assert sink.error is not None and sink.error.unsent
        assert "certificate verify failed" in str(sink.error)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert (await response(target)).body == b'{"data": [1]}'
        assert await ServerProbe(target, 5.0).json("/x") == {"data": [1]}
        other = replace(target, host="localhost")  # not in the certificate
        assert (await response(other)).error is not None
