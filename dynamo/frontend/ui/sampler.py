"""Samples of the deployment for the open pages: collected in a thread, once for all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from dynamo.frontend.ui.source import UiSource
from dynamo.frontend.ui.stream import EventStreams, event
from dynamo.http import Exchange
from dynamo.protocols.status import FrontendStatus
from dynamo.runtime.process.tasks import Tasks

__all__ = ["StatusSampler"]

log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_SHORTEST_S = 0.2  # after a change, so that a burst of changes costs five samples a second
_PAGES = 16


class StatusSampler:
    """Sends a sample to each page once a second and after :meth:`wake`.

    Without a page nothing runs. Collecting blocks, so it runs in a thread.
    """

    def __init__(self, source: UiSource, own: Callable[[], FrontendStatus], tasks: Tasks) -> None:
        self.pages = EventStreams(_PAGES)
        self._source = source
        self._own = own
        self._tasks = tasks
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def open(self, exchange: Exchange) -> None:
        """Stream samples to a page."""
        if not self.pages.open(exchange):
            return
        self._wake.set()
        if self._running is None or self._running.done():
            self._running = self._tasks.spawn(self._run(), name="ui samples")

    def wake(self) -> None:
        """Collect a sample now: something has changed."""
        self._wake.set()

    async def _run(self) -> None:
        try:
            with self._source.watch(self.wake):
                while self.pages:
                    started_s = time.monotonic()
                    self._wake.clear()
                    status = await asyncio.to_thread(self._source.collect, self._own())
                    self.pages.send(event("status", msgspec.json.encode(status)))
                    for outcome in self._source.outcomes():
                        self.pages.send(event("outcome", msgspec.json.encode(outcome)))
                    await self._pause(started_s)
        finally:  # after a failure the pages open their streams again
            self.pages.close("the status can't be read; the frontend's log says why")

    async def _pause(self, started_s: float) -> None:
        """Wait for the next second, or for a change, but not for a closed page."""
        try:
            async with asyncio.timeout(started_s + _INTERVAL_S - time.monotonic()):
                await self._wake.wait()
        except TimeoutError:
            return
        rest_s = started_s + _SHORTEST_S - time.monotonic()
        if rest_s > 0:
            await asyncio.sleep(rest_s)
