"""Predictors: the next values of a series of intervals.

NaN counts as 0, leading zeros (an idle start) are not stored, below five values the last one is the
prediction, and no prediction is negative. :meth:`Predictor.predict` is exactly one interval ahead.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from dynamo.planner.capacity.interpolation import load_library
from dynamo.planner.policies.kalman import TrendFilter

MIN_VALUES = 5
"""Values that a model needs."""

_CAUTION = 1.0
"""Standard deviations that are added to a rate to prepare for: the further ahead, the more. With
one, 5 in 6 rates are below it; the next decision is a whole interval later."""

_MOST_GROWTH = 2.0

Predictions: TypeAlias = Sequence[tuple[float, float]]
"""Predictions with their standard deviations; 0 where it is not known."""

_INSTEAD = "--load-predictor constant"


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
        known = max(1, len(self.values) // 2 - 1)
        most = _MOST_GROWTH * max(self.values, default=0.0)
        return min(self._bounded(min(steps, known), _CAUTION), most)

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


class _Arima(Predictor):
    """ARIMA. The order is chosen by AICc among a few small ones, again after some predictions.

    Each fit has a bound on its iterations, so a prediction costs a tenth of a second, and one that
    chooses the order less than a second.
    """

    ORDERS = ((0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1), (2, 1, 0))
    _CHOOSE_EVERY = 20

    def __init__(self, window: int) -> None:
        super().__init__(window)
        module = load_library(
            "statsmodels.tsa.arima.model", "--load-predictor arima", f"{_INSTEAD} or kalman"
        )
        self._model: Callable[..., Any] = module.ARIMA
        self._order = self.ORDERS[0]
        self._predictions = 0

    def _path(self, steps: int) -> Predictions:
        last = [(self.values[-1], 0.0)]
        if min(self.values) == max(self.values):
            return last  # no variance to fit
        with _quiet("statsmodels"):
            if self._predictions % self._CHOOSE_EVERY == 0:
                fits = {order: self._fit(order) for order in self.ORDERS}
                known = {order: fit for order, fit in fits.items() if fit is not None}
                self._order = min(known, key=lambda o: known[o].aicc, default=self.ORDERS[0])
            self._predictions += 1
            fit = self._fit(self._order)
            if fit is None:
                return last
            ahead = fit.get_forecast(steps)
            return list(zip(ahead.predicted_mean, ahead.se_mean, strict=True))

    def _fit(self, order: tuple[int, int, int]) -> Any:
        """Return the fitted model; None if it cannot be fitted, or only without a usable AICc."""
        try:
            model = self._model(np.asarray(self.values), order=order)
            fit = model.fit(method_kwargs={"maxiter": 30, "disp": False})
        except (ValueError, ArithmeticError, np.linalg.LinAlgError):
            return None
        return fit if math.isfinite(fit.aicc) else None


class _Prophet(Predictor):
    """Prophet on timestamps one minute apart; it needs real dates, but not the real interval."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        with _quiet("prophet.plot"):
            self._prophet = load_library("prophet", "--load-predictor prophet", _INSTEAD).Prophet
        _pandas()

    def _path(self, steps: int) -> Predictions:
        pandas = _pandas()  # not an attribute: a policy is copied, and a module cannot be
        count = len(self.values)
        stamps = pandas.date_range("2024-01-01", periods=count + steps, freq="min")
        with _quiet("cmdstanpy"), _quiet("prophet"):
            model = self._prophet(
                daily_seasonality=False,
                weekly_seasonality=False,
                yearly_seasonality=False,
                uncertainty_samples=0,
            )
            model.fit(pandas.DataFrame({"ds": stamps[:count], "y": list(self.values)}))
            ahead = model.predict(pandas.DataFrame({"ds": stamps[count:]}))["yhat"]
            return [(float(value), 0.0) for value in ahead]


def _pandas() -> Any:
    return load_library("pandas", "--load-predictor prophet", _INSTEAD)


_PREDICTORS: dict[str, type[Predictor]] = {
    "constant": _Constant,
    "arima": _Arima,
    "kalman": _Kalman,
    "prophet": _Prophet,
}


def make_predictor(name: str, window: int) -> Predictor:
    """Return the predictor ``name`` of --load-predictor.

    Raises ConfigError if its library is not installed.
    """
    return _PREDICTORS[name](window)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Drop the warnings and messages of a library; its failures raise."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
