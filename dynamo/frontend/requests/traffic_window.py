"""Rates and quantiles of a model: counters that are read once a second, and the recent requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dynamo.frontend.requests.metrics import ModelMetrics
from dynamo.frontend.requests.recent import EndedRequest, RecentRequests

__all__ = ["ModelTraffic", "TrafficWindows"]

_PERIOD_S = 1.0
_RATE_SAMPLES = 11
_RECENT_S = 60.0


class ModelTraffic(NamedTuple):
    """One model: rates over the last ``rate_s`` (10) seconds; times to the first token and the
    cached share of prompts of the requests that ended in the last minute."""

    rate_s: float = 0.0
    output_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    hit_rate: float | None = None
    idle_s: float | None = None


class _Counts(NamedTuple):
    at_s: float
    output_tokens: float
    ended: int


class TrafficWindows:
    """Reads the counters of all ``models()`` once a second; each costs some microseconds.

    ``open_tokens()`` has the tokens that requests in progress have so far, by model: the counters
    have those of ended requests alone.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ModelMetrics]],
        open_tokens: Callable[[], Mapping[str, int]],
        recent: RecentRequests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._open_tokens = open_tokens
        self._recent = recent
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
            window = self._window(metrics, now_s)
            window.add(window.read(now_s, tokens.get(metrics.name, 0)))

    def traffic(self) -> dict[str, ModelTraffic]:
        """Return the figures of every model now. O(recent requests + requests in progress)."""
        now_s, tokens = self._clock(), self._open_tokens()
        ended: dict[str, list[EndedRequest]] = {}
        for one in map(EndedRequest._make, reversed(self._recent.records)):
            if now_s - one.ended_s > _RECENT_S:
                break
            ended.setdefault(one.model, []).append(one)
        for metrics in self._models():
            self._window(metrics, now_s)
        return {
            name: window.traffic(window.read(now_s, tokens.get(name, 0)), ended.get(name, ()))
            for name, window in self._windows.items()
        }

    def _window(self, metrics: ModelMetrics, now_s: float) -> _Window:
        found = self._windows.get(metrics.name)
        if found is None:
            # The model is new since the last reading, when its counters were 0.
            found = self._windows[metrics.name] = _Window(metrics, now_s - _PERIOD_S)
        return found


class _Window:
    def __init__(self, metrics: ModelMetrics, since_s: float) -> None:
        self._metrics = metrics
        self._counts = deque([_Counts(since_s, 0.0, 0)], maxlen=_RATE_SAMPLES)
        self._active_s: float | None = None
        self._ended = 0

    def read(self, now_s: float, open_tokens: int) -> _Counts:
        """Return the counters; note when the model was last in use."""
        metrics = self._metrics
        ended = sum(metrics.duration.counts)
        if metrics.active.value or ended != self._ended:
            self._ended, self._active_s = ended, now_s
        return _Counts(now_s, metrics.output_tokens.value + open_tokens, ended)

    def add(self, counts: _Counts) -> None:
        """Keep the counters of one second."""
        self._counts.append(counts)

    def traffic(self, now: _Counts, ended: Sequence[EndedRequest]) -> ModelTraffic:
        """Return the figures between the oldest counters and ``now``, and those of ``ended``."""
        since = self._counts[0]
        rate_s = now.at_s - since.at_s
        tokens = max(0.0, now.output_tokens - since.output_tokens)
        ttfts = sorted(one.ttft_s for one in ended if one.ttft_s is not None)
        return ModelTraffic(
            rate_s=rate_s,
            output_tokens_per_s=tokens / rate_s,
            requests_per_s=(now.ended - since.ended) / rate_s,
            ttft_p50_s=_quantile(ttfts, 0.5),
            ttft_p99_s=_quantile(ttfts, 0.99),
            hit_rate=_hit_rate(ended),
            idle_s=None if self._active_s is None else now.at_s - self._active_s,
        )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[round(share * (len(ordered) - 1))] if ordered else None


def _hit_rate(ended: Sequence[EndedRequest]) -> float | None:
    """Return the cached share of the prompts; None if no engine has reported it."""
    prompt_tokens = cached_tokens = 0
    for one in ended:
        if one.usage is not None and one.usage.cached_tokens is not None:
            prompt_tokens += one.prompt_tokens
            cached_tokens += one.usage.cached_tokens
    return cached_tokens / prompt_tokens if prompt_tokens else None
