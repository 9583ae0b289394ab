"""The frontend's report for operators: traffic, models, and the requests that ended last.

For operators. Counters are read once a second and when the route is called, never by a request.

``?limit=`` (20), ``model=`` and ``after=`` (the cursor of an earlier answer) choose from the list;
``/v1/requests/last`` is the newest request.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, shorten
from dynamo.frontend.models.model import LoadedModel, ModelEntry
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.errors import error_response
from dynamo.frontend.requests.metrics import GONE_MODELS, ModelMetrics
from dynamo.frontend.requests.recent import RecentRequests, RequestFigures
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange, query_fields
from dynamo.http.routes import Routes
from dynamo.protocols.status import FrontendStatus, ModelFigures, WorkerFigures
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import Picker
from dynamo.router.worker_pool import Member

_REQUESTS = 20
_PATH = "/v1/requests"
_LIMIT = 20
_MOST = 1000
_LAST = "last"
_CURSOR = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,20})?")
_PERIOD_S = 1.0
_RATE_SAMPLES = 11
_RECENT_S = 60.0


class ModelTraffic(NamedTuple):
    """One model: rates over the last ``rate_s`` (10) seconds; times to the first token and the
    cached share of prompts of the requests that ended in the last minute."""

    rate_s: float = 0.0
    output_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    hit_rate: float | None = None
    idle_s: float | None = None


class _Counts(NamedTuple):
    at_s: float
    output_tokens: float
    ended: int


class TrafficWindows:
    """Reads the counters of all ``models()`` once a second; each costs some microseconds.

    ``open_tokens()`` has the tokens that requests in progress have so far, by model: the counters
    have those of ended requests alone.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ModelMetrics]],
        open_tokens: Callable[[], Mapping[str, int]],
        recent: RecentRequests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._open_tokens = open_tokens
        self._recent = recent
        self._clock = clock
        self._windows: dict[str, _Window] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running loop."""
        self.sample()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self.start)

    def stop(self) -> None:
        """Stop reading."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sample(self) -> None:
        """Read the counters now."""
        now_s, tokens = self._clock(), self._open_tokens()
        current: dict[str, _Window] = {}
        for metrics in self._models():
            window = current[metrics.name] = self._window(metrics, now_s)
            window.counts.append(window.read(now_s, tokens.get(metrics.name, 0)))
        # A model that returns has its old counters, and so its old window; not for ever.
        if len(self._windows) > len(current) + GONE_MODELS:
            self._windows = current

    def traffic(self) -> tuple[dict[str, ModelTraffic], list[float]]:
        """Return the figures of every model now, and the times to the first token of all of them,
        in order. O(n log n) in the recent requests."""
        now_s, tokens = self._clock(), self._open_tokens()
        ended: dict[str, list[RequestFigures]] = {}
        # They are in the order in which they ended.
        for request in reversed(self._recent.records):
            if now_s - request.ended_s > _RECENT_S:
                break
            ended.setdefault(request.model, []).append(request)
        ttfts_s = {name: _ttfts_s(requests) for name, requests in ended.items()}
        # A model that came since the last sample needs a window, too: every entry is looked up.
        for metrics in self._models():
            self._window(metrics, now_s)
        figures = {
            name: window.traffic(
                window.read(now_s, tokens.get(name, 0)),
                ttfts_s.get(name, []),
                _hit_rate(ended.get(name, ())),
            )
            for name, window in self._windows.items()
        }
        return figures, sorted(itertools.chain.from_iterable(ttfts_s.values()))

    def _window(self, metrics: ModelMetrics, now_s: float) -> _Window:
        window = self._windows.get(metrics.name)
        if window is None:
            # The model is new since the last reading, when its counters were 0.
            window = self._windows[metrics.name] = _Window(metrics, now_s - _PERIOD_S)
        window.metrics = metrics  # a model that was removed and returns has new gauges
        return window


class _Window:
    def __init__(self, metrics: ModelMetrics, since_s: float) -> None:
        self.metrics = metrics
        self.counts = deque([_Counts(since_s, 0.0, 0)], maxlen=_RATE_SAMPLES)
        self._active_s: float | None = None
        self._ended = 0

    def read(self, now_s: float, open_tokens: int) -> _Counts:
        """Return the counters; note when the model was last in use."""
        metrics = self.metrics
        ended = sum(metrics.duration.counts)
        # Not only while one is active: it may have come and ended since the last reading.
        if metrics.active.value or ended != self._ended:
            self._ended, self._active_s = ended, now_s
        return _Counts(now_s, metrics.output_tokens.value + open_tokens, ended)

    def traffic(self, now: _Counts, ttfts_s: list[float], hit_rate: float | None) -> ModelTraffic:
        """Return the figures between the oldest counters and ``now``, and those given."""
        since = self.counts[0]
        rate_s = now.at_s - since.at_s
        # A request that ends counts its usage, which may be less than its stream was.
        tokens = max(0.0, now.output_tokens - since.output_tokens)
        return ModelTraffic(
            rate_s=rate_s,
            output_tokens_per_s=tokens / rate_s,
            requests_per_s=(now.ended - since.ended) / rate_s,
            ttft_p50_s=_quantile(ttfts_s, 0.5),
            ttft_p99_s=_quantile(ttfts_s, 0.99),
            hit_rate=hit_rate,
            idle_s=None if self._active_s is None else now.at_s - self._active_s,
        )


def _ttfts_s(ended: Iterable[RequestFigures]) -> list[float]:
    """Return the times to the first token of those that had one, in order."""
    return sorted(
        request.first_token_s - request.received_s for request in ended if request.first_token_s
    )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[round(share * (len(ordered) - 1))] if ordered else None


def _hit_rate(ended: Sequence[RequestFigures]) -> float | None:
    """Return the cached share of the prompts; None if no engine has reported it."""
    prompt_tokens = cached_tokens = 0
    for request in ended:
        if request.usage is not None and request.usage.cached_tokens is not None:
            prompt_tokens += request.prompt_tokens
            cached_tokens += request.usage.cached_tokens
    return cached_tokens / prompt_tokens if prompt_tokens else None


class RecentRoutes:
    """Responds at once, from memory."""

    def __init__(self, recent: RecentRequests) -> None:
        self._recent = recent

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get(_PATH, self._list)
        routes.get(f"{_PATH}/", self._one)

    def _list(self, exchange: Exchange) -> None:
        try:
            limit, model, cursor = _parse(exchange.query)
        except DynamoError as error:
            exchange.respond(*error_response(error))
            return
        exchange.respond(200, msgspec.json.encode(self._recent.after(cursor, limit, model)))

    def _one(self, exchange: Exchange) -> None:
        name = unquote(exchange.path.removeprefix(f"{_PATH}/"))
        try:
            ended = self._recent.last() if name == _LAST else self._recent.find(name)
        except DynamoError as error:
            exchange.respond(*error_response(error))
            return
        exchange.respond(200, msgspec.json.encode(ended.explained()))


def _parse(query: str) -> tuple[int, str, float]:
    """Return limit, model and cursor of a query. Raises InvalidArgument."""
    fields = query_fields(query)
    unknown = sorted(fields.keys() - {"limit", "model", "after"})
    if unknown:
        names = ", ".join(f"`{shorten(name)}`" for name in unknown)
        raise InvalidArgument(f"The query takes `limit`, `model` and `after`, not {names}")
    text = fields.get("limit", str(_LIMIT))
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= _MOST):
        raise InvalidArgument(f"`limit` must be a number from 1 to {_MOST}, got {shorten(text)}")
    after = fields.get("after", "0")
    if not _CURSOR.fullmatch(after):
        raise InvalidArgument(f"`after` must be the cursor of an answer, got {shorten(after)}")
    return int(text), fields.get("model", ""), float(after)


class StatusRoutes:
    """Responds at once, from memory. Start its ``windows`` on the running loop."""

    def __init__(self, models: Models, requests: RequestRegistry) -> None:
        self._models = models
        self._requests = requests
        self._started_s = time.monotonic()
        self._recent = requests.metrics.recent
        self.windows = TrafficWindows(
            lambda: [entry.metrics for entry in models.entries()],
            requests.open_tokens,
            self._recent,
        )

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        routes.get("/v1/status", self._status)

    def _status(self, exchange: Exchange) -> None:
        exchange.respond(200, msgspec.json.encode(self.status()))

    def status(self) -> FrontendStatus:
        """Return the figures now."""
        traffic, ttfts_s = self.windows.traffic()
        running = self._requests.in_flight_by_model()
        in_flight = self._requests.in_flight_by_worker()
        entries = {entry.name: entry for entry in self._models.entries()}
        cold = {model.name for model in self._models.on_demand.listed()} - entries.keys()
        return FrontendStatus(
            draining=self._requests.draining,
            uptime_s=time.monotonic() - self._started_s,
            ttft_p50_s=_quantile(ttfts_s, 0.5),
            ttft_p99_s=_quantile(ttfts_s, 0.99),
            models=(
                *(
                    _model(
                        entry, traffic[name], running[name], self._idle_s(name, traffic), in_flight
                    )
                    for name, entry in entries.items()
                ),
                *(
                    ModelFigures(model=name, queued=self._requests.metrics.waiting(name))
                    for name in sorted(cold)
                ),
            ),
            requests=tuple(self._recent.newest(_REQUESTS)),
            rejected=self._models.rejections(),
            records_content=self._requests.content is not None,
        )

    def _idle_s(self, model: str, traffic: Mapping[str, ModelTraffic]) -> float | None:
        """Return how long the workers of a model are not used, by its adapters neither."""
        idle_s = self._models.on_demand.idle_s(model)
        if idle_s is not None:
            return idle_s
        names = self._models.on_demand.together(model)
        idle_times_s = (traffic[name].idle_s for name in names if name in traffic)
        return min((idle_s for idle_s in idle_times_s if idle_s is not None), default=None)


def _model(
    entry: ModelEntry,
    traffic: ModelTraffic,
    running: int,
    idle_s: float | None,
    in_flight: Mapping[int, int],
) -> ModelFigures:
    config = entry.card.runtime_config
    return ModelFigures(
        model=entry.name,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        in_flight=running,
        queued=int(entry.metrics.cold_start_queue.value) + entry.queued,
        window_s=traffic.rate_s,
        output_tokens_per_s=traffic.output_tokens_per_s,
        requests_per_s=traffic.requests_per_s,
        ttft_p50_s=traffic.ttft_p50_s,
        ttft_p99_s=traffic.ttft_p99_s,
        hit_rate=traffic.hit_rate,
        idle_s=idle_s,
        workers=() if entry.loaded is None else _workers(entry.loaded, in_flight),
    )


def _workers(loaded: LoadedModel, in_flight: Mapping[int, int]) -> tuple[WorkerFigures, ...]:
    pool = loaded.picker.worker_pool
    figures = [
        WorkerFigures(
            worker=f"{worker_id:x}",
            in_flight=in_flight.get(worker_id, 0),
            kv_use=_kv_use(loaded.picker, member),
            busy=worker_id in pool.busy or worker_id in pool.avoided,
        )
        for worker_id, member in pool.members.items()
    ]
    prefill = loaded.prefill.router
    if prefill is not None:
        for worker_id in prefill.queue.all_workers:
            running = len(prefill.queue.running_at(worker_id))
            figures.append(WorkerFigures(worker=f"{worker_id:x}", in_flight=running))
    return tuple(figures)


def _kv_use(picker: Picker, member: Member) -> float | None:
    """Return the share of its KV blocks that a worker reports as used, else the reserved share."""
    # There are reports only with busy thresholds; else the router's own count is all there is.
    reports = picker.eligibility.busy.reports(member.worker_id)
    used = [report.kv_used_blocks for report in reports if report.kv_used_blocks is not None]
    totals = [report.kv_total_blocks for report in reports if report.kv_total_blocks is not None]
    total = sum(totals) or (member.config.total_kv_blocks or 0) * len(member.slots)
    if not total:
        return None
    if used:
        return min(1.0, sum(used) / total)
    if not isinstance(picker, KvPicker) or not picker.active.track_blocks:
        return None
    return min(1.0, sum(picker.active.load(slot)[1] for slot in member.slots.values()) / total)
