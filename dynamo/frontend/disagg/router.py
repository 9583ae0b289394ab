"""Prompts go through a prefill worker first, while there is one. Spec 7.5, SP 7.

A request waits in the line until a prefill worker has a free slot, is computed there, and goes on
to a decode worker with what that worker needs to fetch the KV blocks. Where that fails, the decode
worker computes the prompt itself, unless ``--enforce-disagg`` forbids it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from dynamo.config.router import RouterSettings
from dynamo.errors import (
    Disconnected,
    DynamoError,
    HttpFailure,
    InvalidArgument,
    Overloaded,
    WorkerUnavailable,
)
from dynamo.frontend.disagg.fallback import Fallback
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.prefill_request import Prefilled, PrefillRequest, after_prefill
from dynamo.frontend.disagg.sender import PrefillSender
from dynamo.frontend.disagg.workers import PrefillWorkers
from dynamo.frontend.requests.dispatch import Dispatch, DispatchJob
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.picker import Decision, Picker
from dynamo.router.queue.prefill import PrefillQueue, capacity_of
from dynamo.router.queue.waiting import priority_of
from dynamo.runtime import Client

__all__ = ["PrefillRouter"]

log = logging.getLogger(__name__)


class PrefillRouter:
    """The prefill side of one model. ``dispatch`` takes requests on to the decode workers.

    It is *active* while a prefill worker is there that answers; whoever knows the workers calls
    :meth:`attach`, :meth:`add_worker`, :meth:`suspend`, :meth:`remove_worker`.
    """

    def __init__(
        self,
        model: str,
        block_size: int,
        settings: RouterSettings,
        metrics: PrefillMetrics,
        dispatch: Dispatch,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.queue: PrefillQueue[PrefillRequest] = PrefillQueue(
            settings.prefill_queue_limit, lambda ticket: len(ticket.job.request.token_ids)
        )
        self.workers = PrefillWorkers(block_size)
        self._settings = settings
        self._metrics = metrics
        self._dispatch = dispatch
        self._fallback = Fallback(model, block_size, settings, metrics, dispatch)
        self._sender = PrefillSender(
            self.queue, self.workers, self._fallback, metrics, settings.prefill_patience_s
        )
        self._known = False
        self._loop = asyncio.get_running_loop()

    @property
    def on_change(self) -> Callable[[], None]:
        """Called when the line or the workers may have changed."""
        return self._sender.on_change

    @on_change.setter
    def on_change(self, callback: Callable[[], None]) -> None:
        self._sender.on_change = callback

    @property
    def active(self) -> bool:
        """Whether a prompt can be computed by a prefill worker now."""
        return self.workers.picker is not None and bool(self.queue.workers)

    @property
    def patient(self) -> bool:
        """Whether a prompt waits for the best worker while others have a free slot."""
        return self._settings.prefill_patience_s > 0

    # -- requests

    def take(self, job: DispatchJob) -> bool:
        """See to it that the prompt is computed, then decoded; False: the decode worker is to do
        both, at once.

        Raises InvalidArgument for a pin to an unknown worker, Overloaded when the line is full or
        the workers are over a threshold of prefill tokens with what waits, Unavailable when there
        is no prefill worker and decode-only serving is forbidden.
        """
        if not self.active:
            self._fallback.absent(self._known)
            return False
        routing = job.routing
        reason = self.stays(job.request.token_ids, routing)
        if reason:
            self._metrics.kept_local(reason)
            return False
        now_s = time.monotonic()
        pin = self.workers.pin(routing)
        ticket = PrefillRequest(self, job, pin, now_s)
        if self.workers.overloaded(pin, self.queue.waiting_tokens):
            self._metrics.refused("overloaded")
            raise Overloaded("all prefill workers have too many prompt tokens to compute")
        strict, priority_boost_s = priority_of(routing)
        try:
            self.queue.add(
                ticket, now_s, strict=strict, priority_boost_s=max(priority_boost_s, 0.0), pin=pin
            )
        except Overloaded:
            self._metrics.refused("queue_full")
            raise
        job.leg.pending = ticket
        job.leg.call.meter.routed("prefill")
        self._sender.drain()
        return True

    def stays(self, tokens: Tokens, routing: Routing | None) -> str:
        """Why a decode worker had better compute the prompt although there are prefill workers
        (``short``, ``cached``, ``queue``), or "". Who names a prefill worker gets it."""
        if routing is not None and routing.prefill_worker_id is not None:
            return ""
        return self._fallback.prefers(tokens, routing, len(self.queue))

    def locate(self, tokens: Tokens, routing: Routing | None) -> Decision | None:
        """Where the prompt would be computed now; None: at the decode worker. Raises as
        :meth:`Picker.pick`."""
        if not self.active or self.stays(tokens, routing):
            return None
        return self.workers.locate(tokens, routing)

    # -- workers

    def attach(self, picker: Picker, client: Client) -> None:
        """From now on ``picker`` chooses among the workers behind ``client``."""
        self.workers.picker, self.workers.client = picker, client
        self.queue.busy = self.workers.busy
        self._known = True
        self._metrics.show(self.queue)
        client.on_inhibited(self.suspend)

    def detach(self) -> None:
        """No prefill worker is left: who waits goes without, who is served may end."""
        self.workers.picker = self.workers.client = None
        self.queue.busy = self.workers.busy
        for worker_id in self.queue.all_workers:
            self.remove_worker(worker_id)

    def add_worker(self, worker_id: int, config: RuntimeConfig) -> None:
        """The worker may be sent requests, within its capacity."""
        self.queue.set_worker(worker_id, capacity_of(config, self._settings.prefill_slots))
        self._sender.settle()

    def suspend(self, worker_id: int, suspended: bool) -> None:
        """The worker did not answer (or may be tried again)."""
        self._sender.suspend(worker_id, suspended)

    def remove_worker(self, worker_id: int) -> None:
        """The worker is gone. What it still computes it may finish, for a while."""
        for ticket in self.queue.remove_worker(worker_id):
            if ticket.pin is None:
                self.queue.bind(ticket, None)
            else:
                self._sender.go_without(ticket, "no_worker")
        if self.queue.running_at(worker_id):
            self._loop.call_later(self._settings.prefill_drain_timeout_s, self._lose, worker_id)
        self._sender.settle()

    # -- told by the tickets

    def cancelled(self, ticket: PrefillRequest) -> None:
        """The client has gone: nothing runs or waits for it."""
        self.queue.remove(ticket)
        ticket.release()
        self._sender.drain()

    def computed(self, ticket: PrefillRequest) -> None:
        """On to the decode worker."""
        decision, output, job = ticket.decision, ticket.output, ticket.job
        assert decision is not None and output is not None, "a sent ticket has both at its end"
        now_s = time.monotonic()
        ticket.stream = None
        self.queue.finish(ticket)
        ticket.release()
        tokens = len(job.request.token_ids)
        self._metrics.computed(now_s - ticket.sent_s)
        if self.workers.knows(decision.worker_id):
            self._metrics.last_of(*decision[:2], tokens, now_s - ticket.sent_s)
        done = Prefilled(*decision[:4], ticket.sent_s, now_s)
        job.leg.call.prefilled(done)
        job.leg.call.rests()
        request = after_prefill(job.request, output)
        self._dispatch.decode_later(job._replace(request=request))
        self._sender.drain()

    def failed(self, ticket: PrefillRequest, error: DynamoError) -> None:
        """Again with another worker, without, or not at all: it depends on the error."""
        self.queue.finish(ticket)
        ticket.release()
        ticket.job.leg.call.rests()
        ticket.output = None
        if isinstance(error, WorkerUnavailable):
            self._again(ticket, error)
        elif isinstance(error, InvalidArgument) or _is_clients(error):
            self._sender.refuse(ticket, error, by_worker=True)
        else:
            reason = "overloaded" if isinstance(error, Overloaded) else "engine_error"
            self._sender.go_without(ticket, reason, error)
        self._sender.drain()

    # -- own steps

    def _again(self, ticket: PrefillRequest, error: DynamoError) -> None:
        ticket.attempts += 1
        if ticket.attempts > self._settings.prefill_retries:
            self._sender.go_without(ticket, "retries", error)
        elif not self.active or ticket.pin not in (None, *self.queue.all_workers):
            self._sender.go_without(ticket, "no_worker", error)
        else:
            log.info("prefill of %s goes back to the head: %s", ticket.reservation_id, error)
            self._metrics.requeued()
            ticket.patient = False
            ticket.job.leg.call.meter.routed("prefill")
            self.queue.requeue(ticket, ticket.pin)

    def _lose(self, worker_id: int) -> None:
        """A worker that left has not finished in time: it hangs, or its host is gone."""
        if self.workers.knows(worker_id):
            return  # it has come back
        for ticket in self.queue.running_at(worker_id):
            self.failed(ticket, Disconnected(f"prefill worker {worker_id} left without an answer"))


def _is_clients(error: DynamoError) -> bool:
    return isinstance(error, HttpFailure) and error.status < 500
