"""`dynamo web`: the address of the page, or why there is none and what to do."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo.cli import frontend_client as client
from dynamo.cli import main as cli
from dynamo.errors import Unavailable
from dynamo.protocols.status import BoxStatus, WorkerStatus


class Frontend(BaseHTTPRequestHandler):
    """Answers GET /ui with ``status``."""

    status = 200

    def do_GET(self) -> None:
        assert self.path == "/ui"
        assert "authorization" not in self.headers
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Frontend, "status", 200)
    with HTTPServer(("127.0.0.1", 0), Frontend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def box(url: str = "", state: str = "running", frontend: str = "ready") -> BoxStatus:
    others = (WorkerStatus(name="ns_Frontend", service="Frontend", state="failed"),)
    return BoxStatus(
        namespace="ns", state=state, at_s=0.0, frontend=frontend, url=url, others=others
    )


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (box(state="stopped"), "no deployment runs in namespace 'ns'; start one: dynamo run"),
        (box(frontend="none"), "has no frontend"),
        (box("http://a:1", frontend="down"), "does not answer at http://a:1.*dynamo logs ns_Front"),
        (box("http://127.0.0.1:9"), "can't reach http://127.0.0.1:9/ui: .*dynamo ps"),
    ],
)
def test_why_there_is_no_page(seen: BoxStatus, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        client.page_url(seen)


def test_a_page_that_is_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.page_url(box(url)) == f"{url}/ui"
    monkeypatch.setattr(Frontend, "status", 404)
    with pytest.raises(Unavailable, match="is off: give the frontend --ui"):
        client.page_url(box(url))
    monkeypatch.setattr(Frontend, "status", 503)
    with pytest.raises(Unavailable, match="answered 503"):
        client.page_url(box(url))


@pytest.mark.parametrize(
    ("flags", "display", "opens"),
    [([], ":0", True), ([], "", False), (["--no-open"], ":0", False)],
)
def test_a_browser_is_opened_where_there_is_a_display(
    url: str,
    flags: list[str],
    display: str,
    opens: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[str] = []
    seen = [box(url)]
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(client, "BoxCollector", lambda runtime: SimpleNamespace(collect=seen.pop))
    assert client.web(flags) == 0
    assert capsys.readouterr().out == f"{url}/ui\n"
    assert opened == ([f"{url}/ui"] if opens else [])


def test_without_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    assert cli.main(["web", "--namespace", "nowhere"]) == 1
    assert "no deployment runs in namespace 'nowhere'" in capsys.readouterr().err
