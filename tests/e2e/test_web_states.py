"""The web page in a real Chromium, in states that a test describes: no deployment runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from web_kit import ScriptedPage, needs_chromium

from dynamo.frontend.ui.history import figures_of
from dynamo.protocols.status import (
    BoxEvent,
    GpuStatus,
    ModelFigures,
    ModelStatus,
    PlannerSummary,
    RequestRecord,
    WorkerStatus,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_chromium


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ScriptedPage]:
    site = ScriptedPage(tmp_path)
    yield site
    site.close()


def test_a_cold_start_has_a_stage_of_its_own(site: ScriptedPage, browser: Browser) -> None:
    record = RequestRecord(
        request_id="cold",
        model="tiny",
        endpoint="chat_completions",
        received_at_s=1e9,
        duration_s=43.0,
        outcome="ok",
        worker="7",
        worker_wait_s=42.0,
        prepare_s=0.1,
        queue_s=0.1,
        prefill_s=0.3,
        decode_s=0.4,
    )
    warm = RequestRecord(
        request_id="warm", model="tiny", endpoint="x", received_at_s=1e9, duration_s=1.0, outcome=""
    )
    site.records["cold"] = record
    site.end(record, warm)
    page = site.open(browser, "requests")
    page.click("button:text('cold')")
    page.wait_for_selector(".legend >> text=waiting for a worker 42.0 s")
    box = page.locator(".timeline .waiting-for-a-worker").bounding_box()
    assert box is not None and box["width"] > 900
    page.click("button:text('warm')")
    page.wait_for_selector(".legend >> nth=1")
    assert "waiting" not in page.locator(".legend").nth(1).inner_text()
    page.context.close()


def test_the_planner_s_button_keeps_the_focus(site: ScriptedPage, browser: Browser) -> None:
    def planner(next_s: float, state: str = "running") -> PlannerSummary:
        decisions = ("tiny: decode 1 -> 2: the KV load is high",)
        return PlannerSummary(state=state, mode="load", next_s=next_s, decisions=decisions)

    site.show(planner=planner(9.0))
    page = site.open(browser)
    button = page.locator("#planner .acts button")
    button.focus()
    for next_s in (8.0, 7.0):
        site.show(planner=planner(next_s))
        page.wait_for_selector(f"#planner >> text=next decision in {next_s:.0f} s")
    assert page.evaluate("document.activeElement.textContent") == "Pause"
    assert page.locator("#planner li").inner_text().startswith("tiny: decode 1 -> 2")
    site.show(planner=planner(7.0, "paused"))
    page.wait_for_selector("#planner button >> text=Resume")
    site.show(planner=None)
    page.wait_for_selector("#planner >> text=No planner in this deployment")
    assert not button.is_visible()
    page.context.close()


def test_a_gap_is_not_drawn_as_data(site: ScriptedPage, browser: Browser) -> None:
    at_s = 1000.0
    site.show(at_s=at_s, ttft_p50_s=0.1, ttft_p99_s=0.2)
    page = site.open(browser)
    for later in (1, 2, 40, 41):
        site.show(at_s=at_s + later, ttft_p50_s=0.1 + later / 1e3, ttft_p99_s=0.2)
        page.wait_for_selector(f"#charts .plot[aria-valuetext*='p50 {100 + later} ms']")
    page.wait_for_selector(
        "#charts .chart:nth-child(2) p:has-text('highest 141 ms')", state="attached"
    )
    for selector in (".line.s0", ".area"):
        paths = page.locator("#charts .chart").nth(1).locator(selector)
        assert str(paths.get_attribute("d")).count("M") == 2, paths.get_attribute("d")
    page.context.close()


def test_the_history_of_models_and_gpus_is_read_by_keyboard(
    site: ScriptedPage, browser: Browser
) -> None:
    history = site.routes.sampler.history
    gpu = GpuStatus(gpu="0", name="H100", used_bytes=60 << 30, total_bytes=80 << 30, watts=300.0)
    model = ModelStatus(
        model="org/tiny", state="ready", figures=ModelFigures(model="org/tiny", in_flight=4)
    )
    end_s = 1_800_000_000
    for at_s in range(end_s - 7200, end_s, 10):
        ttft_s = 0.05 if at_s < end_s - 3600 else 0.15
        history.add(at_s, figures_of(msgspec.structs.replace(site.status, ttft_p50_s=ttft_s)))
    site.show(at_s=end_s, models=(model,), gpus=(gpu,))
    page = site.open(browser)
    page.click("#chart-ranges >> text='2 h'")
    chart = page.locator("#charts .chart").nth(1)
    chart.locator("p:has-text('p50: lowest 50 ms')").wait_for(state="attached")
    assert "highest 150 ms" in chart.locator("p").inner_text()
    plot = chart.locator(".plot")
    plot.focus()
    page.keyboard.press("Home")
    page.wait_for_selector("#charts .plot[aria-valuetext^='p50 50 ms, p99 –']")
    page.keyboard.press("End")
    page.wait_for_selector("#charts .plot[aria-valuetext^='p50 150 ms, p99 –']")
    assert chart.locator(".ticks span:visible").count() >= 3
    page.select_option("#chart-subject", "model org/tiny")
    page.wait_for_selector(
        "#charts .plot[aria-label=Requests][aria-valuetext^='running 4, queued 0']"
    )
    page.select_option("#chart-subject", "gpu 0")
    page.wait_for_selector(
        "#charts .plot[aria-label='GPU memory'][aria-valuetext^='used 60.0 GiB']"
    )
    page.wait_for_selector("#charts .plot[aria-label='GPU power'][aria-valuetext^='300 W']")
    assert page.locator("#charts .chart").count() == 3
    page.context.close()


def test_events_are_listed_below_the_charts(site: ScriptedPage, browser: Browser) -> None:
    end_s = 1_800_000_000.0
    site.show(at_s=end_s, models=(ModelStatus(model="a", state="ready"),))
    old = BoxEvent(kind="started", at_s=end_s - 3600, name="dynamo_W", text="pid 1", model="a")
    died = BoxEvent(kind="died", at_s=end_s - 60, name="dynamo_W", text="was killed", model="a")
    site.happen(old, died)
    page = site.open(browser)
    page.wait_for_selector("#event-list li.failed:has-text('was killed')")
    assert page.locator("#event-list li").count() == 1  # the other one is an hour old
    by = "root (pid 7)"
    site.happen(BoxEvent(kind="drain", at_s=end_s - 1, name="<b>x</b>", text="draining", by=by))
    page.wait_for_selector(
        "#event-list li:first-child:has-text('<b>x</b>draining (by root (pid 7))')"
    )
    page.click("#chart-ranges >> text='2 h'")
    page.wait_for_selector("#event-list li >> nth=2")
    marks = page.locator("#event-strip span")
    assert [
        marks.nth(one).evaluate("node => Math.round(parseFloat(node.style.left))")
        for one in range(3)
    ] == [50, 99, 100]
    page.select_option("#chart-subject", "model a")
    page.wait_for_selector("#event-list li >> nth=2", state="detached")
    assert page.locator("#event-list b").all_inner_texts() == ["died", "started"]
    page.context.close()


def test_a_log_stays_where_its_reader_is(site: ScriptedPage, browser: Browser) -> None:
    log = site.logs / "dynamo_W.log"
    log.write_text("".join(f"line {number}\n" for number in range(300)))
    names = ("dynamo_W", "dynamo_W_2", "dynamo_W_10")
    workers = [WorkerStatus(name=one, service="W", state="ready") for one in names]
    site.show(workers=tuple(workers))
    page = site.open(browser, "logs")
    assert page.locator("#log-name option").all_inner_texts() == [*names]
    page.wait_for_selector("#log-lines >> text=line 299")
    scrolled = "document.getElementById('log-lines').scrollTop"
    page.wait_for_selector("#log-follow:checked")
    page.evaluate(f"{scrolled} = 100")
    page.wait_for_selector("#log-follow:not(:checked)")
    with log.open("a") as file:
        file.write("one more\n")
    page.wait_for_selector("#log-lines >> text=one more", state="attached")
    assert page.evaluate(scrolled) == 100
    page.evaluate(f"{scrolled} = 1e9")
    page.wait_for_selector("#log-follow:checked")
    page.context.close()
