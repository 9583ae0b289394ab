"""The requests of a simulation: from a trace or a pattern, and their counters."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import cos, exp, inf, log1p, pi, sqrt

import numpy as np

from dynamo.bench.trace import parents
from dynamo.bench.trace_formats import TraceRequest
from dynamo.errors import ConfigError
from dynamo.planner.capacity.observation import Traffic

BLOCK_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""
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


def generate(
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
    # Gaps in expected requests, with mean 1 (shape * scale) and variance cv**2; each load is then
    # looked up in the integral of the rate.
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
    # The logarithm has this deviation; half its square less keeps the mean.
    sigma = sqrt(log1p(spread**2))
    return max(1, round(mean * rng.lognormvariate(-(sigma**2) / 2, sigma)))


def _positive(text: str, zero: bool = False) -> float:
    value = float(text)
    if not 0 <= value < float("inf") or not (value or zero):
        raise ValueError(text)
    return value


@dataclass(slots=True)
class TrafficCounters:
    """Sums since the start of the replay."""

    arrived: int = 0
    rejected: int = 0
    finished: int = 0
    first_tokens: int = 0
    tokens: int = 0
    isl: int = 0
    osl: int = 0
    ttft_s: float = 0.0
    token_s: float = 0.0
    request_s: float = 0.0

    def first_token(self, request: RequestState) -> None:
        """Count the first token of ``request``."""
        self.first_tokens += 1
        self.isl += request.isl
        self.ttft_s += request.ttft_s

    def finish(self, request: RequestState) -> None:
        """Count ``request`` as finished."""
        self.finished += 1
        self.osl += request.osl
        self.request_s += request.end_s - request.arrived_s

    def since(self, before: TrafficCounters, duration_s: float) -> Traffic:
        """Return the traffic between ``before`` and now, ``duration_s`` later."""
        first = self.first_tokens - before.first_tokens
        finished = self.finished - before.finished
        tokens = self.tokens - before.tokens
        return Traffic(
            duration_s=duration_s,
            arrived=self.arrived - before.arrived,
            finished=finished,
            isl=_mean(self.isl - before.isl, first),
            osl=_mean(self.osl - before.osl, finished),
            ttft_ms=_mean(1000 * (self.ttft_s - before.ttft_s), first),
            itl_ms=_mean(1000 * (self.token_s - before.token_s), tokens),
            request_s=_mean(self.request_s - before.request_s, finished),
            queued=self.arrived - self.rejected - self.first_tokens,
            inflight=self.arrived - self.rejected - self.finished,
        )


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request: it arrives at ``at_s``, or ``delay_s`` after the answer of ``parent`` if that is
    later. ``blocks`` are the ids of its prompt's full blocks; equal prefixes can be reused."""

    at_s: float
    isl: int
    osl: int
    blocks: tuple[int, ...] = ()
    parent: int | None = None
    delay_s: float = 0.0


def from_trace(requests: Sequence[TraceRequest]) -> list[ReplayRequest]:
    """Convert a trace; conversations are found as ``dynamo.bench.trace.parents`` describes.

    Requests with the same timestamp are spread evenly over one tick of the trace's clock, which is
    the smallest gap in it: 3 s in the Mooncake traces, whose timestamps are rounded.
    """
    return sorted_by_arrival(_convert(requests, _spread([r.timestamp / 1000 for r in requests])))


def _spread(times_s: Sequence[float]) -> list[float]:
    sizes = Counter(times_s)
    distinct = sorted(sizes)
    tick_s = min((after - before for before, after in pairwise(distinct)), default=0.0)
    seen: Counter[float] = Counter()
    spread = []
    for at_s in times_s:
        spread.append(at_s + tick_s * seen[at_s] / sizes[at_s])
        seen[at_s] += 1
    return spread


def sorted_by_arrival(requests: Iterable[ReplayRequest]) -> list[ReplayRequest]:
    """Sort by ``at_s``; the indices of parents follow."""
    originals = list(requests)
    order = sorted(range(len(originals)), key=lambda number: originals[number].at_s)
    new_index = {old: new for new, old in enumerate(order)}
    return [_move(originals[number], new_index) for number in order]


def _move(request: ReplayRequest, new_index: dict[int, int]) -> ReplayRequest:
    parent = None if request.parent is None else new_index[request.parent]
    return replace(request, parent=parent)


def _convert(requests: Sequence[TraceRequest], times_s: Sequence[float]) -> Iterable[ReplayRequest]:
    for request, parent, at_s in zip(requests, parents(requests), times_s, strict=True):
        isl = request.input_length or max(1, len(request.hash_ids) * BLOCK_TOKENS)
        yield ReplayRequest(
            at_s=at_s,
            isl=isl,
            osl=max(1, request.output_length),
            blocks=tuple(request.hash_ids[: (isl - 1) // BLOCK_TOKENS]),
            parent=parent,
            delay_s=request.delay / 1000,
        )


class RequestState:
    """One request in a simulation.

    ``prompt`` tokens are to be computed, ``computed`` of them have KV; ``left`` tokens are still to
    be generated when it joins a batch; it finishes with iteration ``finish_step`` of its worker.
    ``estimate`` is the prefill work that the router counted for it.
    """

    __slots__ = (
        "arrived_s",
        "blocks",
        "computed",
        "end_s",
        "estimate",
        "finish_step",
        "first_s",
        "index",
        "isl",
        "left",
        "osl",
        "preempted_s",
        "prompt",
        "rejected",
        "transferred",
    )

    def __init__(self, index: int, request: ReplayRequest, arrived_s: float) -> None:
        self.index = index
        self.arrived_s = arrived_s
        self.isl = self.prompt = request.isl
        self.osl = self.left = request.osl
        self.blocks = request.blocks
        self.computed = self.estimate = 0
        self.finish_step = -1
        self.first_s = self.end_s = self.preempted_s = -1.0
        self.rejected = self.transferred = False

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_s - self.arrived_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens; 0 for a single token."""
        return (self.end_s - self.first_s) / (self.osl - 1) if self.osl > 1 else 0.0
