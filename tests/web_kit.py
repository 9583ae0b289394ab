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
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import ModelNotFound
from dynamo.frontend.access import frontend_access, guard_ui_routes, operator_guard
from dynamo.frontend.requests.errors import error_response
from dynamo.frontend.ui.route import UiRoutes
from dynamo.http import Exchange, HttpLimits, HttpServer
from dynamo.http.routes import Routes
from dynamo.protocols.status import BoxStatus, FrontendStatus, RequestRecord
from dynamo.runtime.process.tasks import Tasks

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is missing: apt-get install chromium"
)
WAIT_MS = 20_000
_START_S = 10.0


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser."""
    with sync_playwright() as playwright:
        # As root, as in a container, Chromium's sandbox does not start.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


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
        self.logs = logs / "logs"
        self.logs.mkdir(exist_ok=True)
        self.status = BoxStatus(namespace="dynamo", state="running", at_s=0.0, frontend="ready")
        self.records: dict[str, RequestRecord] = {}
        self._settings = settings or FrontendSettings()
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

    def collect(self, own: FrontendStatus) -> BoxStatus:
        """The state that the test describes."""
        return self.status

    def outcomes(self) -> Iterator[Any]:
        """Nothing was pressed."""
        return iter(())

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Samples come once a second and with :meth:`show`."""
        yield

    def act(self, action: str, name: str) -> str:
        """Press a button."""
        return f"{name}: {action}"

    async def _serve(self) -> None:
        tasks = Tasks("scripted page")
        source: Any = self
        guard = operator_guard(self._settings, own_pages=True)
        has_keys = self._settings.api_key_file is not None
        routes = UiRoutes(source, FrontendStatus, tasks, guard, has_keys)
        table = Routes()
        routes.install(table)
        table.get("/v1/requests/", self._request)
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

    def _request(self, exchange: Exchange) -> None:
        found = self.records.get(exchange.path.rpartition("/")[2])
        if found is None:
            exchange.respond(*error_response(ModelNotFound("No request")))
        else:
            exchange.respond(200, msgspec.json.encode(found))
