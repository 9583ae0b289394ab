"""GPUs, models and workers of the web page in a real Chromium: many of them, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from web_kit import ScriptedPage, accessibility_findings, needs_chromium

from dynamo.protocols.status import (
    GpuHolder,
    GpuStatus,
    LoadEffect,
    ModelFigures,
    ModelStatus,
    WorkerStatus,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_chromium
GIB = 1 << 30
STATES = ("ready", "ready", "ready", "asleep", "loading", "failed")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ScriptedPage]:
    site = ScriptedPage(tmp_path)
    yield site
    site.close()


def worker(number: int, in_flight: int) -> WorkerStatus:
    state = STATES[number % len(STATES)]
    return WorkerStatus(
        name=f"dynamo_W{number}",
        service=f"W{number}",
        state=state,
        model=f"model-{number % 12}",
        gpus=(str(number % 8),),
        in_flight=in_flight,
        cause="out of memory" if state == "failed" else "",
    )


def forty(turn: int = 0) -> tuple[WorkerStatus, ...]:
    return tuple(worker(number, (number * 7 + turn) % 40) for number in range(40))


def names(page: Page, table: str = "workers") -> list[str]:
    return page.locator(f"#{table} td.name").all_inner_texts()


def test_the_gpus_come_first_and_say_who_holds_them(site: ScriptedPage, browser: Browser) -> None:
    workers = (
        WorkerStatus(name="d_A", service="A", state="ready", model="chat", gpus=("0",)),
        WorkerStatus(name="d_B", service="B", state="ready", model="small", gpus=("0",)),
        WorkerStatus(name="d_C", service="C", state="asleep", model="coder", gpus=("1",)),
    )
    holders = (
        GpuHolder(pid=7, used_bytes=40 * GIB, name="python", worker="d_A"),
        GpuHolder(pid=8, used_bytes=20 * GIB, name="python", worker="d_B"),
        GpuHolder(pid=9, used_bytes=4 * GIB, name="<i>Xorg</i>"),
    )
    full = GpuStatus(
        gpu="0",
        name="H100",
        utilization=0.5,
        used_bytes=65 * GIB,
        total_bytes=80 * GIB,
        watts=300.0,
        limit_watts=700.0,
        celsius=61,
        workers=("d_A", "d_B"),
        holders=holders,
    )
    asleep = GpuStatus(gpu="1", name="H100", used_bytes=2 * GIB, total_bytes=80 * GIB)
    effect = LoadEffect(text="starts a worker", gpus=("1",), removes=("d_C",))
    held = LoadEffect(text="needs 2 GPUs, more than is free", blocked_by=("d_A",))
    models = (
        ModelStatus(model="chat", state="ready", figures=ModelFigures(model="chat", idle_s=61)),
        ModelStatus(model="vision", state="zero", load=(effect,)),
        ModelStatus(model="large", state="zero", load=(held,)),
    )
    site.show(gpus=(full, asleep), workers=workers, models=models)
    page = site.open(browser)
    first = page.locator("#overview h2").first
    assert first.inner_text() == "GPUs 2 GPUs · 67.0 GiB of 160 GiB · 300 W"
    rows = page.locator("#gpus > tbody:not([hidden])").all_inner_texts()
    for text in ("chat d_A 40.0 GiB", "small d_B 20.0 GiB", "300 of 700 W", "61 °C", "50 %"):
        assert text in rows[0], rows[0]
    assert "<i>Xorg</i> pid 9 not ours 4.0 GiB" in rows[0] and "others not visible here" in rows[0]
    assert "coder d_C asleep" in rows[1]
    assert page.locator("#gpus .track.stack .piece").count() == 5
    loads = page.locator("#loads li").all_inner_texts()
    assert loads == [
        "A load of vision starts a worker on GPU 1; removes the sleeping d_C (coder)",
        "A load of large needs 2 GPUs, more than is free; "
        "GPUs are held by d_A (chat, idle 1 min 1 s)",
    ]
    assert accessibility_findings(page) == []
    page.click("button[aria-label='Load vision']")
    page.wait_for_selector("#confirm:has-text('removes the sleeping d_C (coder)')")
    page.keyboard.press("Escape")
    # Without a driver, those of the graph.
    site.show(gpus=(GpuStatus(gpu="0", workers=("d_A", "d_B")), GpuStatus(gpu="1")))
    page.wait_for_selector("#gpu-summary:has-text('no driver')")
    bare = page.locator("#gpus > tbody:not([hidden])").all_inner_texts()
    assert "chat d_A" in bare[0] and "small d_B" in bare[0] and "asleep" in bare[1]
    page.context.close()


def test_forty_workers_are_filtered_ordered_and_grouped(
    site: ScriptedPage, browser: Browser
) -> None:
    site.show(workers=forty())
    page = site.open(browser)
    page.wait_for_selector("text=40 workers")
    assert names(page)[:3] == ["dynamo_W0", "dynamo_W1", "dynamo_W2"]
    page.click("#workers th button:text('Running')")
    assert page.get_attribute("#workers th[aria-sort=ascending]", "class") == "num"
    running = [
        int(one) for one in page.locator("#workers td[data-label=Running]").all_inner_texts()
    ]
    assert running == sorted(running)
    page.keyboard.press("Enter")  # the heading has the focus
    page.wait_for_selector("#workers th[aria-sort=descending]")
    page.keyboard.press("Enter")
    assert page.locator("#workers th[aria-sort=none]").count() == 9
    page.fill("#list-workers-filter", "Model-3 w2")
    page.wait_for_selector("text=1 of 40 workers")
    assert names(page) == ["dynamo_W27"]
    page.fill("#list-workers-filter", "nothing like it")
    page.wait_for_selector("text=None of 40 workers match the filter.")
    page.fill("#list-workers-filter", "")
    page.select_option("#list-workers-state", "failed")
    page.wait_for_selector("text=6 of 40 workers")
    page.select_option("#list-workers-state", "")
    page.select_option("#list-workers-group", "GPU")
    headings = page.locator("#workers tbody.group th").all_inner_texts()
    assert headings[:2] == ["GPU 0 · 5", "GPU 1 · 5"] and len(headings) == 8
    page.reload()  # what was chosen is kept in the tab
    page.wait_for_selector("#workers tbody.group >> text=GPU 7 · 5")
    page.select_option("#list-workers-group", "Model")
    page.wait_for_selector("#workers tbody.group >> text=model-11 · 3")
    page.context.close()


def test_the_focus_stays_where_rows_move(site: ScriptedPage, browser: Browser) -> None:
    site.show(workers=forty())
    page = site.open(browser)
    page.click("#workers th button:text('Running')")
    button = "button[aria-label='Restart dynamo_W12']"
    page.focus(button)
    for turn in (1, 2, 3):
        site.show(workers=forty(turn))
        place = (
            f"#workers tbody:has(td.name:text-is('dynamo_W12')) td:text-is('{(84 + turn) % 40}')"
        )
        page.wait_for_selector(place)
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label == "Restart dynamo_W12"
    page.context.close()


def test_an_unchanged_sample_changes_no_node(site: ScriptedPage, browser: Browser) -> None:
    gpus = tuple(GpuStatus(gpu=str(one), workers=(f"dynamo_W{one}",)) for one in range(8))
    models = tuple(ModelStatus(model=f"model-{one}", state="ready", ready=1) for one in range(12))
    site.show(workers=forty(), models=models, gpus=gpus)
    page = site.open(browser)
    page.wait_for_selector("text=40 workers")
    page.wait_for_selector("text=12 models")
    page.evaluate(
        """() => {
          window.changes = 0;
          new MutationObserver((all) => { window.changes += all.length; }).observe(
            document.querySelector("#workers").closest("section"),
            { subtree: true, childList: true, characterData: true, attributes: true });
          const charts = document.getElementById("charts");
          charts.remove();
        }"""
    )
    for at_s in (1.0, 2.0, 3.0):
        site.show(at_s=at_s)
    page.wait_for_timeout(2500)
    assert page.evaluate("window.changes") <= 1  # the charts that were taken out
    page.context.close()


def test_forty_workers_fit_390_px(site: ScriptedPage, browser: Browser) -> None:
    gpus = tuple(
        GpuStatus(gpu=str(one), name="H100", used_bytes=one * GIB, total_bytes=80 * GIB)
        for one in range(8)
    )
    site.show(workers=forty(), gpus=gpus)
    page = site.open(browser, width=390)
    page.wait_for_selector("text=40 workers")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert accessibility_findings(page) == []
    page.select_option("#list-workers-sort", "Running")
    running = [
        int(one) for one in page.locator("#workers td[data-label=Running]").all_inner_texts()
    ]
    assert running == sorted(running)
    page.context.close()
