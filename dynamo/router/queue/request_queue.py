"""The queue before the workers, and its metrics: requests wait while all workers have enough.

It precedes a :class:`KvPicker` and postpones the decision: a request is routed when it reaches the
head, with the caches and loads of that moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dynamo.config.router import RouterSettings
from dynamo.errors import (
    DynamoError,
    InvalidArgument,
    Overloaded,
    RouterQueueLimitExceeded,
    Unavailable,
)
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.protocols.codec import Tokens
from dynamo.protocols.control import UNKNOWN_BATCH_TOKENS
from dynamo.protocols.engine import Routing
from dynamo.router.kv_mode.cost import cached_tokens
from dynamo.router.kv_mode.kv import KvPicker
from dynamo.router.metrics import RouterLabels
from dynamo.router.picker import Attempt, Decision
from dynamo.router.queue.waiting import POLICY_CLASS, QueueEntry, WaitingQueue, priority_of
from dynamo.router.worker_pool import Saturation

TICK_S = 0.1
"""Poll this often, while requests wait, for changes without a callback: load that decays with time,
busy reports that expire."""
_BATCH = 32
"""Requests that one loop iteration routes, or whose cached tokens it refreshes."""
log = logging.getLogger(__name__)
OnDecision = Callable[[Decision], None]
OnError = Callable[[DynamoError], None]
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
    """The series of ``model`` in ``registry``, or in a registry of their own without it."""

    def __init__(
        self, registry: Registry | None = None, model: str = "", worker_type: str = "decode"
    ) -> None:
        self._registry = registry
        self._labels = (model, POLICY_CLASS, worker_type)
        into = registry or Registry()
        self.received = into.child(_RECEIVED, *self._labels)
        self.left = into.child(_LEFT, *self._labels)
        self.waited = into.child(_WAIT_SECONDS, *self._labels)
        self._rejected, self._pressed = (
            {one: into.child(spec, model, POLICY_CLASS, one, worker_type) for one in reasons}
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


CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
"""(delay in seconds, callback) to a timer."""


@dataclass(slots=True, eq=False)
class QueuedRequest(QueueEntry):
    """A request in the queue."""

    request_id: str
    tokens: Tokens
    routing: Routing | None
    override: Mapping[str, Any] | None
    attempt: Attempt | None
    on_decision: OnDecision
    on_error: OnError
    _queue: RequestQueue
    refreshed_s: float = field(default=0.0, init=False)

    def cancel(self) -> None:
        """Remove the request: nothing is booked, no callback is called. Idempotent, also after
        the end."""
        self._queue._cancel(self)


class RequestQueue:
    """Passes requests to ``picker``, or queues them in the order of a policy.

    A request waits if others do, or if every (worker, dp_rank) that may take it has more active
    prefill tokens than ``threshold`` of its ``max_num_batched_tokens``. The head waits until one
    has less, and all others behind it. ``clock`` is the picker's own, ``call_later`` calls back on
    the loop's thread.
    """

    def __init__(
        self,
        picker: KvPicker,
        settings: RouterSettings,
        metrics: QueueMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
        call_later: CallLater | None = None,
    ) -> None:
        assert settings.queue_threshold is not None, "a queue needs a threshold"
        self.picker = picker
        self._threshold = settings.queue_threshold
        self._refresh_s = settings.overlap_refresh_after_s
        self._queue: WaitingQueue[QueuedRequest] = WaitingQueue(
            settings.queue_policy,
            settings.queue_limit,
            picker.active.prefill_seconds if settings.in_seconds else None,
        )
        self._requests: dict[str, QueuedRequest] = {}  # the least recently refreshed first
        self._metrics = metrics or QueueMetrics()
        self._metrics.show(self._queue)
        self._clock = clock
        self._call_later = call_later or _on_loop
        self._drain_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._saturation = Saturation()
        self._was_full = False
        picker.eligibility.on_change = self.wake

    def __len__(self) -> int:
        return len(self._queue)

    def submit(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        attempt: Attempt | None = None,
        on_decision: OnDecision,
        on_error: OnError,
    ) -> Decision | QueuedRequest:
        """Return the decision, booked, if the request need not wait; else the queued request.

        Of a queued request exactly one of ``on_decision`` (booked by then) and ``on_error`` is
        called, later and from the loop, unless it is cancelled. Raises what :meth:`Picker.pick`
        raises, and RouterQueueLimitExceeded.
        """
        self._metrics.received.value += 1
        try:
            if self._closed:
                raise Unavailable("Service is shutting down")
            # Behind others a request waits even if a worker is free for it: they go first.
            if not self._queue and self._admits(routing, attempt):
                return self.picker.pick(
                    request_id, tokens, routing=routing, override=override, attempt=attempt
                )
            request = QueuedRequest(
                priority=priority_of(routing),
                isl_tokens=len(tokens),
                request_id=request_id,
                tokens=tokens,
                routing=routing,
                override=override,
                attempt=attempt,
                on_decision=on_decision,
                on_error=on_error,
                _queue=self,
            )
            self._enqueue(request)
            return request
        except Overloaded as error:
            self._metrics.refused(error)
            raise

    def check(self) -> None:
        """Raise Overloaded, counted, if every request would be rejected now, whatever it asks for.

        O(1), so that a caller need not prepare such a request.
        """
        error: Overloaded | None = None
        if self.picker.worker_pool.all_busy:
            error = Overloaded("all eligible workers are overloaded")
        elif self._was_full:
            error = self._queue.limit_error()
        if error is not None:
            self._metrics.received.value += 1
            self._metrics.refused(error)
            raise error

    def report_to(self, saturation: Saturation) -> None:
        """Count this queue there while it is full."""
        self._saturation = saturation
        if self._was_full:
            saturation.changed(True)

    def wake(self) -> None:
        """Schedule another look at the head: load or workers have changed."""
        if self._queue and self._drain_timer is None:
            self._drain_timer = self._call_later(0.0, self._drain)

    def close(self) -> None:
        """Reject all queued and all further requests. Idempotent."""
        self._closed = True
        for timer in (self._drain_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        self._drain_timer = self._tick_timer = None
        for request in list(self._requests.values()):
            self._reject(request, Unavailable("Service is shutting down"))

    def _admits(self, routing: Routing | None, attempt: Attempt | None) -> bool:
        """Return whether an eligible slot is below the threshold.

        Raises as :meth:`EligibilityFilter.slots`.
        """
        picker = self.picker
        if attempt is not None:
            routing = attempt.limit(routing)
        load, threshold = picker.active.load, self._threshold
        owners, members = picker.worker_pool.owners, picker.worker_pool.members
        for slot in picker.eligibility.slots(routing, self._clock()):
            owner = owners[slot]
            batch = members[owner[0]].config.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS
            if load(slot)[0] <= threshold * batch:
                return True
        return False

    def _enqueue(self, request: QueuedRequest) -> None:
        request_id = request.request_id
        if request_id in self._requests or request_id in self.picker.active:
            raise InvalidArgument(f"Request {request_id} already exists")
        if self._queue.is_full:  # before the caches are searched, which costs more
            raise self._queue.limit_error()
        request.cached_tokens = self._cached_tokens(request)
        request.arrived_s = request.refreshed_s = self._clock()
        self._metrics.joined(len(self._queue))
        self._queue.add(request)
        self._requests[request_id] = request
        self._size_changed()
        self.wake()  # it may be the new head, and eligible for workers that the old head was not
        if self._tick_timer is None:
            self._tick_timer = self._call_later(TICK_S, self._tick)

    def _cached_tokens(self, request: QueuedRequest) -> int:
        """Return the prompt tokens that the best eligible worker holds. Raises what the pick
        would."""
        routing = request.attempt.limit(request.routing) if request.attempt else request.routing
        inputs, error, _ = self.picker.weigh(request.tokens, routing, request.override)
        if error is not None:
            raise error
        return cached_tokens(inputs.params.weights, inputs.best_overlap)

    def _drain(self) -> None:
        """Route requests from the head on, a batch in each loop iteration."""
        self._drain_timer = None
        for _ in range(_BATCH):
            head = self._queue.head()
            if head is None or not self._route(head):
                return
        self.wake()

    def _route(self, request: QueuedRequest) -> bool:
        """Send or reject the head; return False if it has to wait on."""
        request_id = request.request_id
        try:
            if not self._admits(request.routing, request.attempt):
                return False
            decision = self.picker.pick(
                request_id,
                request.tokens,
                routing=request.routing,
                override=request.override,
                attempt=request.attempt,
            )
        except DynamoError as error:
            if isinstance(error, Overloaded) and self.picker.eligibility.busy.any_at_capacity:
                return False  # a full worker has room again within a second
            self._reject(request, error)
            return True
        except Exception:
            log.exception("routing request %s failed", request_id)
            self._reject(request, DynamoError("Internal router error"))
            return True
        self._remove(request)
        self._metrics.waited.observe(self._clock() - request.arrived_s)
        try:
            request.on_decision(decision)
        except Exception:
            log.exception("request %s: the decision callback failed", request_id)
            self.picker.free(request_id)
        return True

    def _reject(self, request: QueuedRequest, error: DynamoError) -> None:
        """Remove a request that no worker can serve, or whose routing failed."""
        self._remove(request)
        if isinstance(error, Overloaded):
            self._metrics.refused(error)
        try:
            request.on_error(error)
        except Exception:
            log.exception("request %s: the error callback failed", request.request_id)

    def _cancel(self, request: QueuedRequest) -> None:
        if self._remove(request):
            self._metrics.left.value += 1
            self.wake()

    def _remove(self, request: QueuedRequest) -> bool:
        if not self._queue.remove(request):
            return False
        del self._requests[request.request_id]
        self._size_changed()
        if not self._queue and self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        return True

    def _size_changed(self) -> None:
        if self._queue.is_full != self._was_full:
            self._was_full = not self._was_full
            self._saturation.changed(self._was_full)

    def _tick(self) -> None:
        self._tick_timer = None
        self._refresh()
        self._drain()
        if self._queue and not self._closed:
            self._tick_timer = self._call_later(TICK_S, self._tick)

    def _refresh(self) -> None:
        """Update the cached tokens of requests that wait long, a batch at a time."""
        if not self._refresh_s:
            return
        before_s = self._clock() - self._refresh_s
        for request in list(islice(self._requests.values(), _BATCH)):
            if request.refreshed_s > before_s:
                return  # so are all behind it
            request.refreshed_s = self._clock()
            # To the end of the dict, whose order is that of the last refresh.
            self._requests[request.request_id] = self._requests.pop(request.request_id)
            try:
                cached = self._cached_tokens(request)
            except DynamoError:
                continue  # the pick at the head raises it again, and rejects the request
            self._queue.set_cached_tokens(request, cached)


def make_queue(
    settings: RouterSettings, picker: KvPicker, registry: Registry, place: RouterLabels
) -> RequestQueue | None:
    """Return the queue before ``picker``, or None: without a threshold, before prefill workers
    (the prefill router has its own), and, with a warning, where prefill load is not tracked."""
    if settings.queue_threshold is None or place.worker_type == "prefill":
        return None
    if not settings.track_prefill_tokens:
        log.warning("--router-queue-threshold has no effect with --no-router-track-prefill-tokens")
        return None
    return RequestQueue(picker, settings, QueueMetrics(registry, place.model, place.worker_type))


def _on_loop(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, callback)
