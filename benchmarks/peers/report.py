"""Figures as a table on the terminal, as Markdown for a README, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from results import Figure
from rich.console import Console
from rich.table import Table

_COLUMNS = ("figure", "unit", "ours", "theirs", "ratio", "min-max", "bar", "holds")


def print_table(console: Console, figures: Sequence[Figure]) -> None:
    """Print one line for each figure, then the notes."""
    table = Table(title="ours ÷ theirs, medians over rounds", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "figure" else "right")
    colours = {"yes": "green", "NO": "red", "": ""}
    for figure in figures:
        cells = _cells(figure)
        table.add_row(*cells, style=colours[cells[-1]])
    console.print(table)
    for note in _notes(figures):
        console.print(f"  {note}", highlight=False)


def markdown(figures: Sequence[Figure], facts: dict[str, Any]) -> str:
    """Return a section for a README: date, machine, versions, and the table."""
    ours = facts["ours"]
    lines = [
        f"Measured {facts['date']} by `benchmarks/peers/run` on {facts['cpu']}, "
        f"{facts['cores']} cores, Linux {facts['kernel']}: dynamo-appliance "
        f"{ours.get('dynamo-appliance', '?')} ({facts['revision']}, Python {ours['python']}, "
        f"uvloop {ours.get('uvloop')}) against {_peers(facts)}. All serve the same "
        f"model directory, in turn, with the same requests; {facts['rounds']} rounds, medians; all "
        f"tokens asked for were delivered by all unless noted. Other processes used "
        f"{facts['others']:.0%} of the machine.",
        "",
        "| figure | ours | theirs | ratio | min-max | bar | holds |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for figure in figures:
        title, unit, mine, yours, *rest = _cells(figure)
        cells = [title, f"{mine} {unit}", f"{yours} {unit}" if yours else "", *rest]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {note}" for note in _notes(figures)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def _peers(facts: dict[str, Any]) -> str:
    theirs = facts["theirs"]
    dynamo = (
        f"ai-dynamo {theirs.get('ai-dynamo')} (ai-dynamo-runtime "
        f"{theirs.get('ai-dynamo-runtime')}, log level {facts['their_log']}), each with two mock "
        "workers"
    )
    named = [dynamo] if "ai-dynamo" in theirs else []
    return "; ".join(named + facts["core_peers"])


def as_json(figures: Sequence[Figure], facts: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements."""
    return {"facts": facts, "figures": [figure.as_dict() for figure in figures]}


def others_share(figures: Sequence[Figure]) -> float:
    """Share of the machine that processes outside the comparison used, median over samples."""
    shares = [
        sample["others_cpu_share"]
        for figure in figures
        for sample in figure.samples
        if "others_cpu_share" in sample
    ]
    return median(shares) if shares else 0.0


def _cells(figure: Figure) -> list[str]:
    spread = figure.ratios if figure.theirs else figure.ours
    holds = {True: "yes", False: "NO", None: ""}[figure.holds]
    limit = "" if figure.limit is None else f"≤ {figure.limit:g}"
    if figure.limit is not None and not figure.theirs:
        limit += f" {figure.unit}"
    return [
        figure.title,
        figure.unit,
        _short(median(figure.ours)) if figure.ours else "–",
        _short(median(figure.theirs)) if figure.theirs else "",
        f"{median(figure.ratios):.2f}" if figure.ratios else "",
        f"{_short(min(spread))}-{_short(max(spread))}" if len(spread) > 1 else "",
        limit,
        holds,
    ]


def _notes(figures: Sequence[Figure]) -> list[str]:
    return [f"{figure.key}: {note}" for figure in figures for note in figure.notes]


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
