"""What other programs see of a running planner: ``planner.json``, its decisions, its pause."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from dynamo.config.planner import PlannerSettings
from dynamo.errors import InvalidArgument
from dynamo.planner.capacity.observation import Observation
from dynamo.planner.live.control import PlannerControl
from dynamo.planner.live.decisions import DecisionRecord
from dynamo.planner.live.gpu_sharing import is_on_demand
from dynamo.planner.live.loop import LoopObserver, ScalingLoop
from dynamo.planner.live.model_state import Pools
from dynamo.planner.policies.base import ScalingDecision
from dynamo.protocols.control import PLANNER, PLANNER_PAUSE, PlannerChange
from dynamo.protocols.status import PlannedModel, PlannerReport
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import write_atomic
from dynamo.serve.state.process_table import stat
from dynamo.status.logs import read_planner

_DAY_S = 86_400.0
EXPLAIN = (PLANNER, "explain")
"""Component and endpoint of a running planner, in its namespace."""
log = logging.getLogger(__name__)


class StateFile(LoopObserver):
    """Rewrites ``path`` when something has changed."""

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

    def decided(self, record: DecisionRecord, seen: Observation, decision: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        before = self._models.get(record.model)
        self._models[record.model] = PlannedModel(
            model=record.model,
            # The sharing of GPUs says nothing about the policy.
            problem=before.problem if before and record.mode == "sharing" else decision.problem,
            at_s=record.at_s,
            text="; ".join(pool.text(with_figures=False) for pool in record.pools),
            wanted={pool.pool: pool.wanted for pool in record.pools},
            next_at_s=record.at_s + seen.interval_s,
        )
        self.write()

    def waits(self, model: str, reason: str) -> None:
        """See :class:`LoopObserver`."""
        before = self._models.get(model)
        if before is not None and before.waits_for != reason:
            self._models[model] = msgspec.structs.replace(before, waits_for=reason)
            self.write()

    def finished(self, record: DecisionRecord) -> None:
        """See :class:`LoopObserver`."""
        before = self._models.get(record.model)
        # Not if a newer decision has taken its place.
        if before is not None and before.at_s == record.at_s:
            text = "; ".join(pool.text() for pool in record.pools)
            self._models[record.model] = msgspec.structs.replace(before, text=text)
            self.write()

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
        report = read_planner(self._path.parent)
        return report is not None and report.pid != os.getpid()


async def serve_explain(runtime: DistributedRuntime, loop: ScalingLoop) -> None:
    """Serve the endpoint of ``dynamo planner explain``; return when the lease is revoked."""

    async def explain(request: object) -> AsyncIterator[object]:
        yield msgspec.to_builtins(await model_reports(loop))

    endpoint = runtime.endpoint(".".join((runtime.settings.namespace, *EXPLAIN)))
    await endpoint.serve_endpoint(explain)


async def serve_control(runtime: DistributedRuntime, control: PlannerControl) -> None:
    """Serve the endpoint that pauses and changes the planner; return when the lease is revoked."""

    async def change(request: object) -> AsyncIterator[object]:
        try:
            wanted = msgspec.convert(request, PlannerChange)
        except msgspec.ValidationError as error:
            raise InvalidArgument(str(error)) from error
        yield msgspec.to_builtins(control.change(wanted))

    path = (runtime.settings.namespace, PLANNER, PLANNER_PAUSE)
    await runtime.endpoint(".".join(path)).serve_endpoint(change)


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner would decide now for one model.

    The next decision is due in ``next_s`` seconds, unless it waits for the ``running`` ones, or the
    planner is ``paused``.
    """

    now: DecisionRecord
    next_s: float
    paused: bool = False
    running: tuple[DecisionRecord, ...] = ()


class ExplainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last ``decisions``, the oldest first, and the ``models`` of the running planner, if any.

    ``running``: a planner answered.
    """

    namespace: str
    running: bool
    models: tuple[ModelReport, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()


async def model_reports(loop: ScalingLoop) -> list[ModelReport]:
    """Ask the policies of ``loop`` what they would decide now, without effect on them."""
    return [
        ModelReport(
            now=record,
            next_s=max(0.0, state.due_s - time.monotonic()),
            paused=loop.paused,
            running=tuple(state.pending),
        )
        for state, record in await loop.explain()
    ]


def report_text(report: ExplainReport) -> str:
    """Return the report for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: ExplainReport) -> Iterator[str]:
    if report.decisions:
        yield "last decisions:"
    elif report.running:
        yield "no decision yet"
    for record in report.decisions:
        form = "%H:%M:%S" if time.time() - record.at_s < _DAY_S else "%Y-%m-%d %H:%M:%S"
        when = time.strftime(form, time.localtime(record.at_s))
        yield f"{when}  model {record.model}, policy {record.mode}: {record.ending()}"
        yield from _pools(record)
    for model in report.models:
        now = model.now
        for record in model.running:
            yield f"running   model {record.model}, for {now.at_s - record.at_s:.0f} s"
            yield from _pools(record)
        yield f"now       model {now.model}, policy {now.mode}: {_next(model)}"
        yield from _pools(now)
    if not report.running:
        last = ": these are the decisions of the last one" if report.decisions else ""
        yield f"no planner runs in namespace {report.namespace!r}{last}"


def _next(model: ModelReport) -> str:
    if model.paused:
        return "paused; dynamo planner resume ends it"
    when = "when that is done" if model.running else f"due in {model.next_s:.0f} s"
    return f"the next decision is {when}"


def _pools(record: DecisionRecord) -> Iterator[str]:
    for pool in record.pools:
        yield f"          {pool.text()}"
    if not record.pools:
        yield "          no pool to change"
