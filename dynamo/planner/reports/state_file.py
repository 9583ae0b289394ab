"""Writes what a running planner does to ``planner.json``, for ``dynamo ps`` and ``top``."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from dynamo.config.planner import PlannerSettings
from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.model_state import Pools
from dynamo.planner.observation import Observation, Pull
from dynamo.planner.policies.base import ScalingDecision
from dynamo.planner.reports.decisions import DecisionRecord
from dynamo.planner.sharing.zero import is_on_demand
from dynamo.protocols.status import PlannedModel, PlannerReport
from dynamo.runtime.discovery.layout import write_atomic
from dynamo.serve.state.process_table import stat
from dynamo.status.planner_file import read_planner

log = logging.getLogger(__name__)


class StateFile:
    """A :class:`LoopObserver` that rewrites ``path`` when something has changed."""

    def __init__(self, path: Path, settings: PlannerSettings) -> None:
        me = stat(os.getpid())
        self._path = path
        self._models: dict[str, PlannedModel] = {}
        self._on_demand: set[str] = set()
        self._report = PlannerReport(
            pid=os.getpid(),
            start_ticks=me.start_ticks if me else 0,
            state="observing" if settings.no_operation else "running",
            mode=settings.mode,
            idle_timeout_s=settings.idle_timeout_s,
        )
        self._written: PlannerReport | None = None
        self._acting = self._report.state
        self._failed = False
        self._interval_s = settings.adjustment_interval_s

    @property
    def acts(self) -> bool:
        """Whether the planner changes workers when it is not paused."""
        return self._acting == "running"

    def paused(self, paused: bool) -> None:
        """Write that the planner is paused, or is not any more."""
        state = "paused" if paused else self._acting
        self._report = msgspec.structs.replace(self._report, state=state)
        self.write()

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        if model not in self._models:
            at_s = time.time()
            self._models[model] = PlannedModel(
                model=model,
                at_s=at_s,
                text="no decision yet",
                next_at_s=at_s + self._interval_s,
            )
        (self._on_demand.add if is_on_demand(pools) else self._on_demand.discard)(model)
        self.write()

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        """See :class:`LoopObserver`."""

    def decided(self, record: DecisionRecord, seen: Observation, made: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        self._models[record.model] = PlannedModel(
            model=record.model,
            at_s=record.at_s,
            text="; ".join(pool.text() for pool in record.pools),
            wanted={pool.pool: pool.wanted for pool in record.pools},
            next_at_s=record.at_s + seen.interval_s,
        )
        self.write()

    def finished(self, record: DecisionRecord) -> None:
        """See :class:`LoopObserver`."""
        before = self._models.get(record.model)
        if before is not None and before.at_s == record.at_s:
            text = "; ".join(pool.text() for pool in record.pools)
            self._models[record.model] = msgspec.structs.replace(before, text=text)
            self.write()

    def acted(self, action: WorkerAction) -> None:
        """See :class:`LoopObserver`."""

    def forgotten(self, model: str) -> None:
        """See :class:`LoopObserver`."""
        self._models.pop(model, None)
        self._on_demand.discard(model)
        self.write()

    def write(self) -> None:
        """Write the file if something has changed since; a failure is logged once.

        A planner that only observes leaves the file to another one.
        """
        report = msgspec.structs.replace(
            self._report,
            models=tuple(self._models.values()),
            on_demand=tuple(sorted(self._on_demand)),
        )
        if report == self._written or (self._acting == "observing" and self._is_taken()):
            return
        try:
            write_atomic(self._path, msgspec.json.encode(report))
        except OSError as error:
            if not self._failed:
                log.error("cannot write %s: %s", self._path, error.strerror)
            self._failed = True
            return
        self._written = report

    def remove(self) -> None:
        """Remove the file: the planner ends."""
        if not self._is_taken():
            self._path.unlink(missing_ok=True)

    def _is_taken(self) -> bool:
        found = read_planner(self._path.parent)
        return found is not None and found.pid != os.getpid()
