"""Metrics of the frontend: children looked up once per model, then plain additions.

Names of models that are not served share one label value: a client cannot fill the memory with
label values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from dynamo._fast.histogram import Histogram
from dynamo.frontend.prompt.preprocessor import PromptMetrics
from dynamo.frontend.requests.recent import WORKER_WAIT, RecentRequests
from dynamo.observability.metrics import (
    ISL_BUCKETS,
    OSL_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    Family,
    Gauge,
    MetricSpec,
    Registry,
    counter,
    gauge,
    histogram,
)
from dynamo.prometheus_names import name_prefix
from dynamo.protocols.control import ModelCard

UNKNOWN_MODEL = "unknown_model"

PHASES = ("aggregated", "prefill", "decode")
"""What a request is routed or dispatched for: all of it, or one half of disaggregated serving."""

PREPROCESS = ("", "preprocess")
"""Phase and stage of a request that has just come."""

WORKER_WAIT_STAGE = ("", WORKER_WAIT)
"""Those of a request that waits for the first worker of its model."""

C = TypeVar("C", Counter, Gauge, Histogram)

# fmt: off
_ITL_BUCKETS = (
    0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1,
    7.4, 13, 24, 44, 80,
)
# fmt: on
_SHORT_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)

# Requests, by model.
_ACTIVE = gauge("dynamo_frontend_active_requests", "Requests being processed, by model", "model")
_INFLIGHT = gauge(
    "dynamo_frontend_inflight_requests", "Requests sent to an engine, by model", "model"
)
_QUEUED = gauge(
    "dynamo_frontend_queued_requests", "Requests waiting for their first token", "model"
)
_COLD_START_QUEUE = gauge(
    "dynamo_frontend_cold_start_queue_requests",
    "Requests waiting for the first worker of their model",
    "model",
)
_DURATION = histogram(
    "dynamo_frontend_request_duration_seconds",
    "From the request's arrival to the end of its response",
    (0, 2, 4, 8, 16, 32, 64, 130, 260, 510),
    "model",
)
_TTFT = histogram(
    "dynamo_frontend_time_to_first_token_seconds", "Time to first token", TTFT_BUCKETS, "model"
)
_TTFT_WORKER_WAIT = counter(
    "dynamo_frontend_time_to_first_token_worker_wait_seconds_total",
    "The part of the times to first token in which the model had no worker",
    "model",
)
_DURATION_WORKER_WAIT = counter(
    "dynamo_frontend_request_worker_wait_seconds_total",
    "The part of the durations of requests in which the model had no worker",
    "model",
)
_ITL = histogram(
    "dynamo_frontend_inter_token_latency_seconds", "Inter-token latency", _ITL_BUCKETS, "model"
)
_ISL = histogram(
    "dynamo_frontend_input_sequence_tokens", "Prompt length in tokens", ISL_BUCKETS, "model"
)
_OSL = histogram(
    "dynamo_frontend_output_sequence_tokens", "Output length in tokens", OSL_BUCKETS, "model"
)
_CACHED = histogram(
    "dynamo_frontend_cached_tokens", "Prompt tokens found in the KV cache", ISL_BUCKETS, "model"
)
_OUTPUT_TOKENS = counter("dynamo_frontend_output_tokens_total", "Tokens generated", "model")

_IMAGES = histogram(
    "dynamo_frontend_images_per_request",
    "Images of a request that has some",
    (1, 2, 4, 8, 16, 32, 64),
    "model",
)
_IMAGE_TOKENS = histogram(
    "dynamo_frontend_image_tokens_per_request",
    "Prompt tokens that stand for the images of a request, as its engine reports them",
    (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "model",
)
_EMBEDDING = histogram(
    "dynamo_frontend_embedding_latency_seconds",
    "From the arrival of a request for embeddings to the end of its response",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    "model",
)

# How requests begin and end.
_STARTED = counter(
    "dynamo_frontend_requests_started_total",
    "Requests accepted for processing, those that wait for the first worker of their model too",
    "endpoint model request_type",
)
_REQUESTS = counter(
    "dynamo_frontend_requests_total",
    "Requests that ended",
    "endpoint error_type model request_type status",
)
_REJECTION = counter(
    "dynamo_frontend_model_rejection_total", "Requests rejected by overload", "model endpoint"
)
_CANCELLATION = counter(
    "dynamo_frontend_model_cancellation_total",
    "Requests whose client left before full delivery",
    "model endpoint request_type",
)
_FAILURES = counter(
    "dynamo_frontend_failures_total", "Failures by class and reason", "class reason"
)
_DISCONNECTED = gauge("dynamo_frontend_disconnected_clients", "Clients that left before the end")

# Where their time goes.
_STAGE_SECONDS = histogram(
    "dynamo_frontend_stage_duration_seconds",
    "Time spent in a stage: worker_wait, preprocess, route, transport_roundtrip, dispatch",
    (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5),
    "stage",
)
_STAGE_REQUESTS = gauge("dynamo_frontend_stage_requests", "Requests now in a stage", "phase stage")
_TEMPLATE_SECONDS = histogram(
    "dynamo_frontend_template_seconds",
    "Rendering the chat template",
    (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05),
)
_TOKENIZE_SECONDS = histogram(
    "dynamo_frontend_tokenize_seconds", "Tokenizing the prompt", _SHORT_BUCKETS
)
_TOKENIZER_LATENCY_MS = histogram(
    "dynamo_frontend_tokenizer_latency_ms",
    "Tokenizing a prompt, detokenizing a response",
    (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "operation",
)
_DETOKENIZE_TOKENS = counter("dynamo_frontend_detokenize_token_count", "Tokens detokenized")
_DETOKENIZE_US = counter("dynamo_frontend_detokenize_total_us", "Microseconds spent detokenizing")
_CACHE_HITS = counter(
    "dynamo_frontend_tokenizer_cache_hits_total", "Prompt segments found tokenized"
)
_CACHE_MISSES = counter("dynamo_frontend_tokenizer_cache_misses_total", "Prompt segments tokenized")
_LOOP_DELAY = histogram(
    "dynamo_frontend_event_loop_delay_seconds",
    "How late a timer of the event loop fired",
    (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
)
_LOOP_STALLS = counter("dynamo_frontend_event_loop_stall_total", "Delays of 100 ms and more")
_PLANE_INFLIGHT = gauge("dynamo_request_plane_inflight_requests", "Streams open to workers")
_PLANE_QUEUE = histogram(
    "dynamo_request_plane_queue_seconds", "From arrival to sending", _SHORT_BUCKETS
)
_PLANE_SEND = histogram("dynamo_request_plane_send_seconds", "Encoding and sending", _SHORT_BUCKETS)
_PLANE_ROUNDTRIP = histogram(
    "dynamo_request_plane_roundtrip_ttft_seconds",
    "Sending to first item",
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)

# Models and workers.
_MODEL_READY = gauge("dynamo_frontend_model_ready", "1 while the model has a worker", "model")
_MODEL_CONTEXT = gauge(
    "dynamo_frontend_model_context_length", "Longest sequence in tokens", "model"
)
_MODEL_BLOCK_SIZE = gauge(
    "dynamo_frontend_model_kv_cache_block_size", "Tokens per KV block", "model"
)
_MODEL_BATCHED_TOKENS = gauge(
    "dynamo_frontend_model_max_num_batched_tokens", "Tokens a worker computes at once", "model"
)
_MODEL_SEQS = gauge(
    "dynamo_frontend_model_max_num_seqs", "Sequences a worker runs at once", "model"
)
_MODEL_MIGRATION = gauge("dynamo_frontend_model_migration_limit", "Migrations allowed", "model")
_MODEL_KV_BLOCKS = gauge("dynamo_frontend_model_total_kv_blocks", "KV blocks of a worker", "model")
_MODEL_USED_KV_BLOCKS = gauge(
    "dynamo_frontend_model_used_kv_blocks",
    "KV blocks that running requests of this frontend hold, mean of the model's workers",
    "model",
)
_WORKER = "dp_rank worker_id worker_type"
_WORKER_LAST_ISL = gauge(
    "dynamo_frontend_worker_last_input_sequence_tokens",
    "Prompt length of the latest request",
    _WORKER,
)
_WORKER_LAST_TTFT = gauge(
    "dynamo_frontend_worker_last_time_to_first_token_seconds",
    "Time to first token of the latest request",
    _WORKER,
)
_WORKER_LAST_ITL = gauge(
    "dynamo_frontend_worker_last_inter_token_latency_seconds",
    "Inter-token latency of the latest request",
    _WORKER,
)

# This project's own.
_HTTP_CONNECTIONS = gauge("dynamo_frontend_http_connections", "Client connections")
_HTTP_REFUSED = counter(
    "dynamo_frontend_http_refused_total", "Requests refused by the HTTP layer", "status"
)
_CARDS_REJECTED = counter(
    "dynamo_frontend_model_cards_rejected_total",
    "Model cards that disagree with the model's other workers, or can't be read",
    "model reason",
)
GONE_MODELS = 64
_MODELS_DROPPED = counter(
    "dynamo_frontend_models_dropped_total",
    f"Models and adapters that are gone and whose counters were removed: {GONE_MODELS} are kept",
)


class WorkerLast(NamedTuple):
    """What the latest request of a worker took: prompt tokens and seconds."""

    isl: Gauge
    ttft: Gauge
    itl: Gauge


class _WorkersLast(dict[tuple[int, int, str], WorkerLast]):
    """The gauges by worker, rank and type (prefill, decode); indexing makes them on first use."""

    def __init__(self, *families: Family[Gauge]) -> None:
        super().__init__()
        self._families = families

    def __missing__(self, key: tuple[int, int, str]) -> WorkerLast:
        worker_id, dp_rank, worker_type = key
        labels = (str(dp_rank), str(worker_id), worker_type)
        gauges = self[key] = WorkerLast(*(family[labels] for family in self._families))
        return gauges

    def forget(self, worker_id: int) -> None:
        """Remove the gauges of a worker and all its ranks."""
        for key in [key for key in self if key[0] == worker_id]:
            del self[key]
            for family in self._families:
                family.remove(str(key[1]), str(worker_id), key[2])


class FrontendMetrics:
    """All metrics of the frontend, on ``registry``, with names that begin with ``prefix``.

    ``recent`` has the requests that ended last.
    """

    def __init__(self, registry: Registry, prefix: str = name_prefix.FRONTEND) -> None:
        self.registry = registry
        self.prefix = prefix
        self.recent = RecentRequests()
        self._models: dict[str, ModelMetrics] = {}
        self._gone: dict[str, None] = {}
        self.models_dropped = self.child(_MODELS_DROPPED)
        self.disconnected = self.child(_DISCONNECTED)
        self.http_refused = self.family(_HTTP_REFUSED)
        self.http_connections = self.child(_HTTP_CONNECTIONS)
        self.failures = self.family(_FAILURES)
        self.cards_rejected = self.family(_CARDS_REJECTED)
        self.loop_delay = self.child(_LOOP_DELAY)
        self.loop_stalls = self.child(_LOOP_STALLS)
        self.prompt = PromptMetrics(
            self.child(_TEMPLATE_SECONDS),
            self.child(_TOKENIZE_SECONDS),
            self.child(_TOKENIZER_LATENCY_MS, "tokenize"),
        )
        self.detokenize_ms = self.child(_TOKENIZER_LATENCY_MS, "detokenize")
        self.detokenize_tokens = self.child(_DETOKENIZE_TOKENS)
        self.detokenize_us = self.child(_DETOKENIZE_US)
        self.worker_wait_stage = self.child(_STAGE_SECONDS, WORKER_WAIT)
        self.preprocess_stage = self.child(_STAGE_SECONDS, "preprocess")
        self.route_stage = self.child(_STAGE_SECONDS, "route")
        self.dispatch_stage = self.child(_STAGE_SECONDS, "dispatch")
        self.roundtrip_stage = self.child(_STAGE_SECONDS, "transport_roundtrip")
        stages = (WORKER_WAIT_STAGE, PREPROCESS, *itertools.product(PHASES, ("route", "dispatch")))
        self.stages = {stage: self.child(_STAGE_REQUESTS, *stage) for stage in stages}
        self.plane_inflight = self.child(_PLANE_INFLIGHT)
        self.plane_queue = self.child(_PLANE_QUEUE)
        self.plane_send = self.child(_PLANE_SEND)
        self.plane_roundtrip = self.child(_PLANE_ROUNDTRIP)
        self.workers = _WorkersLast(
            self.family(_WORKER_LAST_ISL),
            self.family(_WORKER_LAST_TTFT),
            self.family(_WORKER_LAST_ITL),
        )
        self._unknown = Outcomes(self, UNKNOWN_MODEL)
        self._tokenized = WeakKeyDictionary[object, tuple[int, int]]()

    def family(self, spec: MetricSpec[C]) -> Family[C]:
        """The family of ``spec`` under this frontend's prefix."""
        return self.registry.family(spec, self.prefix)

    def child(self, spec: MetricSpec[C], *values: str) -> C:
        """The child of ``spec`` for these label values."""
        return self.registry.family(spec, self.prefix)[values]

    def tokenizer_cache(self, encoder: object, hits: int, misses: int) -> None:
        """Count the prompt segments that ``encoder`` has found and not found tokenized so far.

        They stay when it is removed with its model: counters do not fall.
        """
        before_hits, before_misses = self._tokenized.get(encoder, (0, 0))
        self.child(_CACHE_HITS).value += hits - before_hits
        self.child(_CACHE_MISSES).value += misses - before_misses
        self._tokenized[encoder] = hits, misses

    def refused(self, status: int) -> None:
        """Count a request that the HTTP layer refused."""
        self.http_refused.labels(str(status)).value += 1

    def model(self, name: str) -> ModelMetrics:
        """The children of a model that is or was served."""
        metrics = self._models.get(name)
        if metrics is None:
            self._gone.pop(name, None)
            metrics = self._models[name] = ModelMetrics(self, name)
        return metrics

    def waiting(self, name: str) -> int:
        """How many requests wait for the first worker of ``name``, which gets no series by this."""
        metrics = self._models.get(name)
        return 0 if metrics is None else int(metrics.cold_start_queue.value)

    @property
    def models(self) -> Iterable[ModelMetrics]:
        """Those of all models that are or were served."""
        return self._models.values()

    def outcomes(self, name: str) -> Outcomes:
        """The outcomes of ``name`` if it is or was served, else of all unknown models together."""
        return self._models.get(name) or self._unknown

    def forget(self, name: str) -> None:
        """Remove gauges and histograms of a model that is gone, and the counters of an older one.

        The counters of the last ``GONE_MODELS`` stay.
        """
        self.registry.forget("model", name, (Gauge, Histogram))
        self._models.pop(name, None)
        self.recent.forget(name)
        self._gone[name] = None
        if len(self._gone) > GONE_MODELS:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self.registry.forget("model", oldest, (Counter, Gauge, Histogram))
            self.models_dropped.value += 1

    def show_card(
        self, card: ModelCard, ready: bool, migration_limit: int, workers: int = 1
    ) -> None:
        """Set the model's gauges, most of them from its card."""
        config = card.runtime_config
        model = self._models.get(card.display_name)
        if model is not None and config.total_kv_blocks:
            model.kv_block_size, model.workers = card.kv_cache_block_size or 0, max(1, workers)
        rows: list[tuple[MetricSpec[Gauge], float | None]] = [
            (_MODEL_READY, ready),
            (_MODEL_CONTEXT, card.context_length),
            (_MODEL_BLOCK_SIZE, card.kv_cache_block_size),
            (_MODEL_BATCHED_TOKENS, config.max_num_batched_tokens),
            (_MODEL_SEQS, config.max_num_seqs),
            (_MODEL_MIGRATION, migration_limit),
            (_MODEL_KV_BLOCKS, config.total_kv_blocks),
        ]
        for spec, value in rows:
            if value is not None:
                self.child(spec, card.display_name).value = value

    def show_used_blocks(self, running: Iterable[tuple[str, int]]) -> None:
        """Show the KV blocks that ``running`` requests hold: each has its model and its tokens."""
        models = {name: model for name, model in self._models.items() if model.kv_block_size}
        used = dict.fromkeys(models, 0)
        for name, tokens in running:
            if name in models:
                used[name] += -(-tokens // models[name].kv_block_size)
        for name, model in models.items():
            self.child(_MODEL_USED_KV_BLOCKS, name).value = used[name] / model.workers


class Outcomes:
    """How the requests for one model begin and end.

    ``started`` and ``requests`` are public because indexing a family costs no Python call.
    """

    def __init__(self, metrics: FrontendMetrics, name: str) -> None:
        self.name = name
        self.started = metrics.family(_STARTED)
        self.requests = metrics.family(_REQUESTS)
        self._rejection = metrics.family(_REJECTION)
        self._cancellation = metrics.family(_CANCELLATION)

    def failed(self, endpoint: str, request_type: str, error_type: str) -> None:
        """Count a request that has failed."""
        self.requests[endpoint, error_type, self.name, request_type, "error"].value += 1
        if error_type == "cancelled":
            self._cancellation[self.name, endpoint, request_type].value += 1
        elif error_type == "overload":
            self._rejection[self.name, endpoint].value += 1


class ModelMetrics(Outcomes):
    """The children of one model that is or was served."""

    def __init__(self, metrics: FrontendMetrics, name: str) -> None:
        super().__init__(metrics, name)
        self.active = metrics.child(_ACTIVE, name)
        self.inflight = metrics.child(_INFLIGHT, name)
        self.queued = metrics.child(_QUEUED, name)
        self.cold_start_queue = metrics.child(_COLD_START_QUEUE, name)
        self.duration = metrics.child(_DURATION, name)
        self.ttft = metrics.child(_TTFT, name)
        self.itl = metrics.child(_ITL, name)
        self.isl = metrics.child(_ISL, name)
        self.osl = metrics.child(_OSL, name)
        self.cached = metrics.child(_CACHED, name)
        self.kv_block_size, self.workers = 0, 1
        # Families: a model has no series of what it never had: a cold start, images, embeddings.
        self.ttft_worker_wait = metrics.family(_TTFT_WORKER_WAIT)
        self.duration_worker_wait = metrics.family(_DURATION_WORKER_WAIT)
        self.images = metrics.family(_IMAGES)
        self.image_tokens = metrics.family(_IMAGE_TOKENS)
        self.embedding = metrics.family(_EMBEDDING)
        self.output_tokens = metrics.child(_OUTPUT_TOKENS, name)
