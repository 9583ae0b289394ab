"""vLLM's metrics (``vllm:…``) of an engine whose outputs vLLM does not process.

Names, labels, buckets and their meaning are vLLM's: its logger declares them, its statistics fill
them. Steps and requests are recorded here, in Python; the gaps between plain tokens, which no
Python sees one by one, arrive as counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import vllm.envs
from prometheus_client import REGISTRY, Counter, Gauge, Metric, generate_latest
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.samples import Sample
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import (
    IterationStats,
    LoRARequestStates,
    RequestStateStats,
    SchedulerStats,
)

from dynamo._fast.histogram import Histogram
from dynamo.vllm.engine import OutputSink

_PREFIX = "vllm:"
Gaps = Iterable[tuple[float, int]]
"""Seconds between two tokens of a request, and of how many tokens."""


class _EngineMetrics:
    """The collector of all metrics of vLLM in this process."""

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's metrics, for Prometheus's client."""
        for metric in REGISTRY.collect():
            if metric.name.startswith(_PREFIX):
                yield metric


def vllm_page() -> str:
    """Return vLLM's metrics of this process in Prometheus's format. O(metrics)."""
    return generate_latest(_EngineMetrics()).decode()


class _PlainValue:
    """A counter or gauge of one thread, without the client's lock: each step changes twenty."""

    counted = 0.0

    def _child_samples(self) -> Iterable[Sample]:
        """The samples of one child: the client's, with our value."""
        sample, *more = super()._child_samples()  # type: ignore[misc]
        return (sample._replace(value=self.counted), *more)


class _FastCounter(_PlainValue, Counter):
    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Add ``amount``."""
        self.counted += amount


class _FastGauge(_PlainValue, Gauge):
    def set(self, value: float) -> None:
        """Set the gauge; vLLM's logger calls nothing else of it."""
        self.counted = float(value)


class _FastHistogram(ClientHistogram):
    """A histogram whose observation is a search in C: 0.1 µs, where the client's takes 2 µs."""

    def _metric_init(self) -> None:
        super()._metric_init()
        # The last bound is infinity, which ours has anyway.
        self.counted = Histogram(self._upper_bounds[:-1])
        self.observe = self.counted.observe  # type: ignore[assignment, method-assign]

    def _child_samples(self) -> Iterable[Sample]:
        """The samples of one child: the client's, with our counts."""
        counts, total = iter(self.counted.counts), 0
        for sample in super()._child_samples():
            if sample.name == "_bucket":
                total += next(counts)
            values = {"_bucket": total, "_count": total, "_sum": self.counted.total}
            yield sample._replace(value=values.get(sample.name, sample.value))


class _Logger(PrometheusStatLogger):  # type: ignore[misc]
    _gauge_cls = _FastGauge
    _counter_cls = _FastCounter
    _histogram_cls = _FastHistogram


class RunningRequest:
    """A request in the engine: the sink of its outputs, and vLLM's statistics of it."""

    __slots__ = (
        "cached_tokens",
        "lora",
        "max_tokens",
        "passing",
        "prefilling",
        "prompt_tokens",
        "rank",
        "sink",
        "stats",
    )

    def __init__(self, sink: OutputSink, max_tokens: int | None, lora: str | None) -> None:
        self.sink = sink
        self.max_tokens = max_tokens
        self.lora = lora
        self.prefilling = True
        self.passing = False  # plain tokens go to its stream
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.rank = 0
        self.stats = RequestStateStats(arrival_time=time.time())

    def passed(self, tokens: int, last_s: float) -> None:
        """Count ``tokens`` that went to the stream, the last at ``last_s`` of the engine."""
        self.passing = False
        self.stats.num_generation_tokens += tokens
        self.stats.last_token_ts = last_s


class EngineMetrics:
    """Records steps with vLLM's own logger; :meth:`text` is in Prometheus's format.

    A step is begun with :meth:`step`, gets its outputs, and ends with :meth:`record`.
    """

    def __init__(self, config: Any, ranks: Sequence[int]) -> None:
        self._logger = _Logger(config, list(ranks))
        self._logger.log_engine_initialized()
        self._loras = LoRARequestStates(log_stats=config.lora_config is not None)
        self._counts_nans = bool(vllm.envs.VLLM_COMPUTE_NANS_IN_LOGITS)
        self._gaps = {
            rank: histogram.counted
            for rank, histogram in self._logger.histogram_inter_token_latency.items()
        }
        self._stopped: dict[int, IterationStats] = {}

    def step(self, rank: int, plain_tokens: int) -> IterationStats:
        """Begin a step, which produced ``plain_tokens`` so far."""
        # Requests that were stopped since the last step end with this one.
        step = self._stopped.pop(rank, None) or IterationStats()
        step.iteration_timestamp = time.time()
        step.num_generation_tokens = plain_tokens
        return step

    def output(
        self,
        step: IterationStats,
        rank: int,
        timestamp: float,
        request: RunningRequest,
        output: Any,
    ) -> None:
        """Count an output of the engine."""
        if not request.prefilling and output.events is None and not self._counts_nans:
            # As vLLM does below, for most of the outputs.
            stats, count = request.stats, len(output.new_token_ids)
            step.num_generation_tokens += count
            stats.num_generation_tokens += count
            step.inter_token_latencies_iter.append(timestamp - stats.last_token_ts)
            stats.last_token_ts = timestamp
            return
        if request.prefilling and output.prefill_stats is not None:
            request.prompt_tokens = output.prefill_stats.num_prompt_tokens
            request.cached_tokens = output.prefill_stats.num_cached_tokens
        step.update_from_output(
            output, timestamp, request.prefilling, request.stats, self._loras, request.lora
        )
        request.prefilling, request.rank = False, rank

    def finished(
        self, step: IterationStats, number: str, request: RunningRequest, reason: FinishReason
    ) -> None:
        """Count the end of a request; with its plain tokens, whose count is known now."""
        step.update_from_finished_request(
            reason,
            number,
            request.prompt_tokens,
            request.max_tokens,
            request.stats,
            request.cached_tokens,
        )
        # The frontend sends an engine request for each of ``n`` choices.
        step.n_params_iter.append(1)
        step.max_num_generation_tokens_iter.append(request.stats.num_generation_tokens)
        self._loras.request_finished(number, request.lora)

    def aborted(self, number: str, request: RunningRequest, stopped: bool) -> None:
        """Forget a request. vLLM counts it if a stop string ended it, which the frontend finds."""
        if not stopped or request.prefilling:
            self._loras.request_finished(number, request.lora)
            return
        step = self._stopped.setdefault(request.rank, IterationStats())
        step.iteration_timestamp = time.time()
        self.finished(step, number, request, FinishReason.STOP)

    def record(self, rank: int, stats: SchedulerStats | None, step: IterationStats | None) -> None:
        """End a step, if there was one, with the statistics of the scheduler."""
        self._loras.update_scheduler_stats(stats)
        self._logger.record(stats, step, engine_idx=rank)

    def gaps(self, rank: int, gaps: Gaps) -> None:
        """Count the gaps before plain tokens."""
        observe = self._gaps[rank].observe
        for seconds, tokens in gaps:
            observe(seconds, tokens)

    def sleeps(self, level: int) -> None:
        """Show that the engine sleeps at ``level``; 0: it is awake."""
        self._logger.record_sleep_state(int(level > 0), level)

    def text(self) -> str:
        """Return the metrics. O(metrics)."""
        for rank in list(self._stopped):
            self.record(rank, None, self.step(rank, 0))
        return vllm_page()
