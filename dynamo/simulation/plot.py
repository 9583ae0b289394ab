"""A plot of a comparison: load, workers and attainment over time. Needs matplotlib."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from dynamo.errors import ConfigError
from dynamo.simulation.compare import ORACLE, Comparison
from dynamo.simulation.result import ReplayResult


def require_matplotlib() -> None:
    """Raise ConfigError with the remedy if matplotlib is not installed."""
    _figure_class()


def draw_comparison(found: Comparison, path: Path) -> None:
    """Write a PNG of the policies, beside the cheapest fixed deployment that is not worse than the
    best of them. Raises ConfigError if ``path`` can't be written."""
    figure = _figure_class()(figsize=(11, 9), layout="constrained")
    load, workers, attainment = figure.subplots(3, sharex=True)
    _draw_load(load, found.results[0])
    for result in _shown(found):
        style = "--" if result.policy.startswith(("fixed", ORACLE)) else "-"
        minutes = [sample.at_s / 60 for sample in result.samples]
        held = [s.ready + s.starting + s.draining + s.prefill_ready for s in result.samples]
        label = f"{result.policy}: {result.gpu_hours:.2f} GPU-hours, {result.attainment:.1%}"
        workers.step(minutes, held, style, where="post", label=label)
        known = [(at + 0.5, 100 * s) for at, s in enumerate(result.minutes) if s is not None]
        attainment.plot([at for at, _ in known], [share for _, share in known], style)
    workers.set_ylabel("workers that hold GPUs")
    workers.legend(fontsize="small")
    attainment.set_ylabel("requests within targets (%)")
    attainment.set_xlabel("time (min)")
    for axes in (load, workers, attainment):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ConfigError(f"--plot: can't write {path}: {error.strerror}") from None


def _draw_load(axes: Any, result: ReplayResult) -> None:
    pairs = list(pairwise(result.samples))
    rates = [(b.arrived - a.arrived) / (b.at_s - a.at_s) for a, b in pairs]
    axes.plot([a.at_s / 60 for a, _ in pairs], rates, color="gray")
    axes.set_ylabel("arrivals (1/s)")


def _shown(found: Comparison) -> list[ReplayResult]:
    shown = list(found.results)
    if found.baseline is None:
        return shown
    best = max(result.attainment for result in shown)
    enough = [run for run in found.baseline.fixed if run.attainment >= best]
    fixed = enough[0] if enough else found.baseline.fixed[-1]
    if all(result.policy != fixed.policy for result in shown):
        shown.append(fixed)
    return shown


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}): pip install 'dynamo-appliance[planner]'"
        ) from None
    return Figure
