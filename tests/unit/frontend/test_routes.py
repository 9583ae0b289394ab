"""Which function answers which request, and the bodies when none does."""

from __future__ import annotations

import json

import pytest
from http_bench import Bench, error_json

from dynamo.http import Exchange
from dynamo.http.routes import Routes


def table() -> Routes:
    routes = Routes()

    def say(exchange: Exchange) -> None:
        exchange.respond(200, exchange.path.encode(), "text/plain")

    routes.get("/a", say)
    routes.get("/models", say)
    routes.get("/models/", say)
    routes.post("/p", say)
    return routes


REFUSED = ("invalid_request_error", None, None)


def ask(method: str, path: str, content_type: str | None = None) -> tuple[int, dict[str, str], str]:
    bench = Bench(handler=table())
    extra = f"Content-Type: {content_type}\r\n" if content_type else ""
    request = f"{method} {path} HTTP/1.1\r\nHost: a\r\n{extra}Content-Length: 0\r\n\r\n"
    head, _, body = bench.feed(request.encode()).decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    return int(status.split(" ")[1]), dict(line.split(": ", 1) for line in lines), body


def test_exact_paths_and_prefixes() -> None:
    assert ask("GET", "/a?q=1")[::2] == (200, "/a")
    assert ask("GET", "/models")[::2] == (200, "/models")
    assert ask("GET", "/models/org/name")[::2] == (200, "/models/org/name")
    assert ask("GET", "/models/org%2Fname")[::2] == (200, "/models/org/name")
    assert ask("HEAD", "/a")[::2] == (200, "")


@pytest.mark.parametrize("path", ["/x", "/a/", "/A", "/models/", "/"])
def test_unknown_paths(path: str) -> None:
    status, _, body = ask("GET", path)
    assert status == 404
    text = f"Route not found: GET {path}"
    assert json.loads(body) == error_json(text, "Not Found", 404, REFUSED)


def test_wrong_methods() -> None:
    status, headers, body = ask("DELETE", "/a")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    text = "/a does not take DELETE; it takes GET, HEAD"
    assert json.loads(body) == error_json(text, "Method Not Allowed", 405, REFUSED)
    status, headers, body = ask("GET", "/p")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(body)["error"]["message"] == "/p does not take GET; it takes POST"
    status, headers, body = ask("HEAD", "/p")
    assert (status, headers["allow"], body) == (405, "POST", "")


def test_options_of_the_server() -> None:
    """RFC 9110 9.3.7: some proxies and monitors use it as a ping."""
    status, headers, body = ask("OPTIONS", "*")
    assert (status, body) == (200, "") and "OPTIONS" in headers["allow"]
    assert ask("GET", "*")[0] == 400


def test_no_websocket() -> None:
    """Codex tries one where it takes this server for OpenAI's, and after a 426 sends a POST."""
    bench = Bench(handler=table())
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    sent = bench.feed(f"GET /p HTTP/1.1\r\nHost: a\r\n{upgrade}\r\n".encode())
    head = sent.decode().lower().split("\r\n")
    assert head[0].startswith("http/1.1 426 ")
    assert {"connection: upgrade", "upgrade: http/1.1", "content-length: 0"} <= set(head)
    assert b" 200 " in bench.feed(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n")  # it goes on


def test_no_compressed_bodies() -> None:
    def post(coding: str) -> bytes:
        lines = (
            "POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 0",
            f"Content-Type: application/json\r\nContent-Encoding: {coding}\r\n\r\n",
        )
        return Bench(handler=table()).feed("\r\n".join(lines).encode())

    for coding in ("gzip", "zstd"):
        sent = post(coding)
        assert sent.startswith(b"HTTP/1.1 415 ") and b"without compression" in sent
    assert post("identity").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("good", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken(good: str) -> None:
    assert ask("POST", "/p", good)[0] == 200


@pytest.mark.parametrize("bad", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_anything_else_is_not(bad: str | None) -> None:
    status, _, body = ask("POST", "/p", bad)
    assert status == 415
    text = "Expected request with Content-Type application/json"
    assert json.loads(body) == error_json(text, "Unsupported Media Type", 415, REFUSED)


def test_a_wrong_base_url_is_explained() -> None:
    assert "/v1 too many" in json.loads(ask("POST", "/v1/v1/chat/completions")[2])["message"]
