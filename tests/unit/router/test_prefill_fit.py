"""A model of prefill times from what was observed."""

from __future__ import annotations

import logging
from random import Random

import pytest

from dynamo.router.load.prefill_model import MIN_SAMPLES, BusyInterval, PrefillFit


def seconds(tokens: int, cached: int) -> float:
    """A worker: 4 ms each, 20 µs a token, and attention."""
    return 0.004 + 2e-5 * tokens + 1e-9 * tokens * (cached + tokens / 2)


def taught(count: int, noise: float, outliers: float, seed: int = 1) -> PrefillFit:
    """A fit that saw ``count`` prefills, two seconds apart."""
    source = Random(seed)
    fit = PrefillFit()
    for number in range(count):
        tokens = int(2 ** source.uniform(4, 15))
        cached = source.choice([0, 0, 512, 8192])
        took = seconds(tokens, cached) * source.uniform(1 - noise, 1 + noise)
        if source.random() < outliers:
            took *= source.choice([0.05, 8.0, 30.0])
        fit.observe(BusyInterval(1, tokens, tokens * (cached + tokens / 2), took), number * 2.0)
    return fit


def worst(fit: PrefillFit) -> float:
    """The largest relative error over a range of prompts."""
    errors = []
    for tokens in (64, 512, 4096, 16384):
        for cached in (0, 4096):
            said = fit.predict(tokens, cached)
            assert said is not None
            errors.append(abs(said / seconds(tokens, cached) - 1))
    return max(errors)


def test_there_is_no_prediction_before_enough_samples() -> None:
    assert taught(MIN_SAMPLES - 1, 0, 0).predict(100, 0) is None
    assert taught(MIN_SAMPLES, 0, 0).predict(100, 0) is not None


def test_exact_times_are_reproduced() -> None:
    assert worst(taught(64, 0.0, 0.0)) < 0.02


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_hardly_change_the_fit(seed: int) -> None:
    assert worst(taught(200, 0.1, 0.25, seed)) < 0.25


def test_a_worker_that_becomes_slower_is_followed() -> None:
    fit = taught(200, 0.05, 0.0)
    before = fit.predict(4096, 0)
    source = Random(2)
    for number in range(200):
        tokens = int(2 ** source.uniform(4, 15))
        took = 3 * seconds(tokens, 0)
        fit.observe(BusyInterval(1, tokens, tokens * tokens / 2, took), 1000.0 + number)
    after = fit.predict(4096, 0)
    assert before is not None and after is not None
    assert 2.7 < after / before < 3.3


def test_an_interval_of_several_prefills_gives_the_same_fit() -> None:
    source = Random(3)
    fit = PrefillFit()
    for number in range(100):
        sizes = [int(2 ** source.uniform(4, 15)) for _ in range(source.randint(1, 8))]
        took = sum(seconds(size, 0) for size in sizes)
        interval = BusyInterval(
            len(sizes), sum(sizes), sum(size * size / 2 for size in sizes), took
        )
        fit.observe(interval, float(number))
    said = fit.predict(1024, 0)
    assert said is not None and abs(said / seconds(1024, 0) - 1) < 0.02


def test_alike_prompts_only() -> None:
    fit = PrefillFit()
    for number in range(50):
        fit.observe(BusyInterval(1, 1000, 500_000.0, 0.05), number * 2.0)
    said = fit.predict(1000, 0)
    assert said is not None and abs(said - 0.05) < 1e-6
    assert all(term >= 0 for term in fit.terms or ())


def test_memory_and_effort_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fit = PrefillFit()
    for number in range(10_000):
        fit.observe(BusyInterval(1, 100 + number % 7, 5000.0, 0.01), number * 1e-3)
    assert len(fit) == 128
    assert caplog.text.count("prefill load model") == 10, "one fit a second"


def test_zero_times_are_harmless() -> None:
    fit = PrefillFit()
    for number in range(20):
        fit.observe(BusyInterval(1, 1, 0.5, 1e-12), number * 2.0)
    said = fit.predict(10**6, 10**6)
    assert said is not None and 0 <= said < 1e6
