"""Metrics by name, type, help, labels and buckets: frontend, request plane, router. Spec 6.

A worker's own are in ``names_worker``. ``counter(registry,
spec)`` and its sisters make (or find) the family; names of the frontend area take the prefix of
``--metrics-prefix``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynamo.observability.metrics import Counter, Family, Gauge, Histogram, Registry

__all__ = [
    "DEFAULT_FRONTEND_PREFIX",
    "FrontendNames",
    "MetricSpec",
    "RequestPlane",
    "Router",
    "Worker",
    "counter",
    "gauge",
    "histogram",
]

DEFAULT_FRONTEND_PREFIX = "dynamo_frontend"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``labels`` in the order in which ``Family.labels`` takes their values."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def named(self, prefix: str) -> str:
        """The full name when the frontend's prefix is ``prefix``."""
        if self.name.startswith(DEFAULT_FRONTEND_PREFIX + "_"):
            return prefix + self.name[len(DEFAULT_FRONTEND_PREFIX) :]
        return self.name


def counter(
    registry: Registry, spec: MetricSpec, prefix: str = DEFAULT_FRONTEND_PREFIX
) -> Family[Counter]:
    """The counter family of ``spec``."""
    return registry.counter(spec.named(prefix), spec.help, spec.labels)


def gauge(
    registry: Registry, spec: MetricSpec, prefix: str = DEFAULT_FRONTEND_PREFIX
) -> Family[Gauge]:
    """The gauge family of ``spec``."""
    return registry.gauge(spec.named(prefix), spec.help, spec.labels)


def histogram(
    registry: Registry, spec: MetricSpec, prefix: str = DEFAULT_FRONTEND_PREFIX
) -> Family[Histogram]:
    """The histogram family of ``spec``."""
    return registry.histogram(spec.named(prefix), spec.help, spec.buckets, spec.labels)


def _c(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec("counter", name, help, labels)


def _g(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec("gauge", name, help, labels)


def _h(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec("histogram", name, help, labels, buckets)


# Buckets that more than one histogram has.
_ISL = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_OSL = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
# fmt: off
_TTFT = (
    0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480
)
_ITL = (
    0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1,
    7.4, 13, 24, 44, 80,
)
# fmt: on
_SHORT = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_HASHING_MS = tuple(0.001 * 2**i for i in range(15))
_RATIO = tuple(0.05 * i for i in range(21))
_ROUNDTRIP = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


def _tripled(first: float, count: int) -> tuple[float, ...]:
    bounds = [first]
    while len(bounds) < count:
        bounds.append(bounds[-1] * 3)
    return tuple(bounds)


_OVERHEAD_MS = _tripled(0.01, 17)
_FRONT = DEFAULT_FRONTEND_PREFIX


class FrontendNames:
    """``dynamo_frontend_*``. Spec 6, 6.1."""

    ACTIVE = _g(f"{_FRONT}_active_requests", "Requests being processed, by model", "model")
    INFLIGHT = _g(f"{_FRONT}_inflight_requests", "Requests sent to an engine, by model", "model")
    QUEUED = _g(f"{_FRONT}_queued_requests", "Requests waiting for their first token", "model")
    DISCONNECTED = _g(f"{_FRONT}_disconnected_clients", "Clients that left before the end")
    STARTED = _c(
        f"{_FRONT}_requests_started_total",
        "Requests accepted for processing",
        "endpoint",
        "model",
        "request_type",
    )
    REQUESTS = _c(
        f"{_FRONT}_requests_total",
        "Requests that ended",
        "endpoint",
        "error_type",
        "model",
        "request_type",
        "status",
    )
    REJECTION = _c(
        f"{_FRONT}_model_rejection_total", "Requests rejected by overload", "model", "endpoint"
    )
    CANCELLATION = _c(
        f"{_FRONT}_model_cancellation_total",
        "Requests whose client left before full delivery",
        "model",
        "endpoint",
        "request_type",
    )
    FAILURES = _c(f"{_FRONT}_failures_total", "Failures by class and reason", "class", "reason")
    DURATION = _h(
        f"{_FRONT}_request_duration_seconds",
        "From the request's arrival to the end of its response",
        (0, 2, 4, 8, 16, 32, 64, 130, 260, 510),
        "model",
    )
    TTFT = _h(f"{_FRONT}_time_to_first_token_seconds", "Time to first token", _TTFT, "model")
    ITL = _h(f"{_FRONT}_inter_token_latency_seconds", "Inter-token latency", _ITL, "model")
    ISL = _h(f"{_FRONT}_input_sequence_tokens", "Prompt length in tokens", _ISL, "model")
    OSL = _h(f"{_FRONT}_output_sequence_tokens", "Output length in tokens", _OSL, "model")
    CACHED = _h(f"{_FRONT}_cached_tokens", "Prompt tokens found in the KV cache", _ISL, "model")
    OUTPUT_TOKENS = _c(f"{_FRONT}_output_tokens_total", "Tokens generated", "model")
    STAGE_SECONDS = _h(
        f"{_FRONT}_stage_duration_seconds",
        "Time spent in a stage: preprocess, route, transport_roundtrip, dispatch",
        (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5),
        "stage",
    )
    STAGE_REQUESTS = _g(f"{_FRONT}_stage_requests", "Requests now in a stage", "phase", "stage")
    TEMPLATE_SECONDS = _h(
        f"{_FRONT}_template_seconds",
        "Rendering the chat template",
        (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05),
    )
    TOKENIZE_SECONDS = _h(f"{_FRONT}_tokenize_seconds", "Tokenizing the prompt", _SHORT)
    TOKENIZER_LATENCY_MS = _h(
        f"{_FRONT}_tokenizer_latency_ms",
        "Tokenizing a prompt, detokenizing a response",
        (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        "operation",
    )
    DETOKENIZE_TOKENS = _c(f"{_FRONT}_detokenize_token_count", "Tokens detokenized")
    DETOKENIZE_US = _c(f"{_FRONT}_detokenize_total_us", "Microseconds spent detokenizing")
    CACHE_HITS = _c(f"{_FRONT}_tokenizer_cache_hits_total", "Prompt segments found tokenized")
    CACHE_MISSES = _c(f"{_FRONT}_tokenizer_cache_misses_total", "Prompt segments tokenized")
    LOOP_DELAY = _h(
        f"{_FRONT}_event_loop_delay_seconds",
        "How late a timer of the event loop fired",
        (0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
    )
    LOOP_STALLS = _c(f"{_FRONT}_event_loop_stall_total", "Delays of 100 ms and more")
    MODEL_READY = _g(f"{_FRONT}_model_ready", "1 while the model has a worker", "model")
    MODEL_CONTEXT = _g(f"{_FRONT}_model_context_length", "Longest sequence in tokens", "model")
    MODEL_BLOCK_SIZE = _g(f"{_FRONT}_model_kv_cache_block_size", "Tokens per KV block", "model")
    MODEL_BATCHED_TOKENS = _g(
        f"{_FRONT}_model_max_num_batched_tokens", "Tokens a worker computes at once", "model"
    )
    MODEL_SEQS = _g(f"{_FRONT}_model_max_num_seqs", "Sequences a worker runs at once", "model")
    MODEL_MIGRATION = _g(f"{_FRONT}_model_migration_limit", "Migrations allowed", "model")
    MODEL_KV_BLOCKS = _g(f"{_FRONT}_model_total_kv_blocks", "KV blocks of a worker", "model")
    WORKER_DECODE_BLOCKS = _g(
        f"{_FRONT}_worker_active_decode_blocks",
        "Blocks of running requests",
        "dp_rank",
        "worker_id",
        "worker_type",
    )
    WORKER_PREFILL_TOKENS = _g(
        f"{_FRONT}_worker_active_prefill_tokens",
        "Prompt tokens still to be computed",
        "dp_rank",
        "worker_id",
        "worker_type",
    )
    WORKER_LAST_ISL = _g(
        f"{_FRONT}_worker_last_input_sequence_tokens",
        "Prompt length of the latest request",
        "dp_rank",
        "worker_id",
        "worker_type",
    )
    WORKER_LAST_TTFT = _g(
        f"{_FRONT}_worker_last_time_to_first_token_seconds",
        "Time to first token of the latest request",
        "dp_rank",
        "worker_id",
        "worker_type",
    )
    WORKER_LAST_ITL = _g(
        f"{_FRONT}_worker_last_inter_token_latency_seconds",
        "Inter-token latency of the latest request",
        "dp_rank",
        "worker_id",
        "worker_type",
    )
    # Ours: what the HTTP layer turned away before any route saw it.
    HTTP_CONNECTIONS = _g(f"{_FRONT}_http_connections", "Client connections")
    HTTP_REFUSED = _c(
        f"{_FRONT}_http_refused_total", "Requests refused by the HTTP layer", "status"
    )
    CARDS_REJECTED = _c(
        f"{_FRONT}_model_cards_rejected_total",
        "Model cards that disagree with the model's other workers, or can't be read",
        "model",
        "reason",
    )


class RequestPlane:
    """``dynamo_request_plane_*``: the frontend's side of the way to the workers. Spec 6.2."""

    INFLIGHT = _g("dynamo_request_plane_inflight_requests", "Streams open to workers")
    QUEUE_SECONDS = _h("dynamo_request_plane_queue_seconds", "From arrival to sending", _SHORT)
    SEND_SECONDS = _h("dynamo_request_plane_send_seconds", "Encoding and sending", _SHORT)
    ROUNDTRIP = _h(
        "dynamo_request_plane_roundtrip_ttft_seconds", "Sending to first item", _ROUNDTRIP
    )


_COMPONENT = ("dynamo_component", "dynamo_namespace")
_ROUTED = (*_COMPONENT, "router_id", "worker_id")


class Router:
    """Router metrics on the frontend's page. Spec 6.2, 6.3."""

    BLOCK_HASHING_MS = _h(
        "dynamo_router_overhead_block_hashing_ms", "Block hashing", _HASHING_MS, "router_id"
    )
    SEQ_HASHING_MS = _h(
        "dynamo_router_overhead_seq_hashing_ms", "Sequence hashing", _HASHING_MS, "router_id"
    )
    FIND_MATCHES_MS = _h(
        "dynamo_router_overhead_indexer_find_matches_ms", "Index lookup", _OVERHEAD_MS, "router_id"
    )
    SCHEDULING_MS = _h(
        "dynamo_router_overhead_scheduling_ms", "Cost, choice, booking", _OVERHEAD_MS, "router_id"
    )
    TOTAL_MS = _h("dynamo_router_overhead_total_ms", "Whole decision", _OVERHEAD_MS, "router_id")
    EVENT_WARNINGS = _c(
        "dynamo_component_kv_cache_event_warnings",
        "KV events that were odd but tolerable",
        *_COMPONENT,
        "warning_kind",
        "worker_id",
    )
    EVENTS_APPLIED = _c(
        "dynamo_component_kv_cache_events_applied",
        "KV events by type and outcome",
        *_COMPONENT,
        "event_type",
        "status",
        "worker_id",
    )
    ISL = _h(
        "dynamo_component_router_input_sequence_tokens",
        "Prompt length of routed requests",
        _ISL,
        *_COMPONENT,
        "model",
        "phase",
        "router_id",
        "worker_id",
    )
    OSL = _h("dynamo_component_router_output_sequence_tokens", "Output length", _OSL, *_ROUTED)
    TTFT = _h("dynamo_component_router_time_to_first_token_seconds", "TTFT", _TTFT, *_ROUTED)
    ITL = _h(
        "dynamo_component_router_inter_token_latency_seconds",
        "Inter-token latency",
        (0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2),
        *_ROUTED,
    )
    HIT_RATE = _h(
        "dynamo_component_router_kv_hit_rate", "Cached share of the prompt", _RATIO, *_ROUTED
    )
    STARTED = _c("dynamo_component_router_requests_started_total", "Requests routed", *_ROUTED)
    REQUESTS = _c("dynamo_component_router_requests_total", "Routed requests ended", *_ROUTED)
    WORKER_REGISTERED = _g(
        "dynamo_component_router_worker_registered",
        "1 for each worker the router knows",
        "dp_rank",
        *_COMPONENT,
        "router_worker_id",
        "worker_id",
        "worker_type",
    )


_SERVED = ("dynamo_component", "dynamo_endpoint", "dynamo_namespace", "worker_id")


class Worker:
    """Endpoints served by this process, on its system port. Spec 6.4."""

    REQUESTS = _c("dynamo_component_requests_total", "Requests received", *_SERVED)
    INFLIGHT = _g("dynamo_component_inflight_requests", "Requests being served", *_SERVED)
    CANCELLATION = _c("dynamo_component_cancellation_total", "Requests cancelled", *_SERVED)
    ERRORS = _c("dynamo_component_errors_total", "Failed requests", *_SERVED, "error_type")
    REQUEST_BYTES = _c("dynamo_component_request_bytes_total", "Bytes received", *_SERVED)
    RESPONSE_BYTES = _c("dynamo_component_response_bytes_total", "Bytes sent", *_SERVED)
    DURATION = _h(
        "dynamo_component_request_duration_seconds",
        "Serving one request",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600),
        *_SERVED,
    )
    UPTIME = _g("dynamo_component_uptime_seconds", "Seconds since start", "worker_id")
