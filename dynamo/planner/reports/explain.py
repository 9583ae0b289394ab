"""What ``dynamo planner explain`` shows: the last decisions, and what would be decided now.

The endpoints of a running planner: what it would decide, and its pause.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import msgspec

from dynamo.planner.live.loop import ScalingLoop
from dynamo.planner.live.model_state import ModelState
from dynamo.planner.reports.decisions import DecisionRecord
from dynamo.planner.reports.state_file import StateFile
from dynamo.protocols.control import PLANNER, PLANNER_PAUSE, PlannerPause, PlannerState
from dynamo.runtime import DistributedRuntime

_DAY_S = 86_400.0
EXPLAIN = (PLANNER, "explain")
"""Component and endpoint of a running planner, in its namespace."""


async def serve_explain(runtime: DistributedRuntime, loop: ScalingLoop) -> None:
    """Serve the endpoint of ``dynamo planner explain``; return when the lease is revoked."""

    async def explain(request: object) -> AsyncIterator[object]:
        yield msgspec.to_builtins(await model_reports(loop))

    endpoint = runtime.endpoint(".".join((runtime.settings.namespace, *EXPLAIN)))
    await endpoint.serve_endpoint(explain)


async def serve_pause(
    runtime: DistributedRuntime, loop: ScalingLoop, state_file: StateFile
) -> None:
    """Serve the endpoint that pauses and resumes ``loop``; return when the lease is revoked."""

    async def pause(request: object) -> AsyncIterator[object]:
        wanted = msgspec.convert(request, PlannerPause).paused
        if wanted is not None:
            (loop.pause if wanted else loop.resume)()
            state_file.paused(wanted)
        state = PlannerState(
            paused=loop.paused,
            acts=state_file.acts,
            models=loop.models(),
            on_demand=loop.on_demand(),
        )
        yield msgspec.to_builtins(state)

    path = (runtime.settings.namespace, PLANNER, PLANNER_PAUSE)
    await runtime.endpoint(".".join(path)).serve_endpoint(pause)


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
    return [_model(state, record, loop.paused) for state, record in await loop.explain()]


def report_text(found: ExplainReport) -> str:
    """Return the report for a terminal."""
    return "\n".join(_lines(found))


def _model(state: ModelState, record: DecisionRecord, paused: bool) -> ModelReport:
    due_s = state.due_s - time.monotonic()
    next_s = max(0.0, due_s)
    return ModelReport(now=record, next_s=next_s, paused=paused, running=tuple(state.pending))


def _lines(found: ExplainReport) -> Iterator[str]:
    if found.decisions:
        yield "last decisions:"
    elif found.running:
        yield "no decision yet"
    for record in found.decisions:
        form = "%H:%M:%S" if time.time() - record.at_s < _DAY_S else "%Y-%m-%d %H:%M:%S"
        when = time.strftime(form, time.localtime(record.at_s))
        yield f"{when}  model {record.model}, policy {record.mode}: {record.ending()}"
        yield from _pools(record)
    for model in found.models:
        now = model.now
        for record in model.running:
            yield f"running   model {record.model}, for {now.at_s - record.at_s:.0f} s"
            yield from _pools(record)
        yield f"now       model {now.model}, policy {now.mode}: {_next(model)}"
        yield from _pools(now)
    if not found.running:
        last = ": these are the decisions of the last one" if found.decisions else ""
        yield f"no planner runs in namespace {found.namespace!r}{last}"


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
