"""Readiness probes against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection

import pytest

from dynamo.errors import ConfigError
from dynamo.serve import readiness
from dynamo.serve.graph.command import listen_facts
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.readiness import (
    FrontendHealth,
    check_free,
    probe,
    wait_until_ready,
)

Answer = Callable[[str], tuple[int, object]]


async def serve(answer: Answer, chunked: bool = False) -> tuple[asyncio.Server, FrontendAddress]:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, document = answer(head.split(b" ")[1].decode())
        body = json.dumps(document).encode()
        framing = b"Content-Length: %d" % len(body)
        if chunked:
            framing, body = (
                b"Transfer-Encoding: chunked",
                b"%x\r\n%s\r\n0\r\n\r\n"
                % (
                    len(body),
                    body,
                ),
            )
        writer.write(b"HTTP/1.1 %d X\r\n%s\r\n\r\n%s" % (status, framing, body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    return server, FrontendAddress("127.0.0.1", server.sockets[0].getsockname()[1])


@pytest.mark.parametrize("chunked", [False, True])
async def test_ready_when_all_workers_are_registered(chunked: bool) -> None:
    looks = 0

    def answer(path: str) -> tuple[int, object]:
        nonlocal looks
        looks += 1
        models = ["tiny"] if looks > 2 else []
        workers = [{"endpoint": "generate"}] * (looks - 2)
        return (200 if looks > 1 else 503), {"instances": workers, "models": models}

    server, address = await serve(answer, chunked)
    async with server, asyncio.timeout(10):
        assert await wait_until_ready(address, lambda: 2) == FrontendHealth(("tiny",), 2)


async def test_every_registered_model_is_listed() -> None:
    looks = 0

    def answer(path: str) -> tuple[int, object]:
        nonlocal looks
        looks += 1
        models = ["tiny", "large"] if looks > 2 else ["tiny"]
        return 200, {"instances": [{"endpoint": "generate"}] * 2, "models": models}

    server, address = await serve(answer)
    async with server, asyncio.timeout(10):
        found = await wait_until_ready(address, lambda: 2, models=lambda: ["large", "tiny"])
    assert found.models == ("large", "tiny")


async def test_a_frontend_alone_needs_no_model() -> None:
    server, address = await serve(lambda path: (200, {"models": [], "instances": []}))
    async with server, asyncio.timeout(10):
        assert await wait_until_ready(address, lambda: 0) == FrontendHealth((), 0)


async def test_another_program_is_not_ready() -> None:
    server, address = await serve(lambda path: (200, {"models": ["x"], "instances": []}))
    answers = iter([False, False, True])
    async with server, asyncio.timeout(10):
        await wait_until_ready(address, lambda: 0, lambda: next(answers))
    assert list(answers) == []


async def test_a_worker_that_still_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_ALL_WORKERS_WITHIN_S", 0.1)
    worker = {"endpoint": "generate"}
    server, address = await serve(lambda path: (200, {"models": ["x"], "instances": [worker]}))
    missing, parts = ["W_1"], []

    def partly(health: FrontendHealth, names: Collection[str]) -> None:
        parts.append((health.instances, list(names)))
        missing.clear()

    async with server, asyncio.timeout(10):
        found = await wait_until_ready(
            address, lambda: 2, missing=lambda: missing, on_partial=partly
        )
    assert (found.instances, parts) == (1, [(1, ["W_1"])])


async def test_a_port_in_use_is_an_error() -> None:
    server, address = await serve(lambda path: (200, {}))
    async with server:
        with pytest.raises(ConfigError, match=f"cannot listen on {address.url}: Address already"):
            check_free(address)
    check_free(address)
    with pytest.raises(ConfigError, match=r"cannot listen on http://192\.0\.2\.1:80: "):
        check_free(FrontendAddress("192.0.2.1", 80))


async def test_an_invalid_answer_is_not_ready() -> None:
    server, address = await serve(lambda path: (200, ["what"]))
    async with server:
        assert await probe(address) is None
    assert await probe(address) is None  # nothing listens any more


@pytest.mark.parametrize(
    ("flags", "env", "url"),
    [
        ("", {}, "http://127.0.0.1:8000"),
        ("--http-port 81", {"DYN_HTTP_PORT": "82"}, "http://127.0.0.1:81"),
        ("", {"DYN_HTTP_PORT": "82", "DYN_HTTP_HOST": "0.0.0.0"}, "http://127.0.0.1:82"),
        ("--http_port=83 --http-host 10.0.0.1", {}, "http://10.0.0.1:83"),
        ("--http-host ::1", {}, "http://[::1]:8000"),
        ("--http-host ::", {}, "http://[::1]:8000"),
        ("--http-host 0:0::0", {}, "http://[::1]:8000"),
        ("--http-host box.example", {}, "http://box.example:8000"),
        ("--tls-cert-path cert.pem", {}, "https://127.0.0.1:8000"),
        ("", {"DYN_TLS_CERT_PATH": "cert.pem"}, "https://127.0.0.1:8000"),
    ],
)
def test_address(flags: str, env: dict[str, str], url: str) -> None:
    address = listen_facts(flags.split(), env, "/graphs").address
    assert address is not None and address.url == url


@pytest.mark.parametrize("port", ["0", "x", "65536", "-1"])
def test_an_invalid_port_is_an_error(port: str) -> None:
    facts = listen_facts(["--http-port", port], {}, "/graphs")
    assert facts.address is None and "between 1 and 65535" in facts.problem


def test_the_files_of_a_frontend_are_absolute() -> None:
    words = ["--tls-cert-path", "cert.pem", "--api-key-file=/etc/keys"]
    facts = listen_facts(words, {"DYN_METRICS_PREFIX": "mine"}, "/graphs")
    assert facts.tls_cert_path == "/graphs/cert.pem" and facts.api_key_file == "/etc/keys"
    assert facts.metrics_prefix == "mine"
    assert listen_facts([], {}, "/graphs").tls_cert_path == ""
