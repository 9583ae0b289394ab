"""The metrics of the queue before the workers."""

from __future__ import annotations

from typing import Any

from dynamo.errors import Overloaded, RouterQueueLimitExceeded
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.router.queue.waiting import POLICY_CLASS, WaitingQueue

_QUEUED = "model policy_class worker_type"
_REASONED = "model policy_class reason worker_type"
_REQUESTS = gauge(
    "dynamo_frontend_router_queue_pending_requests",
    "Requests waiting in the router's queue",
    _QUEUED,
)
_ISL_TOKENS = gauge(
    "dynamo_frontend_router_queue_pending_isl_tokens",
    "Prompt tokens of the requests waiting in the router's queue",
    _QUEUED,
)
_CACHED_TOKENS = gauge(
    "dynamo_frontend_router_queue_pending_cached_tokens",
    "Those of them that a worker holds",
    _QUEUED,
)
_BACKPRESSURE = counter(
    "dynamo_frontend_router_queue_backpressure_total",
    "Requests that had to wait: behind others, or for prefill load to fall",
    _REASONED,
)
_RECEIVED = counter(
    "dynamo_frontend_router_admission_received_total",
    "Requests that came to the router's queue, whether they had to wait or not",
    _QUEUED,
)
_REJECTED = counter(
    "dynamo_frontend_router_admission_rejected_total",
    "Requests turned away there: the queue was full, or all workers overloaded",
    _REASONED,
)
_LEFT = counter(
    "dynamo_frontend_router_queue_left_total",
    "Requests whose client left while they waited",
    _QUEUED,
)
_WAIT_SECONDS = histogram(
    "dynamo_frontend_router_queue_wait_seconds",
    "Time in the router's queue of the requests that had to wait and were served",
    (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
    _QUEUED,
)
_LIMIT, _OVERLOADED = "queue_limit", "overloaded"
_BACKLOG, _PREFILL = "backlog", "prefill_load"


class QueueMetrics:
    """The series of a class of ``model`` in ``registry``, or in a registry of their own."""

    def __init__(
        self,
        registry: Registry | None = None,
        model: str = "",
        worker_type: str = "decode",
        policy_class: str = POLICY_CLASS,
    ) -> None:
        self._registry = registry
        self._labels = (model, policy_class, worker_type)
        into = registry or Registry()
        self.received = into.child(_RECEIVED, *self._labels)
        self.left = into.child(_LEFT, *self._labels)
        self.waited = into.child(_WAIT_SECONDS, *self._labels)
        self._rejected, self._pressed = (
            {one: into.child(spec, model, policy_class, one, worker_type) for one in reasons}
            for spec, reasons in (
                (_REJECTED, (_LIMIT, _OVERLOADED)),
                (_BACKPRESSURE, (_BACKLOG, _PREFILL)),
            )
        )

    def show(self, queue: WaitingQueue[Any]) -> None:
        """Export the size of ``queue``."""
        if self._registry is None:
            return
        for spec, read in (
            (_REQUESTS, queue.__len__),
            (_ISL_TOKENS, lambda: queue.isl_tokens),
            (_CACHED_TOKENS, lambda: queue.cached_tokens),
        ):
            self._registry.child(spec, *self._labels).function = read

    def joined(self, before: int) -> None:
        """Count a queued request, with ``before`` others ahead."""
        self._pressed[_BACKLOG if before else _PREFILL].value += 1

    def refused(self, error: Overloaded) -> None:
        """Count a rejected request."""
        full = isinstance(error, RouterQueueLimitExceeded)
        self._rejected[_LIMIT if full else _OVERLOADED].value += 1
