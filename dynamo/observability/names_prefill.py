"""Metrics of disaggregated serving that are this project's own, beside ``names.Frontend``."""

from __future__ import annotations

from dynamo.observability.names import DEFAULT_FRONTEND_PREFIX, MetricSpec

__all__ = ["Prefill"]

_FRONT = f"{DEFAULT_FRONTEND_PREFIX}_prefill"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Prefill:
    """``dynamo_frontend_prefill_*``: prompts on their way through prefill workers."""

    QUEUE_DEPTH = MetricSpec(
        "gauge", f"{_FRONT}_queue_depth", "Requests waiting for a prefill slot", ("model",)
    )
    ACTIVE = MetricSpec(
        "gauge", f"{_FRONT}_active_requests", "Requests at a prefill worker", ("model",)
    )
    WORKERS = MetricSpec(
        "gauge", f"{_FRONT}_workers", "Prefill workers that may be sent requests", ("model",)
    )
    WAIT = MetricSpec(
        "histogram",
        f"{_FRONT}_queue_wait_seconds",
        "From arrival in the prefill queue to the prefill worker",
        ("model",),
        _SECONDS,
    )
    SECONDS = MetricSpec(
        "histogram",
        f"{_FRONT}_seconds",
        "From the prefill worker's getting a prompt to its result",
        ("model",),
        _SECONDS,
    )
    REQUESTS = MetricSpec(
        "counter", f"{_FRONT}_requests_total", "Prompts that a prefill worker computed", ("model",)
    )
    FALLBACKS = MetricSpec(
        "counter",
        f"{_FRONT}_fallbacks_total",
        "Requests served by decode workers alone although prefill was wanted",
        ("model", "reason"),
    )
    LOCAL = MetricSpec(
        "counter",
        f"{_FRONT}_local_total",
        "Prompts not worth a prefill worker (conditional disaggregation)",
        ("model", "reason"),
    )
    REQUEUES = MetricSpec(
        "counter",
        f"{_FRONT}_requeues_total",
        "Requests back at the head of the queue because their prefill worker went away",
        ("model",),
    )
    REFUSED = MetricSpec(
        "counter",
        f"{_FRONT}_refused_total",
        "Requests refused: queue full, or no prefill worker with --enforce-disagg",
        ("model", "reason"),
    )
