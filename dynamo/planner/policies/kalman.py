"""A Kalman filter for a level with a trend that fades, with the noise chosen by likelihood. Pure.

The model, in units of the noise of an observation:

    value  = level + noise
    level' = level + damping * slope + sqrt(q) * noise
    slope' = damping * slope + sqrt(s) * noise

A bank of filters with different ``q``, ``s`` and ``damping`` runs side by side; the one whose
one-step errors are the most likely makes the forecast. Old errors fade, so the choice follows a
change of the traffic. This is the local linear trend of statsmodels' UnobservedComponents, without
an optimiser: one value costs some microseconds, and nothing has to converge.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

__all__ = ["Forecast", "TrendFilter"]

_LEVEL_NOISE = (1e-3, 1e-2, 1e-1, 1.0)
_SLOPE_NOISE = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_DAMPING = (1.0, 0.98, 0.9)
_BANK = np.array(list(itertools.product(_LEVEL_NOISE, _SLOPE_NOISE, _DAMPING)))

_DIFFUSE = 1e4
"""Variance of the slope before anything is known of it."""

_UNSCORED = 2
"""First values, which every filter predicts badly."""


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
        found = []
        for _ in range(steps):
            level, slope = level + damping * slope, damping * slope
            p11 += 2 * damping * p12 + damping**2 * p22 + q
            p12 = damping * p12 + damping**2 * p22
            p22 = damping**2 * p22 + s
            found.append(Forecast(level, math.sqrt(max(p11, 0.0) * scale), noise))
        return found

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
        cost = np.log(np.maximum(noise, 1e-12)) * self._weight + self._logs
        best = int(np.argmin(cost))
        return best, float(noise[best])
