"""The queue before the workers, and its metrics: requests wait while all workers have enough.

It precedes a :class:`KvPicker` and postpones the decision: a request is routed when it reaches the
head, with the caches and loads of that moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from dynamo.config.router import RouterSettings
from dynamo.config.router_policy import PolicyProfile
from dynamo.errors import (
    DynamoError,
    InvalidArgument,
    Overloaded,
    RouterQueueLimitExceeded,
    Unavailable,
)
from dynamo.observability.metrics import Registry
from dynamo.protocols.codec import Tokens
from dynamo.protocols.control import UNKNOWN_BATCH_TOKENS
from dynamo.protocols.engine import Routing
from dynamo.router.decision.cost import cached_tokens
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.policy import GuardedClassifier, make_guarded_classifier
from dynamo.router.modes.policy_types import policy_request
from dynamo.router.queue.classes import (
    Classifier,
    QueueClass,
    QueueMetrics,
    Turns,
    default_class,
    profile_of,
)
from dynamo.router.queue.waiting import QueueEntry, priority_of
from dynamo.router.worker_pool import Saturation

TICK_S = 0.1
"""Poll this often, while requests wait, for changes without a callback: load that decays with time,
busy reports that expire."""
_BATCH = 32
"""Requests that one loop iteration routes, or whose cached tokens it refreshes."""
log = logging.getLogger(__name__)
OnDecision = Callable[[Decision], None]
OnError = Callable[[DynamoError], None]


MakeMetrics = Callable[..., QueueMetrics]
"""Makes the metrics of ``policy_class``."""
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
    in_class: QueueClass[QueuedRequest]
    refreshed_s: float = field(default=0.0, init=False)

    def cancel(self) -> None:
        """Remove the request: nothing is booked, no callback is called. Idempotent, also after
        the end."""
        self._queue._cancel(self)


class RequestQueue:
    """Passes requests to ``picker``, or queues them in the order of a policy.

    A request waits if others of its class do, or if every (worker, dp_rank) that may take it has
    more active prefill tokens than the threshold of the class. The head waits until one has less,
    and all others of the class behind it. Without a ``profile`` there is one class, that of the
    settings. ``clock`` is the picker's own, ``call_later`` calls back on the loop's thread.
    ``policy``, if given, names the class of a request before its client does.
    """

    def __init__(
        self,
        picker: KvPicker,
        settings: RouterSettings,
        metrics: MakeMetrics = QueueMetrics,
        clock: Callable[[], float] = time.perf_counter,
        call_later: CallLater | None = None,
        profile: PolicyProfile | None = None,
        policy: GuardedClassifier | None = None,
    ) -> None:
        assert profile is not None or settings.queue_threshold is not None, "no threshold"
        self.picker = picker
        self._refresh_s = settings.overlap_refresh_after_s
        configs = [default_class(settings)] if profile is None else profile.policy_classes
        work = picker.active.prefill_seconds if settings.in_seconds else None
        self._classes: list[QueueClass[QueuedRequest]] = [
            QueueClass(config, settings.queue_limit, work, metrics(policy_class=config.name))
            for config in configs
        ]
        self._only = self._classes[0] if len(self._classes) == 1 else None
        self._classifier = None if profile is None else Classifier(profile)
        self._policy = policy
        self._turns = Turns(self._classes)
        self._requests: dict[str, QueuedRequest] = {}  # the least recently refreshed first
        self._clock = clock
        self._call_later = call_later or _on_loop
        self._drain_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._saturation = Saturation()
        self._was_full = False
        picker.eligibility.on_change = self.wake

    def __len__(self) -> int:
        return len(self._requests)

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
        in_class = self._only or self._classify(tokens, routing, override, attempt)
        in_class.metrics.received.value += 1
        try:
            if self._closed:
                raise Unavailable("Service is shutting down")
            # Behind others a request waits even if a worker is free for it: they go first.
            if not in_class.queue and self._admits(in_class, routing, attempt):
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
                in_class=in_class,
            )
            self._enqueue(request)
            return request
        except Overloaded as error:
            in_class.metrics.refused(error)
            raise

    def check(self) -> None:
        """Raise Overloaded, counted, if every request would be rejected now, with any constraints.

        O(1), so that a caller need not prepare such a request.
        """
        error: Overloaded | None = None
        if self.picker.worker_pool.all_busy:
            error = Overloaded("all eligible workers are overloaded")
        elif self._was_full:
            error = self._full()
        if error is not None:
            metrics = self._classes[0].metrics
            metrics.received.value += 1
            metrics.refused(error)
            try:
                raise error
            finally:
                del error  # a cycle: the error has this frame

    def report_to(self, saturation: Saturation) -> None:
        """Count this queue there while it is full."""
        self._saturation = saturation
        if self._was_full:
            saturation.changed(True)

    def wake(self) -> None:
        """Schedule another look at the head: load or workers have changed."""
        if self._requests and self._drain_timer is None:
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

    def _classify(
        self,
        tokens: Tokens,
        routing: Routing | None,
        override: Mapping[str, Any] | None,
        attempt: Attempt | None,
    ) -> QueueClass[QueuedRequest]:
        """Return the class of a request, one of several."""
        classifier = self._classifier
        assert classifier is not None
        name = None if routing is None else routing.policy_class
        if self._policy is not None:
            size = self.picker.block_size
            request = policy_request(len(tokens), len(tokens) // size, size, routing)
            name = self._policy.classify(request) or name
        number = classifier.explicit(name)
        if number is None:
            cached = 0
            if classifier.by_cache:
                limited = routing if attempt is None else attempt.limit(routing)
                inputs, error, _ = self.picker.weigh(tokens, limited, override)
                if error is None:  # else the request is refused anyway
                    cached = cached_tokens(inputs.params.weights, inputs.best_overlap)
            number = classifier.by_family(name, len(tokens) - cached)
        return self._classes[number]

    def _admits(
        self, in_class: QueueClass[QueuedRequest], routing: Routing | None, attempt: Attempt | None
    ) -> bool:
        """Return whether an eligible slot is below the threshold.

        Raises as :meth:`EligibilityFilter.slots`.
        """
        picker = self.picker
        if attempt is not None:
            routing = attempt.limit(routing)
        slots = picker.eligibility.slots(routing, self._clock())
        return in_class.admits(self._loads(slots), len(slots))

    def _loads(self, slots: array[int]) -> Iterator[tuple[int, int]]:
        """Yield the active prefill tokens and the batch size of each slot."""
        picker = self.picker
        load = picker.active.load
        owners, members = picker.worker_pool.owners, picker.worker_pool.members
        for slot in slots:
            config = members[owners[slot][0]].config
            yield load(slot)[0], config.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS

    def _full(self) -> RouterQueueLimitExceeded | None:
        """Return why no class takes more requests; None if one does."""
        workers = len(self.picker.worker_pool.members)
        error = None
        for in_class in self._classes:
            if not in_class.queue:  # its next request may find a worker, even with a limit of 0
                return None
            error = in_class.limit_error(workers)
            if error is None:
                return None
        return error

    def _enqueue(self, request: QueuedRequest) -> None:
        request_id = request.request_id
        if request_id in self._requests or request_id in self.picker.active:
            raise InvalidArgument(f"Request {request_id} already exists")
        in_class = request.in_class
        full = in_class.limit_error(len(self.picker.worker_pool.members))
        if full is not None:  # before the caches are searched, which costs more
            try:
                raise full
            finally:
                del full  # a cycle: the error has this frame
        # Before the request is in the queue: this raises what the pick would.
        request.cached_tokens = self._cached_tokens(request)
        request.arrived_s = request.refreshed_s = self._clock()
        in_class.metrics.joined(len(in_class.queue))
        in_class.queue.add(request)
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
            if not self._route_next():
                return
        self.wake()

    def _route_next(self) -> bool:
        """Send or reject the head of the class whose turn it is; return False if all wait on."""
        if self._only is not None:
            head = self._only.queue.head()
            return head is not None and self._route(head)
        turns = self._turns.in_order()
        for index, turn in enumerate(turns):
            if self._route(turn.head):
                self._turns.served(turn, turns[index + 1 :])
                return True
        return False

    def _route(self, request: QueuedRequest) -> bool:
        """Send or reject the head; return False if it has to wait on."""
        request_id = request.request_id
        try:
            if not self._admits(request.in_class, request.routing, request.attempt):
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
        request.in_class.metrics.waited.observe(self._clock() - request.arrived_s)
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
            request.in_class.metrics.refused(error)
        try:
            request.on_error(error)
        except Exception:
            log.exception("request %s: the error callback failed", request.request_id)

    def _cancel(self, request: QueuedRequest) -> None:
        if self._remove(request):
            request.in_class.metrics.left.value += 1
            self.wake()

    def _remove(self, request: QueuedRequest) -> bool:
        if not request.in_class.queue.remove(request):
            return False
        del self._requests[request.request_id]
        self._size_changed()
        if not self._requests and self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        return True

    def _size_changed(self) -> None:
        if (self._full() is not None) != self._was_full:
            self._was_full = not self._was_full
            self._saturation.changed(self._was_full)

    def _tick(self) -> None:
        self._tick_timer = None
        self._refresh()
        self._drain()
        if self._requests and not self._closed:
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
            request.in_class.queue.set_cached_tokens(request, cached)


def make_queue(
    settings: RouterSettings, picker: KvPicker, registry: Registry, labels: RouterLabels
) -> RequestQueue | None:
    """Return the queue before ``picker``, or None: without a threshold, before prefill workers
    (the prefill router has its own), and, with a warning, where prefill load is not tracked."""
    profile = profile_of(settings, labels.model)
    if (settings.queue_threshold is None and profile is None) or labels.worker_type == "prefill":
        return None
    if not settings.track_prefill_tokens:
        flag = "--router-queue-threshold" if profile is None else "policy_classes"
        log.warning("%s has no effect with --no-router-track-prefill-tokens", flag)
        return None
    metrics = partial(QueueMetrics, registry, labels.model, labels.worker_type)
    policy = None if profile is None else make_guarded_classifier(settings, registry, labels)
    return RequestQueue(picker, settings, metrics, profile=profile, policy=policy)


def _on_loop(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, callback)
