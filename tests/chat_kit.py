"""A frontend with three models for tests of the page's Chat, and what a reader does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployment import Deployment
from image_kit import write_eyes
from web_kit import WAIT_MS, collect_errors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

RICH = """# Plan

Some **bold**, `code`, [docs](https://example.com/x) and [bad](javascript:alert(1)).

```python
def greet(name):  # say it
    return f"hello {name}"
```

| a | b |
|---|--:|
| 1 | 2 |

3. three
4. four

<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>
![pic](/v1/models?leak) ![pic](data:image/svg+xml,<svg>) [x](data:text/html,y) [y](/ui/leak)
"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
THOUGHT = "<think>\nLet me <b>see</b>.\n</think>\n"
LONG = "".join(f"Paragraph {number} has **some** words.\n\n" for number in range(500))
SCRIPT = {"SUNNY": "It is sunny.", "weather": THOUGHT + "I look.\n" + CALL, "long": LONG}


class Site:
    """A frontend with four models: ``rich`` has a script, ``echo`` repeats, ``eyes`` sees, and
    ``slow`` repeats so slowly that an answer can be interrupted on any machine."""

    def __init__(self, path: Path, browser: Browser) -> None:
        self.browser = browser
        self.errors: list[str] = []
        self.deployment = Deployment(path)
        script = path / "script.jsonl"
        lines = [{"match": match, "reply": reply} for match, reply in SCRIPT.items()]
        script.write_text("\n".join(map(json.dumps, [*lines, {"reply": THOUGHT + RICH}])))
        parsers = ("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")
        self._mocker("rich", "--reply", "script", "--reply-script", str(script), *parsers)
        self._mocker("echo", "--reply", "echo")
        self._mocker("eyes", "--model-path", str(write_eyes(path / "eyes")))
        self._mocker("slow", "--reply", "echo", speed="0.2")
        self.deployment.frontend()
        self.deployment.wait_for_workers(4)
        self.deployment.until(lambda: len(self.models()) == 4)

    def models(self) -> list[Any]:
        found: list[Any] = json.loads(self.deployment.request("GET", "/v1/models")[2])["data"]
        return found

    def open(self, context: BrowserContext | None = None, **options: Any) -> Page:
        """Open the Chat, in a browser without conversations if no ``context`` is given."""
        if context is None:
            context = self.browser.new_context(**options)
            self.errors.clear()
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        collect_errors(page, self.errors)
        page.goto(f"{self.deployment.url}/ui#chat")
        wait_for_models(page)
        return page

    def _mocker(self, name: str, *flags: str, speed: str = "10") -> None:
        endpoint = f"{self.deployment.namespace}.{name}.generate"
        names = ("--model-name", name, "--endpoint", endpoint)
        self.deployment.mocker("--speedup-ratio", speed, *flags, *names)


def wait_for_models(page: Page) -> None:
    page.wait_for_selector("#chat-model option >> nth=2", state="attached")


def reload(page: Page) -> None:
    """Load the page again, up to where a question can be asked: the models come last."""
    page.reload()
    wait_for_models(page)


def send(page: Page, text: str, model: str = "") -> None:
    if model:
        page.select_option("#chat-model", model)
    page.fill("#chat-text", text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str, model: str = "") -> None:
    """Send a question and wait for the end of its answer."""
    turns = page.locator(".turn").count()
    send(page, text, model)
    page.wait_for_selector(f".turn >> nth={turns}")
    page.wait_for_selector(f".turn >> nth={turns} >> text=Receipt")


def bodies(page: Page) -> list[Any]:
    """The questions that the page sends, from now on."""
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    return sent


def titles(page: Page) -> list[str]:
    return page.locator("#chat-list .link").all_inner_texts()


def answer_with(page: Page, *chunks: str, status: int = 200) -> None:
    """Let the next questions get this answer instead of a model's."""

    def fulfill(route: Route) -> None:
        body = "".join(f"data: {chunk}\n\n" for chunk in chunks)
        route.fulfill(status=status, body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)


def part(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
