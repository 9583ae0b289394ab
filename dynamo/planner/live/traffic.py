"""The traffic of an interval, from the pages of metrics of all frontends. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dynamo.observability.metrics_page import samples
from dynamo.planner.capacity.observation import Traffic
from dynamo.prometheus_names import name_prefix

Counts = dict[str, float]
"""Values by the name of the metric without its prefix."""
_STARTED, _FINISHED = "requests_started_total", "requests_total"
_QUEUED, _ACTIVE = "queued_requests", "active_requests"
_HELD = "cold_start_queue_requests"
"""Requests that wait for the first worker of their model."""
_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
_ISL, _OSL = "input_sequence_tokens", "output_sequence_tokens"
_DURATION = "request_duration_seconds"
_TTFT_WORKER_WAIT = "time_to_first_token_worker_wait_seconds_total"
_DURATION_WORKER_WAIT = "request_worker_wait_seconds_total"
"""What a start of the first worker took is no cost of a request."""
_NAMES = (
    *(_STARTED, _FINISHED, _QUEUED, _ACTIVE, _HELD, _TTFT_WORKER_WAIT, _DURATION_WORKER_WAIT),
    *(
        f"{name}_{part}"
        for name in (_TTFT, _ITL, _ISL, _OSL, _DURATION)
        for part in ("sum", "count")
    ),
)
_GAUGES = (_QUEUED, _ACTIVE, _HELD)
_START_TIME = "process_start_time_seconds"
_PROCESSES = 64
_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
_ALL = ""
"""In place of the addresses that are missing where no frontend answers."""


@dataclass(frozen=True, slots=True)
class FrontendPage:
    """The counts of one frontend process, by model.

    ``started_at`` (Unix time) identifies the process: after a restart another one answers on the
    same address, and during a reload two do.
    """

    started_at: float
    models: Mapping[str, Counts]


def read_page(page: bytes, prefix: str = name_prefix.FRONTEND) -> FrontendPage:
    """Read a page of a frontend whose metrics begin with ``prefix``.

    ValueError: it is not one, or a sample is damaged: what it counts would be taken as 0.
    """
    names = {f"{prefix}_{name}": name for name in _NAMES}
    models: dict[str, Counts] = {}
    started_at = 0.0
    for name, labels, value in samples(page, _START_TIME, *names, strict=True):
        if name == _START_TIME:
            started_at = value
        else:
            _add(models.setdefault(labels.get("model", ""), {}), {names[name]: value})
    if not started_at:
        raise ValueError(f"it has no {_START_TIME}")
    return FrontendPage(started_at, models)


class TrafficCounter:
    """Adds up the counters of all frontends; :meth:`take` returns what an interval had.

    A process that started after ``since`` (Unix time) counts from 0. Of an older one only the
    requests after its first page are traffic. ``now_s`` is the planner's clock. A frontend that
    does not answer for ``patience_s`` is ``ignored`` until it does: the others are all traffic.
    """

    def __init__(self, since: float, now_s: float, patience_s: float) -> None:
        self.ignored: frozenset[str] = frozenset()
        self._since = since
        self._start_s = now_s
        self._patience_s = patience_s
        self._silent_since_s: dict[str, float] = {}
        self._pages: dict[tuple[str, float], FrontendPage] = {}
        self._totals: dict[str, Counts] = {}
        self._gauges: dict[str, Counts] = {}
        self._missing = frozenset({_ALL})
        self._missed = 0
        self._marks: dict[str, _Mark] = {}

    def add(
        self,
        pages: Mapping[str, FrontendPage],
        missing: Collection[str],
        now_s: float,
        adapters: Mapping[str, str] = _NO_ADAPTERS,
    ) -> None:
        """Add a round of ``pages`` by address; the frontends ``missing`` did not answer.

        What ``adapters`` have counts for their models, which the values name.
        """
        were_ignored = self.ignored
        self.ignored = self._silent(missing, now_s)
        self._missing = frozenset(self._silent_since_s) if pages else frozenset({_ALL})
        is_partial = bool(self._missing - self.ignored)
        self._gauges = {}
        for address, page in pages.items():
            before = self._replace((address, page.started_at), page)
            if address in were_ignored:
                before = None  # what it has counted since then is not this interval's
            is_partial |= before is None
            for name, counts in page.models.items():
                model = adapters.get(name, name)
                # Without an earlier page nothing has risen: its counts are of earlier times.
                old = before.get(name, {}) if before is not None else counts
                risen = {
                    metric: counts[metric] - old.get(metric, 0) for metric in _counters(counts)
                }
                _add(self._totals.setdefault(model, {}), risen)
                gauges = {metric: counts.get(metric, 0) for metric in _GAUGES}
                _add(self._gauges.setdefault(model, {}), gauges)
        self._missed += is_partial

    def take(self, model: str, now_s: float) -> Traffic:
        """Return the traffic of ``model`` since the last call, and begin its next interval."""
        traffic = self.peek(model, now_s)
        totals = dict(self._totals.get(model, {}))
        self._marks[model] = _Mark(now_s, totals, self._missed, self._missing)
        return traffic

    def peek(self, model: str, now_s: float) -> Traffic:
        """Return the traffic of ``model`` since the last :meth:`take`."""
        mark = self._marks.get(model) or _Mark(self._start_s)
        counts = {
            name: value - mark.totals.get(name, 0)
            for name, value in self._totals.get(model, {}).items()
        }
        gauges = self._gauges.get(model, {})
        held_requests = gauges.get(_HELD, 0)
        return Traffic(
            duration_s=now_s - mark.at_s,
            arrived=round(counts.get(_STARTED, 0)),
            finished=round(counts.get(_FINISHED, 0)),
            isl=_mean(counts, _ISL),
            osl=_mean(counts, _OSL),
            ttft_ms=_mean(counts, _TTFT, 1000, _TTFT_WORKER_WAIT),
            itl_ms=_mean(counts, _ITL, 1000),
            request_s=_mean(counts, _DURATION, 1, _DURATION_WORKER_WAIT),
            queued=round(gauges.get(_QUEUED, 0) + held_requests),
            inflight=round(gauges.get(_ACTIVE, 0) + held_requests),
            known=self._missed == mark.missed and mark.missing <= self.ignored,
        )

    def _silent(self, missing: Collection[str], now_s: float) -> frozenset[str]:
        """Return those of ``missing`` that have not answered for too long."""
        since_s = self._silent_since_s
        self._silent_since_s = {address: since_s.get(address, now_s) for address in missing}
        limit_s = now_s - self._patience_s
        return frozenset(
            address for address, at_s in self._silent_since_s.items() if at_s <= limit_s
        )

    def _replace(self, key: tuple[str, float], page: FrontendPage) -> Mapping[str, Counts] | None:
        """Store the page; return the counts of the one before, None if they are unknown."""
        before = self._pages.pop(key, None)
        self._pages[key] = page
        while len(self._pages) > _PROCESSES:
            del self._pages[next(iter(self._pages))]  # the one that has not answered for longest
        if before is not None:
            return before.models
        return {} if page.started_at > self._since else None


@dataclass(slots=True)
class _Mark:
    """The start of an interval: its time, the counts, and the rounds with a missing frontend.

    Requests of the frontends ``missing`` then arrive in this interval's counts.
    """

    at_s: float
    totals: Counts = field(default_factory=dict)
    missed: int = 0
    missing: frozenset[str] = frozenset()


def _counters(counts: Counts) -> Iterable[str]:
    return (name for name in counts if name not in _GAUGES)


def _add(to: Counts, values: Counts) -> None:
    for name, value in values.items():
        to[name] = to.get(name, 0) + value


def _mean(counts: Counts, metric: str, factor: float = 1, without: str = "") -> float | None:
    """Return the mean of ``metric`` times ``factor``, without what the counter ``without`` has."""
    number = counts.get(f"{metric}_count", 0)
    if number <= 0:
        return None
    return factor * max(counts[f"{metric}_sum"] - counts.get(without, 0.0), 0.0) / number
