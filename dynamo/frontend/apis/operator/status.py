"""GET /v1/status: the figures of this frontend, by model and worker, for ``dynamo ps`` and others.

For operators. Counters are read once a second and when the route is called, never by a request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from dynamo.frontend.models.model import ModelEntry
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.traffic_window import ModelTraffic, TrafficWindows
from dynamo.http import Exchange
from dynamo.http.routes import Routes
from dynamo.protocols.status import FrontendStatus, ModelFigures, WorkerFigures
from dynamo.router.kv_mode.kv import KvPicker
from dynamo.router.picker import Picker
from dynamo.router.worker_pool import Member

__all__ = ["StatusRoutes"]

_REQUESTS = 20


class StatusRoutes:
    """Responds at once, from memory. Start it on the running loop."""

    def __init__(self, models: Models, requests: RequestRegistry) -> None:
        self._models = models
        self._requests = requests
        self._started_s = time.monotonic()
        self._recent = requests.metrics.recent
        self._windows = TrafficWindows(
            lambda: [entry.metrics for entry in models.entries()],
            requests.open_tokens,
            self._recent,
        )

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        routes.get("/v1/status", self._status)

    def start(self) -> None:
        """Begin to read the counters."""
        self._windows.start()

    def stop(self) -> None:
        """Stop reading."""
        self._windows.stop()

    def _status(self, exchange: Exchange) -> None:
        exchange.respond(200, msgspec.json.encode(self.status()))

    def status(self) -> FrontendStatus:
        """Return the figures now."""
        traffic = self._windows.traffic()
        in_flight = self._requests.in_flight_by_worker()
        entries = {entry.name: entry for entry in self._models.entries()}
        cold = {name for name, *_ in self._models.on_demand.listed()} - entries.keys()
        return FrontendStatus(
            draining=self._requests.draining,
            uptime_s=time.monotonic() - self._started_s,
            models=(
                *(_model(entry, traffic[name], in_flight) for name, entry in entries.items()),
                *(self._cold(name) for name in sorted(cold)),
            ),
            requests=tuple(self._recent.newest(_REQUESTS)),
            rejected=self._models.rejections(),
        )

    def _cold(self, name: str) -> ModelFigures:
        """Return the figures of a model without a worker so far."""
        waiting = self._requests.metrics.model(name).cold_start_queue.value
        return ModelFigures(model=name, queued=int(waiting))


def _model(entry: ModelEntry, traffic: ModelTraffic, in_flight: Mapping[int, int]) -> ModelFigures:
    metrics = entry.metrics
    return ModelFigures(
        model=entry.name,
        in_flight=int(metrics.inflight.value),
        queued=int(metrics.cold_start_queue.value) + entry.queued,
        window_s=traffic.rate_s,
        output_tokens_per_s=traffic.output_tokens_per_s,
        requests_per_s=traffic.requests_per_s,
        ttft_p50_s=traffic.ttft_p50_s,
        ttft_p99_s=traffic.ttft_p99_s,
        hit_rate=traffic.hit_rate,
        idle_s=traffic.idle_s,
        workers=_workers(entry, in_flight) if entry.ready else (),
    )


def _workers(entry: ModelEntry, in_flight: Mapping[int, int]) -> tuple[WorkerFigures, ...]:
    pool = entry.picker.worker_pool
    found = [
        WorkerFigures(
            worker=f"{worker_id:x}",
            in_flight=in_flight.get(worker_id, 0),
            kv_use=_kv_use(entry.picker, member),
            busy=worker_id in pool.busy or worker_id in pool.avoided,
        )
        for worker_id, member in pool.members.items()
    ]
    prefill = entry.prefill.router
    for worker_id in prefill.queue.all_workers if prefill is not None else ():
        running = len(prefill.queue.running_at(worker_id)) if prefill is not None else 0
        found.append(WorkerFigures(worker=f"{worker_id:x}", in_flight=running))
    return tuple(found)


def _kv_use(picker: Picker, member: Member) -> float | None:
    """Return the share of its KV blocks that a worker reports as used, else the reserved share."""
    reports = picker.eligibility.busy.reports(member.worker_id)
    used = [one.kv_used_blocks for one in reports if one.kv_used_blocks is not None]
    totals = [one.kv_total_blocks for one in reports if one.kv_total_blocks is not None]
    total = sum(totals) or (member.config.total_kv_blocks or 0) * len(member.slots)
    if not total:
        return None
    if used:
        return min(1.0, sum(used) / total)
    if not isinstance(picker, KvPicker) or not picker.active.track_blocks:
        return None
    return min(1.0, sum(picker.active.load(slot)[1] for slot in member.slots.values()) / total)
