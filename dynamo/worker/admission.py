"""How many requests a worker takes: N in the engine, Q in line, the rest refused. Spec 9."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dynamo.errors import Overloaded
from dynamo.observability import names_worker as names
from dynamo.observability.metrics import Registry
from dynamo.observability.names import counter, gauge, histogram

__all__ = ["AdmissionQueue"]

_UNLIMITED = (10_000, 40_000)


class AdmissionQueue:
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

    def submit(self, start: Callable[[], None]) -> None:
        """Call ``start`` now or when a place is free. Overloaded, at once, if the line is full.

        Whoever was started calls :meth:`release` once; whoever gives up waiting :meth:`withdraw`.
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

    def release(self) -> None:
        """A started request is over; the next in line starts."""
        self._running -= 1
        if self._line and self._running < self._limit:
            self._running += 1
            start, since = self._line.popleft()
            self._waits.observe(time.monotonic() - since)
            start()

    def withdraw(self, start: Callable[[], None]) -> bool:
        """Step out of the line; False if ``start`` was called already. O(line)."""
        for place, (waiting, _) in enumerate(self._line):
            if waiting == start:
                del self._line[place]
                return True
        return False

    def _export(self, registry: Registry) -> None:
        self._refused = counter(registry, names.REJECTIONS).labels()
        self._rejected = counter(registry, names.ENQUEUE_REJECTED).labels()
        self._waits = histogram(registry, names.PERMIT_WAIT).labels()
        for spec, read in (
            (names.ENGINE_REQUEST, lambda: self._running),
            (names.POOL_ACTIVE, lambda: self._running),
            (names.REQUEST_QUEUE, lambda: max(0, len(self._line) - 1)),
            (names.QUEUE_DEPTH, lambda: max(0, len(self._line) - 1)),
            (names.POOL_CAPACITY, lambda: self._limit),
            (names.QUEUE_CAPACITY, lambda: max(1, self._queue_limit - 1)),
        ):
            gauge(registry, spec).labels().function = read
