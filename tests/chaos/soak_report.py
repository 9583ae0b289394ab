"""What a soak is asked for, and what it found: verdicts, trends, the same for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_run import SUCCESS_RATE
from fault_schedule import LASTING_FAULTS
from serving import ROOT
from soak_judge import Judge
from soak_samples import Sample
from soak_trend import Trend, trend
from validator import Violation

__all__ = ["SoakOptions", "SoakReport", "as_markdown", "trends_of"]

SERIES = (
    *("rss", "pss", "anonymous", "fds", "threads", "tasks", "blocks", "series", "files", "bytes"),
)
TOLERANCE = {"rss": 1024, "pss": 1024, "anonymous": 1024, "blocks": 1000, "bytes": 1 << 20}
"""Growth of this much over a whole run counts as none: KiB, blocks of the allocator, bytes."""


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to run. ``hours`` are wall clock."""

    seed: int
    hours: float = 1.0
    speed: float = 10.0
    faults_per_minute: float = 12.0
    sample_s: float = 10.0
    warm_up_s: float = 300.0
    block_tokens: int = 32
    output_scale: float = 0.25
    trace: Path = ROOT / "benchmarks/traces/sample.jsonl"
    faults: Mapping[str, int] = field(default_factory=lambda: LASTING_FAULTS)


@dataclass
class SoakReport:
    """What came of it."""

    options: SoakOptions
    judge: Judge = field(default_factory=Judge)
    problems: list[Violation] = field(default_factory=list)
    trends: dict[str, dict[str, Trend]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    new_series: dict[str, list[str]] = field(default_factory=dict)
    tracebacks: dict[str, int] = field(default_factory=dict)

    @property
    def violations(self) -> list[Violation]:
        """Every broken promise, and every series that grows.

        RSS and PSS do not count: they change with what other processes have mapped.
        """
        verdict = self.judge.verdict
        found = [*verdict.violations, *self.problems]
        if verdict.success_rate < SUCCESS_RATE:
            rate = f"{verdict.success_rate:.3%} of {verdict.counted}"
            found.append(Violation("deployment", "success rate", rate))
        for role, names in self.trends.items():
            for name, one in names.items():
                if one.verdict == "grows" and name not in ("rss", "pss"):
                    detail = f"{name} by {one.slope:.4g} an hour ({one.low:.4g} to {one.high:.4g})"
                    found.append(Violation(role, "grows", detail))
        return found

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        verdict = self.judge.verdict
        return {
            **{
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(self.options).items()
                if name != "faults"
            },
            **self.facts,
            "requests": verdict.requests,
            "refused": verdict.refused,
            "complete": verdict.complete,
            "cancelled": verdict.cancelled,
            "no_worker": verdict.no_worker,
            "workers_lost": verdict.workers_lost,
            "counted": verdict.counted,
            "succeeded": verdict.succeeded,
            "success_rate": round(verdict.success_rate, 6),
            "tokens": verdict.tokens,
            "longest_gap_s": round(verdict.longest_gap_s, 2),
            "failures": dict(verdict.failures),
            "faults": sum(self.judge.faults.values()),
            "faults_by_kind": dict(sorted(self.judge.faults.items())),
            "tracebacks": self.tracebacks,
            "new_series": self.new_series,
            "trends": {
                role: {name: one._asdict() for name, one in names.items()}
                for role, names in self.trends.items()
            },
            "violations": [violation._asdict() for violation in self.violations],
        }


def trends_of(samples: Sequence[Sample], warm_up_s: float) -> dict[str, Trend]:
    """Return the trend of each series that the process has."""
    found = {}
    for name in SERIES:
        points = [
            (one.at_s, float(value)) for one in samples if (value := getattr(one, name)) is not None
        ]
        if points:
            found[name] = trend(points, warm_up_s, float(TOLERANCE.get(name, 0)))
    return found


def as_markdown(report: SoakReport) -> str:
    """The report for people."""
    plain = report.as_json()
    lines = ["# Soak", "", "| | |", "|---|---|"]
    lines += [
        f"| {key} | {value} |"
        for key, value in plain.items()
        if key not in ("trends", "violations", "new_series", "cpu_s")
    ]
    lines += ["", "## Trends an hour, with the 99 % interval", ""]
    lines += ["| process | series | median | slope | low | high | second half | verdict |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for role, names in report.trends.items():
        for name, one in names.items():
            lines.append(
                f"| {role} | {name} | {one.level:.6g} | {one.slope:.4g} | {one.low:.4g} | "
                f"{one.high:.4g} | {one.late_slope:.4g} ({one.late_low:.4g} to "
                f"{one.late_high:.4g}) | {one.verdict} |"
            )
    lines += ["", "## CPU seconds", "", json.dumps(plain.get("cpu_s", {}))]
    lines += ["", "## New metric series since the warm-up", ""]
    lines += [f"- {role}: {name}" for role, names in report.new_series.items() for name in names]
    lines += ["", "## Violations", ""]
    lines += [f"- {one.request}: {one.rule}: {one.detail}" for one in report.violations]
    return "\n".join(lines) + "\n"
