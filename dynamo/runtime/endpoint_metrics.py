"""Metrics of a process that serves endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dynamo.observability.logs import dropped_lines
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.runtime.endpoints.health import SystemHealth
from dynamo.runtime.requests import EndpointStats, RequestServer

__all__ = [
    "POOL_ACTIVE",
    "POOL_CAPACITY",
    "MetricsLabels",
    "endpoint_stats",
    "export_dropped_lines",
    "export_pool",
    "export_uptime",
]

MetricsLabels = Sequence[tuple[str, str]]
"""(name, value) of labels that a user adds to the metrics of an endpoint."""

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SERVED = "dynamo_component dynamo_endpoint dynamo_namespace worker_id"

_REQUESTS = counter("dynamo_component_requests_total", "Requests received", _SERVED)
_INFLIGHT = gauge("dynamo_component_inflight_requests", "Requests being served", _SERVED)
_CANCELLATION = counter("dynamo_component_cancellation_total", "Requests cancelled", _SERVED)
_ERRORS = counter("dynamo_component_errors_total", "Failed requests", f"{_SERVED} error_type")
_REQUEST_BYTES = counter("dynamo_component_request_bytes_total", "Bytes received", _SERVED)
_RESPONSE_BYTES = counter("dynamo_component_response_bytes_total", "Bytes sent", _SERVED)
_DURATION = histogram(
    "dynamo_component_request_duration_seconds",
    "Serving one request",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600),
    _SERVED,
)
_UPTIME = gauge("dynamo_component_uptime_seconds", "Seconds since start", "worker_id")
_FIRST_RESPONSE = histogram(
    "dynamo_work_handler_time_to_first_response_seconds",
    "Seconds from the request to its first response item",
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
_DROPPED_LINES = counter(
    "dynamo_log_lines_dropped_total", "Lines of output dropped because the pipe was full"
)
POOL_CAPACITY = gauge("dynamo_work_handler_pool_capacity", "Requests the engine takes")
POOL_ACTIVE = gauge("dynamo_work_handler_pool_active_tasks", "Requests being served")


def endpoint_stats(
    metrics: Registry, path: tuple[str, str, str], instance_id: int, extra: MetricsLabels = ()
) -> EndpointStats:
    """Return the counters of (namespace, component, endpoint). ValueError: bad labels ``extra``."""
    _check(extra)
    namespace, component, endpoint = path
    labels = (component, endpoint, namespace, f"{instance_id:x}")
    errors = metrics.family(_ERRORS)

    def failed(error_type: str) -> None:
        errors.extended((*labels, error_type), extra).value += 1

    return EndpointStats(
        requests=metrics.family(_REQUESTS).extended(labels, extra),
        inflight=metrics.family(_INFLIGHT).extended(labels, extra),
        request_bytes=metrics.family(_REQUEST_BYTES).extended(labels, extra),
        response_bytes=metrics.family(_RESPONSE_BYTES).extended(labels, extra),
        cancellations=metrics.family(_CANCELLATION).extended(labels, extra),
        duration_s=metrics.family(_DURATION).extended(labels, extra),
        first_response_s=metrics.child(_FIRST_RESPONSE),
        failed=failed,
    )


def export_uptime(metrics: Registry, instance_id: int, health: SystemHealth) -> None:
    """Show the seconds since the start."""
    metrics.child(_UPTIME, f"{instance_id:x}").function = lambda: health.uptime_s


def export_dropped_lines(metrics: Registry) -> None:
    """Show how many lines of output this process has dropped."""
    dropped = metrics.child(_DROPPED_LINES)

    def update() -> None:
        dropped.value = dropped_lines()

    metrics.before_render.append(update)


def export_pool(metrics: Registry, server: RequestServer) -> None:
    """Show how full the request server is, unless the worker has an admission queue to show."""
    for spec, read in (
        (POOL_ACTIVE, lambda: server.inflight),
        (POOL_CAPACITY, lambda: server.settings.max_streams),
    ):
        child = metrics.child(spec)
        child.function = child.function or read


def _check(labels: MetricsLabels) -> None:
    taken = {"le", *_ERRORS.labels}
    for name, value in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in taken:
            raise ValueError(f"metrics_labels: {name!r} cannot name an added label")
        if not isinstance(value, str):
            raise ValueError(f"metrics_labels: the value of {name!r} must be text, got {value!r}")
        taken.add(name)
