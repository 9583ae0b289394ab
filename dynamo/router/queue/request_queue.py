"""The line before the workers: requests wait while all of them have enough prefill to do.

It stands between callers and a :class:`KvPicker`. Waiting puts the decision off: it is made with
what is cached and booked when the request's turn comes. Spec 3.9; seed: router guide, queue
threshold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError, InvalidArgument, Overloaded, Unavailable
from dynamo.observability.metrics import Registry
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.cost import cached_tokens
from dynamo.router.eligibility.busy import UNKNOWN_BATCH_TOKENS
from dynamo.router.kv import KvPicker
from dynamo.router.metrics import RouterLabels
from dynamo.router.picker import Decision, Picker
from dynamo.router.queue.metrics import QueueMetrics
from dynamo.router.queue.queued_request import Handle, Later, OnDecision, OnError, QueuedRequest
from dynamo.router.queue.waiting import QueueEntry, WaitingQueue, claim_of

__all__ = ["TICK_S", "RequestQueue", "line_for"]

TICK_S = 0.1
"""While somebody waits, look this often for what nobody tells: busy reports, decaying load."""
_AT_ONCE = 32

logger = logging.getLogger(__name__)


class RequestQueue:
    """Lets requests through to ``picker``, or has them wait for it, in the order of a policy.

    A request waits if others do, or if every (worker, dp_rank) that may take it has more active
    prefill tokens than ``threshold`` of its ``max_num_batched_tokens``. The head of the line waits
    until one has less, and everybody behind it with it. ``clock`` is the picker's own, ``later``
    calls back on the loop's thread.
    """

    def __init__(
        self,
        picker: KvPicker,
        settings: RouterSettings,
        metrics: QueueMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
        later: Later | None = None,
    ) -> None:
        assert settings.queue_threshold is not None, "without a threshold there is no line"
        self.picker = picker
        self._threshold = settings.queue_threshold
        self._refresh_s = settings.overlap_refresh_after_s
        self._queue: WaitingQueue[QueuedRequest] = WaitingQueue(
            settings.queue_policy, settings.queue_limit
        )
        self._waiters: dict[
            str, QueueEntry[QueuedRequest]
        ] = {}  # in the order of looking at their caches
        self._metrics = metrics or QueueMetrics()
        self._metrics.show(self._queue)
        self._clock = clock
        self._later = later or _on_loop
        self._soon: Handle | None = None
        self._tick_timer: Handle | None = None
        self._closed = False
        picker.eligibility.on_change = self.wake

    def __len__(self) -> int:
        return len(self._queue)

    def request(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        on_decision: OnDecision,
        on_error: OnError,
    ) -> Decision | QueuedRequest:
        """The decision, booked, if there is no need to wait; else a ticket.

        Of a ticket, exactly one of ``on_decision`` (booked by then) and ``on_error`` is called,
        later and from the loop, unless it is cancelled. Raises what :meth:`Picker.pick` raises, and
        RouterQueueLimitExceeded.
        """
        self._metrics.received.value += 1
        try:
            if self._closed:
                raise Unavailable("Service is shutting down")
            if not self._queue and self._admits(routing):
                return self.picker.pick(request_id, tokens, routing=routing, override=override)
            return self._join(
                QueuedRequest(
                    self.leave, request_id, tokens, routing, override, on_decision, on_error
                )
            )
        except Overloaded as error:
            self._metrics.refused(error)
            raise

    def wake(self) -> None:
        """Load or workers have changed: soon see who may go."""
        if self._queue and self._soon is None:
            self._soon = self._later(0.0, self._drain)

    def leave(self, ticket: QueuedRequest) -> None:
        """See :meth:`QueuedRequest.cancel`."""
        if self._remove(ticket):
            self._metrics.left.value += 1
            self.wake()

    def close(self) -> None:
        """Turn away who waits and who comes from now on. Idempotent."""
        self._closed = True
        for timer in (self._soon, self._tick_timer):
            if timer is not None:
                timer.cancel()
        self._soon = self._tick_timer = None
        for waiter in list(self._waiters.values()):
            self._tell(waiter.item, Unavailable("Service is shutting down"))

    def _admits(self, routing: Routing | None) -> bool:
        """Whether a slot that may take the request has room. Raises as :meth:`Gate.slots`."""
        picker = self.picker
        load, threshold = picker.active.load, self._threshold
        owners, members = picker.worker_pool.owners, picker.worker_pool.members
        for slot in picker.eligibility.slots(routing, self._clock()):
            owner = owners[slot]
            assert owner is not None, "a candidate slot has an owner"
            batch = members[owner[0]].config.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS
            if load(slot)[0] <= threshold * batch:
                return True
        return False

    def _join(self, ticket: QueuedRequest) -> QueuedRequest:
        request_id = ticket.request_id
        if request_id in self._waiters or request_id in self.picker.active:
            raise InvalidArgument(f"Request {request_id} already exists")
        if self._queue.full:
            raise self._queue.refuse()
        cached = self._cached_tokens(ticket)
        now_s = self._clock()
        self._metrics.joined(len(self._queue))
        claim, isl = claim_of(ticket.routing), len(ticket.tokens)
        self._waiters[request_id] = self._queue.join(ticket, claim, isl, cached, now_s)
        ticket.seen_s = now_s
        self.wake()  # it may be first now, and have other workers to go to than who was
        if self._tick_timer is None:
            self._tick_timer = self._later(TICK_S, self._tick)
        return ticket

    def _cached_tokens(self, ticket: QueuedRequest) -> int:
        """Tokens of the prompt that the best of its workers need not compute. Raises what its pick
        would."""
        snapshot = self.picker.snapshot(ticket.tokens, ticket.routing, ticket.override)
        if snapshot.error is not None:
            raise snapshot.error
        weights = snapshot.params.weights
        return cached_tokens(weights, snapshot.cached_blocks.best_overlap(weights, snapshot.slots))

    def _drain(self) -> None:
        """Let go who may, from the head on, a few in a turn of the loop."""
        self._soon = None
        for _ in range(_AT_ONCE):
            head = self._queue.head()
            if head is None or not self._serve(head.item, head.arrived_s):
                return
        self.wake()

    def _serve(self, ticket: QueuedRequest, arrived_s: float) -> bool:
        """Send or turn away the head; False: it must wait on."""
        request_id = ticket.request_id
        try:
            if not self._admits(ticket.routing):
                return False
            decision = self.picker.pick(
                request_id, ticket.tokens, routing=ticket.routing, override=ticket.override
            )
        except DynamoError as error:
            self._tell(ticket, error)
            return True
        except Exception:
            logger.exception("request %s could not be routed", request_id)
            self._tell(ticket, DynamoError("Internal router error"))
            return True
        self._remove(ticket)
        self._metrics.waited.observe(self._clock() - arrived_s)
        try:
            ticket.on_decision(decision)
        except Exception:
            logger.exception("request %s did not take its decision", request_id)
            self.picker.free(request_id)
        return True

    def _tell(self, ticket: QueuedRequest, error: DynamoError) -> None:
        """It shall not wait any more: nobody can take it."""
        self._remove(ticket)
        if isinstance(error, Overloaded):
            self._metrics.refused(error)
        try:
            ticket.on_error(error)
        except Exception:
            logger.exception("request %s did not take its error", ticket.request_id)

    def _remove(self, ticket: QueuedRequest) -> bool:
        waiter = self._waiters.get(ticket.request_id)
        if waiter is None or waiter.item is not ticket:
            return False
        del self._waiters[ticket.request_id]
        self._queue.leave(waiter)
        if not self._queue and self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        return True

    def _tick(self) -> None:
        self._tick_timer = None
        self._refresh()
        self._drain()
        if self._queue and not self._closed:
            self._tick_timer = self._later(TICK_S, self._tick)

    def _refresh(self) -> None:
        """Look anew, a few at a time, at what is cached for those that wait long."""
        if not self._refresh_s:
            return
        before_s = self._clock() - self._refresh_s
        for waiter in list(islice(self._waiters.values(), _AT_ONCE)):
            ticket = waiter.item
            if ticket.seen_s > before_s:
                return
            ticket.seen_s = self._clock()
            self._waiters[ticket.request_id] = self._waiters.pop(ticket.request_id)
            try:
                self._queue.recount(waiter, self._cached_tokens(ticket))
            except DynamoError:
                continue  # its turn will tell


def line_for(
    settings: RouterSettings, picker: Picker, registry: Registry, place: RouterLabels
) -> RequestQueue | None:
    """The line before ``picker``, None where there is none: without a threshold, before prefill
    workers (theirs is the prefill router's), and, with a warning, where no prefill load is known.
    """
    if settings.queue_threshold is None or place.worker_type == "prefill":
        return None
    if not isinstance(picker, KvPicker):
        logger.warning(
            "--router-queue-threshold has no effect in mode %s, only in kv", settings.mode
        )
        return None
    if not settings.track_prefill_tokens:
        logger.warning(
            "--router-queue-threshold has no effect with --no-router-track-prefill-tokens"
        )
        return None
    return RequestQueue(picker, settings, QueueMetrics(registry, place.model, place.worker_type))


def _on_loop(delay_s: float, callback: Callable[[], None]) -> Handle:
    return asyncio.get_running_loop().call_later(delay_s, callback)
