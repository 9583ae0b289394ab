"""What ``dynamo planner explain`` shows: the last decisions, and what would be decided now."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from dynamo.planner.decisions import DecisionRecord
from dynamo.planner.loop import ScalingLoop
from dynamo.planner.model_state import ModelState

__all__ = ["EXPLAIN", "ExplainReport", "ModelReport", "model_reports", "report_text"]

EXPLAIN = ("planner", "explain")
"""Component and endpoint of a running planner, in its namespace."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner would decide now for one model.

    The next decision is due in ``next_s`` seconds, unless it waits for the ``running`` ones.
    """

    now: DecisionRecord
    next_s: float
    running: tuple[DecisionRecord, ...] = ()


class ExplainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last ``decisions``, the oldest first, and the ``models`` of the running planner, if any.

    ``running``: a planner answered.
    """

    running: bool
    models: tuple[ModelReport, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()


async def model_reports(loop: ScalingLoop) -> list[ModelReport]:
    """Ask the policies of ``loop`` what they would decide now, without effect on them."""
    return [_model(state, record) for state, record in await loop.explain()]


def report_text(found: ExplainReport) -> str:
    """Return the report for a terminal."""
    return "\n".join(_lines(found))


def _model(state: ModelState, record: DecisionRecord) -> ModelReport:
    due_s = state.due_s - time.monotonic()
    return ModelReport(now=record, next_s=max(0.0, due_s), running=tuple(state.pending))


def _lines(found: ExplainReport) -> Iterator[str]:
    if found.decisions:
        yield "last decisions:"
    else:
        yield "no decision yet"
    for record in found.decisions:
        yield f"  {time.strftime('%H:%M:%S', time.localtime(record.at_s))}  {record.text()}"
    for model in found.models:
        for record in model.running:
            yield f"running: {record.text()}"
        pools = "; ".join(pool.text() for pool in model.now.pools) or "no pool to change"
        when = "when that is done" if model.running else f"in {model.next_s:.0f} s"
        yield f"now, model {model.now.model}: {pools} (next decision {when})"
    if not found.running:
        yield "no planner runs: these are the decisions of the last one"
