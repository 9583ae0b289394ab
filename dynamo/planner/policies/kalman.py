"""Forecasts of a rate: a Kalman filter of level and trend, and what followed similar moments. Pure.

The model of the filter, in units of the noise of an observation:

    value  = level + noise
    level' = level + damping * slope + sqrt(q) * noise
    slope' = damping * slope + sqrt(s) * noise

A bank of filters with different ``q``, ``s`` and ``damping`` runs side by side; the one whose
one-step errors are the most likely makes the forecast. Old errors fade, so the choice follows a
change of the traffic. This is the local linear trend of statsmodels' UnobservedComponents, without
an optimiser: one value costs some microseconds, and nothing has to converge.

A trend alone does not see a rise before it begins. So the forecast also looks up the moments of the
past at which the rate was at a similar level and had risen as much, and takes what came after them:
a daily curve, a cron job or any other pattern is used once it has been seen, without a period to
set. The more similar moments there are, the more they count.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.planner.capacity.season import Usual, blended

_LEVEL_NOISE = (1e-3, 1e-2, 1e-1, 1.0)
_SLOPE_NOISE = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_DAMPING = (1.0, 0.98, 0.9)
_BANK = np.array(list(itertools.product(_LEVEL_NOISE, _SLOPE_NOISE, _DAMPING)))
_DIFFUSE = 1e4
"""Variance of the slope before anything is known of it."""
_UNSCORED = 2
"""First values, which every filter predicts badly."""
_RateArray: TypeAlias = NDArray[np.float64]
_HISTORY = 8192
_CAUTION = 0.5
"""Standard deviations of the trend that are added to it: the longer a start-up and the more
volatile the rate, the more."""
_MOST_GROWTH = 2.0
"""A trend is followed up to this multiple of the rate."""
_CLIMB, _PEAKS, _ABOVE_PEAK = 8, 480, 1.2
"""A climb of so many intervals that is still below so much of an earlier peak of two hours is not
followed further than that: most waves are like the last one."""
_FEW_REQUESTS = 2.0
"""Requests in an interval below which a growth in proportion means nothing."""
_RECENT, _SURGE = 2, 5.0
"""A surge: so many standard deviations above the forecast in the last two counts."""
_SHORT, _LONG = 4, 12
"""Intervals over which the rise is compared."""
_SIMILAR = 0.24
"""Difference in level, as a share of the mean rate, at which a moment counts 60 %."""
_SAME_MOMENT = 6.0
"""Neighbouring intervals are one event: so many of them count as one similar moment."""


class RateForecast:
    """Collects arrivals in intervals of ``interval_s``; :meth:`path` is the rate from now on."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._filter = TrendFilter()
        self._levels: deque[float] = deque(maxlen=_HISTORY)
        self._arrived = 0
        self._duration_s = 0.0
        self._path: _RateArray | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    @property
    def known(self) -> bool:
        """Whether there is a forecast: after two intervals."""
        return len(self._levels) >= 2

    @property
    def rate(self) -> float:
        """The requests per second now, smoothed."""
        return self._levels[-1] if self._levels else 0.0

    def add(self, arrived: int, duration_s: float) -> None:
        """Count ``arrived`` requests of the last ``duration_s``."""
        self._recent.append((arrived, duration_s))
        self._arrived += arrived
        self._duration_s += duration_s
        # A sum of durations may miss the interval by a rounding.
        if self._duration_s >= self.interval_s - 1e-6:
            self._filter.add(self._arrived / self._duration_s)
            self._levels.append(max(self._filter.forecast(1).level, 0.0))
            self._arrived, self._duration_s, self._path = 0, 0.0, None

    def path(self, horizon_s: float, usual: Usual | None = None) -> _RateArray:
        """Return the rates after 1, 2, … intervals, up to ``horizon_s``. O(history).

        What is ``usual`` at that time counts, too.
        """
        steps = math.ceil(horizon_s / self.interval_s) + 1
        if self._path is None or len(self._path) < steps:
            self._path = self._with_history(self._trend(steps))
        rates = self._path[:steps]
        if usual is not None:
            rates = np.array(blended(rates.tolist(), self.interval_s, usual, self.rate))
        return np.maximum(rates, self.surge)

    @property
    def surge(self) -> float:
        """The rate of the last moments if it is far above the forecast, else 0.

        A crowd shows in ten seconds of arrivals, long before the trend follows.
        """
        duration_s = sum(duration_s for _, duration_s in self._recent)
        if len(self._recent) < _RECENT or duration_s <= 0:
            return 0.0
        rate = sum(arrived for arrived, _ in self._recent) / duration_s
        ahead = self._filter.forecast(1)
        # Noise of a shorter time is larger; of few requests it is at least that of counting them.
        noise = ahead.noise * math.sqrt(self.interval_s / duration_s)
        noise = max(noise, math.sqrt(max(ahead.level, 1.0 / duration_s) / duration_s))
        return rate if rate > ahead.level + _SURGE * noise else 0.0

    def _trend(self, steps: int) -> _RateArray:
        # Nothing is extrapolated further than half of what has been observed.
        reach = max(1, self._filter.count // 2 - 1)
        most = _MOST_GROWTH * max(self.rate, _FEW_REQUESTS / self.interval_s)
        earlier = itertools.islice(reversed(self._levels), _CLIMB, _PEAKS)
        highest = _ABOVE_PEAK * max(earlier, default=0.0)
        if self.rate < highest:
            most = min(most, highest)
        path = self._filter.path(min(steps, reach))
        rates = [min(max(a.level + _CAUTION * a.deviation, 0.0), most) for a in path]
        # Beyond what may be extrapolated, the last value stays.
        return np.array(rates + rates[-1:] * (steps - len(rates)))

    def _with_history(self, trend: _RateArray) -> _RateArray:
        """Return the mean of ``trend`` and what followed similar moments, by their weight."""
        levels, steps = np.array(self._levels), len(trend)
        # Moments with enough values before them, and a whole path after them.
        past = np.arange(_LONG, len(levels) - steps)
        scale = _SIMILAR * levels.mean() if len(levels) else 0.0
        if not len(past) or scale <= 0:
            return trend
        now = len(levels) - 1
        distance = ((levels[past] - levels[now]) / scale) ** 2
        for span, width in ((_SHORT, scale), (_LONG, 2 * scale)):
            rise = levels[now] - levels[now - span]
            distance += ((levels[past] - levels[past - span] - rise) / width) ** 2
        weights = np.exp(-distance / 2)
        # One similar moment counts as much as the trend, four count four times as much.
        total = weights.sum() / _SAME_MOMENT
        share = total / (total + 1.0)
        after = levels[past[:, None] + np.arange(1, steps + 1)] - levels[past][:, None]
        followed = np.maximum(levels[now] + _weighted_median(after, weights), 0.0)
        return (1.0 - share) * trend + share * followed


def _weighted_median(rows: _RateArray, weights: _RateArray) -> _RateArray:
    """Return the weighted median of each column."""
    order = np.argsort(rows, axis=0)
    reached = np.cumsum(weights[order], axis=0) >= weights.sum() / 2
    return np.take_along_axis(rows, order, axis=0)[reached.argmax(axis=0), np.arange(rows.shape[1])]


class Forecast(NamedTuple):
    """The level some intervals ahead, its standard deviation, and that of a value around it."""

    level: float
    deviation: float
    noise: float


class TrendFilter:
    """Takes one value an interval; forecasts any number of intervals ahead.

    ``memory`` is the number of values after which an error counts about a third.
    """

    def __init__(self, memory: float = 100.0) -> None:
        self.count = 0
        self._q, self._s, self._damping = _BANK.T
        models = len(_BANK)
        self._level = np.zeros(models)
        self._slope = np.zeros(models)
        # Covariance of level and slope: three numbers a filter.
        self._p11, self._p12 = np.ones(models), np.zeros(models)
        self._p22 = np.full(models, _DIFFUSE)
        self._keep = 1.0 - 1.0 / memory
        self._weight = 0.0
        self._squares = np.zeros(models)
        self._logs = np.zeros(models)

    def add(self, value: float) -> None:
        """Take the value of the interval that ended. O(size of the bank)."""
        if not self.count:
            self._level[:] = value
            self.count = 1
            return
        self._step()
        error = value - self._level
        variance = self._p11 + 1.0
        self._score(error, variance)
        gain_level, gain_slope = self._p11 / variance, self._p12 / variance
        self._level += gain_level * error
        self._slope += gain_slope * error
        # In this order: each line uses the covariance before the value.
        self._p22 -= gain_slope * self._p12
        self._p12 = self._p12 * (1.0 - gain_level)
        self._p11 = self._p11 * (1.0 - gain_level)
        self.count += 1

    def forecast(self, steps: int) -> Forecast:
        """Return the forecast of ``steps`` intervals ahead. O(steps)."""
        return self.path(steps)[-1]

    def path(self, steps: int) -> list[Forecast]:
        """Return the forecasts of 1, 2, … ``steps`` intervals ahead. O(steps)."""
        best, scale = self._best()
        q, s, damping = _BANK[best].tolist()
        level, slope = float(self._level[best]), float(self._slope[best])
        p11, p12 = float(self._p11[best]), float(self._p12[best])
        p22, noise = float(self._p22[best]), math.sqrt(scale)
        forecasts = []
        for _ in range(steps):
            level, slope = level + damping * slope, damping * slope
            p11 += 2 * damping * p12 + damping**2 * p22 + q
            p12 = damping * p12 + damping**2 * p22
            p22 = damping**2 * p22 + s
            forecasts.append(Forecast(level, math.sqrt(max(p11, 0.0) * scale), noise))
        return forecasts

    def _step(self) -> None:
        """Predict the next interval."""
        damping = self._damping
        self._level += damping * self._slope
        self._slope *= damping
        self._p11 += 2 * damping * self._p12 + damping**2 * self._p22 + self._q
        self._p12 = damping * self._p12 + damping**2 * self._p22
        self._p22 = damping**2 * self._p22 + self._s

    def _score(self, error: np.ndarray, variance: np.ndarray) -> None:
        if self.count < _UNSCORED:
            return
        self._weight = self._weight * self._keep + 1.0
        self._squares = self._squares * self._keep + error**2 / variance
        self._logs = self._logs * self._keep + np.log(variance)

    def _best(self) -> tuple[int, float]:
        """Return the most likely filter and the variance of its observation noise."""
        if not self._weight:
            return 0, 0.0
        noise = self._squares / self._weight
        # -2 log likelihood of the errors, for the noise that makes them the most likely.
        cost = np.log(np.maximum(noise, 1e-12)) * self._weight + self._logs
        best = int(np.argmin(cost))
        return best, float(noise[best])
