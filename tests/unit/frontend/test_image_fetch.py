"""Images by URL from servers and name servers that never end: one deadline, no foreign threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.prompt import images
from dynamo.frontend.prompt.images import ImageFetcher


def asking(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


class Server(asyncio.Protocol):
    """Answers a request with ``begin``, and then with ``more`` again and again."""

    def __init__(self, begin: bytes, more: bytes) -> None:
        self.begin, self.more = begin, more
        self.request = b""
        self.ended = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.request += data
        self.transport.write(self.begin)
        self.go_on()

    def go_on(self) -> None:
        if self.more and not self.ended.is_set():
            self.transport.write(self.more)
            asyncio.get_running_loop().call_later(0.005, self.go_on)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    """Return a function that starts a server, and returns it and its URL."""
    servers: list[Any] = []

    async def start(begin: bytes, more: bytes = b"") -> tuple[Server, str]:
        protocol = Server(begin, more)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
        servers.append((server, protocol))
        return protocol, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server, protocol in servers:
        server.close()
        if protocol.transport is not None:  # a deadline may pass before it is asked
            await asyncio.wait_for(protocol.ended.wait(), 30)  # the fetcher closes its connection


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: image/png; a=b\r\n"


async def test_an_image_is_put_into_the_message(serve: Any) -> None:
    server, url = await serve(HEAD + b"content-length: 3\r\n\r\nabc")
    messages = asking(f"{url}/a b\u00e4.png?x=1&y=%20")
    await ImageFetcher(["127.0.0.1"]).fetch(messages)
    assert messages[0]["content"][0]["image_url"] == {"url": "data:image/png;base64,YWJj"}
    assert server.request.startswith(b"GET /a%20b%C3%A4.png?x=1&y=%20 HTTP/1.1\r\nhost: 127.0.0.1:")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"", b""),
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (HEAD, b"a: b\r\n"),
        (HEAD + b"\r\n", b"x"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
async def test_a_server_that_goes_on_for_ever_meets_the_deadline(
    serve: Any, begin: bytes, more: bytes
) -> None:
    _, url = await serve(begin, more)
    fetcher = ImageFetcher(["127.0.0.1"], timeout_s=0.1)
    with pytest.raises(InvalidArgument, match="cannot be fetched"):
        await asyncio.wait_for(fetcher.fetch(asking(url)), 30)


async def test_slow_names_take_no_thread_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not while they still wait, after their requests have ended."""
    waiting, go_on = threading.Semaphore(0), threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        waiting.release()
        go_on.wait(60)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    fetcher = ImageFetcher(["slow.example"], timeout_s=0.1)
    try:
        fetches = [fetcher.fetch(asking("http://slow.example/a.png")) for _ in range(64)]
        failed = await asyncio.wait_for(asyncio.gather(*fetches, return_exceptions=True), 30)
        assert all("cannot be fetched" in str(one) for one in failed)
        assert waiting.acquire(timeout=30)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), 30) == 5
    finally:
        go_on.set()


async def test_the_images_of_a_request_are_bounded_together(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = HEAD + b"content-length: 30\r\n\r\n" + b"x" * 30
    urls = [(await serve(answer))[1] for _ in range(3)]
    monkeypatch.setattr(images, "MAX_IMAGES_BYTES", 150)
    fetcher = ImageFetcher(["127.0.0.1"])
    await fetcher.fetch([*asking(urls[0]), *asking(urls[1])])
    with pytest.raises(InvalidArgument, match=r"messages\[2\].*the images of a request have"):
        await fetcher.fetch([one for url in urls for one in asking(url)])


async def test_a_url_with_credentials_is_refused() -> None:
    """They would be sent to the server, and be in its logs."""
    with pytest.raises(InvalidArgument, match="images are not fetched from"):
        await ImageFetcher(["127.0.0.1"]).fetch(asking("http://user:key@127.0.0.1:1/a.png"))
