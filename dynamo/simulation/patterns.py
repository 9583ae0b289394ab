"""Synthetic traffic and warps of traces: the same seed gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import cos, exp, inf, log1p, pi, sqrt

import numpy as np

from dynamo.errors import ConfigError
from dynamo.simulation.request import ReplayRequest

Rate = Callable[[float], float]
"""Time in seconds → requests per second, or factor of a trace's rate."""

_STEP_S = 1.0
_LONGEST_S = 1e6


def flat(rate: float) -> Rate:
    """The same rate all the time."""
    return lambda at_s: rate


def sine(low: float, high: float, period_s: float) -> Rate:
    """From ``low`` at the start to ``high`` after half a period, and back."""
    return lambda at_s: low + (high - low) * (1 - cos(2 * pi * at_s / period_s)) / 2


def day(low: float, high: float, period_s: float) -> Rate:
    """A day in ``period_s``: a quiet night, a steep morning, a dip at noon, an evening peak."""
    curve = (0.1, 0.05, 0.0, 0.05, 0.35, 0.8, 0.95, 0.75, 0.85, 0.9, 1.0, 0.5, 0.1)
    hours = [number * period_s / (len(curve) - 1) for number in range(len(curve))]
    return lambda at_s: low + (high - low) * float(np.interp(at_s % period_s, hours, curve))


def flash(low: float, high: float, period_s: float) -> Rate:
    """``low``, and once each period a crowd: ``high`` for a tenth of it, then a decay."""

    def rate(at_s: float) -> float:
        since_s = at_s % period_s - 0.4 * period_s
        if since_s < 0:
            return low
        fade = max(0.0, since_s / period_s - 0.1) / 0.05
        return low + (high - low) * exp(-fade)

    return rate


PATTERNS: dict[str, Callable[..., Rate]] = {
    "flat": flat,
    "sine": sine,
    "day": day,
    "flash": flash,
}
"""Curves of the rate by name: ``flat:RATE``, the others ``NAME:LOW-HIGH:PERIOD``."""


def parse_pattern(text: str, option: str) -> Rate:
    """Return the curve that ``text`` describes, such as ``sine:0.2-2.2:600``.

    Raises ConfigError that names ``option``.
    """
    name, *rest = text.split(":")
    try:
        if name == "flat":
            (rate,) = rest
            return flat(_positive(rate))
        span, period = rest
        low, high = span.split("-")
        return PATTERNS[name](_positive(low, zero=True), _positive(high), _positive(period))
    except (KeyError, ValueError):
        curves = "|".join(name for name in PATTERNS if name != "flat")
        raise ConfigError(
            f"{option} must look like flat:RATE or {curves}:LOW-HIGH:SECONDS, got {text!r}"
        ) from None


def generate(  # noqa: PLR0913 - all but the first by name
    rate: Rate,
    *,
    duration_s: float,
    isl: int,
    osl: int,
    cv: float = 1.0,
    spread: float = 0.0,
    seed: int = 0,
) -> list[ReplayRequest]:
    """Return requests at ``rate`` for ``duration_s``.

    The gaps have a gamma distribution with coefficient of variation ``cv``: 1 is Poisson, more
    comes in bursts. The lengths have mean ``isl`` and ``osl`` and, with ``spread``, a log-normal
    distribution with that coefficient of variation.
    """
    rng = random.Random(seed)
    ends, totals = _integral(rate, duration_s)
    loads: list[float] = []
    load = rng.gammavariate(1 / cv**2, cv**2)
    while load < totals[-1]:
        loads.append(load)
        load += rng.gammavariate(1 / cv**2, cv**2)
    return [
        ReplayRequest(at_s, _length(rng, isl, spread), _length(rng, osl, spread))
        for at_s in np.interp(np.asarray(loads), totals, ends).tolist()
    ]


def speed_up(requests: Sequence[ReplayRequest], factor: float) -> list[ReplayRequest]:
    """Return the trace ``factor`` times faster."""
    return [replace(request, at_s=request.at_s / factor) for request in requests]


def warp(requests: Sequence[ReplayRequest], rate: Rate) -> list[ReplayRequest]:
    """Return the trace at ``rate(t)`` times its own speed at time t."""
    last_s = max((request.at_s for request in requests), default=0.0)
    ends, totals = _integral(rate, _LONGEST_S, last_s)
    if totals[-1] < last_s:
        raise ConfigError("--warp: the rate is too low for the trace to end; raise it")
    times_s = np.interp(np.array([r.at_s for r in requests]), totals, ends).tolist()
    return [replace(r, at_s=at_s) for r, at_s in zip(requests, times_s, strict=True)]


def _integral(rate: Rate, duration_s: float, total: float = inf) -> tuple[list[float], list[float]]:
    """Return points in time, and the integral of ``rate`` up to each, until it is ``total``."""
    ends, totals = [0.0], [0.0]
    while ends[-1] < duration_s and totals[-1] < total:
        step_s = min(_STEP_S, duration_s - ends[-1])
        totals.append(totals[-1] + rate(ends[-1] + step_s / 2) * step_s)
        ends.append(ends[-1] + step_s)
    return ends, totals


def _length(rng: random.Random, mean: int, spread: float) -> int:
    if not spread:
        return mean
    sigma = sqrt(log1p(spread**2))
    return max(1, round(mean * rng.lognormvariate(-(sigma**2) / 2, sigma)))


def _positive(text: str, zero: bool = False) -> float:
    value = float(text)
    if not 0 <= value < float("inf") or not (value or zero):
        raise ValueError(text)
    return value
