"""The frontend's counters: children looked up once for each model, then plain additions.

Spec 6, 6.1, 6.2. Names of models nobody serves fold into one label value, so that a client can't
fill the memory with label values.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo.observability.metrics import Counter, Family, Gauge, Histogram, Registry
from dynamo.observability.names import (
    DEFAULT_FRONTEND_PREFIX,
    FrontendNames,
    MetricSpec,
    RequestPlane,
    counter,
    gauge,
    histogram,
)
from dynamo.protocols.card import ModelCard

__all__ = ["PHASES", "UNKNOWN_MODEL", "FrontendMetrics", "ModelMetrics", "Outcomes", "WorkerLast"]

UNKNOWN_MODEL = "unknown_model"

PHASES = ("aggregated", "prefill", "decode")
"""Label values of requests that are routed or dispatched: to a worker that does all of it, or to
either half where there are prefill workers."""


class WorkerLast(NamedTuple):
    """What the latest request of a worker saw: prompt tokens and seconds."""

    isl: Gauge
    ttft: Gauge
    itl: Gauge


class FrontendMetrics:
    """Everything the frontend counts, on ``registry``, with names that begin with ``prefix``."""

    def __init__(self, registry: Registry, prefix: str = DEFAULT_FRONTEND_PREFIX) -> None:
        self.registry = registry
        self.prefix = prefix
        self._models: dict[str, ModelMetrics] = {}
        self.disconnected = self._gauge(FrontendNames.DISCONNECTED).labels()
        self.disconnected.set(0)
        self.http_refused = self._counter(FrontendNames.HTTP_REFUSED)
        self.http_connections = self._gauge(FrontendNames.HTTP_CONNECTIONS).labels()
        self.failures = self._counter(FrontendNames.FAILURES)
        self.cards_rejected = self._counter(FrontendNames.CARDS_REJECTED)
        self.loop_delay = self._histogram(FrontendNames.LOOP_DELAY).labels()
        self.loop_stalls = self._counter(FrontendNames.LOOP_STALLS).labels()
        self.template = self._histogram(FrontendNames.TEMPLATE_SECONDS).labels()
        self.tokenize = self._histogram(FrontendNames.TOKENIZE_SECONDS).labels()
        latency = self._histogram(FrontendNames.TOKENIZER_LATENCY_MS)
        self.tokenize_ms = latency.labels("tokenize")
        self._detokenize_ms = latency.labels("detokenize")
        self._detokenize_tokens = self._counter(FrontendNames.DETOKENIZE_TOKENS).labels()
        self._detokenize_us = self._counter(FrontendNames.DETOKENIZE_US).labels()
        stages = self._histogram(FrontendNames.STAGE_SECONDS)
        self.preprocess_stage = stages.labels("preprocess")
        self.route_stage = stages.labels("route")
        self.dispatch_stage = stages.labels("dispatch")
        self.roundtrip_stage = stages.labels("transport_roundtrip")
        waiting = self._gauge(FrontendNames.STAGE_REQUESTS)
        self.preprocessing = waiting.labels("", "preprocess")
        self.routing = {phase: waiting.labels(phase, "route") for phase in PHASES}
        self.dispatching = {phase: waiting.labels(phase, "dispatch") for phase in PHASES}
        self.plane_inflight = gauge(registry, RequestPlane.INFLIGHT).labels()
        self.plane_queue = histogram(registry, RequestPlane.QUEUE_SECONDS).labels()
        self.plane_send = histogram(registry, RequestPlane.SEND_SECONDS).labels()
        self.plane_roundtrip = histogram(registry, RequestPlane.ROUNDTRIP).labels()
        self._last = (
            self._gauge(FrontendNames.WORKER_LAST_ISL),
            self._gauge(FrontendNames.WORKER_LAST_TTFT),
            self._gauge(FrontendNames.WORKER_LAST_ITL),
        )
        self._workers: dict[tuple[int, int, str], WorkerLast] = {}
        self._unknown = Outcomes(self, UNKNOWN_MODEL)

    def tokenized(self, seconds: float) -> None:
        """A prompt was tokenized."""
        self.tokenize.observe(seconds)
        self.tokenize_ms.observe(seconds * 1e3)

    def detokenized(self, tokens: int, seconds: float) -> None:
        """An answer of so many tokens has become text."""
        self._detokenize_ms.observe(seconds * 1e3)
        self._detokenize_tokens.value += tokens
        self._detokenize_us.value += seconds * 1e6

    def tokenizer_cache(self, hits: int, misses: int) -> None:
        """Prompt segments found and not found tokenized, all models, since the start."""
        self._counter(FrontendNames.CACHE_HITS).labels().value = hits
        self._counter(FrontendNames.CACHE_MISSES).labels().value = misses

    def refused(self, status: int) -> None:
        """The HTTP layer turned a request away."""
        self.http_refused.labels(str(status)).value += 1

    def model(self, name: str) -> ModelMetrics:
        """The children of a model that is or was served."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelMetrics(self, name)
        return found

    def outcomes(self, name: str) -> Outcomes:
        """Of ``name`` if it is or was served, else of all unknown models together."""
        return self._models.get(name) or self._unknown

    def worker(self, worker_id: int, dp_rank: int, kind: str = "decode") -> WorkerLast:
        """The gauges of a worker's latest request; ``kind`` is its label ``worker_type``."""
        found = self._workers.get((worker_id, dp_rank, kind))
        if found is None:
            labels = (str(dp_rank), str(worker_id), kind)
            found = self._workers[worker_id, dp_rank, kind] = WorkerLast(
                *(family.labels(*labels) for family in self._last)
            )
        return found

    def forget_worker(self, worker_id: int) -> None:
        """The worker is gone, with all its ranks."""
        for key in [key for key in self._workers if key[0] == worker_id]:
            del self._workers[key]
            for family in self._last:
                family.remove(str(key[1]), str(worker_id), key[2])

    def show_card(self, card: ModelCard, ready: bool) -> None:
        """The model's gauges, from its card."""
        config = card.runtime_config
        rows: list[tuple[MetricSpec, float | None]] = [
            (FrontendNames.MODEL_READY, float(ready)),
            (FrontendNames.MODEL_CONTEXT, card.context_length),
            (FrontendNames.MODEL_BLOCK_SIZE, card.kv_cache_block_size),
            (FrontendNames.MODEL_BATCHED_TOKENS, config.max_num_batched_tokens),
            (FrontendNames.MODEL_SEQS, config.max_num_seqs),
            (FrontendNames.MODEL_MIGRATION, card.migration_limit),
            (FrontendNames.MODEL_KV_BLOCKS, config.total_kv_blocks),
        ]
        for spec, value in rows:
            if value is not None:
                self._gauge(spec).labels(card.display_name).set(value)

    def _counter(self, spec: MetricSpec) -> Family[Counter]:
        return counter(self.registry, spec, self.prefix)

    def _gauge(self, spec: MetricSpec) -> Family[Gauge]:
        return gauge(self.registry, spec, self.prefix)

    def _histogram(self, spec: MetricSpec) -> Family[Histogram]:
        return histogram(self.registry, spec, self.prefix)


class Outcomes:
    """How the requests for one model begin and end."""

    def __init__(self, metrics: FrontendMetrics, name: str) -> None:
        registry, prefix = metrics.registry, metrics.prefix
        self.name = name
        self._started = counter(registry, FrontendNames.STARTED, prefix)
        self._requests = counter(registry, FrontendNames.REQUESTS, prefix)
        self._rejection = counter(registry, FrontendNames.REJECTION, prefix)
        self._cancellation = counter(registry, FrontendNames.CANCELLATION, prefix)

    def started(self, endpoint: str, request_type: str) -> None:
        """A request was accepted for processing."""
        self._started.labels(endpoint, self.name, request_type).value += 1

    def ended(self, endpoint: str, request_type: str, error_type: str) -> None:
        """A request has ended; ``error_type`` is "" for success. Spec 6."""
        status = "error" if error_type else "success"
        self._requests.labels(endpoint, error_type, self.name, request_type, status).value += 1
        if error_type == "cancelled":
            self._cancellation.labels(self.name, endpoint, request_type).value += 1
        elif error_type == "overload":
            self._rejection.labels(self.name, endpoint).value += 1


class ModelMetrics(Outcomes):
    """The children of one model that is or was served."""

    def __init__(self, metrics: FrontendMetrics, name: str) -> None:
        super().__init__(metrics, name)
        registry, prefix = metrics.registry, metrics.prefix
        self.active = gauge(registry, FrontendNames.ACTIVE, prefix).labels(name)
        self.inflight = gauge(registry, FrontendNames.INFLIGHT, prefix).labels(name)
        self.queued = gauge(registry, FrontendNames.QUEUED, prefix).labels(name)
        self.duration = histogram(registry, FrontendNames.DURATION, prefix).labels(name)
        self.ttft = histogram(registry, FrontendNames.TTFT, prefix).labels(name)
        self.itl = histogram(registry, FrontendNames.ITL, prefix).labels(name)
        self.isl = histogram(registry, FrontendNames.ISL, prefix).labels(name)
        self.osl = histogram(registry, FrontendNames.OSL, prefix).labels(name)
        self.cached = histogram(registry, FrontendNames.CACHED, prefix).labels(name)
        self.output_tokens = counter(registry, FrontendNames.OUTPUT_TOKENS, prefix).labels(name)
