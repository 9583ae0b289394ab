"""Metrics of the prefill workers of a model, and its queue length on the event plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import counter, gauge, histogram
from dynamo.protocols.codec import encode
from dynamo.protocols.kv import PrefillQueueState
from dynamo.router.queue.prefill import PrefillQueue

INTERVAL_S = 0.1
REPEAT_S = 1.0

_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

_QUEUE_DEPTH = gauge(
    "dynamo_frontend_prefill_queue_depth", "Requests waiting for a prefill slot", "model"
)
_ACTIVE = gauge("dynamo_frontend_prefill_active_requests", "Requests at a prefill worker", "model")
_WORKERS = gauge(
    "dynamo_frontend_prefill_workers", "Prefill workers that may be sent requests", "model"
)
_WAIT = histogram(
    "dynamo_frontend_prefill_queue_wait_seconds",
    "From arrival in the prefill queue to the prefill worker",
    _SECONDS_BUCKETS,
    "model",
)
_SECONDS = histogram(
    "dynamo_frontend_prefill_seconds",
    "From the prefill worker's getting a prompt to its result",
    _SECONDS_BUCKETS,
    "model",
)
_REQUESTS = counter(
    "dynamo_frontend_prefill_requests_total", "Prompts that a prefill worker computed", "model"
)
_FALLBACKS = counter(
    "dynamo_frontend_prefill_fallbacks_total",
    "Requests served by decode workers alone although prefill was wanted",
    "model reason",
)
_LOCAL = counter(
    "dynamo_frontend_prefill_local_total",
    "Prompts not worth a prefill worker (conditional disaggregation)",
    "model reason",
)
_REQUEUES = counter(
    "dynamo_frontend_prefill_requeues_total",
    "Requests back at the head of the queue because their prefill worker went away",
    "model",
)
_REFUSED = counter(
    "dynamo_frontend_prefill_refused_total",
    "Requests refused: queue full, or no prefill worker with --enforce-disagg",
    "model reason",
)


class PrefillMetrics:
    """Metrics of ``model``; those that nothing has counted yet are not on the page."""

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self._model = model
        self._metrics = metrics
        self._gauges = [metrics.family(spec) for spec in (_QUEUE_DEPTH, _ACTIVE, _WORKERS)]
        self._fallbacks = metrics.family(_FALLBACKS)
        self._local = metrics.family(_LOCAL)
        self._refused = metrics.family(_REFUSED)
        self._wait = metrics.family(_WAIT)
        self._seconds = metrics.family(_SECONDS)
        self._requests = metrics.family(_REQUESTS)
        self._requeues = metrics.family(_REQUEUES)

    def show(self, queue: PrefillQueue[Any]) -> None:
        """Export depth, active requests and workers of ``queue`` from now on."""
        depth, active, workers = (family.labels(self._model) for family in self._gauges)
        depth.function = queue.__len__
        active.function = lambda: queue.running
        workers.function = lambda: len(queue.workers)
        self._requeues.labels(self._model)

    def fell_back(self, reason: str) -> None:
        """Count a prompt that the decode worker computes because no prefill worker can."""
        self._fallbacks[self._model, reason].value += 1

    def kept_local(self, reason: str) -> None:
        """Count a prompt that a decode worker computes by choice."""
        self._local[self._model, reason].value += 1

    def refused(self, reason: str) -> None:
        """Count a request that was refused."""
        self._refused[self._model, reason].value += 1

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
        last = self._metrics.workers[worker_id, dp_rank, "prefill"]
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
        # Else the timer is armed for the end of the interval already.
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
