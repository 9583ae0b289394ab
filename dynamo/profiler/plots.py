"""Plots of a profile. Needs matplotlib, of the extra ``planner``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo.errors import ConfigError
from dynamo.profiler.results import DecodeSample, ProfileResult

_SAME_CONTEXT = 0.15


def require_matplotlib() -> None:
    """Raise ConfigError with the remedy if matplotlib is not installed."""
    _figure_class()


def draw_profile(result: ProfileResult, directory: Path) -> list[Path]:
    """Write ``prefill.png`` and ``decode.png`` into ``directory``; return their paths."""
    drawn = {"prefill": _prefill(result), "decode": _decode(result)}
    paths = []
    for name, figure in drawn.items():
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"plots need matplotlib ({error}): pip install 'dynamo-appliance[planner]', "
            "or give --no-plots"
        ) from None
    return Figure


def _prefill(result: ProfileResult) -> Any:
    figure, (left, right) = _panels(result, "prefill, one prompt at a time")
    isl = [point.isl for point in result.prefill]
    left.plot(isl, [point.ttft_ms for point in result.prefill], marker="o")
    right.plot(isl, [point.tokens_per_s_per_gpu for point in result.prefill], marker="o")
    for axes, label in ((left, "TTFT (ms)"), (right, "prompt tokens/s per GPU")):
        axes.set_xlabel("prompt length (tokens)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)  # after plotting: it ends the automatic limits
    return figure


def _decode(result: ProfileResult) -> Any:
    figure, (left, right) = _panels(result, "decode, by context length")
    for context, points in _by_context(result.decode):
        usage = [point.kv_usage for point in points]
        label = f"{context:.0f} tokens"
        left.plot(usage, [point.itl_ms for point in points], marker="o", label=label)
        right.plot(usage, [p.tokens_per_s_per_gpu for p in points], marker="o", label=label)
    for axes, label in ((left, "ITL (ms)"), (right, "output tokens/s per GPU")):
        axes.set_xlabel("KV cache in use")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)  # after plotting: it ends the automatic limits
        axes.legend()
    return figure


def _panels(result: ProfileResult, what: str) -> tuple[Any, Any]:
    figure = _figure_class()(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(f"{result.model} ({', '.join(result.services)}): {what}")
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _by_context(points: Sequence[DecodeSample]) -> list[tuple[float, list[DecodeSample]]]:
    """Group points whose context lengths are nearly the same, each group by KV usage."""
    groups: list[tuple[float, list[DecodeSample]]] = []
    for point in sorted(points, key=lambda point: point.context_tokens):
        if groups and point.context_tokens <= groups[-1][0] * (1 + _SAME_CONTEXT):
            groups[-1][1].append(point)
        else:
            groups.append((point.context_tokens, [point]))
    return [(context, sorted(group, key=lambda p: p.kv_usage)) for context, group in groups]
