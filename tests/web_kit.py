"""A real headless Chromium, and the page's routes over a deployment that a test describes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dynamo.config.frontend import FrontendSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.frontend.access import frontend_access, guard_ui_routes, operator_guard
from dynamo.frontend.requests.recent import RecentRequests
from dynamo.frontend.ui.route import OwnFacts, UiRoutes
from dynamo.http import Exchange, HttpLimits, HttpServer
from dynamo.http.routes import Routes
from dynamo.protocols.status import BoxEvent, BoxStatus, FrontendStatus, RecentList, RequestRecord
from dynamo.runtime.process.tasks import Tasks

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is missing: apt-get install chromium"
)
WAIT_MS = 45_000
_START_S = 10.0


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser."""
    from playwright.sync_api import sync_playwright  # takes 0.3 s

    with sync_playwright() as playwright:
        # As root, as in a container, Chromium's sandbox does not start.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def accessibility_findings(page: Page) -> list[str]:
    """Return what axe finds serious or critical: rule, and the elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    if not page.evaluate("() => 'axe' in window"):  # 0.5 MB of script
        page.evaluate(axe.Axe().axe_script)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']}: {[node['html'] for node in one['nodes']]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def collect_errors(page: Page, errors: list[str]) -> None:
    """Add what the console of ``page`` shows to ``errors``."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            errors.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: errors.append(str(error)))


class ScriptedPage:
    """Serves the page in a thread, with the state that :meth:`show` was given last."""

    def __init__(self, logs: Path, settings: FrontendSettings | None = None) -> None:
        self.namespace = "dynamo"
        self.settings = RuntimeSettings()
        self.logs = logs / "logs"
        self.history_file = logs / "history"
        self.logs.mkdir(exist_ok=True)
        self.status = BoxStatus(namespace="dynamo", state="running", at_s=0.0, frontend="ready")
        self._happened: list[BoxEvent] = []
        self.records: dict[str, RequestRecord] = {}
        self.requests: list[RequestRecord] = []
        self.content: dict[str, bytes] = {}
        self.asked: list[Any] = []
        self.routing: object = None
        self.answer: Any = {}
        self._sent = 0
        self.peers = self
        self._settings = settings or FrontendSettings()
        self.routes: UiRoutes
        self._ready = threading.Event()
        self._stop: Callable[[], object]
        self._wake: Callable[[], object]
        self.url = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(_START_S)

    def show(self, **changes: Any) -> None:
        """Send a sample with these changes."""
        self.status = msgspec.structs.replace(self.status, **changes)
        self._wake()

    def end(self, *requests: RequestRecord) -> None:
        """These requests end now."""
        self.requests += requests
        self._wake()

    def happen(self, *events: BoxEvent) -> None:
        """Send events."""
        self._happened += events
        self._wake()

    def close(self) -> None:
        """End the server."""
        self._stop()
        self._thread.join(_START_S)

    def open(self, browser: Browser, tab: str = "overview", width: int = 1280) -> Page:
        """Open a section in a window of its own; it shows samples."""
        context = browser.new_context(viewport={"width": width, "height": 900})
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{self.url}/ui#{tab}")
        page.wait_for_selector("#live.ready")
        return page

    # -- as a BoxSource

    needs_own = True

    def collect(self, own: FrontendStatus | None) -> BoxStatus:
        """The state that the test describes."""
        return self.status

    def events(self) -> list[BoxEvent]:
        """What :meth:`happen` was given since the last call."""
        found, self._happened = self._happened, []
        return found

    def outcomes(self) -> Iterator[Any]:
        """Nothing was pressed."""
        return iter(())

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Samples come once a second and with :meth:`show`."""
        yield

    def act(self, action: str, name: str, by: str) -> str:
        """Press a button."""
        return f"{name}: {action}"

    # -- as PeerRequests

    def all(self, limit: int) -> list[RecentList]:
        """All of them."""
        return [RecentList(requests=tuple(self.requests))]

    def begin(self, cursor: float) -> None:
        """What is there already comes with the whole list."""
        self._sent = len(self.requests)

    def newer(self, limit: int) -> list[RecentList]:
        """What has ended since."""
        found = self.requests[self._sent :]
        self._sent = len(self.requests)
        return [RecentList(requests=tuple(found))]

    def find(self, request_id: str) -> RequestRecord | None:
        """One of ``records``."""
        return self.records.get(request_id)

    async def _read_routing(self, first: bool) -> object:
        return self.routing

    def _chat(self, exchange: Exchange) -> None:
        self.asked.append(msgspec.json.decode(exchange.body))
        exchange.respond(200, msgspec.json.encode(self.answer))

    async def _serve(self) -> None:
        tasks = Tasks("scripted page")
        source: Any = self
        guard = operator_guard(self._settings, own_pages=True)
        has_keys = self._settings.api_key_file is not None
        running: Any = self.records.get
        facts = OwnFacts(
            FrontendStatus, RecentRequests(), running, self.content.get, self._read_routing
        )
        routes = UiRoutes(source, facts, tasks, guard, has_keys)
        self.routes = routes
        table = Routes()
        table.post("/v1/chat/completions", self._chat)
        routes.install(table)
        guard_ui_routes(table, guard)
        server = HttpServer(table, HttpLimits(), access=frontend_access(self._settings))
        host, port = await server.start("127.0.0.1", 0)
        stopped = asyncio.Event()
        call = asyncio.get_running_loop().call_soon_threadsafe
        self.url = f"http://{host}:{port}"
        self._stop = partial(call, stopped.set)
        self._wake = partial(call, routes.sampler.wake)
        self._ready.set()
        await stopped.wait()
        routes.stop()
        await server.close()
        await tasks.close()
