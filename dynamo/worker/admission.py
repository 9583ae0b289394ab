"""How many requests a worker takes: N in the engine, Q in line, the rest refused. Spec 9."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dynamo.errors import Overloaded
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.runtime.metrics import POOL_ACTIVE, POOL_CAPACITY

__all__ = ["AdmissionGate"]

_UNLIMITED = (10_000, 40_000)

_ENGINE_REQUEST = gauge("dynamo_engine_request", "Requests in the engine")
_REQUEST_QUEUE = gauge("dynamo_request_queue", "Requests in line behind the next one")
_REJECTIONS = counter("dynamo_rejection_request_total", "Requests refused by a full worker")
_QUEUE_DEPTH = gauge("dynamo_work_handler_queue_depth", "Requests in line behind the next one")
_ENQUEUE_REJECTED = counter(
    "dynamo_work_handler_enqueue_rejected_total", "Requests that found the line full"
)
_PERMIT_WAIT = histogram(
    "dynamo_work_handler_permit_wait_seconds",
    "Seconds in line",
    (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60),
)
_QUEUE_CAPACITY = gauge("dynamo_work_handler_queue_capacity", "Places in the line")


class AdmissionGate:
    """At most ``limit`` requests run and ``queue_limit`` wait; without a limit, 10000 and 40000.

    One of those in line is the next to start; the gauge of the line does not count it.
    """

    def __init__(self, limit: int | None, queue_limit: int, registry: Registry) -> None:
        self._limit, self._queue_limit = _UNLIMITED if limit is None else (limit, queue_limit)
        self._running = 0
        self._line: deque[tuple[Callable[[], None], float]] = deque()
        self._export(registry)

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in line, the next one included."""
        return len(self._line)

    def enter(self, start: Callable[[], None]) -> None:
        """Call ``start`` now or when a place is free. Overloaded, at once, if the line is full.

        Whoever was started calls :meth:`leave` once; whoever gives up waiting :meth:`give_up`.
        """
        if self._running < self._limit:
            self._running += 1
            self._waits.observe(0.0)
            start()
        elif len(self._line) < self._queue_limit:
            self._line.append((start, time.monotonic()))
        else:
            self._refused.value += 1
            self._rejected.value += 1
            raise Overloaded("Server overloaded: worker at capacity")

    def leave(self) -> None:
        """A started request is over; the next in line starts."""
        self._running -= 1
        if self._line and self._running < self._limit:
            self._running += 1
            start, since = self._line.popleft()
            self._waits.observe(time.monotonic() - since)
            start()

    def give_up(self, start: Callable[[], None]) -> bool:
        """Step out of the line; False if ``start`` was called already. O(line)."""
        for place, (waiting, _) in enumerate(self._line):
            if waiting == start:
                del self._line[place]
                return True
        return False

    def _export(self, registry: Registry) -> None:
        self._refused = registry.child(_REJECTIONS)
        self._rejected = registry.child(_ENQUEUE_REJECTED)
        self._waits = registry.child(_PERMIT_WAIT)
        for spec, read in (
            (_ENGINE_REQUEST, lambda: self._running),
            (POOL_ACTIVE, lambda: self._running),
            (_REQUEST_QUEUE, lambda: max(0, len(self._line) - 1)),
            (_QUEUE_DEPTH, lambda: max(0, len(self._line) - 1)),
            (POOL_CAPACITY, lambda: self._limit),
            (_QUEUE_CAPACITY, lambda: max(1, self._queue_limit - 1)),
        ):
            registry.child(spec).function = read
