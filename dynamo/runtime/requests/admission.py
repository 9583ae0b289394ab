"""Requests to the endpoints of a process: their admission and their metrics."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence

from dynamo.errors import WorkerAtCapacity
from dynamo.observability.logs import dropped_lines
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.server import RequestServer
from dynamo.runtime.requests.stream import EndpointStats, ServerStream

_UNLIMITED = (10_000, 40_000)
"""(limit, queue limit) if none is set: bounds on memory, not on load."""
_ENGINE_REQUEST = gauge("dynamo_engine_request", "Requests in the engine")
_REQUEST_QUEUE = gauge("dynamo_request_queue", "Queued requests, the next one included")
_REJECTIONS = counter("dynamo_rejection_request_total", "Requests rejected by a full worker")
_QUEUE_DEPTH = gauge("dynamo_work_handler_queue_depth", "Queued requests behind the next one")
_ENQUEUE_REJECTED = counter(
    "dynamo_work_handler_enqueue_rejected_total", "Requests rejected by a full queue"
)
_PERMIT_WAIT = histogram(
    "dynamo_work_handler_permit_wait_seconds",
    "Seconds in the queue",
    (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60),
)
_QUEUE_CAPACITY = gauge("dynamo_work_handler_queue_capacity", "Capacity of the queue")
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


class AdmissionQueue:
    """At most ``limit`` requests run and ``queue_limit`` are queued; unlimited: 10000 and 40000.

    Dynamo's dispatcher takes the head out of its channel before it waits for a permit. Its work
    handler's gauges of depth and capacity therefore count one less than this queue; so do ours.
    """

    def __init__(self, limit: int | None, queue_limit: int, registry: Registry) -> None:
        self._limit, self._queue_limit = _UNLIMITED if limit is None else (limit, queue_limit)
        self._running = 0
        self._queue: deque[tuple[Callable[[], None], float]] = deque()
        self._rejections = registry.child(_REJECTIONS)
        self._enqueue_rejections = registry.child(_ENQUEUE_REJECTED)
        self._waits = registry.child(_PERMIT_WAIT)
        for spec, read in (
            (_ENGINE_REQUEST, lambda: self._running),
            (POOL_ACTIVE, lambda: self._running),
            (_REQUEST_QUEUE, lambda: len(self._queue)),
            (_QUEUE_DEPTH, lambda: max(0, len(self._queue) - 1)),
            (POOL_CAPACITY, lambda: self._limit),
            (_QUEUE_CAPACITY, lambda: max(1, self._queue_limit - 1)),
        ):
            registry.child(spec).function = read

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in the queue, its head included."""
        return len(self._queue)

    def submit(self, start: Callable[[], None]) -> None:
        """Call ``start`` now or when a running request ends. Raises WorkerAtCapacity.

        Call :meth:`release` once for each started request, :meth:`withdraw` for one that is queued
        and no longer wanted.
        """
        if self._running < self._limit:
            self._running += 1
            self._waits.observe(0.0)
            start()
        elif len(self._queue) < self._queue_limit:
            self._queue.append((start, time.monotonic()))
        else:
            self._rejections.value += 1
            self._enqueue_rejections.value += 1
            raise WorkerAtCapacity("Server overloaded: worker at capacity")

    def enter(self, stream: ServerStream, start: Callable[[], None]) -> None:
        """:meth:`submit` the request of ``stream``; remove it from the queue if cancelled.

        ``start`` is not called, and nothing is to be released, for a stream that has ended.
        """

        def admitted() -> None:
            if stream.closed:
                self.release()
            else:
                start()

        def cancelled(kind: CancelKind) -> None:
            if self.withdraw(admitted):
                stream.end()

        self.submit(admitted)
        if self._queue:
            # Without a queue the request has started, and there is nothing to withdraw.
            stream.context.on_cancel(cancelled)

    def release(self) -> None:
        """End a started request; start the head of the queue."""
        self._running -= 1
        if self._queue and self._running < self._limit:
            self._running += 1  # before start(), which may end its request and call us again
            start, since = self._queue.popleft()
            self._waits.observe(time.monotonic() - since)
            start()

    def withdraw(self, start: Callable[[], None]) -> bool:
        """Remove a request from the queue; False if ``start`` was called already. O(queue)."""
        for position, (queued, _) in enumerate(self._queue):
            # Not "is": each access to a bound method makes a new object.
            if queued == start:
                del self._queue[position]
                return True
        return False
