"""Metrics of the router's queue. Spec 6.1."""

from __future__ import annotations

from dynamo.observability.names import MetricSpec

__all__ = ["RouterQueue"]

_QUEUED = ("model", "policy_class", "worker_type")
_REASONED = ("model", "policy_class", "reason", "worker_type")


class RouterQueue:
    """Requests that wait for a worker. ``LEFT`` and ``WAIT_SECONDS`` are this project's own."""

    REQUESTS = MetricSpec(
        "gauge",
        "dynamo_frontend_router_queue_pending_requests",
        "Requests waiting in the router's queue",
        _QUEUED,
    )
    ISL_TOKENS = MetricSpec(
        "gauge",
        "dynamo_frontend_router_queue_pending_isl_tokens",
        "Prompt tokens of the requests waiting in the router's queue",
        _QUEUED,
    )
    CACHED_TOKENS = MetricSpec(
        "gauge",
        "dynamo_frontend_router_queue_pending_cached_tokens",
        "Those of them that a worker holds",
        _QUEUED,
    )
    BACKPRESSURE = MetricSpec(
        "counter",
        "dynamo_frontend_router_queue_backpressure_total",
        "Requests that had to wait: behind others, or for prefill load to fall",
        _REASONED,
    )
    RECEIVED = MetricSpec(
        "counter",
        "dynamo_frontend_router_admission_received_total",
        "Requests that came to the router's queue, whether they had to wait or not",
        _QUEUED,
    )
    REJECTED = MetricSpec(
        "counter",
        "dynamo_frontend_router_admission_rejected_total",
        "Requests turned away there: the queue was full, or all workers overloaded",
        _REASONED,
    )
    LEFT = MetricSpec(
        "counter",
        "dynamo_frontend_router_queue_left_total",
        "Requests whose client left while they waited",
        _QUEUED,
    )
    WAIT_SECONDS = MetricSpec(
        "histogram",
        "dynamo_frontend_router_queue_wait_seconds",
        "Time in the router's queue of the requests that had to wait and were served",
        _QUEUED,
        (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
    )
