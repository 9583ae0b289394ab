"""Images by http(s) URL: fetched from allowed hosts only, by the frontend, in the place of data:
URLs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from image_kit import data_url, png, write_eyes

WORKER = Path(__file__).with_name("worker_images.py")
CHAT = "/v1/chat/completions"
IMAGE = png(8, 8)


class ImageServer(BaseHTTPRequestHandler):
    """Replies by path, and counts."""

    asked: list[str] = []  # noqa: RUF012 - emptied by the fixture

    def do_GET(self) -> None:
        """Reply with an image, or what a server may send instead."""
        self.asked.append(self.path)
        if self.path == "/moved":
            self._reply(302, b"", location="/a.png")
        elif self.path == "/page":
            self._reply(200, b"<html>", content_type="text/html")
        elif self.path == "/large":
            self._reply(200, bytes(19 << 20))
        elif self.path == "/missing":
            self._reply(404, b"")
        else:
            self._reply(200, IMAGE)

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_type": "image/png", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the frontend has read enough
            self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


@pytest.fixture
def images() -> Iterator[str]:
    """The URL of a server with images."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ImageServer)
    ImageServer.asked.clear()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def asking(*urls: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, *content]}]
    return {"model": "eyes", "messages": messages, "max_tokens": 2}


def message(deployment: Deployment, *urls: str) -> str:
    status, _, body = deployment.request("POST", CHAT, asking(*urls))
    assert status == 400, body
    return str(json.loads(body)["message"])


def serve(deployment: Deployment, tmp_path: Path, *flags: str) -> None:
    deployment.frontend(*flags)
    named = ("--model-path", str(write_eyes(tmp_path / "eyes")), "--model-name", "eyes")
    deployment.start("dynamo.mocker", *named)
    deployment.wait_for_workers()


def test_images_of_allowed_hosts_are_fetched(
    deployment: Deployment, tmp_path: Path, images: str
) -> None:
    serve(deployment, tmp_path, "--allowed-media-domains", "127.0.0.1")
    urls = (f"{images}/a.png?x=1", data_url(IMAGE), f"{images}/b.png")
    status, _, body = deployment.request("POST", CHAT, asking(*urls))
    assert status == 200, body
    assert ImageServer.asked == ["/a.png?x=1", "/b.png"]
    page = deployment.request("GET", "/metrics")[2].decode()
    assert 'dynamo_frontend_images_per_request_sum{model="eyes"} 3' in page
    assert "dynamo_frontend_image_tokens_per_request_" not in page  # the mocker counts none
    other = images.replace("127.0.0.1", "localhost")
    refused = {
        f"{other}/a.png": "not fetched from `localhost`",
        images.replace("//", "//user@") + "/a.png": "not fetched from",
        "http://[::1/a.png": "Invalid IPv6 URL",
        f"{images}/moved": "the server replied 302",
        f"{images}/missing": "the server replied 404",
        f"{images}/page": "expected an image, got `text/html`",
        f"{images}/large": "at most 24 MiB",
        "https://127.0.0.1:1/a.png": "cannot be fetched",
        "file:///etc/passwd": "expected `data:image/",
    }
    for url, text in refused.items():
        found = message(deployment, url)
        assert "messages[0].content[1].image_url.url" in found and text in found, found
    assert "at most 64 images" in message(deployment, *[f"{images}/a.png"] * 65)


def test_nothing_is_fetched_by_default(deployment: Deployment, tmp_path: Path, images: str) -> None:
    serve(deployment, tmp_path)
    text = message(deployment, f"{images}/a.png")
    assert "images are not fetched without --allowed-media-domains" in text
    assert not ImageServer.asked


def test_tokens_of_images_are_those_of_the_engine(deployment: Deployment, tmp_path: Path) -> None:
    deployment.frontend()
    model = str(write_eyes(tmp_path / "eyes"))
    with (deployment.logs / "worker.log").open("wb") as log:
        command = [sys.executable, str(WORKER), model]
        deployment.processes.append(
            subprocess.Popen(command, env=deployment.env, stdout=log, stderr=log)
        )
    deployment.wait_for_workers()
    status, _, body = deployment.request("POST", CHAT, asking(*[data_url(IMAGE)] * 2))
    assert status == 200, body
    page = deployment.request("GET", "/metrics")[2].decode()
    assert 'dynamo_frontend_image_tokens_per_request_sum{model="eyes"} 14' in page
