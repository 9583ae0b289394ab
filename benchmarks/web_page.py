"""Measure what the web page costs: CPU of the frontend with open pages and without, heap of a page.

    python benchmarks/web_page.py [--rate 50] [--pages 4] [--rounds 3] [--seconds 20]
                                  [--heap-minutes 10] [--tabs overview,requests,…] [--json]

A real deployment of mock engines, a client of ``--rate`` requests a second all the time, and pages
in Chromium, half of them on Overview and half on Requests. Each round measures without a page, then
with all of them. Then a page of each section stays open for ``--heap-minutes``: its heap is read
after a garbage collection each minute. It also says what a section receives each second, what a
page loads, from where, and its first paint.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, async_playwright

HERE = Path(__file__).resolve().parents[1]
READY_S = 60.0
WAIT_MS = 30_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
TABS = ("overview", "requests")
ALL_TABS = (*TABS, "routing", "logs", "chat", "connect")
MODELS = ("chat-8b", "coder-30b", "small-1b")
TEXT = (
    "the model answers with a few plain words about tea rivers seven mountains and how light "
    "moves through glass while people walk slowly along some old road to another town"
)
GRAPH = """\
namespace: {namespace}
Frontend: {{run: dynamo.frontend, http-port: {port}, router-mode: kv, router-cost: seconds}}
Chat:
  run: dynamo.mocker
  model-path: {model}
  model-name: chat-8b
  enable-sleep-mode: true
  ServiceArgs: {{workers: 2, resources: {{gpu: 1}}}}
Coder:
  run: dynamo.mocker
  model-path: {model}
  model-name: coder-30b
  enable-sleep-mode: true
  ServiceArgs: {{workers: 2, resources: {{gpu: 1}}}}
Small:
  run: dynamo.mocker
  model-path: {model}
  model-name: small-1b
  ServiceArgs: {{workers: 2, resources: {{gpu: 0.5}}}}
Vision:
  run: dynamo.mocker
  model-path: {model}
  model-name: vision-7b
  enable-sleep-mode: true
  ServiceArgs: {{workers: 1, resources: {{gpu: 1}}}}
"""


class Box:
    """``with Box(...)``: a deployment of mock engines runs; ``url`` is its frontend."""

    def __init__(self, namespace: str = "box", gpus: int = 6) -> None:
        self.namespace = namespace
        self._gpus = gpus
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = tempfile.TemporaryDirectory()
        self.path = Path(self._directory.name)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        self.env = {
            **kept,
            "DYN_LOCAL_STATE_DIR": str(self.path / "state"),
            "DYN_NAMESPACE": namespace,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Box:
        graph = self.path / "graph.yaml"
        model = HERE / "examples" / "model"
        graph.write_text(GRAPH.format(namespace=self.namespace, port=self.port, model=model))
        with (self.path / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dynamo", "serve", str(graph), "--gpus", str(self._gpus)],
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + READY_S
        while b"ready: http" not in (self.path / "log").read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit((self.path / "log").read_text()[-3000:])
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(READY_S)
        self._directory.cleanup()

    def dynamo(self, *words: str) -> str:
        """Run a verb on the deployment; return what it prints."""
        command = [sys.executable, "-m", "dynamo", *words]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=READY_S, check=True
        ).stdout

    def pids(self) -> dict[str, int]:
        """The processes that a page costs something: the frontend and the arbiter."""
        document = json.loads((self.path / "state" / f"{self.namespace}.json").read_text())
        frontend = document["components"][f"{self.namespace}_Frontend"]
        return {"frontend": frontend["processes"][0]["pid"], "arbiter": document["arbiter"]["pid"]}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Load:
    """Sends ``rate`` requests a second, at random times, until it is cancelled."""

    def __init__(self, port: int, rate: float, models: Sequence[str] = MODELS) -> None:
        self.done = 0
        self.failed = 0
        self._port = port
        self._rate = rate
        self._models = models
        self._random = random.Random(7)

    async def run(self) -> None:
        """Send requests."""
        async with asyncio.TaskGroup() as group:
            next_s = time.monotonic()
            while True:
                next_s += self._random.expovariate(self._rate)
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                group.create_task(self._ask())

    async def _ask(self) -> None:
        words = " ".join(self._random.choices(TEXT.split(), k=self._random.randrange(20, 400)))
        about = self._random.randrange(12)  # some prompts begin alike
        body = json.dumps(
            {
                "model": self._random.choice(self._models),
                "messages": [
                    {"role": "system", "content": f"Document {about}. " + 8 * TEXT},
                    {"role": "user", "content": words},
                ],
                "max_tokens": self._random.randrange(8, 96),
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
        except OSError:
            self.failed += 1
            return
        good = answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"0\r\n\r\n")
        self.done += good
        self.failed += not good


@contextlib.asynccontextmanager
async def running(load: Load) -> AsyncIterator[None]:
    """Send the requests of ``load`` in the block."""
    task = asyncio.create_task(load.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start the browser."""
    async with async_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        await browser.close()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, with its threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS_PER_S


async def phase(box: Box, load: Load, seconds: float) -> dict[str, float]:
    """Return the CPU of each process in ``seconds``, in percent of a core, and per request."""
    pids = box.pids()
    before, done, began_s = {k: cpu_s(p) for k, p in pids.items()}, load.done, time.monotonic()
    await asyncio.sleep(seconds)
    took_s, requests = time.monotonic() - began_s, load.done - done
    found: dict[str, float] = {"requests_per_s": requests / took_s}
    for name, pid in pids.items():
        used_s = cpu_s(pid) - before[name]
        found[f"{name}_percent"] = 100 * used_s / took_s
        found[f"{name}_ms_per_request"] = 1000 * used_s / max(1, requests)
    return found


async def open_page(browser: Browser, box: Box, tab: str) -> Page:
    """Open a section in a window of its own, and wait until it shows samples."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    await page.goto(f"{box.url}/ui#{tab}")
    await page.wait_for_selector("#live.ready")
    return page


async def ask(page: Page) -> None:
    """Ask a question in Chat, and wait for the end of its answer."""
    await page.click("#chat-settings summary")
    await page.fill("#chat-tokens", "300")
    await page.fill("#chat-text", TEXT)
    await page.press("#chat-text", "Enter")
    await page.wait_for_selector(".foot >> text=Receipt")


async def measure_cpu(browser: Browser, box: Box, load: Load, args: Any) -> dict[str, Any]:
    """Return the CPU of each round, without pages and with them."""
    rounds: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for number in range(args.rounds):
        rounds["without"].append(await phase(box, load, args.seconds))
        pages = [await open_page(browser, box, TABS[n % len(TABS)]) for n in range(args.pages)]
        await asyncio.sleep(2.0)  # the lists are complete
        rounds["with"].append(await phase(box, load, args.seconds))
        for page in pages:
            await page.context.close()
        shown = [rounds[one][-1]["frontend_percent"] for one in rounds]
        print(f"round {number + 1}: frontend {shown[0]:.1f} % without, {shown[1]:.1f} % with")
    return rounds


async def measure_bytes(
    browser: Browser, box: Box, seconds: float, tabs: Sequence[str]
) -> dict[str, float]:
    """Return what a page of each section receives, in kB a second."""
    received = dict.fromkeys(tabs, 0)

    def count(tab: str, event: dict[str, int]) -> None:
        received[tab] += event["dataLength"]

    pages = [await open_page(browser, box, tab) for tab in tabs]
    await asyncio.sleep(3.0)  # the lists are complete
    for tab, page in zip(tabs, pages, strict=True):
        session = await page.context.new_cdp_session(page)
        session.on("Network.dataReceived", partial(count, tab))
        await session.send("Network.enable")
    before, began_s = dict(received), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    found = {tab: round((received[tab] - before[tab]) / 1000 / took_s, 2) for tab in tabs}
    for page in pages:
        await page.context.close()
    return found


async def measure_heap(
    browser: Browser, box: Box, minutes: float, tabs: Sequence[str]
) -> dict[str, list[float]]:
    """Return the heap in MB and the nodes of a page of each section, by minute."""
    found: dict[str, list[float]] = {}
    pages = {tab: await open_page(browser, box, tab) for tab in tabs}
    if "chat" in pages:
        await ask(pages["chat"])
    sessions = {tab: await page.context.new_cdp_session(page) for tab, page in pages.items()}
    for session in sessions.values():
        await session.send("Performance.enable")
    began_s = time.monotonic()
    for minute in range(int(minutes) + 1):
        await asyncio.sleep(max(0.0, began_s + 60 * minute - time.monotonic()))
        for tab, session in sessions.items():
            await session.send("HeapProfiler.collectGarbage")
            answer = await session.send("Performance.getMetrics")
            metrics = {one["name"]: one["value"] for one in answer["metrics"]}
            found.setdefault(f"{tab} MB", []).append(round(metrics["JSHeapUsedSize"] / 1e6, 2))
            found.setdefault(f"{tab} nodes", []).append(metrics["Nodes"])
        print(f"minute {minute}: {', '.join(f'{k} {v[-1]:g}' for k, v in found.items())}")
    for page in pages.values():
        await page.context.close()
    return found


async def measure_first_paint(browser: Browser, box: Box) -> dict[str, Any]:
    """Return the time of the first paint, and what was loaded, from which hosts."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    hosts: list[str] = []
    page.on("request", lambda request: hosts.append(urlsplit(request.url).netloc))
    await page.goto(f"{box.url}/ui")
    await page.wait_for_selector("#live.ready")
    paint = await page.evaluate(
        "performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)"
    )
    sizes = await page.evaluate(
        "performance.getEntriesByType('resource').map((one) => one.transferSize)"
    )
    await context.close()
    return {
        "first_paint_ms": round(paint[0], 1) if paint else None,
        "requests": len(hosts),
        "kb": round(sum(sizes) / 1000, 1),
        "hosts": sorted(set(hosts)),
    }


def summary(rounds: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Yield the medians of the rounds as lines."""
    for name in ("frontend_percent", "arbiter_percent", "frontend_ms_per_request"):
        without, with_ = (
            statistics.median(one[name] for one in rounds[kind]) for kind in ("without", "with")
        )
        more = 100 * (with_ / without - 1) if without else 0.0
        yield f"{name}: {without:.2f} without, {with_:.2f} with pages ({more:+.1f} %)"


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; return the figures."""
    with Box() as box:
        load = Load(box.port, args.rate)
        async with chromium() as browser, running(load):
            await asyncio.sleep(3.0)
            paint = await measure_first_paint(browser, box)
            print(f"first paint: {paint}")
            received = await measure_bytes(browser, box, args.seconds, args.tabs)
            print(f"kB/s: {received}")
            rounds = await measure_cpu(browser, box, load, args) if args.rounds else {}
            heap = await measure_heap(browser, box, args.heap_minutes, args.tabs)
        if load.failed:
            raise SystemExit(f"{load.failed} of {load.done + load.failed} requests failed")
    figures = {"first_paint": paint, "kb_per_s": received, "cpu": rounds, "heap": heap}
    return {**figures, "requests": load.done}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--pages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="0 leaves the CPU out")
    parser.add_argument("--tabs", type=lambda text: text.split(","), default=ALL_TABS)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each half of a round")
    parser.add_argument("--heap-minutes", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, too")
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    if args.rounds:
        print("\n".join(summary(found["cpu"])))
    if args.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
