"""Adds the alerts of a deployment to its events, from a thread of the arbiter.

The arbiter is their one writer: a deployment may have several frontends, and a hung one cannot
report itself. It looks every 15 seconds, for about 10 ms.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.doctor.alerts import (
    AlertBook,
    AlertChange,
    AlertConditions,
    AlertFacts,
    AlertKey,
    FrontendCounts,
)
from dynamo.doctor.facts import FileSystemFacts
from dynamo.doctor.read_machine import file_system, models_path
from dynamo.errors import StatefileError
from dynamo.observability.metrics_page import samples
from dynamo.runtime.process.paths import state_path
from dynamo.runtime.process.stop_order import STOP_STAGE
from dynamo.serve.state.events import BoxEventLog
from dynamo.serve.state.frontends import KnownFrontend, frontends_in
from dynamo.serve.state.statefile import Statefile
from dynamo.status.logs import EventReader
from dynamo.status.reading import BoxReader, get

_PERIOD_S = 15.0
_END_S = 3.0
_FAILURES = frozenset({"internal", "unavailable", "response_timeout"})
"""Types of errors that are not the client's."""
_UNAVAILABLE = "dynamo_request_plane_unavailable_workers"
_SILENT = "dynamo_component_router_kv_event_source_mismatch_workers"
_SUMS = {
    "dynamo_router_ttft_error_seconds_count": "estimates",
    "dynamo_router_ttft_error_seconds_sum": "estimate_error_s",
    "dynamo_component_router_time_to_first_token_seconds_sum": "first_tokens_s",
}
log = logging.getLogger(__name__)


class AlertWatch:
    """Watches the deployment of the namespace of ``runtime``. Use it as a context manager.

    An alert that was open when the arbiter was killed goes on, and ends once. A stop ends all.
    ``scale`` multiplies the durations of the rules and the period.
    """

    def __init__(self, runtime: RuntimeSettings, scale: float = 1.0) -> None:
        self._directory = state_path(runtime) / runtime.namespace
        self._reader = BoxReader(runtime)
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._state_path = state_path(runtime)
        self._events = BoxEventLog(self._directory)
        self._scale = scale
        self._conditions = AlertConditions()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def __enter__(self) -> AlertWatch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End. It waits a moment only: a driver or a disk may hang."""
        self._stop.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        # In the thread, not in the constructor: the disk with the events may hang.
        book = AlertBook(self._open(), time.monotonic(), self._scale)
        while not self._stop.wait(_PERIOD_S * self._scale):
            try:
                if not (self._directory / STOP_STAGE).exists():
                    facts = self._read()
                    self._add(book.update(self._conditions.find(facts), facts.now_s))
            except Exception:  # one look must not end the thread
                log.exception("cannot look for alerts")
        self._add(book.end("the deployment stops"))

    def _open(self) -> dict[AlertKey, tuple[float, str]]:
        """Return the alerts that began and did not end, with their ages and models."""
        began: dict[AlertKey, tuple[float, str]] = {}
        with contextlib.closing(EventReader(self._directory)) as reader:
            for event in reader.all():
                key = AlertKey(event.alert, event.name)
                if event.kind == "alert":
                    began[key] = (max(0.0, time.time() - event.at_s), event.model)
                elif event.kind == "cleared":
                    began.pop(key, None)
        return began

    def _add(self, changes: Iterable[AlertChange]) -> None:
        for change in changes:
            kind, key = "cleared" if change.ends else "alert", change.key
            text = f"{key.alert}: {change.text}"
            self._events.add(kind, key.subject, text, model=change.model, alert=key.alert)

    def _read(self) -> AlertFacts:
        return AlertFacts(
            now_s=time.monotonic(),
            box=self._reader.read(None),
            frontends={
                frontend.entry.name: read_counts(frontend) for frontend in self._frontends()
            },
            disks=[*_file_systems([self._state_path, models_path()])],
        )

    def _frontends(self) -> Iterator[KnownFrontend]:
        try:
            document = self._statefile.read()
        except StatefileError:  # the next look may find a readable one
            return
        if document is not None:
            yield from frontends_in(document)


def read_counts(frontend: KnownFrontend) -> FrontendCounts | None:
    """Return what the metrics of a frontend say, which need no key; None without an answer."""
    try:
        status, body = get(frontend, None, "/metrics")
        if status == 200:
            return parse_counts(body, frontend.listens.metrics_prefix, frontend.pid)
    except (OSError, ValueError):
        pass
    return None


def parse_counts(page: bytes, prefix: str, pid: int) -> FrontendCounts:
    """Return the counts on a page of metrics that begin with ``prefix``."""
    requests, rejections = f"{prefix}_requests_total", f"{prefix}_model_rejection_total"
    names = {requests, rejections, _UNAVAILABLE, _SILENT, *_SUMS}
    maps: dict[str, dict[str, float]] = {"requests": {}, "failed": {}, "rejected": {}}
    gauges: dict[str, dict[str, int]] = {"silent": {}, "unavailable": {}}
    sums = dict.fromkeys(_SUMS.values(), 0.0)
    for name, labels, value in samples(page, *names):
        model = labels.get("model", "")
        if name == requests:
            _add(maps["requests"], model, value)
            if labels.get("error_type") in _FAILURES:
                _add(maps["failed"], model, value)
        elif name == rejections:
            _add(maps["rejected"], model, value)
        elif name == _SILENT:
            gauges["silent"][model] = gauges["silent"].get(model, 0) + int(value)
        elif name == _UNAVAILABLE:
            endpoint = labels.get("endpoint", "")
            if not endpoint.endswith("/kv_query"):  # the second one of the same worker
                gauges["unavailable"][endpoint] = int(value)
        else:
            sums[_SUMS[name]] += value
    return msgspec.convert({"pid": pid, **maps, **gauges, **sums}, FrontendCounts)


def _add(counts: dict[str, float], model: str, value: float) -> None:
    counts[model] = counts.get(model, 0.0) + value


def _file_systems(paths: Iterable[Path]) -> Iterator[FileSystemFacts]:
    """Yield the file system of each path that exists, each once."""
    seen = set()
    for path in paths:
        with contextlib.suppress(OSError):
            device = path.stat().st_dev
            if device not in seen:
                seen.add(device)
                yield file_system(path)
