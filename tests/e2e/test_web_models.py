"""Models on disk and on the Hub, by the web page: a real frontend, a Hub on loopback, Chromium."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import pytest
from deployment import MODEL, free_port
from hub_server import Hub, cache_model
from serving import Serving, is_running
from web_kit import WAIT_MS, needs_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
NAME = "acme/tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"w" * 30_000_000,
}
ENGINE = """#!/bin/sh
echo "no memory left" >&2; exit 3
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(NAME, FILES)
    yield found
    found.close()


class Box:
    """A deployment whose caches are its own, and its page."""

    def __init__(self, serving: Serving, browser: Browser, **env: str) -> None:
        self.serving = serving
        self.home = serving.tmp_path / "hf"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.browser = browser
        bin_dir = serving.tmp_path / "bin"
        bin_dir.mkdir()
        engine = bin_dir / "llama-server"
        engine.write_text(ENGINE)
        engine.chmod(0o755)
        for name in ("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
            serving.env.pop(name, None)
        graph = serving.graph(
            f"Frontend: {{run: dynamo.frontend, http-port: {self.url.rpartition(':')[2]}}}\n"
            f"Worker:\n  run: dynamo.mocker\n  model: {MODEL}\n  model-name: tiny\n"
            f"Other:\n  run: dynamo.mocker\n  model: {MODEL}\n  model-name: other\n"
        )
        serving.start(
            graph,
            wait="ready: ",
            HF_HOME=str(self.home),
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_XET="1",
            LLAMA_CACHE=str(serving.tmp_path / "llama"),
            OLLAMA_MODELS=str(serving.tmp_path / "ollama"),
            OLLAMA_HOST="127.0.0.1:1",
            PATH=f"{bin_dir}:{os.environ['PATH']}",
            **env,
        )

    def open(self) -> Page:
        page = self.browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{self.url}/ui#overview")
        page.wait_for_selector("#models .badge.ready", state="attached")
        page.click("#disk summary")
        return page

    def row(self, name: str) -> str:
        return f"#disk-rows tbody:has(td.name:text-is('{name}'))"

    def pulls(self) -> list[int]:
        """The processes that download."""
        (frontend,) = self.serving.pids("Frontend")
        return [one.pid for one in psutil.Process(frontend).children()]


def test_a_model_is_found_downloaded_cancelled_resumed_and_deleted(
    serving: Serving, browser: Browser, hub: Hub
) -> None:
    box = Box(serving, browser, HF_ENDPOINT=hub.url)
    page = box.open()
    page.wait_for_selector(box.row(str(MODEL)))
    page.fill("#hub-text", "tiny")
    page.keyboard.press("Enter")
    page.wait_for_selector("#hub-rows >> text=text-generation")
    hub.gate.clear()
    page.click(f"button[aria-label='Download {NAME}']")
    page.wait_for_selector("#download:has-text('% of 30.0 MB')")
    page.close()
    page = box.browser.new_page()  # the download goes on without a page
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{box.url}/ui#overview")
    page.wait_for_selector("#download:has-text('Downloading acme/tiny: 34 %')")
    page.click("#disk summary")
    page.click(f"button[aria-label='Cancel {NAME}']")
    page.wait_for_selector("#download:has-text('was cancelled')")
    assert box.pulls() == []
    page.wait_for_selector(f"{box.row(NAME)} >> text=incomplete")
    hub.gate.set()
    page.click(f"{box.row(NAME)} button:text-is('Resume')")
    page.wait_for_selector("#download:has-text('Downloaded acme/tiny.')")
    again = [one for one in hub.requests if one.startswith("GET") and one.endswith("config.json")]
    assert len(again) == 1  # it is complete, and not downloaded twice
    assert not list((box.home / "hub").rglob("*.incomplete"))
    page.wait_for_selector(f"{box.row(NAME)} >> text=safetensors")
    page.click(f"{box.row(NAME)} button:text-is('Delete')")
    page.wait_for_selector("#confirm:has-text('30.0 MB')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#confirm", state="hidden")
    page.click(f"{box.row(NAME)} button:text-is('Delete')")
    page.click("#confirm-yes")
    page.wait_for_selector(box.row(NAME), state="detached")
    assert not list((box.home / "hub").glob("models--*"))
    page.close()
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_download_ends_with_its_frontend(serving: Serving, browser: Browser, hub: Hub) -> None:
    box = Box(serving, browser, HF_ENDPOINT=hub.url)
    page = box.open()
    hub.gate.clear()
    page.fill("#hub-text", NAME)
    page.keyboard.press("Enter")
    page.click(f"button[aria-label='Download {NAME}']")
    page.wait_for_selector("#download:has-text('% of 30.0 MB')")
    (pid,) = box.pulls()
    (frontend,) = serving.pids("Frontend")
    os.kill(frontend, signal.SIGKILL)
    serving.until(lambda: not is_running(pid))
    serving.wait_for_pids("Frontend", unlike=frontend, timeout_s=60)
    page.wait_for_selector(f"{box.row(NAME)} >> text=incomplete")
    page.close()
    assert serving.stop() == 0
    serving.assert_clean()


def test_offline_says_so_and_what_is_served_stays(serving: Serving, browser: Browser) -> None:
    box = Box(serving, browser, HF_HUB_OFFLINE="1")
    cache_model(box.home, NAME, FILES)
    page = box.open()
    page.wait_for_selector(f"{box.row(str(MODEL))} >> text={serving.namespace}/Worker")
    assert page.locator(f"{box.row(str(MODEL))} button").count() == 0
    page.fill("#hub-text", "tiny")
    page.keyboard.press("Enter")
    page.wait_for_selector("#hub-state:has-text('HF_HUB_OFFLINE is set')")
    assert page.locator(box.row(NAME)).count() == 1  # what is here is found
    page.click(f"button[aria-label='Add {NAME}']")
    page.wait_for_selector(".toast.failed:has-text('install')")  # no engine can serve it
    page.click("button[aria-label='Remove other']")
    page.wait_for_selector("#confirm:has-text('out of the graph file')")
    page.click("#confirm-yes")
    page.wait_for_selector("#models td.name:text-is('other')", state="detached")
    page.wait_for_selector(".toast:has-text('other: removed')")
    graph = (serving.tmp_path / "graph.yaml").read_text()
    assert "Other:" not in graph and "Worker:" in graph
    page.close()
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_model_is_added_by_the_page(serving: Serving, browser: Browser) -> None:
    """An engine that does not start: the model is taken back, and the page says why."""
    box = Box(serving, browser, HF_HUB_OFFLINE="1")
    llama = serving.tmp_path / "llama"
    llama.mkdir()
    (llama / "small.Q8_0.gguf").write_bytes(b"GGUF")
    page = box.open()
    page.click(f"button[aria-label='Add {llama}/small.Q8_0.gguf']")
    page.wait_for_selector(".toast:has-text('adding')")
    page.wait_for_selector(".toast.failed", timeout=60_000)
    assert "small" not in (serving.tmp_path / "graph.yaml").read_text()
    page.close()
    assert serving.stop() == 0
    serving.assert_clean()
