"""vLLM's own metrics of the scheduler and the cache, for the worker's /metrics.

Counters and gauges only: vLLM's histograms of latency are filled by its output processing, which
the worker does not run. The frontend measures latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import REGISTRY, Metric, generate_latest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats

__all__ = ["EngineMetrics"]

_PREFIX = "vllm:"
_TYPES = ("counter", "gauge")


class EngineMetrics:
    """Records each step with vLLM's own logger; :meth:`text` is in Prometheus's format."""

    def __init__(self, config: Any, ranks: Sequence[int]) -> None:
        self._logger = PrometheusStatLogger(config, list(ranks))
        self._logger.log_engine_initialized()

    def record(self, rank: int, stats: Any, tokens: int, prefills: Sequence[Any]) -> None:
        """Record a step that produced ``tokens`` and ended ``prefills`` (vLLM's statistics)."""
        step = IterationStats()
        step.num_generation_tokens = tokens
        for each in prefills:
            step.prompt_token_stats.update_from_output(each)
        self._logger.record(stats, step, engine_idx=rank)

    def text(self) -> str:
        """Return the metrics; O(metrics)."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's counters and gauges, for Prometheus's client."""
        for metric in REGISTRY.collect():
            if metric.name.startswith(_PREFIX) and metric.type in _TYPES:
                yield metric
