"""What is counted of the prompts of one model that go through prefill workers."""

from __future__ import annotations

from typing import Any

from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.names import counter, gauge, histogram
from dynamo.observability.names_prefill import Prefill
from dynamo.router.queue.prefill import PrefillQueue

__all__ = ["PrefillMetrics"]


class PrefillMetrics:
    """Children of ``model``; :meth:`show` and :meth:`hide` make the gauges come and go."""

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
        """Depth, active requests and workers of ``queue`` are on the page from now on."""
        depth, active, workers = (family.labels(self._model) for family in self._gauges)
        depth.function = queue.__len__
        active.function = lambda: queue.running
        workers.function = lambda: len(queue.workers)
        self._requeues.labels(self._model)

    def fell_back(self, reason: str) -> None:
        """The decode worker computes the prompt, for want of something better."""
        self._fallbacks.labels(self._model, reason).value += 1

    def kept_local(self, reason: str) -> None:
        """The prompt was not worth a prefill worker."""
        self._local.labels(self._model, reason).value += 1

    def refused(self, reason: str) -> None:
        """The client hears an error."""
        self._refused.labels(self._model, reason).value += 1

    def requeued(self) -> None:
        """A worker went away under a request."""
        self._requeues.labels(self._model).value += 1

    def sent(self, wait_s: float) -> None:
        """A request has its worker after ``wait_s`` in the line."""
        self._wait.labels(self._model).observe(wait_s)

    def computed(self, seconds: float) -> None:
        """A worker has computed a prompt in ``seconds``."""
        self._seconds.labels(self._model).observe(seconds)
        self._requests.labels(self._model).value += 1

    def last_of(self, worker_id: int, dp_rank: int, prompt_tokens: int, seconds: float) -> None:
        """The latest prompt of a worker that is still there."""
        last = self._all.worker(worker_id, dp_rank, "prefill")
        last.isl.value = prompt_tokens
        last.ttft.value = seconds
