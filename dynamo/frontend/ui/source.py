"""What the page shows and does, sampled once for all open pages: this deployment or frontend."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from dynamo.errors import ConfigError, InvalidArgument, shorten
from dynamo.frontend.ui.history import History, figures_of
from dynamo.frontend.ui.model_store import ModelStore
from dynamo.frontend.ui.requests import PeerRequests
from dynamo.frontend.ui.stream import EventStreams, event
from dynamo.http import Exchange, query_fields
from dynamo.operations.operate import ActionOutcome, BoxControl, Steps, recorded
from dynamo.protocols.control import INSTANCES, MODEL_CARDS
from dynamo.protocols.status import (
    BoxEvent,
    BoxStatus,
    FrontendStatus,
    ModelFigures,
    ModelStatus,
    WorkerStatus,
)
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.paths import state_path, write_atomic
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread
from dynamo.status.logs import EventReader
from dynamo.status.reading import BoxCollector

log = logging.getLogger(__name__)
_ALONE = (
    "this frontend was not started by dynamo serve: its own figures are shown, and of the buttons "
    "only Drain and those of models on disk have something to act on; start a deployment: dynamo "
    "serve GRAPH"
)
_UNREADABLE = "the status can't be read; the frontend's log says why"
_INTERVAL_S = 1.0
_UNSEEN_S = 10.0  # rates are of 10 s; a sample costs 5 ms of CPU
_SAVE_S = 300.0
_HISTORY_BYTES = 8 << 20
_EVENTS = 500
_FIRST_BYTES = 48 << 10
"""Of the events for a page that opens: with more it could be taken for one that reads slowly."""
_SHORTEST_S = 0.2  # after a change, so that a burst of changes costs five samples a second
_PAGES = 16
Feed = Callable[[bool], Awaitable[object]]
"""Returns what a section needs beyond the samples, None for nothing new. The argument: no page has
shown the section in the last tick, or another one has opened it."""


class StatusSampler:
    """Collects the state for the open pages and for the history.

    With a page that is each second and after :meth:`wake`, else every 10 seconds. Collecting
    blocks, so it runs in a thread. A page names its section in the query (``?show=requests``) and
    gets the ``feeds`` of this section, too. The history is in ``source.history_file`` across a
    restart: it is read at first, and written every five minutes and by :meth:`save`.
    """

    def __init__(
        self,
        source: BoxSource,
        own: Callable[[], FrontendStatus],
        tasks: Tasks,
        feeds: Mapping[str, Feed],
    ) -> None:
        self.pages = EventStreams(_PAGES)
        self.history = _read_history(source.history_file)
        self._feeds = feeds
        self._shown: set[str] = set()
        self.store = ModelStore(source.settings, tasks, self.wake)
        self._source = source
        self._own = own
        self._tasks = tasks
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._collected_s = -math.inf
        self._events: deque[BoxEvent] = deque(maxlen=_EVENTS)
        self._saved_s = time.monotonic()
        self._unwritten = False

    def start(self) -> None:
        """Collect from now on. Idempotent."""
        if self._running is None or self._running.done():
            self._running = self._tasks.spawn(self._run(), name="ui samples")

    def open(self, exchange: Exchange) -> None:
        """Stream samples to a page."""
        section = query_fields(exchange.query).get("show", "")
        if self.pages.open(exchange, section):
            self._shown.discard(section)  # the new page needs what the others have already
            if self._events:
                self.pages.send_one(exchange, _events(_newest(self._events), True))
            self._wake.set()
            self.start()

    def wake(self) -> None:
        """Collect a sample now: something has changed."""
        self._wake.set()

    def save(self) -> None:
        """Write the history: the frontend stops."""
        if self.history.slot:
            self._write(self.history.pack())

    async def _run(self) -> None:
        while True:
            try:
                if self.pages:
                    with self._source.watch(self.wake):
                        while self.pages:
                            await self._collect()
                            await self._pause()
                elif time.monotonic() - self._collected_s >= _UNSEEN_S:
                    await self._collect()
            except Exception:  # the pages open their streams again
                log.exception("the status can't be read")
                self.pages.close(_UNREADABLE)
            # The next page needs all of its section, not what is new.
            self._shown.clear()
            if not self.pages:
                await self._pause()

    async def _collect(self) -> None:
        self._collected_s = time.monotonic()
        # Before the read: a change during it asks for another sample.
        self._wake.clear()
        own = self._own() if self._source.needs_own else None
        status, happened = await in_file_thread(self._read, own)
        self._events.extend(happened)
        self.history.add(status.at_s, figures_of(status))
        if self.pages:
            self.pages.send(event("status", msgspec.json.encode(status)))
            if happened:
                self.pages.send(_events(_newest(happened), False))
            await self._send_feeds()
            self._send_more()
        if self._collected_s - self._saved_s >= _SAVE_S:
            self._saved_s = self._collected_s
            await in_file_thread(self._write, self.history.pack())

    async def _send_feeds(self) -> None:
        for section, read in self._feeds.items():
            if not self.pages.shows(section):
                self._shown.discard(section)
                continue
            first = section not in self._shown
            self._shown.add(section)  # before the read: a page may open while it waits
            try:
                data = await read(first)
            except Exception:  # the pages of the other sections go on
                log.exception("what %s shows can't be read", section)
                self.pages.close(_UNREADABLE, section)
                continue
            if data is not None:
                self.pages.send(event(section, msgspec.json.encode(data)), section)

    def _read(self, own: FrontendStatus | None) -> tuple[BoxStatus, list[BoxEvent]]:
        """Return the state, and the events since the last call. Blocks."""
        return self._source.collect(own), self._source.events()

    def _send_more(self) -> None:
        """Send how actions ended, and the progress of a download."""
        for outcome in self._source.outcomes():
            self.pages.send(event("outcome", msgspec.json.encode(outcome)))
        while self.store.outcomes:
            self.pages.send(event("outcome", msgspec.json.encode(self.store.outcomes.popleft())))
        if self.store.download is not None:
            self.pages.send(event("download", msgspec.json.encode(self.store.download)))

    async def _pause(self) -> None:
        """Wait for the next second, or for a change, but not for a closed page."""
        started_s = self._collected_s if self.pages else time.monotonic()
        try:
            async with asyncio.timeout(started_s + _INTERVAL_S - time.monotonic()):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(max(0.0, started_s + _SHORTEST_S - time.monotonic()))

    def _write(self, data: bytes) -> None:
        try:
            write_atomic(self._source.history_file, data)
        except FileNotFoundError:
            return  # no `dynamo serve` has made a directory for logs
        except OSError as error:
            if not self._unwritten:
                log.warning("cannot write %s: %s", self._source.history_file, error.strerror)
            self._unwritten = True


def _newest(events: Iterable[BoxEvent]) -> list[BoxEvent]:
    """Return the newest events that one message may have."""
    left = _FIRST_BYTES
    newest: list[BoxEvent] = []
    for record in reversed([*events]):
        left -= len(msgspec.json.encode(record)) + 1
        if left < 0:
            break
        newest.append(record)
    return newest[::-1]


def _events(events: Iterable[BoxEvent], are_all: bool) -> bytes:
    """Return what a page gets: new events, or ``are_all`` that are kept here."""
    return event("events", msgspec.json.encode({"events": list(events), "all": are_all}))


def _read_history(path: Path) -> History:
    """Return the history in a file, an empty one if it cannot be used."""
    try:
        with path.open("rb") as file:
            return History.unpack(file.read(_HISTORY_BYTES))
    except FileNotFoundError:
        pass
    except (OSError, InvalidArgument) as error:
        log.warning("the charts begin now: %s cannot be used: %s", path, error)
    return History()


class BoxSource:
    """The deployment in the namespace of ``runtime``. ``collect`` and ``act`` block."""

    def __init__(self, runtime: DistributedRuntime, has_keys: bool) -> None:
        settings = self.settings = runtime.settings
        self._has_keys = has_keys
        self._discovery = runtime.discovery
        self._collector = BoxCollector(settings)
        self._control = BoxControl(settings)
        do = self._control.actions
        self.actions: dict[str, Callable[[str], Steps]] = {
            "restart": do.restart,
            "drain": do.drain,
            "sleep": do.sleep,
            "wake": do.wake,
            "load": do.load,
            "unload": do.unload,
            "pause_planner": lambda name: do.pause_planner(),
            "resume_planner": lambda name: do.resume_planner(),
        }
        self.namespace = settings.namespace
        self._directory = state_path(settings)
        self._statefile = f"{settings.namespace}.json"
        self.logs = self._directory / settings.namespace / "logs"
        self.peers = PeerRequests(settings)
        self.history_file = self.logs / "history"
        self._events = EventReader(self._directory / settings.namespace)
        self._reads_all = True
        self.needs_own = True
        """Whether the next sample needs the figures of this frontend, which cost a millisecond: the
        arbiter asks for them itself."""

    def act(self, action: str, name: str, by: str) -> str:
        """Do what a button says, one of ``actions``, for ``by``. Raises DynamoError. Blocks."""
        steps = self.actions[action]
        verb = action.removesuffix("_planner")
        name = name if verb == action else "planner"
        log.info("%s %s, by %s", verb, shorten(name, 128), by)
        return self._control.begin(lambda: recorded(self.settings, verb, name, by, steps(name)))

    def events(self) -> list[BoxEvent]:
        """Return the events since the last call, at first the newest of those kept. Blocks."""
        events = self._events.all() if self._reads_all else list(self._events.read())
        self._reads_all = False
        return events[-_EVENTS:]

    def outcomes(self) -> Iterator[ActionOutcome]:
        """Yield how actions ended."""
        while self._control.outcomes:
            yield self._control.outcomes.popleft()

    def close(self) -> None:
        """End the thread of the actions."""
        self._control.close()

    def collect(self, own: FrontendStatus | None) -> BoxStatus:
        """Return the state of the deployment; without one, what ``own`` has. Blocks."""
        status = self._collector.collect(own if self._has_keys else None)
        status = msgspec.structs.replace(status, requests=())  # they have a feed of their own
        runs = status.state == "running"
        self.needs_own = self._has_keys or not runs
        return status if runs or own is None else with_own_figures(status, own)

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call ``on_change`` after a change of the statefile or of what workers register."""

        def on_file(name: str, mask: int) -> None:
            if name == self._statefile:
                on_change()

        with contextlib.ExitStack() as stack:
            for prefix in (INSTANCES, MODEL_CARDS):
                watch = self._discovery.watch(prefix, lambda event: on_change())
                stack.callback(watch.close)
            try:
                inotify = Inotify(on_change)
                stack.callback(inotify.close)
                inotify.add(self._directory, Mask.MOVED_TO | Mask.ONLYDIR, on_file)
            except (ConfigError, OSError) as error:  # then a change is shown up to a second later
                log.warning("%s is not watched for the web page: %s", self._directory, error)
            yield


def with_own_figures(status: BoxStatus, own: FrontendStatus) -> BoxStatus:
    """Return ``status``, which has no deployment, with the models and workers of a frontend."""
    return msgspec.structs.replace(
        status,
        frontend="draining" if own.draining else "ready",
        models=tuple(map(_model, own.models)),
        workers=tuple(worker for model in own.models for worker in _workers(model)),
        problems=(*status.problems, _ALONE),
        records_content=own.records_content,
    )


def _model(figures: ModelFigures) -> ModelStatus:
    count = len(figures.workers)
    return ModelStatus(
        model=figures.model,
        state="ready" if count else "zero",
        ready=count,
        wanted=count,
        figures=figures,
        workers=tuple(worker.worker for worker in figures.workers),
    )


def _workers(model: ModelFigures) -> list[WorkerStatus]:
    return [
        WorkerStatus(
            name=worker.worker,
            service="",
            state="ready",
            worker=worker.worker,
            model=model.model,
            in_flight=worker.in_flight,
            kv_use=worker.kv_use,
        )
        for worker in model.workers
    ]
