"""The planner's panel of the web page in a real Chromium, over a real planner."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import msgspec
import pytest
from deployment import MODEL, free_port
from serving import Serving
from web_kit import WAIT_MS, ScriptedPage, accessibility_findings, needs_chromium

from dynamo.protocols.control import PlannerState
from dynamo.protocols.status import PlannerSummary

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = needs_chromium
GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
Worker:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  ServiceArgs: {{workers: 1, resources: {{gpu: 1}}}}
Planner:
  run: dynamo.planner
  mode: auto
  adjustment-interval: 600
  max-gpu-budget: 2
  log-dir: {logs}
"""
TTFT, ITL, MOST, KEPT = (
    "TTFT target, ms",
    "ITL target, ms",
    "GPUs at most",
    "Workers kept of Worker",
)


class Site:
    """A deployment with a planner, and a browser."""

    def __init__(self, serving: Serving, browser: Browser) -> None:
        self.serving = serving
        self.browser = browser
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        logs = serving.tmp_path / "tensorboard"
        graph = serving.graph(GRAPH.format(port=self.port, model=MODEL, logs=logs))
        serving.start(graph, "--gpus", "2", wait="ready: http://")
        serving.until(lambda: "Worker" in self.state().get("minima", {}))

    def state(self) -> dict[str, Any]:
        """What the planner's API answers."""
        answer = httpx.get(f"{self.url}/v1/planner", timeout=20)
        return dict(answer.json())

    def change(self, **change: Any) -> None:
        """Change the planner as another client does."""
        answer = httpx.post(f"{self.url}/v1/planner", json=change, timeout=20)
        assert answer.status_code == 200, answer.text

    def open(self, width: int = 1280) -> Page:
        """Open the page, and the form."""
        context = self.browser.new_context(viewport={"width": width, "height": 900})
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{self.url}/ui#overview")
        page.click("#planner summary")
        page.wait_for_selector("#planner form", state="visible")
        return page


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    serving = Serving(tmp_path_factory.mktemp("planner"))
    try:
        yield Site(serving, browser)
        assert serving.stop() == 0
        serving.assert_clean()
    finally:
        serving.close()


def test_settings_are_changed_by_keyboard(site: Site) -> None:
    site.change(ttft_ms=1000, itl_ms=50, max_gpu_budget=2, minima={"Worker": None})
    page = site.open()
    page.wait_for_selector("#planner summary:has-text('TTFT 1000 ms · ITL 50 ms · at most 2 GPUs')")
    assert page.get_by_label(TTFT).input_value() == "1000"
    assert page.get_by_label(KEPT).input_value() == "1"
    assert accessibility_findings(page) == []
    page.focus("#planner summary")
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("900")
    page.keyboard.press("Enter")
    page.wait_for_selector("#planner [role=status]:has-text('Applied.')")
    page.wait_for_selector("#planner summary:has-text('TTFT 900 ms')")
    found = site.state()
    assert (found["ttft_ms"], found["itl_ms"], found["max_gpu_budget"]) == (900, 50, 2)
    foreign = {"origin": "http://example.com"}
    refused = httpx.post(f"{site.url}/v1/planner", json={"paused": True}, headers=foreign)
    assert refused.status_code == 403 and "not for web pages" in refused.text
    page.context.close()


def test_a_refusal_of_the_api_is_beside_the_form_and_the_edit_stays(site: Site) -> None:
    site.change(max_gpu_budget=2)
    page = site.open()
    for label, text, error in (
        (ITL, "0", "itl_ms must be above 0 and at most 1000000, got 0"),
        (MOST, "1.5", "Failed to deserialize the JSON body: Expected `int | null`, got `float`"),
        (MOST, "two", "Failed to deserialize the JSON body: Expected `int | null`, got `str`"),
        (MOST, "", "Failed to deserialize the JSON body: Expected `int | null`, got `str`"),
        (KEPT, "-1", "minima: Worker must be between 0 and"),
    ):
        page.get_by_label(label).fill(text)
        page.get_by_role("button", name="Apply").click()
        alert = page.locator("#planner form [role=alert]")
        page.wait_for_selector(f'#planner form [role=alert]:has-text("{error}")')
        assert page.get_by_label(label).input_value() == text
        page.get_by_role("button", name="Undo").click()
        assert alert.inner_text() == "" and page.get_by_label(label).input_value() != text
    page.get_by_role("button", name="Apply").click()
    page.wait_for_selector("#planner [role=status]:has-text('Nothing is changed.')")
    assert accessibility_findings(page) == []
    page.context.close()


def test_two_pages_show_the_newest_and_keep_the_edit(site: Site) -> None:
    site.change(ttft_ms=1000, max_gpu_budget=2, minima={"Worker": None})
    one, other = site.open(), site.open()
    one.get_by_label(TTFT).click()
    one.keyboard.press("ControlOrMeta+a")
    one.keyboard.type("70")
    other.get_by_label(TTFT).fill("800")
    other.get_by_label(KEPT).fill("0")
    other.get_by_role("button", name="Apply").click()
    other.wait_for_selector("#planner [role=status]:has-text('Applied.')")
    one.wait_for_selector("#planner label:has-text('TTFT') .now:text-is('now 800')")
    one.wait_for_selector("#planner summary:has-text('Worker keeps 0')")
    assert one.get_by_label(KEPT).input_value() == "0"
    one.keyboard.type("0")  # the focus is still in the box
    assert one.get_by_label(TTFT).input_value() == "700"
    one.keyboard.press("Enter")
    other.wait_for_selector("#planner summary:has-text('TTFT 700 ms')")
    assert other.get_by_label(TTFT).input_value() == "700"
    one.get_by_label(KEPT).fill("")  # what the graph says
    one.keyboard.press("Enter")
    one.wait_for_selector("#planner summary:has-text('Worker keeps 1')")
    assert site.state()["minima"] == {"Worker": 1} and site.state()["ttft_ms"] == 700
    one.context.close()
    other.context.close()


def test_the_pause_and_a_planner_that_is_killed(site: Site) -> None:
    page = site.open(390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.get_by_role("button", name="Pause planner").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Resume planner").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Resume"
    page.get_by_label(ITL).fill("44")
    report = site.serving.state_dir / site.serving.namespace / "planner.json"
    old = json.loads(report.read_text())["pid"]
    os.kill(old, signal.SIGKILL)
    site.serving.until(lambda: report.exists() and json.loads(report.read_text())["pid"] != old)
    page.wait_for_selector("#planner .badge.paused")  # it goes on as it was left
    assert page.get_by_label(ITL).input_value() == "44"
    site.serving.until(lambda: "Worker" in site.state().get("minima", {}))
    page.get_by_role("button", name="Apply").click()
    page.wait_for_selector("#planner summary:has-text('ITL 44 ms')")
    page.get_by_role("button", name="Resume planner").click()
    page.get_by_role("button", name="Pause planner").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.context.close()


def test_mode_load_has_no_targets_and_without_a_planner_there_is_no_form(
    tmp_path: Path, browser: Browser
) -> None:
    scripted = ScriptedPage(tmp_path)
    state = PlannerState(paused=False, mode="load", max_gpu_budget=4, minima={"Worker": 1})

    def answer(route: Route) -> None:
        route.fulfill(body=msgspec.json.encode(state), content_type="application/json")

    try:
        page = scripted.open(browser)
        page.route("**/v1/planner", answer)
        page.wait_for_selector("#planner >> text=No planner in this deployment")
        assert not page.is_visible("#planner details")
        scripted.show(planner=PlannerSummary(state="running", mode="load"))
        page.click("#planner summary:has-text('at most 4 GPUs')")
        labels = page.locator("#planner form label").all_inner_texts()
        assert labels == [MOST, "GPUs that each pool keeps", KEPT]
        page.get_by_label(MOST).fill("3")
        scripted.show(planner=None)  # it is gone: the edit stays, the API says why it fails
        page.wait_for_selector("#planner >> text=No planner in this deployment")
        page.unroute("**/v1/planner")
        page.get_by_role("button", name="Apply").click()
        page.wait_for_selector("#planner form [role=alert]:has-text('Route not found')")
        page.get_by_role("button", name="Undo").click()
        page.focus("#theme")
        page.wait_for_selector("#planner details", state="hidden")
        page.context.close()
    finally:
        scripted.close()
