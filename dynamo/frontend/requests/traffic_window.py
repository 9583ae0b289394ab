"""Rates and quantiles of the last minute, by model, from counters that are read once a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from dynamo.frontend.requests.metrics import ModelMetrics

__all__ = ["ModelTraffic", "TrafficWindows"]

_PERIOD_S = 1.0
_RATE_S = 10.0
_WINDOW_S = 60.0


class ModelTraffic(NamedTuple):
    """One model: rates over the last ``rate_s`` seconds, the rest over the last minute."""

    rate_s: float = 0.0
    output_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    hit_rate: float | None = None
    idle_s: float | None = None


class _Counts(NamedTuple):
    """The counters of a model at ``at_s``; ``cached_tokens`` of the ``prompt_tokens``."""

    at_s: float
    output_tokens: float
    ended: int
    prompt_tokens: float
    cached_tokens: float
    cached_reports: int


class TrafficWindows:
    """Reads the counters of all ``models()`` once a second; each costs some microseconds.

    ``open_tokens()`` has the tokens that requests in progress have so far: the counters have those
    of ended requests alone.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ModelMetrics]],
        open_tokens: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._open_tokens = open_tokens
        self._clock = clock
        self._windows: dict[str, _Window] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running loop."""
        self.sample()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self.start)

    def stop(self) -> None:
        """Stop reading."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sample(self) -> None:
        """Read the counters now."""
        now_s, tokens = self._clock(), self._open_tokens()
        for metrics in self._models():
            window = self._windows.get(metrics.name)
            if window is None:
                window = self._windows[metrics.name] = _Window(metrics)
            window.add(now_s, tokens.get(metrics.name, 0))

    def of(self, model: str) -> ModelTraffic:
        """Return the figures of ``model`` now."""
        window = self._windows.get(model)
        if window is None:
            return ModelTraffic()
        return window.traffic(self._clock(), self._open_tokens().get(model, 0))


class _Window:
    def __init__(self, metrics: ModelMetrics) -> None:
        self._metrics = metrics
        self._counts: deque[_Counts] = deque(maxlen=round(_WINDOW_S / _PERIOD_S) + 1)
        self._active_s: float | None = None
        self._ended = 0

    def add(self, now_s: float, open_tokens: int) -> None:
        """Add the counters at ``now_s``."""
        counts = self._read(now_s, open_tokens)
        self._counts.append(counts)
        self._note_activity(counts)

    def traffic(self, now_s: float, open_tokens: int) -> ModelTraffic:
        """Return the figures between the oldest counters and now."""
        now = self._read(now_s, open_tokens)
        self._note_activity(now)
        oldest = self._counts[0]
        since = next((one for one in self._counts if now_s - one.at_s <= _RATE_S + 0.5), now)
        rate_s = now_s - since.at_s
        tokens = max(0.0, now.output_tokens - since.output_tokens)
        p50_s, p99_s = self._quantiles(now_s)
        return ModelTraffic(
            rate_s=rate_s,
            output_tokens_per_s=tokens / rate_s if rate_s else 0.0,
            requests_per_s=(now.ended - since.ended) / rate_s if rate_s else 0.0,
            ttft_p50_s=p50_s,
            ttft_p99_s=p99_s,
            hit_rate=_hit_rate(oldest, now),
            idle_s=None if self._active_s is None else now_s - self._active_s,
        )

    def _read(self, now_s: float, open_tokens: int) -> _Counts:
        metrics = self._metrics
        return _Counts(
            now_s,
            metrics.output_tokens.value + open_tokens,
            sum(metrics.duration.counts),
            metrics.isl.total,
            metrics.cached.total,
            sum(metrics.cached.counts),
        )

    def _note_activity(self, counts: _Counts) -> None:
        if self._metrics.active.value or counts.ended != self._ended:
            self._ended, self._active_s = counts.ended, counts.at_s

    def _quantiles(self, now_s: float) -> tuple[float | None, float | None]:
        recent = self._metrics.recent_ttfts
        found = sorted(ttft_s for at_s, ttft_s in recent if now_s - at_s <= _WINDOW_S)
        if not found:
            return None, None
        last = len(found) - 1
        return found[round(0.5 * last)], found[round(0.99 * last)]


def _hit_rate(before: _Counts, now: _Counts) -> float | None:
    """Return the cached share of the prompts; None if no engine has reported it."""
    prompt_tokens = now.prompt_tokens - before.prompt_tokens
    if now.cached_reports == before.cached_reports or prompt_tokens <= 0:
        return None
    return min(1.0, (now.cached_tokens - before.cached_tokens) / prompt_tokens)
