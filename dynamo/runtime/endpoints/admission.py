"""Admission of requests: N in the engine, Q queued, the rest rejected."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dynamo.errors import WorkerAtCapacity
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.runtime.endpoint_metrics import POOL_ACTIVE, POOL_CAPACITY
from dynamo.runtime.requests.context import CancelKind
from dynamo.runtime.requests.stream import ServerStream

__all__ = ["AdmissionQueue"]

_UNLIMITED = (10_000, 40_000)
"""(limit, queue limit) if none is set: bounds on memory, not on load."""

_ENGINE_REQUEST = gauge("dynamo_engine_request", "Requests in the engine")
_REQUEST_QUEUE = gauge("dynamo_request_queue", "Queued requests behind the next one")
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


class AdmissionQueue:
    """At most ``limit`` requests run and ``queue_limit`` are queued; unlimited: 10000 and 40000.

    Dynamo's dispatcher takes the head out of its channel before it waits for a permit. Its gauges
    of queue depth and capacity therefore count one less than this queue, and so do ours.
    """

    def __init__(self, limit: int | None, queue_limit: int, registry: Registry) -> None:
        self._limit, self._queue_limit = _UNLIMITED if limit is None else (limit, queue_limit)
        self._running = 0
        self._queue: deque[tuple[Callable[[], None], float]] = deque()
        self._export(registry)

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
            if queued == start:
                del self._queue[position]
                return True
        return False

    def _export(self, registry: Registry) -> None:
        self._rejections = registry.child(_REJECTIONS)
        self._enqueue_rejections = registry.child(_ENQUEUE_REJECTED)
        self._waits = registry.child(_PERMIT_WAIT)
        for spec, read in (
            (_ENGINE_REQUEST, lambda: self._running),
            (POOL_ACTIVE, lambda: self._running),
            (_REQUEST_QUEUE, lambda: max(0, len(self._queue) - 1)),
            (_QUEUE_DEPTH, lambda: max(0, len(self._queue) - 1)),
            (POOL_CAPACITY, lambda: self._limit),
            (_QUEUE_CAPACITY, lambda: max(1, self._queue_limit - 1)),
        ):
            registry.child(spec).function = read
