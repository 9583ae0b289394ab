"""The conversations of the page's Chat in a real Chromium: kept, shared by tabs, of one key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat_kit import Site, ask, reload, send, titles
from deployment import Deployment
from web_kit import WAIT_MS, ScriptedPage, needs_chromium

from dynamo.http.api_keys import key_line, new_key
from dynamo.protocols.status import ModelFigures, ModelStatus

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("chat")
    made: list[Site] = []
    try:
        made.append(Site(path, browser))
        yield made[0]
    finally:
        for one in made:
            one.deployment.close()


def test_conversations_are_kept_and_deleted(site: Site) -> None:
    page = site.open()
    ask(page, "first", "echo")
    page.click("#chat-clear")
    ask(page, "second")
    assert titles(page) == ["second", "first"]
    reload(page)
    page.wait_for_selector(".words:text-is('second')")
    page.click("#chat-list >> text=first")
    page.wait_for_selector(".words:text-is('first')")
    assert page.locator(".turn").count() == 1
    send(page, "word " * 1500, "slow")
    page.wait_for_selector(".turn:last-child .body:has-text('word')")
    page.click("#chat-list >> text=second")  # while the answer arrives: it is stopped
    page.wait_for_selector(".words:text-is('second')")
    page.wait_for_selector("#chat-send:enabled")
    page.click("#chat-list >> text=first")
    page.wait_for_selector(".turn >> nth=1 >> text=stopped")
    assert page.inner_text(".turn:last-child .body").startswith("word")
    page.click("button[aria-label='Delete the conversation first']")
    page.click("#confirm-yes")
    page.wait_for_selector(".turn", state="detached")
    assert titles(page) == ["second"]
    page.click("#chat-forget")
    page.click("#confirm-yes")
    page.wait_for_selector("#chat-list .link", state="detached")
    reload(page)
    assert titles(page) == [] and not site.errors
    page.context.close()


def test_a_reload_during_an_answer_keeps_the_question(site: Site) -> None:
    page = site.open()
    send(page, "word " * 3000, "slow")
    page.wait_for_selector(".message.assistant .body:has-text('word')")
    page.wait_for_selector("#chat-list .link")  # it is kept
    reload(page)
    page.wait_for_selector(".message.assistant >> text=not complete: its page was closed")
    assert page.locator(".turn").count() == 1 and page.is_enabled("#chat-send")
    ask(page, "next")
    assert page.locator(".turn").count() == 2
    page.context.close()


def test_two_tabs_share_the_conversations(site: Site) -> None:
    page = site.open()
    ask(page, "shared", "echo")
    other = site.open(page.context)
    other.click("#chat-list >> text=shared")
    other.wait_for_selector(".words:text-is('shared')")
    ask(other, "from the other tab")
    page.wait_for_selector(".words:text-is('from the other tab')")
    hold: list[Callable[[], None]] = []
    page.route("**/v1/chat/completions", lambda route: hold.append(route.continue_))
    send(page, "mine")
    other.wait_for_selector(".turn:last-child:has-text('mine') >> text=not complete")
    ask(other, "theirs")
    hold.pop()()
    page.wait_for_selector("#chat-stats:has-text('is kept as a copy')")
    page.wait_for_selector("#chat-list .link >> nth=1")
    assert sorted(titles(page)) == ["shared", "shared (copy)"]
    send(page, "more")
    page.wait_for_selector("#chat-stop:enabled")
    other.click("button[aria-label='Delete the conversation shared (copy)']")
    other.click("#confirm-yes")
    page.wait_for_selector("#chat-stats:has-text('deleted in another tab')")
    assert page.locator(".turn").count() == 0 and page.is_enabled("#chat-send")
    page.wait_for_selector("#chat-list .link >> nth=1", state="detached")
    assert titles(page) == ["shared"] and not site.errors
    page.context.close()


def test_an_answer_has_a_link_to_its_receipt(site: Site) -> None:
    page = site.open()
    ask(page, "hello", "echo")
    page.click(".foot >> text=Receipt")
    page.wait_for_selector("#requests", state="visible")
    page.wait_for_selector("#request-rows td.note .legend")
    opened = page.evaluate("location.hash").removeprefix("#requests/")
    assert page.evaluate("document.activeElement.title") == opened
    assert not site.errors
    page.goto(f"{site.deployment.url}/ui#requests/00000000-0000-4000-8000-000000000000")
    page.wait_for_selector(".toast.failed:has-text('the last 1000 are kept')")
    page.click("#tab-chat")
    page.wait_for_selector(".words:text-is('hello')")
    page.context.close()


def test_each_key_has_its_own_conversations(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice, bob = new_key(), new_key()
    lines = [key_line("alice", "user", alice), key_line("bob", "user", bob)]
    keys.write_text("".join(lines))
    keys.chmod(0o600)
    deployment = Deployment(tmp_path)
    try:
        deployment.mocker("--reply", "echo", "--speedup-ratio", "10")
        deployment.frontend("--api-key-file", str(keys))
        deployment.until(lambda: deployment.request("GET", "/health")[0] == 200)
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{deployment.url}/ui#chat")
        sign_in(page, alice)
        page.wait_for_selector("#chat-model option", state="attached")
        ask(page, "of alice")
        page.click("text=Receipt")
        page.wait_for_selector(".message >> text=Receipts are for operators. The id")
        page.click("#sign-out")
        sign_in(page, bob)
        page.wait_for_selector("#chat-count:text-is('Conversations (0)')")
        assert page.locator(".turn").count() == 0
        keys.write_text(lines[0])  # bob's key is withdrawn
        send(page, "of bob")
        page.wait_for_selector("#sign-in", state="visible")
        assert page.locator(".turn").count() == 0
        sign_in(page, alice)
        page.click("#chat-list >> text=of alice")
        page.wait_for_selector(".words:text-is('of alice')")
        assert titles(page) == ["of alice"] and page.input_value("#chat-text") == ""
        page.close()
    finally:
        deployment.close()


def sign_in(page: Page, key: str) -> None:
    page.fill("#key", key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#chat", state="visible")


def test_a_model_that_disappears_is_named_and_chosen_again(
    browser: Browser, tmp_path: Path
) -> None:
    def models(*names: str) -> tuple[ModelStatus, ...]:
        return tuple(
            ModelStatus(
                model=name, state="ready", ready=1, wanted=1, figures=ModelFigures(model=name)
            )
            for name in names
        )

    scripted = ScriptedPage(tmp_path)
    try:
        scripted.show(models=models("a", "b"))
        page = scripted.open(browser, "chat")
        page.select_option("#chat-model", "b")
        scripted.show(models=models("a"))
        page.wait_for_selector("#chat-stats:has-text('b is not served now')")
        assert page.input_value("#chat-model") == "a"
        scripted.show(models=models("a", "b"))
        page.wait_for_selector("#chat-second option >> nth=2", state="attached")
        assert page.input_value("#chat-model") == "b"
        scripted.show(models=())
        page.wait_for_selector("#chat-model option", state="detached")
        send(page, "anyone?")
        page.wait_for_selector("#chat-stats:has-text('No model is served now')")
        assert page.input_value("#chat-text") == "anyone?"
        page.context.close()
    finally:
        scripted.close()


def test_the_keyboard_is_enough(site: Site) -> None:
    page = site.open()
    page.select_option("#chat-model", "rich")
    page.focus("#chat-text")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".foot >> text=Receipt")
    seen = []
    for _ in range(14):
        page.keyboard.press("Shift+Tab")
        seen.append(
            page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
        )
    wanted = ["Receipt", "Regenerate", "Copy the answer", "Code, python", "Copy the code"]
    places = [seen.index(one) for one in [*wanted, "Reasoning", "Edit the question"]]
    assert places == sorted(places), seen
    page.focus(".edit")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "chat-text"
    page.keyboard.press("Escape")
    page.wait_for_selector("#chat-editing", state="hidden")
    assert not site.errors
    page.context.close()
