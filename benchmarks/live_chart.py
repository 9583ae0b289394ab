"""A chart of live runs as SVG, two panels over the offered load. Pure; no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from live_report import COLUMNS, Column, Run, groups

__all__ = ["chart"]

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 44
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#444444")
_STYLE = "font-family:sans-serif;font-size:11px;fill:#555"
Scale = Callable[[float], float]


def chart(runs: Sequence[Run]) -> str:
    """TTFT p99 (logarithmic) and the share of good requests: medians, whiskers least to most."""
    by_title = {column.title: column for column in COLUMNS}
    good = replace(by_title["good"], title="requests within the limits")
    modes = list(dict.fromkeys(run.mode for run in runs))
    colours = {mode: COLOURS[at % len(COLOURS)] for at, mode in enumerate(modes)}
    height = HEIGHT + 18 * math.ceil(len(modes) / 4) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{height}" '
        f'viewBox="0 0 {2 * WIDTH} {height}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_panel(runs, by_title["TTFT p99 ms"], colours, 0, logarithmic=True),
        *_panel(runs, good, colours, WIDTH, logarithmic=False),
    ]
    for at, mode in enumerate(modes):
        x, y = LEFT + at % 4 * 210, HEIGHT + 14 + 18 * (at // 4)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colours[mode]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}" style="{_STYLE}">{mode}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    runs: Sequence[Run], column: Column, colours: dict[str, str], left: int, *, logarithmic: bool
) -> list[str]:
    values = [value for run in runs if not math.isnan(value := column.value(run))]
    rates = sorted({run.rate for run in runs})
    low, high, ticks = _log_axis(values) if logarithmic else (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1.0])
    place: Callable[[float], float] = math.log if logarithmic else float

    def x(rate: float, aside: float = 0.0) -> float:
        spread = (rates[-1] - rates[0]) or 1.0
        room = WIDTH - LEFT - RIGHT - 40
        return left + LEFT + 20 + room * (rate - rates[0]) / spread + aside

    def y(value: float) -> float:
        share = (place(max(value, low)) - place(low)) / (place(high) - place(low))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [f'<text x="{left + LEFT}" y="18" style="{_STYLE}">{column.title}</text>']
    for tick in ticks:
        parts.append(
            f'<path d="M{left + LEFT} {y(tick):.1f}H{left + WIDTH - RIGHT}" stroke="#ddd"/>'
            f'<text x="{left + LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" '
            f'style="{_STYLE}">{format(tick, column.form)}</text>'
        )
    for rate in rates:
        parts.append(
            f'<text x="{x(rate):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" '
            f'style="{_STYLE}">{rate:g} req/s</text>'
        )
    for at, (mode, colour) in enumerate(colours.items()):
        aside = 3 * (at - (len(colours) - 1) / 2)  # keep whiskers apart
        parts += _line(runs, column, mode, colour, partial(x, aside=aside), y)
    return parts


def _line(
    runs: Sequence[Run], column: Column, mode: str, colour: str, x: Scale, y: Scale
) -> list[str]:
    points, parts = [], []
    for rate, one, rounds in groups(runs):
        values = [value for run in rounds if not math.isnan(value := column.value(run))]
        if one != mode or not values:
            continue
        at, middle = x(rate), y(median(values))
        points.append(f"{at:.1f} {middle:.1f}")
        parts.append(
            f'<path d="M{at:.1f} {y(min(values)):.1f}V{y(max(values)):.1f}" stroke="{colour}"/>'
            f'<circle cx="{at:.1f}" cy="{middle:.1f}" r="3" fill="{colour}"/>'
        )
    if points:
        parts.append(
            f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
    return parts


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return ticks at 1, 2 or 5 times a power of ten that enclose the values."""
    least, most = max(min(values, default=1.0), 1e-3), max(max(values, default=10.0), 1e-2)
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= least)
    high = min((tick for tick in ticks if tick >= most and tick > low), default=10 * low)
    return low, high, [tick for tick in ticks if low <= tick <= high]
