"""Reads what the planner of a deployment writes about itself, and sums it up."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from dynamo.protocols.status import PlannerReport, PlannerSummary
from dynamo.runtime.discovery.layout import BadRecord, read_file
from dynamo.serve.state.process_table import same_process

PLANNER_FILE = "planner.json"
"""Name of the file in the run directory of a deployment."""

_decode = msgspec.json.Decoder(PlannerReport).decode


def read_planner(run_directory: Path) -> PlannerReport | None:
    """Return the report of the planner that runs; None without one, or if it cannot be read."""
    try:
        report = _decode(read_file(run_directory / PLANNER_FILE) or b"")
    except (BadRecord, OSError, msgspec.MsgspecError):
        return None
    return report if same_process(report.pid, report.start_ticks) else None


def planner_summary(report: PlannerReport, now_s: float | None = None) -> PlannerSummary:
    """Return the report as ``top`` shows it; ``now_s`` is Unix time."""
    now_s = time.time() if now_s is None else now_s
    due = [one.next_at_s for one in report.models if one.next_at_s is not None]
    waits = report.state == "paused" or not due
    # One that is past is being decided, or was missed: the next one that people can wait for.
    coming = [at_s for at_s in due if at_s > now_s]
    return PlannerSummary(
        state=report.state,
        mode=report.mode,
        next_s=None if waits else min(coming, default=now_s) - now_s,
        decisions=tuple(f"{one.model}: {one.text}" for one in report.models),
    )
