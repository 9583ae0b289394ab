"""What a hub may answer, at most: a mirror need not be Hugging Face's."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hub_server import Body, answering

from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.llm.model_download import MAX_ANSWER_BYTES, HubModel
from dynamo.operations.pull import HubHit, find_on_hub
from dynamo.operations.stored_models import ask_ollama

HIT = {"id": "a/b", "downloads": 3, "likes": 1}


def test_a_list_of_pages_ends() -> None:
    asked: list[str] = []

    def more(url: str) -> tuple[str, dict[str, str]]:
        asked.append(url)
        link = {"link": f'<https://hub/api/models/{len(asked)}>; rel="next"'}
        return "[]", link

    with answering(more):
        with pytest.raises(Unavailable, match="more than 100 pages"):
            find_on_hub("a")
        assert len(asked) <= 101
        with pytest.raises(ConfigError, match="more than 100 pages"):
            HubModel("a/b", None, "a/b").files()


def test_a_list_of_several_pages_is_whole() -> None:
    def page(url: str) -> tuple[str, dict[str, str]]:
        number = int(url.rpartition("page=")[2]) if "page=" in url else 0
        rows = [{"type": "file", "path": f"f{number}", "size": 1, "oid": "a"}]
        link = {"link": f'<{url.partition("?")[0]}?page={number + 1}>; rel="next"'}
        return json.dumps(rows), link if number < 40 else {}

    with answering(page):
        for _ in range(4):  # the count begins again with each list
            assert len(HubModel("a/b", None, "a/b").files()) == 41


def test_an_answer_without_end_is_read_to_the_bound() -> None:
    stream, text = Body(itertools.repeat(b"[" * (1 << 16))), f"more than {MAX_ANSWER_BYTES} bytes"
    with answering(lambda _: (stream, {})), pytest.raises(Unavailable, match=text):
        find_on_hub("a")
    assert stream.size_bytes <= MAX_ANSWER_BYTES + (1 << 17)


def test_an_answer_that_grows_when_unpacked_is_refused() -> None:
    packed, headers = Body([gzip.compress(b" " * (64 << 20))]), {"content-encoding": "gzip"}
    with answering(lambda _: (packed, headers)), pytest.raises(Unavailable, match="compressed"):
        find_on_hub("a")


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        "[1]",
        '[{"id": 3}]',
        "[" * 100_000,
        "[null]",
        '[{"id": "a", "likes": "b", "pipeline_tag": [1]}]',
        '"a"',
        "",
    ],
)
def test_an_odd_answer_is_an_error_or_nothing(body: str) -> None:
    with answering(lambda _: (body, {})):
        try:
            assert find_on_hub("a") in ([], [HubHit(name="a", task="[1]")])
        except DynamoError as error:
            assert len(str(error)) < 500


def test_hits_are_few_and_short() -> None:
    long: list[dict[str, Any]] = [{"id": "x" * 10_000, "pipeline_tag": "t"}]
    rows = [*long, *([{**HIT, "pipeline_tag": "t" * 10_000}] * 100)]
    with answering(lambda _: (json.dumps(rows), {})):
        found = find_on_hub("a")
    assert 0 < len(found) <= 20
    assert all(hit.name == "a/b" and len(hit.task) < 100 for hit in found)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"status": "' + b"a" * (3 << 20), "at most 1048576 bytes"),
        (b"[1]\n", "is no JSON object"),
        (b"[" * 100_000 + b"\n", "recursion"),
        (b'{"error": "' + b"no " * 9000 + b'"}\n', "no no"),
    ],
)
def test_lines_of_ollama_are_bounded(
    body: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ollama(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))  # unread, it resets the connection
            with contextlib.suppress(ConnectionError):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Ollama) as server:
        monkeypatch.setenv("OLLAMA_HOST", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(DynamoError, match=said) as raised:
            list(ask_ollama("POST", "/api/pull", "m"))
        server.shutdown()
    assert len(str(raised.value)) < 500
