"""Predictors on series whose next value is known, and the rules that all of them keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.config.option import from_env
from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.policies.kalman import TrendFilter
from dynamo.planner.policies.predictors import Predictor, make_predictor

NAMES = ("constant", "kalman")


def fed(name: str, values: list[float], window: int = 50) -> Predictor:
    predictor = make_predictor(name, window)
    for value in values:
        predictor.add(value)
    return predictor


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_every_predictor(name: str) -> None:
    assert make_predictor(name, 10).predict() == 0.0
    assert fed(name, [0.0, 0.0, math.nan]).predict() == 0.0
    assert list(fed(name, [0.0, math.nan, 3.0, math.nan, 4.0]).values) == [3.0, 0.0, 4.0]
    assert fed(name, [5.0, 9.0, 1.0, 7.0]).predict() == 7.0  # below five points: the last
    assert list(fed(name, [1.0, 2.0, 3.0], window=2).values) == [2.0, 3.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_flat_series_stays_flat(name: str) -> None:
    assert fed(name, [6.0] * 12).predict() == pytest.approx(6.0, abs=0.1)


def test_a_line_goes_on_by_exactly_one_step() -> None:
    """20, 22, ... 58: the next value is 60; two steps would be 62."""
    predicted = fed("kalman", [20.0 + 2 * step for step in range(20)]).predict()
    assert predicted == pytest.approx(60.0, abs=0.8)


@pytest.mark.parametrize("name", NAMES)
def test_no_prediction_is_negative(name: str) -> None:
    assert fed(name, [40.0 - 4 * step for step in range(11)]).predict() >= 0.0


def test_a_wave_is_predicted_better_than_by_its_last_value() -> None:
    wave = [10 + 8 * math.sin(step / 4) for step in range(50)]
    predictor, errors, naive = make_predictor("kalman", 30), [], []
    for step, value in enumerate(wave):
        if step >= 40:
            errors.append(abs(predictor.predict() - value))
            naive.append(abs(wave[step - 1] - value))
        predictor.add(value)
    assert sum(errors) < sum(naive) / 2


@pytest.mark.parametrize("name", ["arima", "prophet"])
def test_a_predictor_of_dynamo_that_is_gone_is_refused_with_what_replaces_it(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"must be one of constant, kalman, got '{name}'; kalman, .* replaces it"
    ):
        from_env(PlannerSettings, {}, load_predictor=name)


@given(st.lists(st.floats(0, 1e6), max_size=40))
@settings(max_examples=60, deadline=None)
def test_kalman_predictions_are_finite_and_not_negative(values: list[float]) -> None:
    predicted = fed("kalman", values).predict()
    assert math.isfinite(predicted)
    assert predicted >= 0.0


def test_the_deviation_of_a_forecast_is_that_of_its_errors() -> None:
    """White noise around 50 with a deviation of 4: the forecast says so, and 68 % lie within."""
    noise = np.random.default_rng(7).normal(50.0, 4.0, 400)
    fitted, within = TrendFilter(), 0
    for step, value in enumerate(noise):
        if step >= 100:
            ahead = fitted.forecast(1)
            within += abs(value - ahead.level) < math.hypot(ahead.deviation, ahead.noise)
        fitted.add(float(value))
    ahead = fitted.forecast(10)
    assert ahead.level == pytest.approx(50.0, abs=2.0)
    assert ahead.noise == pytest.approx(4.0, rel=0.25)
    assert ahead.deviation < 1.5
    assert 0.58 < within / 300 < 0.78


def test_uncertainty_grows_with_the_horizon() -> None:
    fitted = TrendFilter()
    for value in np.cumsum(np.random.default_rng(3).normal(0.0, 1.0, 200)) + 100:
        fitted.add(float(value))
    deviations = [fitted.forecast(steps).deviation for steps in (1, 4, 16)]
    assert deviations == sorted(deviations)
    assert deviations[2] > 2 * deviations[0]


class Broken(Predictor):
    """A fit that has failed without an error."""

    def _path(self, steps: int) -> list[tuple[float, float]]:
        return [(math.nan, 0.0)] * steps


@pytest.mark.parametrize("value", [3.0, 0.0])
def test_a_prediction_that_is_no_number_is_the_last_value(value: float) -> None:
    predictor = Broken(50)
    for number in (*range(1, 20), value):
        predictor.add(float(number))
    assert predictor.predict() == predictor.highest(3) == value
