"""Capacity of a worker that is learned, without a profile. Pure.

Two lines, each through the last intervals:

    ttft = a * (prompt tokens queued on a worker + isl) + b
    itl  = a * (tokens of the running sequences of a worker) + b

A line needs a positive slope; until there is one, the capacity is unknown. The slope is the median
of the slopes between all pairs (Theil-Sen), so a few odd intervals do not bend it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dynamo.planner.capacity.observation import Observation, Pool, Pull

MIN_POINTS = 5
_WINDOW = 50
_EXTRAPOLATION = 2.0
"""A concurrency above this many times the highest observed one is not promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """An operating point: output tokens per second and GPU, the ITL there, and the KV usage.

    ``kv_usage`` is None where the model does not have it.
    """

    tokens_per_s: float
    itl_ms: float
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """``slope * x + offset``."""

    slope: float
    offset: float


def fit_line(points: Iterable[tuple[float, float]]) -> Line | None:
    """Return the Theil-Sen line; None from too few points or without a positive slope."""
    x, y = np.array(list(points), dtype=float).reshape(-1, 2).T
    if len(x) < MIN_POINTS:
        return None
    # All pairs: 1,225 of a full window.
    first, second = np.triu_indices(len(x), 1)
    distance = x[second] - x[first]
    apart = distance != 0
    if not apart.any():
        return None
    slope = float(np.median((y[second] - y[first])[apart] / distance[apart]))
    if slope <= 0:
        return None
    return Line(slope, float(np.median(y - slope * x)))


@dataclass(frozen=True, slots=True)
class LearnedPrefill:
    """Prefill at ``line`` (ms over prompt tokens) on workers of ``gpus`` GPUs."""

    line: Line
    gpus: float

    def ttft_ms(self, isl: float) -> float:
        """Return the time to first token of a prompt that does not wait."""
        return self.line.slope * isl + max(self.line.offset, 0.0)

    def tokens_per_s(self, isl: float) -> float:
        """Return the prompt tokens per second and GPU."""
        return 1000.0 * max(isl, 1.0) / self.ttft_ms(max(isl, 1.0)) / self.gpus


@dataclass(frozen=True, slots=True)
class LearnedDecode:
    """Decode at ``line`` (ms over tokens of running sequences), observed up to ``most`` tokens."""

    line: Line
    most: float
    gpus: float

    def itl_ms(self, concurrency: float, context: float) -> float:
        """Return the ITL with ``concurrency`` sequences of ``context`` tokens."""
        return self.line.slope * concurrency * context + max(self.line.offset, 0.0)

    def best(self, itl_ms: float, context: float) -> DecodePoint:
        """Return the highest concurrency within ``itl_ms``; at least one sequence."""
        tokens = (itl_ms - max(self.line.offset, 0.0)) / self.line.slope
        concurrency = max(min(tokens, _EXTRAPOLATION * self.most) / max(context, 1.0), 1.0)
        itl = self.itl_ms(concurrency, context)
        return DecodePoint(tokens_per_s=1000.0 * concurrency / itl / self.gpus, itl_ms=itl)


class LearnedCapacity:
    """Learns both lines from what :meth:`observe` receives."""

    def __init__(self) -> None:
        self.prefill: LearnedPrefill | None = None
        self.decode: LearnedDecode | None = None
        self._prefill_points: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._decode_points: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def observe(self, seen: Observation) -> None:
        """Take one interval."""
        traffic, decode = seen.traffic, seen.decode
        if traffic.isl is None or not decode.ready:
            return
        queued = _queued_prompts(seen.pulls)
        if traffic.ttft_ms is not None and queued is not None:
            # The prompt itself, and those that wait before it.
            self._prefill_points.append(((1.0 + queued) * traffic.isl, traffic.ttft_ms))
            line = fit_line(self._prefill_points)
            pool = seen.prefill or decode
            self.prefill = LearnedPrefill(line, _gpus(pool)) if line else self.prefill
        if traffic.itl_ms is not None and traffic.request_s is not None:
            # A running sequence has half of its output on average.
            context = traffic.isl + (traffic.osl or 0.0) / 2
            rate = traffic.finished / traffic.duration_s / decode.ready
            # Little's law: rate times duration is the number of sequences that run on a worker.
            self._decode_points.append((rate * traffic.request_s * context, traffic.itl_ms))
            line = fit_line(self._decode_points)
            most = max(tokens for tokens, _ in self._decode_points)
            self.decode = LearnedDecode(line, most, _gpus(decode)) if line else self.decode


def _gpus(pool: Pool) -> float:
    return pool.gpus_per_worker or 1.0


def _queued_prompts(pulls: Sequence[Pull]) -> float | None:
    """Return the mean number of requests that wait for their prefill, per worker."""
    depths = [pull.prefill_queue for pull in pulls if pull.prefill_queue is not None]
    depths = [depth for depth in depths if math.isfinite(depth)]
    return sum(depths) / len(depths) if depths else None
