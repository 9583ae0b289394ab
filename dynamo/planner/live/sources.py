"""The metrics of a running deployment: its event plane, and its frontends' pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from dynamo.config.planner import PlannerSettings
from dynamo.planner.connector import READY, ScaledService
from dynamo.planner.frontends import FrontendPages
from dynamo.planner.live.traffic import TrafficCounter
from dynamo.planner.observation import Pull, Traffic
from dynamo.planner.scaled_model import ScaledModel
from dynamo.planner.worker_reports import WorkerReports
from dynamo.runtime import DistributedRuntime
from dynamo.serve.state.statefile import Statefile

__all__ = ["LiveSources", "MetricSources", "prefill_slots"]

_STALE_INTERVALS = 3
_SILENT_INTERVALS = 2
"""Adjustment intervals after which the traffic is counted without a frontend that hangs."""
_STALE_S = 3.5  # workers and frontends repeat their reports every second
log = logging.getLogger(__name__)


class MetricSources(Protocol):
    """The metrics of the workers and frontends."""

    def follow(self, models: Iterable[ScaledModel]) -> None:
        """Follow the workers of these models and no others."""

    def pull(self, model: ScaledModel, now_s: float) -> Pull:
        """Return the newest load of the model's workers."""

    async def read_frontends(self) -> None:
        """Read the counters of all frontends, for the next traffic."""

    def traffic(self, model: str, now_s: float, *, ends: bool) -> Traffic:
        """Return the traffic of the current interval; ``ends``: begin the next one."""


class LiveSources:
    """Implements :class:`MetricSources` over ``runtime`` and the frontends in ``statefile``."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        statefile: Statefile,
        settings: PlannerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stale_s = max(_STALE_S, _STALE_INTERVALS * settings.metric_pulling_interval_s)
        self._reports = WorkerReports(runtime, stale_s, clock)
        self._pages = FrontendPages(statefile)
        self._clock = clock
        self._traffic = TrafficCounter(
            time.time(), clock(), _SILENT_INTERVALS * settings.adjustment_interval_s
        )

    async def start(self) -> None:
        """Follow the workers' model cards."""
        await self._reports.start()

    def follow(self, models: Iterable[ScaledModel]) -> None:
        """See :class:`MetricSources`."""
        services = [service for model in models for service in model.services]
        self._reports.follow(worker_id for one in services for worker_id in _ready_ids(one))

    def pull(self, model: ScaledModel, now_s: float) -> Pull:
        """See :class:`MetricSources`."""
        queued = None if model.prefill is None else self._reports.prefill_queue(model.name)
        return Pull(
            at_s=now_s,
            decode=self._reports.loads(_ready_ids(model.decode)),
            prefill_queue=None if queued is None else queued / prefill_slots(model.prefill),
        )

    async def read_frontends(self) -> None:
        """See :class:`MetricSources`."""
        before = self._traffic.ignored
        pages, missing = await self._pages.read()
        self._traffic.add(pages, missing, self._clock())
        for url in self._traffic.ignored - before:
            log.warning("frontend %s still does not answer; traffic is counted without it", url)

    def traffic(self, model: str, now_s: float, *, ends: bool) -> Traffic:
        """See :class:`MetricSources`."""
        return self._traffic.take(model, now_s) if ends else self._traffic.peek(model, now_s)


def prefill_slots(service: ScaledService | None) -> int:
    """Return the prefill slots: one for each worker that serves, at least 1."""
    return max(1, 0 if service is None else len(_ready_ids(service)))


def _ready_ids(service: ScaledService) -> list[int]:
    return [
        worker.worker_id
        for worker in service.workers
        if worker.state == READY and worker.worker_id is not None
    ]
