"""What ``dynamo planner explain`` shows: the last decisions, and what would be decided now."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from dynamo.planner.live.loop import ScalingLoop
from dynamo.planner.live.model_state import ModelState
from dynamo.planner.reports.decisions import DecisionRecord
from dynamo.protocols.control import PLANNER

__all__ = ["EXPLAIN", "ExplainReport", "ModelReport", "model_reports", "report_text"]

_DAY_S = 86_400.0
EXPLAIN = (PLANNER, "explain")
"""Component and endpoint of a running planner, in its namespace."""


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
