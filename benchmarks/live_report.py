"""The result of live runs as a table: medians of the rounds and their spread. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["COLUMNS", "Column", "Run", "cell", "groups", "markdown"]


@dataclass(frozen=True)
class Run:
    """One router mode under one offered load (requests/s) in one round.

    ``summary`` is the output of ``dynamo bench``, ``cpu_share`` the CPU use of this machine.
    """

    mode: str
    rate: float
    round: int
    summary: dict[str, Any]
    cpu_share: float = 0.0


@dataclass(frozen=True)
class Column:
    """One figure of a run; ``form`` formats it."""

    title: str
    value: Callable[[Run], float]
    form: str


def _spread(name: str, part: str) -> Callable[[Run], float]:
    return lambda run: float((run.summary.get(name) or {}).get(part, float("nan")))


def _plain(name: str) -> Callable[[Run], float]:
    return lambda run: float(run.summary.get(name) or 0.0)


def _failed(run: Run) -> float:
    return 1.0 - float(run.summary["completed"]) / max(float(run.summary["requests"]), 1.0)


def _good(run: Run) -> float:
    return float(run.summary.get("good_requests") or 0) / max(float(run.summary["requests"]), 1.0)


COLUMNS = (
    Column("hit rate", _plain("hit_rate"), ".1%"),
    Column("TTFT p50 ms", _spread("ttft_ms", "p50"), ",.0f"),
    Column("TTFT p99 ms", _spread("ttft_ms", "p99"), ",.0f"),
    Column("ITL p50 ms", _spread("itl_ms", "p50"), ",.1f"),
    Column("good req/s", lambda run: run.rate * _good(run), ".1f"),
    Column("good", _good, ".1%"),
    Column("output tok/s", _plain("output_tokens_per_s"), ",.0f"),
    Column("failed", _failed, ".2%"),
    Column("work imbalance", _plain("work_imbalance"), ".2f"),
    Column("CPU", lambda run: run.cpu_share, ".0%"),
)
"""``good``: the share of all requests, failed ones among them, that met the limits, and that share
of the offered rate; ``work imbalance``: the busiest worker's computed prompt tokens and output
tokens over the mean."""


def groups(runs: Iterable[Run]) -> list[tuple[float, str, list[Run]]]:
    """The rounds of every (rate, mode), rates ascending, modes in order of appearance."""
    found: dict[tuple[float, str], list[Run]] = {}
    order: dict[str, int] = {}
    for run in runs:
        order.setdefault(run.mode, len(order))
        found.setdefault((run.rate, run.mode), []).append(run)
    keys = sorted(found, key=lambda key: (key[0], order[key[1]]))
    return [(rate, mode, found[rate, mode]) for rate, mode in keys]


def cell(column: Column, rounds: Sequence[Run]) -> str:
    """The median, and the least and most where they differ from it."""
    values = [column.value(run) for run in rounds]
    middle, low, high = (
        format(value, column.form) for value in (median(values), min(values), max(values))
    )
    return middle if low == high else f"{middle} ({low}–{high})"


def markdown(runs: Sequence[Run], note: str) -> str:
    """Return the table of all runs."""
    titles = ["offered req/s", "router mode", *(column.title for column in COLUMNS)]
    lines = ["| " + " | ".join(titles) + " |", "|---:|---" + "|---:" * len(COLUMNS) + "|"]
    for rate, mode, rounds in groups(runs):
        cells = [f"{rate:g}", mode, *(cell(column, rounds) for column in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", note, ""])
