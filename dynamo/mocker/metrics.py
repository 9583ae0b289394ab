"""The metrics of the simulated engine, under vLLM's names."""

from __future__ import annotations

import asyncio

from dynamo.mocker.scheduler import Batch, Scheduler
from dynamo.observability.metrics import Registry, counter, gauge, histogram

# fmt: off
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)
_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)
# fmt: on
_ENGINE = "engine model_name"

_RUNNING = gauge("vllm:num_requests_running", "Sequences being computed", _ENGINE)
_WAITING = gauge("vllm:num_requests_waiting", "Sequences waiting", _ENGINE)
_KV_USAGE = gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0..1", _ENGINE)
_GPU_USAGE = gauge(
    "vllm:gpu_cache_usage_perc", "Share of the KV cache in use, 0..1 (old name)", _ENGINE
)
_PREEMPTIONS = counter("vllm:num_preemptions_total", "Sequences that lost their blocks", _ENGINE)
_TTFT = histogram(
    "vllm:time_to_first_token_seconds",
    "Seconds from arrival to the first token",
    _TTFT_BUCKETS,
    _ENGINE,
)
_ITL = histogram(
    "vllm:inter_token_latency_seconds",
    "Seconds between two tokens of a sequence",
    _ITL_BUCKETS,
    _ENGINE,
)
_LATENCY = histogram(
    "vllm:e2e_request_latency_seconds",
    "Seconds from arrival to the last token",
    _LATENCY_BUCKETS,
    _ENGINE,
)


class MockerMetrics:
    """The ``vllm:*`` metrics of one data-parallel rank, labelled (engine, model_name)."""

    def __init__(self, registry: Registry, engine: str, model_name: str) -> None:
        labels = (engine, model_name)
        self._registry = registry
        self._labels = labels
        self._preemptions = registry.child(_PREEMPTIONS, *labels)
        self._ttft = registry.child(_TTFT, *labels)
        self._itl = registry.child(_ITL, *labels)
        self._latency = registry.child(_LATENCY, *labels)
        self._now = 0.0

    def export_gauges(self, scheduler: Scheduler) -> None:
        """Read the gauges from ``scheduler`` at scrape."""
        pool = scheduler.pool
        for spec, read in (
            (_RUNNING, lambda: len(scheduler.running)),
            (_WAITING, lambda: len(scheduler.waiting)),
            (_KV_USAGE, lambda: pool.used / pool.capacity),
            (_GPU_USAGE, lambda: pool.used / pool.capacity),
        ):
            self._registry.child(spec, *self._labels).function = read

    def iteration(self, now: float, batch: Batch, preemptions: int) -> None:
        """Record an iteration that ended at ``now`` (monotonic), before its tokens are sent."""
        if batch.decodes:
            self._itl.observe(now - self._now, batch.decodes)
        self._now = now
        self._preemptions.value = preemptions

    def first_token(self, started: float) -> None:
        """Record the first token, in this iteration, of a request that arrived at ``started``."""
        self._ttft.observe(max(0.0, self._now - started))

    def finished(self, started: float) -> None:
        """Record the end of a request that arrived at ``started``."""
        self._latency.observe(asyncio.get_running_loop().time() - started)
