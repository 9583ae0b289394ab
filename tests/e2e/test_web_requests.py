"""The Requests section of the web page in a real Chromium, over requests that a test describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from web_kit import ScriptedPage, accessibility_findings, needs_chromium

from dynamo.protocols.status import (
    ModelStatus,
    RecordedContent,
    RequestRecord,
    RouteCandidate,
    RouteReceipt,
    WorkerStatus,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
ROWS = "#request-rows > tbody:has(td.id)"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ScriptedPage]:
    site = ScriptedPage(tmp_path)
    site.show(
        workers=(
            WorkerStatus(name="dynamo_P", service="P", state="ready", worker="a1", pool="prefill"),
            WorkerStatus(name="dynamo_W", service="W", state="ready", worker="b2"),
            WorkerStatus(name="dynamo_W_1", service="W", state="ready", worker="c3"),
        )
    )
    yield site
    site.close()


def record(number: int, **more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": f"request-{number:04}",
        "model": "tiny",
        "endpoint": "chat_completions",
        "received_at_s": 1e9 + number,
        "duration_s": 0.5 + number / 1e6,
        "outcome": "ok",
        "worker": "b2",
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "ttft_s": 0.1,
        "decode_s": 0.2,
    }
    return RequestRecord(**{**fields, **more})


def shown(page: Page) -> list[str]:
    buttons = page.locator(f"{ROWS} td.id button")
    return [str(one) for one in buttons.evaluate_all("all => all.map(one => one.title)")]


def wait_for_rows(page: Page, count: int, matching: str) -> None:
    page.wait_for_selector(f"#request-count:has-text('{matching}')")
    assert page.locator(ROWS).count() == count


MIXED = [
    record(1, key="alice"),
    record(2, outcome="cancelled", key="bob"),
    record(3, outcome="disconnected", worker="c3"),
    record(4, worker_wait_s=42.0, duration_s=43.0, ttft_s=42.5),
    record(5, model="other", prefill_worker="a1", worker="c3"),
]


def test_filters_narrow_the_list_its_figures_and_the_export(
    site: ScriptedPage, browser: Browser
) -> None:
    site.end(*MIXED)
    page = site.open(browser, "requests")
    wait_for_rows(page, 5, "5 of the last 5 requests")
    assert shown(page)[0] == "request-0004"  # it ended last
    worker = page.locator(f"{ROWS}:has-text('request-0005') td[data-label=Worker]")
    assert worker.inner_text() == "dynamo_P → dynamo_W_1"
    for select, choice, found in (
        ("outcome", "failed", ["request-0003"]),
        ("outcome", "cancelled", ["request-0002"]),
        ("outcome", "cold", ["request-0004"]),
        ("model", "other", ["request-0005"]),
        ("worker", "a1", ["request-0005"]),
        ("worker", "c3", ["request-0005", "request-0003"]),
        ("key", "alice", ["request-0001"]),
    ):
        page.select_option(f"#request-{select}", choice)
        assert shown(page) == found, (select, choice)
        page.select_option(f"#request-{select}", "")
    page.fill("#request-slow", "1000")
    assert shown(page) == ["request-0004"]
    ttft = page.locator("#request-percentiles tr:has-text('TTFT') td").all_inner_texts()
    assert ttft == ["42.5 s"] * 4
    with page.expect_download() as download:
        page.click("#request-export")
    exported = json.loads(Path(str(download.value.path())).read_text())["requests"]
    assert [one["request_id"] for one in exported] == ["request-0004"]
    page.fill("#request-slow", "")
    page.fill("#request-text", "0002")
    assert shown(page) == ["request-0002"]
    page.context.close()


def test_the_tail_is_live_pauses_and_keeps_pins(site: ScriptedPage, browser: Browser) -> None:
    site.end(*(record(number) for number in range(150)))
    page = site.open(browser, "requests")
    wait_for_rows(page, 100, "150 of the last 150")
    page.click("#request-more")
    assert page.locator(ROWS).count() == 150
    page.click("button[aria-label='Pin request-0149']")
    site.end(record(200))
    page.wait_for_selector("#request-count:has-text('151 of the last 151')")
    assert shown(page)[:3] == ["request-0149", "request-0200", "request-0148"]
    page.click("#request-pause")
    site.end(record(201), record(202))
    page.wait_for_selector("#request-count:has-text('paused, 2 newer')")
    assert "request-0201" not in shown(page)
    page.click("#request-pause")
    page.wait_for_selector(f"{ROWS}:has-text('request-0202')")
    # More than a thousand: the oldest are dropped, the pinned one stays.
    for first in range(1000, 2200, 100):
        site.end(*(record(number) for number in range(first, first + 100)))
        page.wait_for_selector(f"{ROWS}:has-text('request-{first + 99}')")
    page.wait_for_selector("#request-count:has-text('1,000 of the last 1,000')")
    assert shown(page)[0] == "request-0149"
    page.click("button[aria-label='Unpin request-0149']")
    assert "request-0149" not in shown(page)
    page.context.close()


def test_a_burst_says_what_is_left_out_and_pause_reads_it(
    site: ScriptedPage, browser: Browser
) -> None:
    page = site.open(browser, "requests")
    page.wait_for_selector("#request-count:has-text('0 of the last 0')")
    site.end(record(1))
    page.wait_for_selector(f"{ROWS}:has-text('request-0001')")
    site.end(*(record(number) for number in range(100, 350)))
    page.wait_for_selector("#request-count:has-text('150 came too fast')")
    page.click("#request-pause")
    page.wait_for_selector("#request-count:has-text('251 of the last 251')")
    page.context.close()


def test_a_receipt_has_both_routes_with_names(site: ScriptedPage, browser: Browser) -> None:
    def route(chosen: str, other: str) -> RouteReceipt:
        terms = {"wait": 0.012, "compute": 0.003, "others": 0.0, "running": 0.0}
        return RouteReceipt(
            mode="kv",
            index="exact",
            reason="the cheapest of 2",
            unit="seconds",
            candidates=(
                RouteCandidate(worker=chosen, chosen=True, cost=0.015, terms=terms),
                RouteCandidate(worker=other, excluded="busy"),
            ),
        )

    one = record(5, prefill_worker="a1", worker="c3", key="alice")
    site.end(one)
    full = {"route": route("c3", "b2"), "prefill_route": route("a1", "d4")}
    site.records[one.request_id] = record(5, prefill_worker="a1", worker="c3", key="alice", **full)
    page = site.open(browser, "requests", 390)
    page.click(f"{ROWS} td.id button")
    page.wait_for_selector("h3:text-is('Prefill on dynamo_P')")
    page.wait_for_selector("h3:text-is('Decode on dynamo_W_1')")
    chosen = page.locator("#request-rows .candidates .chosen").last.inner_text()
    assert chosen.split() == ["dynamo_W_1", "0", "12", "3", "0", "0", "15", "chosen"]
    head, first = (
        page.locator(f"#request-rows .candidates >> nth=-1 >> {one} >> nth=0").bounding_box()
        for one in ("th", "tbody td")
    )
    # The header is there, and a name is not cut into a column of letters.
    assert head is not None and first is not None
    assert head["y"] < first["y"] and head["width"] == first["width"] > first["height"]
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    page.context.close()


def test_a_late_receipt_does_not_replace_the_one_asked_for_since(
    site: ScriptedPage, browser: Browser
) -> None:
    for number in (1, 2):
        site.records[f"request-{number:04}"] = record(number)
    page = site.open(browser, "requests")
    held: list[Any] = []
    page.route("**/ui/requests/request-0001", lambda route: held.append(route))
    with page.expect_request("**/ui/requests/request-0001"):
        page.evaluate("location.hash = 'requests/request-0001'")
    page.evaluate("location.hash = 'requests/request-0002'")
    page.wait_for_selector("[title=request-0002]")
    with page.expect_response("**/ui/requests/request-0001"):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert shown(page) == ["request-0002"]
    page.context.close()


def test_rows_are_opened_and_pinned_by_keyboard(site: ScriptedPage, browser: Browser) -> None:
    site.end(*MIXED)
    page = site.open(browser, "requests")
    wait_for_rows(page, 5, "5 of the last 5")
    page.focus("#request-pause")
    page.keyboard.press("Enter")
    page.wait_for_selector("#request-pause:text-is('Resume')")
    page.focus(f"{ROWS} td.id button")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{ROWS} .legend")
    page.focus("button[aria-label='Pin request-0003']")
    page.keyboard.press("Enter")
    assert shown(page)[0] == "request-0003"
    page.context.close()


def test_recorded_content_is_said_shown_and_replayed_to_another_model(
    site: ScriptedPage, browser: Browser
) -> None:
    names = ("tiny", "other")
    models = tuple(ModelStatus(model=one, state="ready", ready=1) for one in names)
    site.end(record(1))
    site.records["request-0001"] = record(1)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "<b>key</b> [redacted]"}]}
    answer = {"choices": [{"message": {"content": "the recorded answer"}}]}
    recorded = RecordedContent(
        request_id="request-0001",
        model="tiny",
        path="/v1/chat/completions",
        received_at_s=1e9,
        duration_s=0.5,
        outcome="ok",
        body=json.dumps(body),
        response=json.dumps(answer),
    )
    site.content["request-0001"] = msgspec.json.encode(recorded)
    site.answer = {"choices": [{"message": {"content": "another <i>answer</i>"}}]}
    page = site.open(browser, "requests")
    assert not page.is_visible("#recording")
    site.show(models=models, records_content=True)
    page.wait_for_selector("#recording:has-text('content is recorded')")
    page.click(f"{ROWS} td.id button")
    page.wait_for_selector("pre:has-text('the recorded answer')")
    assert "<b>key</b> [redacted]" in page.locator("pre.recorded").first.inner_text()
    assert page.locator("pre b").count() == 0
    page.click("button:text-is('Replay')")
    page.wait_for_selector("pre:has-text('another <i>answer</i>')")
    page.wait_for_selector("[role=status]:has-text('answered in')")
    assert site.asked == [{**body, "model": "other"}]
    assert accessibility_findings(page) == []
    site.show(records_content=False)
    page.wait_for_selector("#recording", state="hidden")
    page.context.close()
