"""The answers of the page's Chat in a real Chromium, over a frontend and simulated engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chat_kit import RICH, TOOLS, Site, answer_with, ask, bodies, part, reload, send
from image_kit import data_url, png
from web_kit import WAIT_MS, needs_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FilePayload

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


def test_an_answer_is_markdown_and_a_hostile_one_does_nothing(site: Site) -> None:
    page = site.open(permissions=["clipboard-read", "clipboard-write"])
    loaded: list[str] = []
    page.on("request", lambda one: loaded.append(one.url))
    ask(page, "hello", "rich")
    answer = page.locator(".message.assistant .body")
    assert answer.locator("h3").inner_text() == "Plan"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator(".code-keyword").all_inner_texts() == ["def", "return"]
    assert answer.locator("td.right").inner_text() == "2"
    assert answer.locator("ol").get_attribute("start") == "3"
    assert [one.get_attribute("href") for one in answer.locator("a").all()] == [
        "https://example.com/x"
    ]
    rel = answer.locator("a").get_attribute("rel")
    assert rel is not None and rel.startswith("noopener noreferrer")
    assert '<img src=x onerror="window.hacked=1">' in answer.inner_text()
    for element in ("img", "script", "svg", "iframe", "style"):
        assert page.locator(f"#chat-log {element}").count() == 0
    assert page.evaluate("window.hacked === undefined")
    assert not [url for url in loaded if "leak" in url or "example.com" in url]
    page.click(".copy-code")
    page.wait_for_selector(".copy-code >> text=Copied")
    assert "def greet(name):" in page.evaluate("navigator.clipboard.readText()")
    assert not site.errors
    page.context.close()


def test_the_libraries_are_loaded_when_the_chat_is_opened(site: Site) -> None:
    context = site.browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    loaded: list[str] = []
    page.on("request", lambda one: loaded.append(one.url))
    page.goto(f"{site.deployment.url}/ui#overview")
    page.wait_for_selector("#live.ready")
    assert not [url for url in loaded if "/vendor/" in url]
    with page.expect_request("**/ui/vendor/highlight.min.js"):
        page.click("#tab-chat")
    hosts = {url.split("/")[2] for url in loaded}
    assert hosts == {site.deployment.url.split("/")[2]}
    context.close()


INCREMENTAL = r"""async (texts) => {
  const { load, MarkdownView } = await import("/ui/markdown.js");
  await load();
  const html = (root) => root.innerHTML.replace(/<div><\/div>$/, "");
  const wrong = [];
  for (const text of texts) {
    const whole = document.createElement("div");
    new MarkdownView(whole).update(text, true);
    for (const step of [1, 2, 3, 7, 50]) {
      const root = document.createElement("div");
      const view = new MarkdownView(root);
      for (let end = step; end < text.length; end += step) view.update(text.slice(0, end));
      view.update(text, true);
      view.update(text, true);
      if (html(root) !== html(whole)) wrong.push([step, html(root), html(whole)]);
    }
  }
  return wrong;
}"""
TEXTS = [
    RICH,
    "para\n# not yet\n#hash\ntext\n- a\n-b\n\n  more\n\n- c\n    - d\n1. x\n2. y\n\ntext\n==\nz\n-",
    "> quote\nlazy\n\n> > two\n\n```js\nlet x = 1;\n```\n```\nopen\n\n\nfence",
    "see [one] and [two][one]\n\n[one]: https://example.com/one\n\nlast",
    "- item\n\n  ```sh\n  ls -l\n  ```\n- next\n\n      code\n\n\n***\n~~s~~ https://a.example/b.",
    "a | b\n--|--\n1 | 2\n\nnot | table\n\r\nwindows\r\n\r\nlines\n\n" + "> " * 60 + "deep",
]


def test_an_answer_in_parts_becomes_the_same_elements(site: Site) -> None:
    page = site.open()
    assert page.evaluate(INCREMENTAL, TEXTS) == []
    page.context.close()


def test_a_long_answer_is_drawn_by_its_new_parts(site: Site) -> None:
    page = site.open()
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")

    def layouts() -> float:
        found = client.send("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in found if one["name"] == "LayoutCount")

    before = layouts()
    send(page, "long", "rich")
    page.wait_for_selector(".body > p >> nth=3")
    page.evaluate("document.querySelector('.body > p').kept = true")
    page.wait_for_selector(".body > p:has-text('Paragraph 499 has some words.')", timeout=60_000)
    page.wait_for_selector("#chat-stop:disabled")
    assert page.locator(".body > p").count() == 500
    assert page.evaluate("document.querySelector('.body > p').kept")
    tokens = int(page.inner_text(".foot .stats").split(" tokens")[0].split()[-1].replace(",", ""))
    assert tokens > 5000 and layouts() - before < tokens / 4
    page.context.close()


def test_settings_are_sent_and_kept_with_the_conversation(site: Site) -> None:
    page = site.open()
    sent = bodies(page)
    page.click("#chat-settings summary")
    values = {"system": "Be brief.", "temperature": "0.5", "top-p": "0.9", "seed": "7"}
    for name, value in {**values, "tokens": "3", "stop-texts": "END\nSTOP"}.items():
        page.fill(f"#chat-{name}", value)
    page.fill("#chat-tools", "{nonsense")
    send(page, "one two three four five six", "echo")
    page.wait_for_selector("#chat-stats:has-text('Tools: ')")
    assert page.input_value("#chat-text") == "one two three four five six" and not sent
    page.fill("#chat-tools", json.dumps(TOOLS))
    page.fill("#chat-temperature", "9")
    send(page, "one two three four five six")
    assert page.locator(".turn").count() == 0 and not sent
    page.fill("#chat-temperature", "0.5")
    ask(page, "one two three four five six")
    (body,) = sent
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    fields = (body["temperature"], body["top_p"], body["seed"], body["max_tokens"], body["stop"])
    assert fields == (0.5, 0.9, 7, 3, ["END", "STOP"]) and body["tools"] == TOOLS
    page.wait_for_selector(".message >> text=ended at the limit of tokens")
    reload(page)
    page.wait_for_selector(".turn")
    assert page.input_value("#chat-system") == "Be brief."
    assert page.input_value("#chat-model") == "echo" and not site.errors
    page.context.close()


def test_regenerate_and_edit_replace_a_turn(site: Site) -> None:
    page = site.open()
    sent = bodies(page)
    for word in ("first", "second", "third"):
        ask(page, word, "echo")
    page.click("text=Regenerate")
    page.wait_for_selector(".turn:last-child >> text=Regenerate")
    assert sent[-1]["messages"] == sent[-2]["messages"] and page.locator(".turn").count() == 3
    page.click(".edit >> nth=1")
    assert page.input_value("#chat-text") == "second"
    page.keyboard.press("Escape")
    assert not page.is_visible("#chat-editing")
    page.click(".edit >> nth=1")
    page.wait_for_selector("#chat-editing", state="visible")
    send(page, "changed")
    page.wait_for_selector(".turn:last-child .words:text-is('changed')")
    page.wait_for_selector(".turn:last-child >> text=Regenerate")
    assert [one["content"] for one in sent[-1]["messages"]] == ["first", "first", "changed"]
    assert page.locator(".turn").count() == 2 and not site.errors
    page.context.close()


def test_what_an_edit_replaces_returns_when_it_fails(site: Site) -> None:
    page = site.open()
    for word in ("first", "second"):
        ask(page, word, "echo")
    answer_with(page, '{"message": "no worker"}', status=503)
    page.click(".edit >> nth=0")
    send(page, "changed")
    page.wait_for_selector(".turn >> text=not part of the conversation")
    assert page.locator(".words").all_inner_texts() == ["first", "second", "changed"]
    assert page.input_value("#chat-text") == "changed" and page.is_visible("#chat-editing")
    page.unroute("**/v1/chat/completions")
    page.click("#chat-send")
    page.wait_for_selector(".turn:only-child >> text=Receipt")
    assert page.locator(".words").all_inner_texts() == ["changed"]
    page.context.close()


def test_an_error_in_an_answer_keeps_what_has_arrived(site: Site) -> None:
    page = site.open()
    sent = bodies(page)
    answer_with(page, part("half an "), part("answer"), '{"error": {"message": "worker lost"}}')
    send(page, "question", "echo")
    page.wait_for_selector(".message.assistant .error:has-text('worker lost')")
    page.wait_for_selector("#chat-stats:has-text('failed')")
    assert page.inner_text(".message.assistant .body") == "half an answer"
    page.unroute("**/v1/chat/completions")
    answer_with(page, part("no end"))
    send(page, "lost")
    page.wait_for_selector(".turn:last-child .error:has-text('was lost; is it running?')")
    page.click(".edit >> nth=1")
    page.unroute("**/v1/chat/completions")
    send(page, "next")
    page.wait_for_selector(".turn:last-child:has-text('next') >> text=Receipt")
    assert [one["content"] for one in sent[-1]["messages"]] == [
        "question",
        "half an answer",
        "next",
    ]
    page.context.close()


def test_images_go_to_models_that_take_them(site: Site) -> None:
    assert {one["id"]: one.get("max_images") for one in site.models()} == {
        "rich": None,
        "echo": None,
        "eyes": 64,
        "slow": None,
    }
    page = site.open()
    sent = bodies(page)
    page.select_option("#chat-model", "echo")
    page.wait_for_selector("#chat-attach", state="hidden")
    page.select_option("#chat-model", "eyes")
    page.wait_for_selector("#chat-attach", state="visible")
    image = png()
    files: list[FilePayload] = [
        {"name": "a.png", "mimeType": "image/png", "buffer": image},
        {"name": "b.txt", "mimeType": "text/plain", "buffer": b"not an image"},
    ]
    page.set_input_files("#chat-files", files)
    page.wait_for_selector("#chat-attached canvas[aria-label='a.png']")
    page.wait_for_selector("#chat-stats:has-text('b.txt: not a PNG')")
    send(page, "what is it?", "echo")
    page.wait_for_selector("#chat-stats:has-text('takes no images')")
    ask(page, "what is it?", "eyes")
    assert sent[-1]["messages"][-1]["content"] == [
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "text", "text": "what is it?"},
    ]
    reload(page)
    page.wait_for_selector(".message.user canvas[aria-label='a.png']")
    assert not site.errors
    page.context.close()


def test_reasoning_and_tool_calls_are_folded_and_results_are_sent(site: Site) -> None:
    page = site.open()
    sent = bodies(page)
    page.click("#chat-settings summary")
    page.fill("#chat-tools", json.dumps(TOOLS))
    ask(page, "weather", "rich")
    answer = page.locator(".message.assistant")
    assert answer.locator("details[open]").count() == 0
    assert answer.locator("summary").all_inner_texts() == ["Reasoning", "Tool call: get_weather"]
    page.click("summary:text-is('Reasoning')")
    assert page.inner_text(".thoughts") == "Let me <b>see</b>."
    page.click("summary:text-is('Tool call: get_weather')")
    assert json.loads(page.inner_text(".fold pre")) == {"city": "Paris"}
    page.fill(".results textarea", "SUNNY")
    page.click("text=Send results")
    page.wait_for_selector(".message.assistant .body >> text=It is sunny.")
    call, result = sent[-1]["messages"][1:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "SUNNY",
    }
    assert page.locator(".results").count() == 0 and not site.errors
    page.context.close()


def test_two_models_answer_side_by_side(site: Site) -> None:
    page = site.open()
    sent = bodies(page)
    page.select_option("#chat-second", "rich")
    ask(page, "hello", "echo")
    page.wait_for_selector(".answers.n2 .message >> nth=1 >> text=Receipt")
    one, other = page.locator(".answers.n2 .message").all()
    left, right = one.bounding_box(), other.bounding_box()
    assert left and right and left["y"] == right["y"] and left["x"] < right["x"]
    ask(page, "again")
    page.wait_for_selector(".turn:last-child .message >> nth=2 >> text=Receipt")
    answers = {one["model"]: one["messages"][1]["content"] for one in sent[2:]}
    assert answers["echo"] == "hello" and answers["rich"].startswith("# Plan")
    page.set_viewport_size({"width": 390, "height": 844})
    left, right = one.bounding_box(), other.bounding_box()
    assert left and right and left["x"] == right["x"] and left["y"] < right["y"]
    assert not site.errors
    page.context.close()
