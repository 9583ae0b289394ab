"""The web page in a real headless Chromium, over a real deployment of simulated engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deployment import Deployment, free_port
from serving import ROOT, Serving
from web_kit import WAIT_MS, collect_errors, needs_chromium

from dynamo.http.api_keys import key_line, new_key

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = needs_chromium
GRAPH = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT, router-mode: kv}}
Worker:
  run: dynamo.mocker
  model-path: {ROOT}/examples/model
  model-name: tiny
  reply: echo
  speedup-ratio: 1
  startup-time: 1
  enable-sleep-mode: true
  ServiceArgs: {{workers: 2}}
"""
TABS = ("overview", "requests", "routing", "logs", "chat", "connect")


class Site:
    """A deployment and a browser; ``errors`` has what the console showed."""

    def __init__(self, serving: Serving, browser: Browser) -> None:
        self.serving = serving
        self.browser = browser
        self.port = free_port()
        self.errors: list[str] = []
        serving.start(GRAPH.replace("PORT", str(self.port)), wait="ready: ")

    def open(self, context: BrowserContext, tab: str = "overview") -> Page:
        self.errors.clear()
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        collect_errors(page, self.errors)
        page.goto(f"http://127.0.0.1:{self.port}/ui#{tab}")
        page.wait_for_selector("#models .badge.ready", state="attached")
        return page


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    serving = Serving(tmp_path_factory.mktemp("web"))
    try:
        yield Site(serving, browser)
        assert serving.stop() == 0
        serving.assert_clean()
    finally:
        serving.close()


def row_of(site: Site, service: str) -> str:
    """A selector of the rows of a worker."""
    return f"#workers > tbody:has(td.name:text-is('{site.serving.namespace}_{service}'))"


def wait_for_state(page: Page, site: Site, service: str, *states: str) -> None:
    """Wait until the page shows one of ``states`` for a worker.

    By selectors alone: the policy of the page forbids the functions that a test would evaluate.
    """
    row = row_of(site, service)
    page.wait_for_selector(", ".join(f"{row} .badge.{one}" for one in states))


def test_the_page_shows_the_deployment_and_chats(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context)
    assert "tiny" in page.inner_text("#models")
    assert page.inner_text("#models td[data-label=Workers]").strip() == "2 / 2"
    wait_for_state(page, site, "Worker", "ready")
    page.wait_for_selector("#charts .plot[aria-label='Output tokens/s'][aria-valuetext^='0 at ']")

    page.click("#tab-chat")
    page.fill("#chat-text", "Say <b>hello</b> & goodbye")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chat-stats:has-text('tokens/s')")
    page.wait_for_selector("#chat-stop:disabled")
    answer = page.inner_text(".message.assistant .body")
    assert "<b>hello</b>" in answer  # echoed as text, not as an element
    assert page.locator(".message b").count() == 0

    page.click("#tab-requests")
    page.click("#request-rows td.id button")
    page.wait_for_selector("#request-rows td.note .candidates .chosen")

    page.click("#tab-routing")
    page.wait_for_selector("#routing-pools .mark")
    assert "kv, costs in blocks" in page.inner_text("#routing-pools h2")
    page.locator("#routing-pools .mark").first.focus()
    page.wait_for_selector("#routing-receipt .candidates .chosen")
    name = f"{site.serving.namespace}_Worker"
    assert name in page.inner_text("#routing-receipt .candidates .chosen")

    page.click("#tab-connect")
    page.wait_for_selector("#snippets >> text=CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072")
    settings = page.inner_text("#snippets")
    assert f"http://127.0.0.1:{site.port}/v1" in settings and 'model="tiny"' in settings
    assert "model_context_window = 131072\nmodel_auto_compact_token_limit = 111411" in settings
    assert not site.errors
    context.close()


def test_a_new_chat_leaves_the_stopped_answer_behind(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context, "chat")
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    page.fill("#chat-text", "first " * 500)
    page.click("#chat-send")
    page.wait_for_selector(".message.assistant .body:has-text('first')")
    # All tokens are in one node of text: an answer of thousands does not make thousands of them.
    nodes = "document.querySelector('.message.assistant .body').childNodes.length"
    assert page.evaluate(nodes) == 1
    page.click("#chat-clear")
    page.wait_for_selector("#chat-send:enabled")
    assert page.locator(".message").count() == 0 and page.input_value("#chat-text") == ""
    page.fill("#chat-text", "second")
    page.click("#chat-send")
    page.wait_for_selector(".message.assistant .body:has-text('second')")
    page.wait_for_selector("#chat-stop:disabled")
    assert [one["messages"] for one in sent][-1] == [{"role": "user", "content": "second"}]
    page.fill("#chat-text", "third")
    page.click("#chat-send")
    page.wait_for_selector(".message.assistant .body:has-text('third')")
    roles = [one["role"] for one in sent[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    context.close()


def test_a_frontend_that_hangs_is_not_shown_as_live(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context)
    page.wait_for_selector("#live.ready")
    (pid,) = site.serving.wait_for_pids("Frontend")
    os.kill(pid, signal.SIGSTOP)
    try:
        page.wait_for_selector("#live.failed:has-text('no sample for')")
        page.wait_for_selector("#deployment.failed")
        assert page.title().startswith("(no sample for")
    finally:
        os.kill(pid, signal.SIGCONT)
    page.wait_for_selector("#live.ready")
    page.wait_for_selector("#deployment.ready")
    assert page.title().startswith("Dynamo · ")
    context.close()


def test_an_answer_can_be_stopped(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context, "chat")
    page.fill("#chat-text", "word " * 1500)
    page.click("#chat-send")
    page.wait_for_selector(".message.assistant .body:not(:empty)")
    page.click("#chat-stop")
    page.wait_for_selector(".message.assistant >> text=stopped")
    assert page.is_enabled("#chat-send") and not site.errors
    context.close()


def test_logs_follow_a_service(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context)
    name = f"{site.serving.namespace}_Worker"
    page.click(f"button[aria-label='Logs of {name}']")
    page.wait_for_selector("#log-lines >> text=serving tiny")
    assert page.input_value("#log-name") == name
    log = site.serving.state_dir / site.serving.namespace / "logs" / f"{name}.log"
    with log.open("a") as file:
        file.write("<img src=x onerror=alert(1)> ERROR from outside\n")
    line = page.wait_for_selector("#log-lines >> text=from outside")
    assert line is not None and line.inner_text().startswith("<img")
    assert page.locator("#log-lines img").count() == 0 and not site.errors
    context.close()


def test_a_worker_is_put_to_sleep_and_woken(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context)
    name = f"{site.serving.namespace}_Worker_1"
    page.click(f"button[aria-label='Sleep {name}']")
    wait_for_state(page, site, "Worker_1", "asleep")
    page.click(f"button[aria-label='Wake {name}']")
    wait_for_state(page, site, "Worker_1", "ready")
    assert page.locator(".toast.failed").count() == 0 and page.locator(".toast").count()
    assert not site.errors
    context.close()


def test_a_killed_worker_is_shown_until_it_serves_again(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context)
    wait_for_state(page, site, "Worker_1", "ready")
    (old,) = site.serving.wait_for_pids("Worker_1")
    os.kill(old, signal.SIGKILL)
    wait_for_state(page, site, "Worker_1", "loading", "failed")
    wait_for_state(page, site, "Worker_1", "ready")
    shown = page.inner_text(f"{row_of(site, 'Worker_1')} td[data-label=PID]")
    assert shown.isdigit() and int(shown) != old and not site.errors
    context.close()


def test_an_open_page_survives_a_restart_of_its_frontend(site: Site) -> None:
    """Its stream does not delay the old process, and it connects to the new one."""
    context = site.browser.new_context()
    page = site.open(context)
    (old,) = site.serving.pids("Frontend")
    page.click(f"button[aria-label='Restart {site.serving.namespace}_Frontend']")
    page.click("#confirm-yes")
    (new,) = site.serving.wait_for_pids("Frontend", unlike=old, timeout_s=20)
    page.wait_for_selector(f"#others td[data-label=PID]:text-is('{new}')")
    page.wait_for_selector("#live.ready")
    context.close()


def test_the_button_changes_the_colors(site: Site) -> None:
    context = site.browser.new_context(color_scheme="light")
    page = site.open(context)
    color = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(color)
    page.focus("#theme")
    while page.evaluate("document.documentElement.dataset.theme") != "dark":
        page.keyboard.press("Enter")
    dark = page.evaluate(color)
    page.reload()
    assert page.evaluate(color) == dark != light
    assert not site.errors
    context.close()


def test_arrow_keys_change_the_section(site: Site) -> None:
    context = site.browser.new_context()
    page = site.open(context)
    page.focus("#tab-overview")
    for tab in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{tab}"
        page.wait_for_selector(f"#{tab}", state="visible")
    assert not site.errors
    context.close()


def test_with_keys_the_page_asks_for_one(browser: Browser, tmp_path: Path) -> None:
    """A frontend that was started by hand shows its own figures, and says so."""
    user, operator = new_key(), new_key()
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", "user", user) + key_line("root", "operator", operator))
    keys.chmod(0o600)
    deployment = Deployment(tmp_path)
    try:
        deployment.mocker("--reply", "echo")
        deployment.frontend("--api-key-file", str(keys))
        deployment.until(lambda: deployment.request("GET", "/health")[0] == 200)
        page = browser.new_page()
        page.set_default_timeout(20_000)
        page.goto(f"{deployment.url}/ui#chat")
        page.wait_for_selector("#sign-in >> text=An operator's key")
        assert not page.is_visible("#tabs") and not page.is_visible("#chat")
        text = page.inner_text("body")
        assert not any(one in text for one in ("No worker", "No NVIDIA", "No planner")), text
        page.keyboard.type("wrong")  # the box has the focus
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-error:has-text('not valid here')")
        page.reload()
        page.wait_for_selector("#sign-in")
        page.fill("#key", user)
        page.keyboard.press("Enter")
        page.wait_for_selector("#who:has-text('alice · user')")
        page.wait_for_selector("#live.ready:has-text('connected')")
        assert page.locator("#tabs [role=tab]:visible").all_inner_texts() == ["Chat", "Connect"]
        note = page.inner_text("#role-note")
        assert "the key 'alice' has the role user: send an operator's key" in note
        assert not page.is_visible("#problems") and not page.is_visible("#deployment")
        page.fill("#chat-text", "with a key")
        page.click("#chat-send")
        page.wait_for_selector(".message.assistant .body:has-text('with a key')")
        page.evaluate("location.hash = 'overview'")  # not for this role
        page.wait_for_selector("#chat", state="visible")
        page.reload()
        page.wait_for_selector("#who:has-text('alice · user')")
        page.click("#sign-out")
        page.wait_for_selector("#sign-in")
        assert page.evaluate("sessionStorage.length") == 0
        page.fill("#key", operator)
        page.keyboard.press("Enter")
        page.wait_for_selector("#who:has-text('root · operator')")
        page.wait_for_selector("#live.ready:has-text('live')")
        page.wait_for_selector("#problems:has-text('was not started by dynamo serve')")
        page.click("#tab-overview")
        page.wait_for_selector("#models .badge.ready")
        keys.write_text(key_line("root", "user", operator))  # while the page is open
        page.wait_for_selector("#who:has-text('root · user')")
        page.wait_for_selector("#chat", state="visible")
        page.wait_for_selector("#problems", state="hidden")
        keys.write_text(key_line("root", "operator", operator))
        page.wait_for_selector("#who:has-text('root · operator')")
        page.wait_for_selector("#problems:has-text('was not started by dynamo serve')")
        assert page.evaluate("localStorage.length") == 0
        page.close()
    finally:
        deployment.close()


def test_a_worker_is_drained_after_a_question(site: Site) -> None:
    """The last test: the worker does not come back."""
    context = site.browser.new_context()
    page = site.open(context)
    name = f"{site.serving.namespace}_Worker_1"
    button = f"button[aria-label='Drain {name}']"
    page.click(button)
    page.wait_for_selector("#confirm:has-text('finishes its running requests')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#confirm", state="hidden")
    wait_for_state(page, site, "Worker_1", "ready")
    page.click(button)
    page.click("#confirm-yes")
    page.wait_for_selector(row_of(site, "Worker_1"), state="detached")
    wait_for_state(page, site, "Worker", "ready")
    assert page.locator(".toast.failed").count() == 0 and not site.errors
    context.close()
