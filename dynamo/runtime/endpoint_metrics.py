"""The metrics of a process that serves endpoints. Spec 6.4."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dynamo.observability import names, names_worker
from dynamo.observability.metrics import Registry
from dynamo.runtime.health import SystemHealth
from dynamo.runtime.requests import EndpointStats, RequestServer

__all__ = ["MetricsLabels", "endpoint_stats", "export_pool", "export_uptime"]

MetricsLabels = Sequence[tuple[str, str]]
"""(name, value) of labels that a user adds to the metrics of an endpoint."""

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def endpoint_stats(
    metrics: Registry, path: tuple[str, str, str], instance_id: int, extra: MetricsLabels = ()
) -> EndpointStats:
    """Return the metrics of (namespace, component, endpoint). ValueError: ``extra`` is invalid."""
    _check(extra)
    namespace, component, endpoint = path
    labels = (component, endpoint, namespace, f"{instance_id:x}")
    worker = names.Worker
    errors = names.counter(metrics, worker.ERRORS)

    def failed(error_type: str) -> None:
        errors.extended((*labels, error_type), extra).value += 1

    return EndpointStats(
        requests=names.counter(metrics, worker.REQUESTS).extended(labels, extra),
        inflight=names.gauge(metrics, worker.INFLIGHT).extended(labels, extra),
        request_bytes=names.counter(metrics, worker.REQUEST_BYTES).extended(labels, extra),
        response_bytes=names.counter(metrics, worker.RESPONSE_BYTES).extended(labels, extra),
        cancellations=names.counter(metrics, worker.CANCELLATION).extended(labels, extra),
        duration_s=names.histogram(metrics, worker.DURATION).extended(labels, extra),
        first_response_s=names.histogram(metrics, names_worker.FIRST_RESPONSE).labels(),
        failed=failed,
    )


def export_uptime(metrics: Registry, instance_id: int, health: SystemHealth) -> None:
    """Export the seconds since the start."""
    uptime = names.gauge(metrics, names.Worker.UPTIME).labels(f"{instance_id:x}")
    uptime.function = lambda: health.uptime_s


def export_pool(metrics: Registry, server: RequestServer) -> None:
    """Export the load of the listener, unless the worker already exports its admission queue."""
    for spec, read in (
        (names_worker.POOL_ACTIVE, lambda: server.inflight),
        (names_worker.POOL_CAPACITY, lambda: server.settings.max_streams),
    ):
        gauge = names.gauge(metrics, spec).labels()
        gauge.function = gauge.function or read


def _check(labels: MetricsLabels) -> None:
    taken = {"le", *names.Worker.ERRORS.labels}
    for name, value in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in taken:
            raise ValueError(f"metrics_labels: {name!r} is not available as a label name")
        if not isinstance(value, str):
            raise ValueError(f"metrics_labels: the value of {name!r} must be text, got {value!r}")
        taken.add(name)
