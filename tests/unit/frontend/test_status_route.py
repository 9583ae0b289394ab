"""GET /v1/status: rates, quantiles and workers from counters and recent requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.frontend.apis.operator.status import ModelTraffic, TrafficWindows
from dynamo.frontend.requests.metrics import GONE_MODELS, FrontendMetrics, ModelMetrics
from dynamo.frontend.requests.recent import RecentRequests, RequestFigures, RequestInfo
from dynamo.observability.metrics import Registry


class Traffic:
    """One model with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.open = 0
        self.model = "tiny"
        self.recent = RecentRequests()
        self.metrics: ModelMetrics = FrontendMetrics(Registry()).model("tiny")
        self.windows = TrafficWindows(
            lambda: [self.metrics], lambda: {"tiny": self.open}, self.recent, lambda: self.now_s
        )

    def end(self, tokens: int, ttft_s: float = 0.1, cached: int | None = None) -> None:
        """A request of 100 prompt tokens ends now."""
        usage: Any = SimpleNamespace(cached_tokens=cached)
        received_s = self.now_s - 1
        self.recent.add(
            RequestFigures(
                RequestInfo("chat", "id", None),
                self.model,
                received_s,
                "ok",
                self.now_s,
                first_token_s=received_s + ttft_s,
                prompt_tokens=100,
                usage=usage,
            )
        )
        self.metrics.output_tokens.value += tokens
        self.metrics.duration.observe(1.0)

    def second(self) -> None:
        """A second passes."""
        self.now_s += 1
        self.windows.sample()

    @property
    def now(self) -> ModelTraffic:
        """The figures now."""
        return self.windows.traffic()[0]["tiny"]


def test_a_model_that_returns_is_in_use() -> None:
    """It has counters of before, and new gauges."""
    metrics = FrontendMetrics(Registry())
    traffic = Traffic()
    traffic.metrics = metrics.model("tiny")
    traffic.second()
    metrics.forget("tiny")
    traffic.metrics = metrics.model("tiny")
    traffic.metrics.active.value = 1
    traffic.now_s += 60
    traffic.second()
    assert traffic.now.idle_s == 0.0


def test_models_that_are_gone_are_not_kept_for_ever() -> None:
    metrics = FrontendMetrics(Registry())
    traffic = Traffic()
    for number in range(3 * GONE_MODELS):
        traffic.metrics = metrics.model(f"adapter{number}")
        traffic.second()
    assert len(traffic.windows.traffic()[0]) <= GONE_MODELS + 1


def test_a_model_without_requests() -> None:
    traffic = Traffic()
    assert traffic.now == ModelTraffic(rate_s=1.0)
    traffic.second()
    assert traffic.now.idle_s is None and traffic.now.hit_rate is None


def test_rates_are_those_of_ten_seconds() -> None:
    traffic = Traffic()
    traffic.windows.sample()
    traffic.end(10_000)
    for _ in range(30):
        traffic.end(50)
        traffic.second()
    assert traffic.now.rate_s == 10.0
    assert traffic.now.output_tokens_per_s == pytest.approx(50)
    assert traffic.now.requests_per_s == pytest.approx(1)


def test_tokens_of_requests_in_progress_count_when_they_arrive() -> None:
    traffic = Traffic()
    traffic.windows.sample()
    for _ in range(10):
        traffic.open += 20
        traffic.second()
    assert traffic.now.output_tokens_per_s == pytest.approx(20)
    traffic.end(traffic.open)
    traffic.open = 0
    assert traffic.now.output_tokens_per_s == pytest.approx(20)


def test_quantiles_and_hit_rate_are_those_of_a_minute() -> None:
    traffic = Traffic()
    traffic.end(1, ttft_s=0.9, cached=100)
    traffic.now_s += 61
    assert traffic.now.ttft_p50_s is None and traffic.now.hit_rate is None
    for number in range(1, 101):
        traffic.end(1, ttft_s=number / 1000, cached=25 if number % 2 else None)
    assert traffic.now.ttft_p50_s == pytest.approx(0.05, abs=0.002)
    assert traffic.now.ttft_p99_s == pytest.approx(0.099, abs=0.002)
    assert traffic.now.hit_rate == 0.25


def test_idle_since_the_last_request() -> None:
    traffic = Traffic()
    traffic.windows.sample()
    traffic.metrics.active.value = 1
    traffic.second()
    assert traffic.now.idle_s == 0
    traffic.metrics.active.value = 0
    traffic.end(1)
    assert traffic.now.idle_s == 0
    for _ in range(7):
        traffic.second()
    assert traffic.now.idle_s == 7


def test_the_times_of_all_models_are_one_distribution() -> None:
    """Two answers of a slow model among many do not make the median theirs."""
    traffic = Traffic()
    for number in range(98):
        traffic.end(1, ttft_s=0.01 + number / 1e5)
    traffic.model = "slow"
    traffic.end(1, ttft_s=9.0)
    traffic.end(1, ttft_s=9.0)
    ttfts_s = traffic.windows.traffic()[1]
    assert len(ttfts_s) == 100 and ttfts_s[49] < 0.02 and ttfts_s[-1] == pytest.approx(9.0)
    traffic.now_s += 61
    assert traffic.windows.traffic()[1] == []
