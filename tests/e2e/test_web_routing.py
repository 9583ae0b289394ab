"""The Routing section of the web page in a real Chromium, over routers that a test describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from web_kit import ScriptedPage, needs_chromium

from dynamo.frontend.ui.routing import RoutedDecision, RoutedPool, RoutedWorker, RoutingView
from dynamo.frontend.ui.stream import columns
from dynamo.protocols.status import RequestRecord, RouteCandidate, RouteReceipt, WorkerStatus

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
AT_S = 1e9


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ScriptedPage]:
    site = ScriptedPage(tmp_path)
    yield site
    site.close()


def worker(name: str, **more: Any) -> RoutedWorker:
    fields: dict[str, Any] = {
        "cached_blocks": 500,
        "total_blocks": 1000,
        "kv_use": 0.25,
        "running": 3,
        "waiting": 1,
        "in_flight": 4,
        "prefill_tokens": 512,
        "prefill_s": 0.8,
    }
    return RoutedWorker(worker=name, **{**fields, **more})


def decision(number: int, at: str, **more: Any) -> RoutedDecision:
    fields: dict[str, Any] = {"overlap_blocks": 9, "prompt_blocks": 10, "at_s": AT_S - 30 + number}
    return RoutedDecision(
        request_id=f"request-{number}", model="tiny", worker=at, **{**fields, **more}
    )


def send(site: ScriptedPage, pools: list[RoutedPool], *made: RoutedDecision, **more: Any) -> None:
    fields: dict[str, Any] = {"at_s": AT_S, "left_out": 0}
    site.routing = RoutingView(pools=tuple(pools), decisions=columns(made), **{**fields, **more})
    site.show()


def names(*workers: str) -> tuple[WorkerStatus, ...]:
    return tuple(
        WorkerStatus(name=f"dynamo_W_{number}", service="W", state="ready", worker=one)
        for number, one in enumerate(workers)
    )


def receipt(number: int, chosen: str, other: str, **more: Any) -> RequestRecord:
    terms = {"wait": 0.012, "compute": 0.003, "others": 0.0, "running": 0.0}
    route = RouteReceipt(
        mode="kv",
        index="exact",
        reason="the cheapest of 2",
        unit="seconds",
        candidates=(
            RouteCandidate(worker=chosen, chosen=True, overlap_blocks=9, cost=0.015, terms=terms),
            RouteCandidate(worker=other, cost=0.025, terms={**terms, "wait": 0.022}),
        ),
    )
    return RequestRecord(
        request_id=f"request-{number}",
        model="tiny",
        endpoint="chat_completions",
        received_at_s=AT_S,
        duration_s=0.5,
        outcome="running",
        worker=chosen,
        route=route,
        **more,
    )


def marks(page: Page) -> int:
    return page.locator("#routing-pools .mark").count()


def test_a_worker_s_queues_and_its_decisions_by_keyboard(
    site: ScriptedPage, browser: Browser
) -> None:
    site.show(workers=names("a1", "b2"))
    pool = RoutedPool(
        model="tiny",
        mode="kv",
        unit="seconds",
        waiting=2,
        workers=(worker("a1"), worker("b2", busy=True, prefill_s=None, waiting=None)),
    )
    first, second = decision(1, "a1"), decision(2, "b2", overlap_blocks=0)
    site.records["request-1"] = receipt(1, "a1", "b2")
    site.records["request-2"] = receipt(2, "b2", "a1")
    send(site, [pool], first, second)
    page = site.open(browser, "routing")
    page.wait_for_selector("#routing-pools .mark >> nth=1")
    heading = page.inner_text("#routing-pools h2")
    assert "kv, costs in seconds; waiting for a worker: 2" in heading
    row = page.locator("#routing-pools tbody:has-text('dynamo_W_0')")
    shown = [one.split("\n")[-1].strip() for one in row.locator("td").all_inner_texts()]
    assert shown[:7] == ["dynamo_W_0", "500", "25 %", "3", "1", "800 ms", "4"]
    other = page.locator("#routing-pools tbody:has-text('dynamo_W_1')").inner_text()
    assert "busy" in other and "512 tokens" in other
    assert page.locator(".mark.cached[aria-label*='request-1: 9 of 10']").count() == 1
    assert page.locator("#routing-pools .mark[tabindex='0']").count() == 1
    page.focus("#routing-pools .mark[tabindex='0']")
    page.wait_for_selector("#routing-title:has-text('request-2')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#routing-title:has-text('request-1')")
    page.wait_for_selector("#routing-receipt h3:text-is('Served on dynamo_W_0')")
    rows = page.locator("#routing-receipt tbody tr").all_inner_texts()
    assert rows[0].split() == ["dynamo_W_0", "9", "12", "3", "0", "0", "15", "chosen"]
    # Samples change neither the focus nor the marks; a decision that comes again is the same.
    for number in (3, 4):
        send(site, [pool], first, second, decision(number, "a1"), at_s=AT_S + number)
        page.wait_for_selector(f".mark[aria-label*='request-{number}:']")
    assert marks(page) == 4
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert "request-1:" in focused
    # A minute later they are gone, but for the one with the focus.
    send(site, [pool], decision(70, "a1", at_s=AT_S + 70), at_s=AT_S + 100)
    page.wait_for_selector(".mark[aria-label*='request-3:']", state="detached")
    assert marks(page) == 2
    page.context.close()


def test_prefill_workers_have_their_own_lanes(site: ScriptedPage, browser: Browser) -> None:
    site.show(workers=names("a1", "b2"))
    pools = [
        RoutedPool(
            model="tiny", mode="kv", phase="prefill", unit="blocks", workers=(worker("a1"),)
        ),
        RoutedPool(model="tiny", mode="kv", phase="decode", unit="blocks", workers=(worker("b2"),)),
    ]
    send(site, pools, decision(1, "b2", prefill_worker="a1"), left_out=7)
    page = site.open(browser, "routing")
    page.wait_for_selector(".mark[aria-label^='prefill of request request-1']")
    page.wait_for_selector(".mark[aria-label^='decode of request request-1']")
    page.wait_for_selector("#routing-note:has-text('7 decisions of the last second')")
    page.hover(".mark[aria-label^='prefill of']")
    page.wait_for_selector("#routing-receipt:has-text('the last 1000 are kept')")  # it is gone
    assert page.locator(".mark.chosen").count() == 2
    page.context.close()


def test_another_mode_shows_what_there_is(site: ScriptedPage, browser: Browser) -> None:
    pool = RoutedPool(
        model="tiny", mode="round-robin", workers=(RoutedWorker(worker="a1", in_flight=2),)
    )
    send(site, [pool], decision(1, "a1", overlap_blocks=0, prompt_blocks=0))
    page = site.open(browser, "routing")
    page.wait_for_selector("h2:has-text('round-robin mode: caches do not count')")
    page.wait_for_selector("#routing-pools .mark.cold")
    visible = page.locator("#routing-pools th:visible").all_inner_texts()
    assert visible == ["Worker", "In flight", "Decisions of the last minute"]
    send(site, [])
    page.wait_for_selector("#routing-empty:visible")
    assert page.locator("#routing-pools table").count() == 0
    page.context.close()


def test_forty_workers_fit_390_px(site: ScriptedPage, browser: Browser) -> None:
    ids = [f"{number:x}" for number in range(256, 296)]
    pool = RoutedPool(
        model="tiny", mode="kv", unit="seconds", workers=tuple(worker(one) for one in ids)
    )
    site.show(workers=names(*ids))
    send(site, [pool], *(decision(number, ids[number % 40]) for number in range(100)))
    page = site.open(browser, "routing", 390)
    page.emulate_media(reduced_motion="reduce")
    page.wait_for_selector("#routing-pools .mark >> nth=99", state="attached")
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    moves = "getComputedStyle(document.querySelector('.track-of-marks')).transitionDuration"
    assert page.evaluate(moves) == "0s"
    found = page.locator("#routing-pools td.name").all_inner_texts()
    assert found[0] == "dynamo_W_0" and found[39] == "dynamo_W_39"
    page.context.close()
