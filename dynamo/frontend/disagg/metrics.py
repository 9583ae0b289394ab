"""Metrics of the prefill workers of a model, and its queue length on the event plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.names import counter, gauge, histogram
from dynamo.observability.names_prefill import Prefill
from dynamo.protocols.codec import encode
from dynamo.protocols.load import PrefillQueueState
from dynamo.router.queue.prefill import PrefillQueue

__all__ = ["INTERVAL_S", "REPEAT_S", "PrefillMetrics", "QueueStatePublisher"]


INTERVAL_S = 0.1
REPEAT_S = 1.0


class PrefillMetrics:
    """Metric children of ``model``; the gauges appear with :meth:`show`."""

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        registry, prefix = metrics.registry, metrics.prefix
        self._model = model
        self._all = metrics
        self._gauges = [
            gauge(registry, spec, prefix)
            for spec in (Prefill.QUEUE_DEPTH, Prefill.ACTIVE, Prefill.WORKERS)
        ]
        self._fallbacks = counter(registry, Prefill.FALLBACKS, prefix)
        self._local = counter(registry, Prefill.LOCAL, prefix)
        self._refused = counter(registry, Prefill.REFUSED, prefix)
        self._wait = histogram(registry, Prefill.WAIT, prefix)
        self._seconds = histogram(registry, Prefill.SECONDS, prefix)
        self._requests = counter(registry, Prefill.REQUESTS, prefix)
        self._requeues = counter(registry, Prefill.REQUEUES, prefix)

    def show(self, queue: PrefillQueue[Any]) -> None:
        """Export depth, active requests and workers of ``queue`` from now on."""
        depth, active, workers = (family.labels(self._model) for family in self._gauges)
        depth.function = queue.__len__
        active.function = lambda: queue.running
        workers.function = lambda: len(queue.workers)
        self._requeues.labels(self._model)

    def fell_back(self, reason: str) -> None:
        """Count a prompt that the decode worker computes because no prefill worker can."""
        self._fallbacks.labels(self._model, reason).value += 1

    def kept_local(self, reason: str) -> None:
        """Count a prompt that a decode worker computes by choice."""
        self._local.labels(self._model, reason).value += 1

    def refused(self, reason: str) -> None:
        """Count a request that was refused."""
        self._refused.labels(self._model, reason).value += 1

    def requeued(self) -> None:
        """Count a request whose prefill worker was lost."""
        self._requeues.labels(self._model).value += 1

    def sent(self, wait_s: float) -> None:
        """Observe the time that a request waited in the queue."""
        self._wait.labels(self._model).observe(wait_s)

    def computed(self, seconds: float) -> None:
        """Observe the time that a worker took for a prompt."""
        self._seconds.labels(self._model).observe(seconds)
        self._requests.labels(self._model).value += 1

    def last_of(self, worker_id: int, dp_rank: int, prompt_tokens: int, seconds: float) -> None:
        """Show the latest prompt of a registered worker."""
        last = self._all.worker(worker_id, dp_rank, "prefill")
        last.isl.value = prompt_tokens
        last.ttft.value = seconds


class QueueStatePublisher:
    """Publishes the state of ``queue``.

    At once when the queue becomes empty or gets its first request, otherwise at most every
    ``INTERVAL_S``; an unchanged state every ``REPEAT_S``, for new subscribers.
    """

    def __init__(
        self, model: str, queue: PrefillQueue[Any], publish: Callable[[bytes], object]
    ) -> None:
        self._model = model
        self._queue = queue
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._published = PrefillQueueState(model)
        self._published_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._send()

    def check(self) -> None:
        """Publish the state if it has changed; called after each change of the queue."""
        if self._timer is None:
            return  # closed
        if bool(self._queue) != bool(self._published.size):
            self._send()
        elif self._due_s > self._published_s + INTERVAL_S and self._state() != self._published:
            self._arm(max(self._published_s + INTERVAL_S, self._loop.time()))

    def close(self) -> None:
        """Publish nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _state(self) -> PrefillQueueState:
        queue = self._queue
        return PrefillQueueState(self._model, len(queue), queue.running, len(queue.workers))

    def _send(self) -> None:
        self._published, self._published_s = self._state(), self._loop.time()
        self._publish(encode(self._published))
        self._arm(self._published_s + REPEAT_S)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._send)
