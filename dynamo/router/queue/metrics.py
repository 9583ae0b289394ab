"""Metrics of the queue before the workers. Spec 6.1."""

from __future__ import annotations

from typing import Any

from dynamo.errors import Overloaded, RouterQueueLimitExceeded
from dynamo.observability.metrics import Counter, Histogram, Registry
from dynamo.observability.names import counter, gauge, histogram
from dynamo.observability.names_queue import RouterQueue
from dynamo.router.queue.waiting import POLICY_CLASS, WaitingQueue

__all__ = ["QueueMetrics"]

_LIMIT, _OVERLOADED = "queue_limit", "overloaded"
_BACKLOG, _PREFILL = "backlog", "prefill_load"


class QueueMetrics:
    """The series of ``model`` in ``registry``, or unregistered ones without a registry."""

    def __init__(
        self, registry: Registry | None = None, model: str = "", worker_type: str = "decode"
    ) -> None:
        self._registry = registry
        self._labels = (model, POLICY_CLASS, worker_type)
        reasoned = model, POLICY_CLASS
        if registry is None:
            self.received, self.left = Counter(), Counter()
            self.waited = Histogram(RouterQueue.WAIT_SECONDS.buckets)
            self._rejected = {one: Counter() for one in (_LIMIT, _OVERLOADED)}
            self._pressed = {one: Counter() for one in (_BACKLOG, _PREFILL)}
            return
        self.received = counter(registry, RouterQueue.RECEIVED).labels(*self._labels)
        self.left = counter(registry, RouterQueue.LEFT).labels(*self._labels)
        self.waited = histogram(registry, RouterQueue.WAIT_SECONDS).labels(*self._labels)
        rejected = counter(registry, RouterQueue.REJECTED)
        self._rejected = {
            one: rejected.labels(*reasoned, one, worker_type) for one in (_LIMIT, _OVERLOADED)
        }
        pressed = counter(registry, RouterQueue.BACKPRESSURE)
        self._pressed = {
            one: pressed.labels(*reasoned, one, worker_type) for one in (_BACKLOG, _PREFILL)
        }

    def show(self, queue: WaitingQueue[Any]) -> None:
        """Export the size of ``queue``."""
        if self._registry is None:
            return
        for spec, read in (
            (RouterQueue.REQUESTS, queue.__len__),
            (RouterQueue.ISL_TOKENS, lambda: queue.isl_tokens),
            (RouterQueue.CACHED_TOKENS, lambda: queue.cached_tokens),
        ):
            gauge(self._registry, spec).labels(*self._labels).function = read

    def joined(self, before: int) -> None:
        """Count a queued request, with ``before`` others ahead."""
        self._pressed[_BACKLOG if before else _PREFILL].value += 1

    def refused(self, error: Overloaded) -> None:
        """Count a rejected request."""
        full = isinstance(error, RouterQueueLimitExceeded)
        self._rejected[_LIMIT if full else _OVERLOADED].value += 1
