"""Every metric of a worker once: name, help, labels, buckets. Spec 6.4."""

from __future__ import annotations

from dynamo.observability.names import MetricSpec

__all__ = [
    "ENGINE_REQUEST",
    "ENQUEUE_REJECTED",
    "FIRST_RESPONSE",
    "PERMIT_WAIT",
    "POOL_ACTIVE",
    "POOL_CAPACITY",
    "PUBLISHER_DROPPED",
    "QUEUE_CAPACITY",
    "QUEUE_DEPTH",
    "REJECTIONS",
    "REQUEST_QUEUE",
    "VLLM_GPU_USAGE",
    "VLLM_ITL",
    "VLLM_KV_USAGE",
    "VLLM_LATENCY",
    "VLLM_PREEMPTIONS",
    "VLLM_RUNNING",
    "VLLM_TTFT",
    "VLLM_WAITING",
]


_ENGINE = ("engine", "model_name")
_COMPONENT = ("dynamo_component", "dynamo_namespace", "worker_id")

ENGINE_REQUEST = MetricSpec("gauge", "dynamo_engine_request", "Requests in the engine")
REQUEST_QUEUE = MetricSpec("gauge", "dynamo_request_queue", "Requests in line behind the next one")
REJECTIONS = MetricSpec(
    "counter", "dynamo_rejection_request_total", "Requests refused by a full worker"
)
POOL_CAPACITY = MetricSpec(
    "gauge", "dynamo_work_handler_pool_capacity", "Requests the engine takes"
)
POOL_ACTIVE = MetricSpec("gauge", "dynamo_work_handler_pool_active_tasks", "Requests being served")
QUEUE_DEPTH = MetricSpec(
    "gauge", "dynamo_work_handler_queue_depth", "Requests in line behind the next one"
)
ENQUEUE_REJECTED = MetricSpec(
    "counter", "dynamo_work_handler_enqueue_rejected_total", "Requests that found the line full"
)
PERMIT_WAIT = MetricSpec(
    "histogram",
    "dynamo_work_handler_permit_wait_seconds",
    "Seconds in line",
    (),
    (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60),
)
FIRST_RESPONSE = MetricSpec(
    "histogram",
    "dynamo_work_handler_time_to_first_response_seconds",
    "Seconds from the request to its first response item",
    (),
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
QUEUE_CAPACITY = MetricSpec("gauge", "dynamo_work_handler_queue_capacity", "Places in the line")
PUBLISHER_DROPPED = MetricSpec(
    "counter",
    "dynamo_component_kv_publisher_engines_dropped_events_total",
    "KV events of the engine that were lost on the way, or malformed",
    _COMPONENT,
)

VLLM_RUNNING = MetricSpec("gauge", "vllm:num_requests_running", "Sequences being computed", _ENGINE)
VLLM_WAITING = MetricSpec("gauge", "vllm:num_requests_waiting", "Sequences waiting", _ENGINE)
VLLM_KV_USAGE = MetricSpec(
    "gauge", "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0..1", _ENGINE
)
VLLM_GPU_USAGE = MetricSpec(
    "gauge", "vllm:gpu_cache_usage_perc", "Share of the KV cache in use, 0..1 (old name)", _ENGINE
)
VLLM_PREEMPTIONS = MetricSpec(
    "counter", "vllm:num_preemptions_total", "Sequences that lost their blocks", _ENGINE
)
VLLM_TTFT = MetricSpec(
    "histogram",
    "vllm:time_to_first_token_seconds",
    "Seconds from arrival to the first token",
    _ENGINE,
    (
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
        640,
        2560,
    ),
)
VLLM_ITL = MetricSpec(
    "histogram",
    "vllm:inter_token_latency_seconds",
    "Seconds between two tokens of a sequence",
    _ENGINE,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
VLLM_LATENCY = MetricSpec(
    "histogram",
    "vllm:e2e_request_latency_seconds",
    "Seconds from arrival to the last token",
    _ENGINE,
    (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
