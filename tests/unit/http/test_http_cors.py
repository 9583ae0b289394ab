"""Requests of pages of other origins, on real sockets: preflights, keys, errors, streams."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.config.frontend import FrontendSettings, checked_origins
from dynamo.errors import ConfigError
from dynamo.frontend.access import frontend_cors
from dynamo.http import Exchange, HttpLimits, HttpServer
from dynamo.http.access import Access
from dynamo.http.api_keys import ApiKeys, key_line, new_key

ALLOWED, OTHER = "http://localhost:3000", "http://evil.example"
PREFLIGHT = (
    "Access-Control-Request-Method: POST",
    "Access-Control-Request-Headers: authorization,content-type",
)


class Site:
    """A server that demands keys, for pages of ``origins``."""

    def __init__(self, keys: str, *origins: str) -> None:
        cors = frontend_cors(FrontendSettings(cors_origins=origins))
        access = Access(keys=ApiKeys(keys), is_open="/health".__eq__)
        limits = HttpLimits(
            body_bytes=100,
            header_bytes=4096,
            header_timeout_s=0.2,
            body_timeout_s=0.2,
            sweep_s=0.05,
        )
        self.server = HttpServer(self.handle, limits, access=access, cors=cors)
        self.handled: list[str] = []
        self.port = 0

    def handle(self, exchange: Exchange) -> None:
        self.handled.append(exchange.method)
        if exchange.path == "/v1/stream":
            exchange.start(200, "text/event-stream", [("x-request-id", "r")])
            exchange.end(b"data: 1\n\n")
        elif exchange.method == "OPTIONS":
            exchange.refuse(405, "no")
        else:
            exchange.respond(200, b"{}")

    async def ask(
        self, method: str, path: str, *headers: str, size: int = 0
    ) -> tuple[int, dict[str, str]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = (f"{method} {path} HTTP/1.1", "Host: a", f"Content-Length: {size}", *headers)
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.close()
        found = re.findall(r"(?m)^([^:\r\n]+): (.*)\r$", head)
        assert len(found) == len(dict(found)), "a header twice"
        return int(head[9:12]), dict(found)

    async def send(self, data: bytes) -> tuple[int, dict[str, str]]:
        """Send what may be no request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.close()
        return int(head[9:12]), dict(re.findall(r"(?m)^([^:\r\n]+): (.*)\r$", head))


@pytest.fixture
def key() -> str:
    return new_key()


@pytest.fixture
def keys(tmp_path: Path, key: str) -> str:
    file = tmp_path / "keys"
    file.write_text(key_line("alice", "user", key))
    file.chmod(0o600)
    return str(file)


@pytest.fixture
async def site(keys: str, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    site = Site(keys, *getattr(request, "param", (ALLOWED,)))
    _, site.port = await site.server.start("127.0.0.1", 0)
    yield site
    await site.server.close(0.2)


async def test_a_preflight_needs_no_key(site: Site) -> None:
    for _ in range(2):  # also from the cache of heads
        status, headers = await site.ask("OPTIONS", "/v1/x", f"Origin: {ALLOWED}", *PREFLIGHT)
        assert status == 200 and headers["access-control-allow-origin"] == ALLOWED
        assert headers["vary"] == "Origin"
        assert headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-allow-credentials"] == "true"
    assert not site.handled
    for lines in ((f"Origin: {OTHER}", *PREFLIGHT), (f"Origin: {ALLOWED}",), PREFLIGHT):
        status, headers = await site.ask("OPTIONS", "/v1/x", *lines)
        assert status == 401 and headers["vary"] == "Origin"


async def test_answers_errors_and_streams_name_the_origin(site: Site, key: str) -> None:
    bearer, origin = f"Authorization: Bearer {key}", f"Origin: {ALLOWED}"
    for path, lines, size, expected in (
        ("/v1/x", (bearer,), 0, 200),
        ("/v1/stream", (bearer,), 0, 200),
        ("/v1/x", (), 0, 401),
        ("/v1/x", ("Authorization: Bearer wrong",), 0, 401),
        ("/v1/messages", (bearer,), 101, 413),
    ):
        status, headers = await site.ask("POST", path, origin, *lines, size=size)
        assert status == expected and headers["access-control-allow-origin"] == ALLOWED, path
        assert "retry-after" in headers["access-control-expose-headers"]
        status, headers = await site.ask("POST", path, f"Origin: {OTHER}", *lines, size=size)
        assert status == expected and headers["vary"] == "Origin"
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", [("*",)], indirect=True)
async def test_any_origin_sends_no_credentials(site: Site) -> None:
    for method, lines in (("OPTIONS", PREFLIGHT), ("GET", ())):
        _, headers = await site.ask(method, "/v1/x", f"Origin: {OTHER}", *lines)
        assert headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in headers and "vary" not in headers


@pytest.mark.parametrize("site", [(ALLOWED,), ("*",)], indirect=True)
@pytest.mark.parametrize(
    "path", ["/v1/route", "/v1/planner", "/busy_threshold", "/v1/requests/a", "/ui", "/ui/actions"]
)
async def test_routes_of_operators_and_the_page_stay_closed(
    site: Site, key: str, path: str
) -> None:
    for method, lines in (("OPTIONS", PREFLIGHT), ("POST", (f"Authorization: Bearer {key}",))):
        status, headers = await site.ask(method, path, f"Origin: {ALLOWED}", *lines)
        assert status == (401 if method == "OPTIONS" else 200)
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", [()], indirect=True)
async def test_it_is_off_by_default(site: Site) -> None:
    status, headers = await site.ask("OPTIONS", "/v1/x", f"Origin: {ALLOWED}", *PREFLIGHT)
    assert status == 401 and "access-control-allow-origin" not in headers and "vary" not in headers


HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nOrigin: %b\r\n"
BROKEN = {
    "malformed": (400, HEAD.replace(b" HTTP/1.1", b" and more HTTP/1.1") + b"\r\n"),
    "version": (505, HEAD.replace(b"HTTP/1.1", b"HTTP/3.0") + b"\r\n"),
    "large": (431, HEAD + b"Cookie: " + b"c" * 5000),
    "many": (431, HEAD + b"x: y\r\n" * 200 + b"\r\n"),
    "host": (400, HEAD + b"Host: b\r\n\r\n"),
    "slow head": (408, HEAD),
    "slow body": (408, HEAD + b"Content-Length: 9\r\n\r\n"),
    "length": (400, HEAD + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"),
}


@pytest.mark.parametrize("site", [(ALLOWED,), ("*",)], indirect=True)
@pytest.mark.parametrize("kind", BROKEN)
async def test_a_page_can_read_why_its_head_was_refused(site: Site, kind: str, key: str) -> None:
    expected, data = BROKEN[kind]
    if kind == "slow body":
        data = data.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    status, headers = await site.send(data % ALLOWED.encode())
    assert status == expected
    assert headers["access-control-allow-origin"] in (ALLOWED, "*")
    status, headers = await site.send(data % OTHER.encode())
    assert status == expected and headers.get("access-control-allow-origin") in (None, "*")
    assert ("vary" in headers) != ("access-control-allow-origin" in headers)
    status, headers = await site.send(data.replace(b"/v1/x", b"/ui") % ALLOWED.encode())
    assert status == expected and not [one for one in headers if one.startswith("access-")]


async def test_a_connection_over_the_limit(site: Site, key: str) -> None:
    site.server.limits = dataclasses.replace(site.server.limits, connections=0)
    bearer = f"Authorization: Bearer {key}\r\n\r\n".encode()
    status, headers = await site.send(HEAD % ALLOWED.encode() + bearer)
    assert status == 503 and headers["access-control-allow-origin"] == ALLOWED


async def test_a_page_can_read_a_refusal_with_another_request_behind_it(site: Site) -> None:
    status, headers = await site.send((HEAD % ALLOWED.encode() + b"\r\n") * 2)
    assert status == 401 and headers["access-control-allow-origin"] == ALLOWED


async def test_two_origins_are_none(site: Site) -> None:
    twice = b"Origin: %b\r\n" % ALLOWED.encode()
    status, headers = await site.send(b"GET /v1/x\r\n" + twice * 2 + b"\r\n")
    assert status == 400 and "access-control-allow-origin" not in headers


async def test_a_page_of_the_internet_may_ask_for_this_network(site: Site) -> None:
    asked = (*PREFLIGHT, "Access-Control-Request-Private-Network: true")
    _, headers = await site.ask("OPTIONS", "/v1/x", f"Origin: {ALLOWED}", *asked)
    assert headers["access-control-allow-private-network"] == "true"
    status, headers = await site.ask("OPTIONS", "/v1/x", f"Origin: {OTHER}", *asked)
    assert status == 401 and "access-control-allow-private-network" not in headers


@pytest.mark.parametrize("site", [(ALLOWED,), ("*",)], indirect=True)
async def test_pages_read_what_clients_read(site: Site) -> None:
    _, headers = await site.ask("GET", "/v1/x", f"Origin: {ALLOWED}")
    shown = headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= {*shown}


def test_origins_are_checked_and_written_as_browsers_do() -> None:
    given = [
        "HTTPS://Chat.Example.com:443",
        "http://a:80",
        "http://[::1]:8080",
        "app://obsidian.md",
    ]
    given += ["http://a:8080"]
    assert checked_origins(given) == (
        *("https://chat.example.com", "http://a", "http://[::1]:8080", "app://obsidian.md"),
        "http://a:8080",
    )
    assert checked_origins(["*"]) == ("*",)
    for wrong in ("localhost:3000", "http://a/", "http://a/b", "null", "", "http://*.a", "a b"):
        with pytest.raises(ConfigError, match=r"--cors-origins: .* is no origin; give scheme"):
            checked_origins([wrong])
    with pytest.raises(ConfigError, match="leave the others out"):
        checked_origins(["*", "http://a"])
