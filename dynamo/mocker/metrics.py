"""What the pretended engine measures of itself, under vLLM's names. Spec 6.4."""

from __future__ import annotations

import asyncio

from dynamo.mocker.scheduler import Batch, Scheduler
from dynamo.observability import names_worker as names
from dynamo.observability.metrics import Registry
from dynamo.observability.names import counter, gauge, histogram

__all__ = ["MockerMetrics"]


class MockerMetrics:
    """The ``vllm:*`` metrics of one data-parallel rank, labelled (engine, model_name)."""

    def __init__(self, registry: Registry, engine: str, model_name: str) -> None:
        labels = (engine, model_name)
        self._registry = registry
        self._labels = labels
        self._preemptions = counter(registry, names.VLLM_PREEMPTIONS).labels(*labels)
        self._ttft = histogram(registry, names.VLLM_TTFT).labels(*labels)
        self._itl = histogram(registry, names.VLLM_ITL).labels(*labels)
        self._latency = histogram(registry, names.VLLM_LATENCY).labels(*labels)
        self._now = 0.0

    def export_gauges(self, scheduler: Scheduler) -> None:
        """Read the gauges from ``scheduler`` at scrape."""
        pool = scheduler.pool
        for spec, read in (
            (names.VLLM_RUNNING, lambda: len(scheduler.running)),
            (names.VLLM_WAITING, lambda: len(scheduler.waiting)),
            (names.VLLM_KV_USAGE, lambda: pool.used / pool.capacity),
            (names.VLLM_GPU_USAGE, lambda: pool.used / pool.capacity),
        ):
            gauge(self._registry, spec).labels(*self._labels).function = read

    def iteration(self, now: float, batch: Batch, preemptions: int) -> None:
        """An iteration ended at ``now`` (monotonic); call before its tokens are handed out."""
        if batch.decodes:
            self._itl.observe(now - self._now, batch.decodes)
        self._now = now
        self._preemptions.value = preemptions

    def first_token(self, started: float) -> None:
        """A request that came at ``started`` got its first token in this iteration."""
        self._ttft.observe(max(0.0, self._now - started))

    def finished(self, started: float) -> None:
        """A request that came at ``started`` is over."""
        self._latency.observe(asyncio.get_running_loop().time() - started)
