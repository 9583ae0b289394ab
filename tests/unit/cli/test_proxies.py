"""Every verb calls the frontend itself, so that no proxy of ``http_proxy`` receives a key."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dynamo.cli import frontend_client
from dynamo.cli import main as cli
from dynamo.errors import Unavailable
from dynamo.protocols.status import BoxStatus

KEY = "sk-secret"


class Frontend(BaseHTTPRequestHandler):
    """Answers every request with 404; ``keys`` has the keys that it received."""

    keys: list[str]

    def do_GET(self) -> None:
        self.keys.append(self.headers["authorization"] or "")
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Frontend, "keys", [], raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Frontend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listener that every variable names as the proxy; the test ends without a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("verb", ["explain", "route", "chat", "bench", "record"])
def test_a_verb_calls_the_frontend_itself(
    verb: str,
    frontend: str,
    proxy: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    words = {"route": ["--prompt-file", "-"], "record": ["trace.jsonl"]}
    assert cli.main([verb, "--url", frontend, *words.get(verb, ())])
    assert set(Frontend.keys) == {f"Bearer {KEY}"}


def test_the_web_page_is_looked_for_without_a_key(
    frontend: str, proxy: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    box = BoxStatus(namespace="n", state="running", at_s=0.0, frontend="ready", url=frontend)
    with pytest.raises(Unavailable, match="is off"):
        frontend_client.page_url(box)
    assert Frontend.keys == [""]


async def test_etcd_is_reached_without_a_proxy(proxy: socket.socket) -> None:
    pytest.importorskip("grpc")
    from dynamo.runtime.discovery.etcd.link import open_channel

    reached = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        channel = open_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        channel.get_state(try_to_connect=True)
        async with asyncio.timeout(30):
            await reached.wait()
        await channel.close()
