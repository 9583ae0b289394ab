"""Every section of the web page in a real Chromium: wide, narrow, enlarged, dark, by keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from web_kit import WAIT_MS, ScriptedPage, accessibility_findings, needs_chromium

from dynamo.frontend.ui.history import figures_of
from dynamo.frontend.ui.model_store import Download
from dynamo.frontend.ui.routing import RoutedDecision, RoutedPool, RoutedWorker, RoutingView
from dynamo.frontend.ui.stream import columns
from dynamo.protocols.control import PlannerState
from dynamo.protocols.status import (
    BoxEvent,
    BoxStatus,
    GpuHolder,
    GpuStatus,
    LoadEffect,
    ModelFigures,
    ModelStatus,
    PlannerSummary,
    RecordedContent,
    RequestRecord,
    RouteCandidate,
    RouteReceipt,
    WorkerStatus,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

pytestmark = needs_chromium
END_S = 1_800_000_000
GIB = 1 << 30
LONG = "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8"
STATES = ("ready", "failed", "asleep", "loading", "draining", "stopped")


class Setting(NamedTuple):
    """How a reader looks at the page: CSS pixels, which a zoom makes fewer, and colors.

    ``axe`` takes seconds, and does not depend on the zoom but for areas that scroll.
    """

    width: int
    height: int
    scheme: str
    axe: bool = True


SETTINGS = {
    "1280x800": Setting(1280, 800, "light"),
    "dark": Setting(1280, 800, "dark"),
    "390x844": Setting(390, 844, "light", axe=False),
    "390x844-dark": Setting(390, 844, "dark"),
    "zoom-200": Setting(640, 400, "light", axe=False),
    "zoom-400": Setting(320, 256, "dark"),
}
MISFITS = """() => {
  // What is not for the eye, a drawing, or a field that scrolls; what may be wider than the page.
  const free = "[aria-hidden=true], .hidden, .skip, thead, .lane, .timeline, .track, svg, "
    + "select, input, textarea";
  const wide = ".scroll, .candidates, pre, #chat .body table";
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility() || !node.getClientRects().length || node.closest(free)) continue;
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    const may = node.closest(wide);
    const inline = style.display === "inline";
    const broader = !inline && node.scrollWidth > node.clientWidth + 1;
    const higher = !inline && node.scrollHeight > node.clientHeight + 1;
    const problems = [
      !may && (box.left < -1 || box.right > innerWidth + 1) && "outside",
      !may && broader && style.overflowX !== "visible" && "cut, or scrolls sideways",
      higher && ["hidden", "clip"].includes(style.overflowY) && "cut below",
    ].filter(Boolean);
    if (problems.length) found.push(`${problems}: ${node.cloneNode().outerHTML} ${node.innerText}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  return found.map((one) => one.slice(0, 160));
}"""
WATCH_FOCUS = """() => {
  const focusable = "a[href], button, select, input, textarea, summary, [tabindex]";
  const usable = (node) => node.tabIndex >= 0 && !node.disabled
    && node.checkVisibility({ visibilityProperty: true });
  const modal = document.querySelector("dialog[open]") ?? document;
  window.expected = [...modal.querySelectorAll(focusable)].filter(usable);
  window.reached = new Map();
  document.activeElement.blur();
  document.addEventListener("focusin", ({ target }) => {
    const style = getComputedStyle(target);
    const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
    window.reached.set(target, outlined);
  });
}"""
UNREACHED = """() => window.expected
  .filter((node) => node.isConnected && !window.reached.get(node))
  .map((node) => (window.reached.has(node) ? "no outline " : "not reached ")
    + node.outerHTML.slice(0, 120))"""
SCROLLED = """(node) => new Promise((resolve, reject) => {
  if (node.scrollTop) resolve();
  node.addEventListener("scroll", resolve);
  setTimeout(() => reject(new Error("not scrolled")), 30000);
})"""
ANSWER = {
    "choices": [
        {
            "index": 0,
            "delta": {
                "reasoning_content": "Let me see " * 30,
                "content": "# Title\n\nA [link](https://example.com), `code` and\n\n```python\n"
                f"print({'x' * 200!r})\n```\n\n|{'a name|' * 9}\n|{'---|' * 9}\n|{'value|' * 9}\n",
                "tool_calls": [
                    {
                        "index": 0,
                        "id": "call-1",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
        }
    ]
}


def _status() -> BoxStatus:
    figures = ModelFigures(
        model=LONG, in_flight=12, queued=3, output_tokens_per_s=1234.5, ttft_p50_s=0.11,
        ttft_p99_s=1.9, hit_rate=0.73, idle_s=0.0,
    )  # fmt: skip
    models = (
        ModelStatus(
            model=LONG, state="ready", ready=2, wanted=3, gpus=("0", "1"), vram_bytes=150 * GIB,
            figures=figures, workers=("dynamo_Worker_0", "dynamo_Worker_1"),
        ),
        ModelStatus(
            model="small", state="zero", idle_until_s=59.0,
            load=(LoadEffect(text="starts a worker", gpus=("1",), removes=("dynamo_Worker_2",)),),
        ),
        *(ModelStatus(model=f"model-{number}", state="ready", ready=1) for number in range(5)),
    )  # fmt: skip
    workers = tuple(
        WorkerStatus(
            name=f"dynamo_Worker_{number}", service="Worker", state=state, model=LONG,
            worker=f"{number:x}", pids=(4_194_300 + number,), gpus=(str(number % 2),),
            in_flight=number, kv_use=0.1 * number, uptime_s=123_456.0, can_sleep=True, restarts=2,
            progress=0.43 if state == "loading" else None,
            cause="CUDA out of memory: 81.2 GiB are needed" if state == "failed" else "",
            remedy="dynamo logs dynamo_Worker_1" if state == "failed" else "",
        )
        for number, state in enumerate(STATES)
    )  # fmt: skip
    gpus = tuple(
        GpuStatus(
            gpu=str(number), name="NVIDIA H100 80GB HBM3", used_bytes=60 * GIB,
            total_bytes=80 * GIB, utilization=0.98, watts=688.0, limit_watts=700.0, celsius=71,
            holders=(GpuHolder(pid=7, used_bytes=58 * GIB, worker=f"dynamo_Worker_{number}"),),
            workers=(f"dynamo_Worker_{number}",),
        )
        for number in range(2)
    )  # fmt: skip
    planner = PlannerSummary(
        state="running", mode="sla", next_s=12.0,
        decisions=(f"{LONG}: decode 1 -> 2: the TTFT of 1,900 ms is over its target of 500 ms",),
    )  # fmt: skip
    return BoxStatus(
        namespace="dynamo", state="running", at_s=END_S, frontend="ready", gpus=gpus,
        models=models, workers=workers, planner=planner, ttft_p50_s=0.1, ttft_p99_s=1.9,
        others=(WorkerStatus(name="dynamo_Frontend", service="Frontend", state="ready"),),
        problems=("dynamo_Worker_1: CUDA out of memory; see: dynamo logs dynamo_Worker_1",),
        records_content=True,
    )  # fmt: skip


def _record(number: int, **more: Any) -> RequestRecord:
    return RequestRecord(
        request_id=f"chatcmpl-{number:032x}", model=LONG, endpoint="chat_completions",
        received_at_s=END_S - 60 + number, duration_s=2.5 + number, worker="0", key="alice",
        outcome="disconnected" if number % 5 == 4 else "ok", prefill_worker="1", ttft_s=0.4,
        prompt_tokens=12_345, completion_tokens=678, overlap_blocks=70, prompt_blocks=96,
        prepare_s=0.1, queue_s=0.2, prefill_s=0.1, decode_s=2.0, **more,
    )  # fmt: skip


def _route() -> RouteReceipt:
    terms = {"wait": 0.012, "compute": 0.003, "others": 0.0, "running": 0.0}
    candidates = tuple(
        RouteCandidate(worker=f"{number:x}", chosen=not number, cost=0.015, terms=terms)
        for number in range(4)
    )
    return RouteReceipt(
        mode="kv", index="exact", reason="the cheapest of 4 workers, by 10 ms", unit="seconds",
        candidates=candidates,
    )  # fmt: skip


def _routing() -> RoutingView:
    workers = tuple(
        RoutedWorker(
            worker=f"{number:x}", cached_blocks=5_123, total_blocks=10_000, kv_use=0.25,
            running=3, waiting=1, in_flight=4, prefill_tokens=512, prefill_s=0.8,
        )
        for number in range(6)
    )  # fmt: skip
    decisions = tuple(
        RoutedDecision(
            request_id=f"chatcmpl-{number:032x}", model=LONG, worker=f"{number % 6:x}",
            overlap_blocks=number % 11, prompt_blocks=10, at_s=END_S - number,
        )
        for number in range(40)
    )  # fmt: skip
    pool = RoutedPool(model=LONG, mode="kv", unit="seconds", waiting=2, workers=workers)
    return RoutingView(at_s=END_S, pools=(pool,), decisions=columns(decisions), left_out=3)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedPage]:
    """A deployment in which every part of the page has something to show."""
    site = ScriptedPage(tmp_path_factory.mktemp("access"))
    status = _status()
    for at_s in range(END_S - 300, END_S):
        site.routes.sampler.history.add(at_s, figures_of(status))
    records = [_record(number) for number in range(12)]
    site.requests += records
    site.records.update(
        {
            f"chatcmpl-{number:032x}": _record(number, route=_route(), prefill_route=_route())
            for number in range(40)
        }
    )
    body = json.dumps({"model": LONG, "messages": [{"role": "user", "content": "w" * 300}]})
    recorded = RecordedContent(
        request_id=records[-1].request_id, model=LONG, path="/v1/chat/completions", body=body,
        received_at_s=END_S, duration_s=1.0, outcome="ok", response=body,
    )  # fmt: skip
    site.content[recorded.request_id] = msgspec.json.encode(recorded)
    site.routes.store.download = Download(
        name=LONG, state="running", done_bytes=1 << 38, total_bytes=1 << 39, bytes_per_s=1e8
    )
    site.routing = _routing()
    site.happen(
        *(
            BoxEvent(
                kind=kind, at_s=END_S - 500 + 7 * number, name=f"dynamo_Worker_{number % 6}",
                model=LONG, text="was killed by signal 9 (out of memory?)", by="root (pid 1234567)",
            )
            for number, kind in enumerate(("started", "died", "drain", "loaded") * 10)
        )
    )  # fmt: skip
    (site.logs / "dynamo_Frontend.log").write_text(
        "".join(f"2026-01-01 WARNING {'a/long/path' * number}\n" for number in range(40))
    )
    site.status = status
    yield site
    site.close()


def _context(browser: Browser, setting: Setting) -> BrowserContext:
    dark: Any = setting.scheme
    context = browser.new_context(
        viewport={"width": setting.width, "height": setting.height},
        color_scheme=dark,
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_MS)
    planner = PlannerState(
        paused=False, mode="sla", ttft_ms=500, itl_ms=30, max_gpu_budget=8, minima={"Worker": 1}
    )
    stored = {"name": LONG, "store": "Hugging Face", "size_bytes": 480e9, "used_at_s": END_S}
    on_disk = [stored, {**stored, "name": "org/cut", "is_complete": False}]
    answers = {
        "**/v1/planner": msgspec.to_builtins(planner),
        "**/v1/models": {"data": [{"id": "model-0", "max_images": 2, "context_window": 131_072}]},
        "**/ui/models": {"models": on_disk, "free_bytes": 9e12},
        "**/ui/models/hub?*": {"models": [{"name": f"org/{LONG}", "downloads": 1234567}]},
    }
    for path, body in answers.items():
        context.route(path, partial(_fulfill, body))
    stream = f"data: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n"
    context.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=stream, content_type="text/event-stream"),
    )
    return context


def _fulfill(body: object, route: Route) -> None:
    route.fulfill(json=body)


def _open_overview(page: Page) -> None:
    page.wait_for_selector("#workers td.note:has-text('out of memory')")
    page.wait_for_selector("#event-list li >> nth=39")
    page.click("#planner summary")
    page.wait_for_selector("#planner input >> nth=4")
    page.click("#disk summary")
    page.wait_for_selector("#disk-rows button >> text=Resume")
    page.fill("#hub-text", "Qwen")
    page.press("#hub-text", "Enter")
    page.wait_for_selector("#hub-rows button >> text=Download")
    page.fill("#hub-text", "")  # which narrows the list of the disk, too
    page.wait_for_selector("#download progress")


def _open_requests(page: Page) -> None:
    page.wait_for_selector("#request-count:has-text('12 of the last 12')")
    page.click("#request-rows td.id button")
    page.wait_for_selector("#request-rows .candidates >> nth=1")
    page.wait_for_selector("#request-rows button >> text=Replay")


def _open_routing(page: Page) -> None:
    page.wait_for_selector("#routing-pools .mark >> nth=39", state="attached")
    page.focus("#routing-pools .mark[tabindex='0']")
    page.wait_for_selector("#routing-receipt .candidates >> nth=1")


def _open_logs(page: Page) -> None:
    page.wait_for_selector("#log-lines div >> nth=39")


def _open_chat(page: Page) -> None:
    page.click("#chat-settings summary")
    if not page.is_visible("#chat-list"):
        page.click("#chat-kept summary")
    page.select_option("#chat-second", "model-1")
    page.fill("#chat-text", "a question " * 20 + "w" * 200)
    page.press("#chat-text", "Enter")
    page.wait_for_selector(".turn .answers.n2 .code >> nth=1")
    page.click(".turn summary:has-text('Reasoning') >> nth=0")
    page.click(".turn summary:has-text('Tool call') >> nth=1")
    page.wait_for_selector("#chat-stop:disabled")


def _open_connect(page: Page) -> None:
    page.wait_for_selector("#snippets >> text=CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072")


SECTIONS: dict[str, Callable[[Page], None]] = {
    "overview": _open_overview,
    "requests": _open_requests,
    "routing": _open_routing,
    "logs": _open_logs,
    "chat": _open_chat,
    "connect": _open_connect,
}


def _sections(context: BrowserContext, url: str) -> Iterator[tuple[str, Page]]:
    """Open all there is to see, one after the other."""
    page = context.new_page()
    page.goto(f"{url}/ui")
    page.wait_for_selector("#live.ready")
    for section, prepare in SECTIONS.items():
        page.click(f"#tab-{section}")
        prepare(page)
        yield section, page
    page.click("#tab-overview")
    page.click(f"button[aria-label='Unload {LONG}']")
    page.click("#confirm-yes")
    page.wait_for_selector(".toast")
    page.click(f"button[aria-label='Unload {LONG}']")
    page.wait_for_selector("#confirm-yes", state="visible")
    yield "question", page
    about = {"keys": True, "role": "none", "name": "", "rest": "for operators"}
    context.route("**/ui/about.json", partial(_fulfill, about))
    page.reload()
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-error:has-text('not valid here')")
    yield "sign-in", page


@pytest.mark.parametrize("name", SETTINGS)
def test_every_section_fits_and_axe_finds_nothing_serious(
    site: ScriptedPage, browser: Browser, name: str
) -> None:
    setting = SETTINGS[name]
    context = _context(browser, setting)
    found = []
    for section, page in _sections(context, site.url):
        problems = page.evaluate(MISFITS)
        if setting.axe:
            problems += accessibility_findings(page)
        found += [f"{section}: {one}" for one in problems]
    assert not found, "\n".join(found)
    context.close()


def test_tab_reaches_everything_and_shows_where_it_is(site: ScriptedPage, browser: Browser) -> None:
    context = _context(browser, SETTINGS["zoom-200"])
    found = []
    for section, page in _sections(context, site.url):
        page.evaluate(WATCH_FOCUS)
        expected = page.evaluate("window.expected.length")
        for _ in range(expected + 2):
            page.keyboard.press("Tab")
        found += [f"{section}: {one}" for one in page.evaluate(UNREACHED)]
    assert not found, "\n".join(found)
    context.close()


def test_charts_and_events_are_read_by_keyboard(site: ScriptedPage, browser: Browser) -> None:
    context = _context(browser, SETTINGS["zoom-400"])
    page = context.new_page()
    page.goto(f"{site.url}/ui")
    page.wait_for_selector("#event-list li >> nth=39")
    page.wait_for_selector("#charts p:has-text('The last')", state="attached")
    page.focus("#chart-ranges button")
    for _ in range(4):
        page.keyboard.press("Tab")  # two more ranges, the choice of the subject, the first chart
    plot = page.locator("#charts .plot").first
    assert plot.evaluate("node => node === document.activeElement")
    now = plot.get_attribute("aria-valuetext")
    page.keyboard.press("PageDown")
    before = plot.get_attribute("aria-valuetext")
    assert before != now and " at " in str(before)
    assert page.locator("#charts .chart .time").first.is_visible()
    events = page.locator("#event-list")
    events.focus()
    page.keyboard.press("End")
    events.evaluate(SCROLLED)
    context.close()
