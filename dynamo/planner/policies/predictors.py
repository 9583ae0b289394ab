"""Predictors: the next values of a series of intervals.

NaN counts as 0, leading zeros (an idle start) are not stored, below five values the last one is the
prediction, and no prediction is negative. :meth:`Predictor.predict` is exactly one interval ahead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from dynamo.planner.policies.kalman import TrendFilter

MIN_VALUES = 5
"""Values that a model needs."""

_CAUTION = 1.0
"""Standard deviations that are added to a rate to prepare for: the further ahead, the more. With
one, 5 in 6 rates are below it; the next decision is a whole interval later."""

_MOST_GROWTH = 2.0

Predictions: TypeAlias = Sequence[tuple[float, float]]
"""Predictions with their standard deviations; 0 where it is not known."""


class Predictor(ABC):
    """Keeps the last ``window`` values and predicts the next one."""

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """Store the value of the interval that ended."""
        finite = value if math.isfinite(value) else 0.0
        if finite or self.values:
            self.values.append(finite)

    def predict(self) -> float:
        """Return the value expected in the next interval; 0 without values."""
        return self._bounded(1, 0.0)

    def highest(self, steps: int) -> float:
        """Return the highest value to prepare for in the next ``steps`` intervals.

        That is the highest prediction, a standard deviation added. Nothing is extrapolated
        further than half of the values, nor above twice the highest one.
        """
        reach = max(1, len(self.values) // 2 - 1)
        most = _MOST_GROWTH * max(self.values, default=0.0)
        return min(self._bounded(min(steps, reach), _CAUTION), most)

    def _bounded(self, steps: int, caution: float) -> float:
        if not self.values:
            return 0.0
        if len(self.values) < MIN_VALUES:
            return max(self.values[-1], 0.0)
        high = max(mean + caution * deviation for mean, deviation in self._path(steps))
        return max(high if math.isfinite(high) else self.values[-1], 0.0)

    @abstractmethod
    def _path(self, steps: int) -> Predictions:
        """Return the predictions of 1, 2, … ``steps`` intervals ahead, from at least
        :data:`MIN_VALUES` values."""


class _Constant(Predictor):
    """The last value."""

    def _path(self, steps: int) -> Predictions:
        return [(self.values[-1], 0.0)]


class _Kalman(Predictor):
    """A local linear trend whose noise is chosen by likelihood."""

    def _path(self, steps: int) -> Predictions:
        fitted = TrendFilter()
        for value in self.values:
            fitted.add(value)
        return [(ahead.level, ahead.deviation) for ahead in fitted.path(steps)]


_PREDICTORS: dict[str, type[Predictor]] = {
    "constant": _Constant,
    "kalman": _Kalman,
}


def make_predictor(name: str, window: int) -> Predictor:
    """Return the predictor ``name`` of --load-predictor."""
    return _PREDICTORS[name](window)
