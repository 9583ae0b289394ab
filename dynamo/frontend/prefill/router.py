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
    NoInstances,
    Overloaded,
    WorkerUnavailable,
)
from dynamo.frontend.dispatch import Dispatch
from dynamo.frontend.leg import Leg
from dynamo.frontend.prefill.fallback import Fallback
from dynamo.frontend.prefill.line import PrefillLine, Turn, capacity_of
from dynamo.frontend.prefill.metrics import PrefillMetrics
from dynamo.frontend.prefill.ticket import Order, Prefilled, PrefillTicket, after_prefill
from dynamo.frontend.prefill.workers import PrefillWorkers
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.router.picker import Decision, Picker
from dynamo.router.queue.waiting import claim_of
from dynamo.runtime import Client

__all__ = ["PrefillRouter"]

log = logging.getLogger(__name__)
_BUSY_TICK_S = 0.1
"""While a slot is free only at busy workers, look this often whether they still are."""


class PrefillRouter:
    """The prefill side of one model. ``dispatch`` takes requests on to the decode workers.

    It is *active* while a prefill worker is there that answers; whoever knows the workers calls
    :meth:`attach`, :meth:`add_worker`, :meth:`suspend`, :meth:`remove_worker`. ``on_change`` is
    called when the line or the workers may have changed.
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
        self.line: PrefillLine[PrefillTicket] = PrefillLine(settings.prefill_queue_limit)
        self.on_change: Callable[[], None] = _nobody
        self._settings = settings
        self._fallback = Fallback(model, block_size, settings, metrics, dispatch)
        self._metrics = metrics
        self._dispatch = dispatch
        self.workers = PrefillWorkers()
        self._draining = False
        self._known = False
        self._tick: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def active(self) -> bool:
        """Whether a prompt can be computed by a prefill worker now."""
        return self.workers.picker is not None and bool(self.line.workers)

    # -- requests

    def take(
        self,
        leg: Leg,
        request: PreprocessedRequest,
        routing: Routing | None,
        headers: dict[str, str],
    ) -> bool:
        """See to it that the prompt is computed, then decoded; False: the decode worker is to do
        both, at once.

        Raises InvalidArgument for a pin to an unknown worker, Overloaded when the line is full,
        Unavailable when there is no prefill worker and decode-only serving is forbidden.
        """
        if not self.active:
            self._fallback.absent(self._known)
            return False
        reason = self.stays(request.token_ids, routing)
        if reason:
            self._metrics.kept_local(reason)
            return False
        now_s = time.monotonic()
        pin = self.workers.pin(routing)
        ticket = PrefillTicket(self, Order(leg, request, routing, headers), pin, now_s)
        strict, jump_s = claim_of(routing)
        try:
            self.line.enter(ticket, now_s, strict=strict, jump_s=max(jump_s, 0.0), pin=pin)
        except Overloaded:
            self._metrics.refused("queue_full")
            raise
        leg.pending = ticket
        self._drain()
        return True

    def stays(self, tokens: Tokens, routing: Routing | None) -> str:
        """Why a decode worker had better compute the prompt although there are prefill workers
        (``short``, ``cached``, ``queue``), or "". Who names a prefill worker gets it."""
        if routing is not None and routing.prefill_worker_id is not None:
            return ""
        return self._fallback.prefers(tokens, routing, len(self.line))

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
        self.line.busy = self.workers.busy
        self._known = True
        self._metrics.show(self.line)
        client.on_inhibited(self.suspend)

    def detach(self) -> None:
        """No prefill worker is left: who waits goes without, who is served may end."""
        self.workers.picker = self.workers.client = None
        self.line.busy = self.workers.busy
        for worker_id in self.line.known_workers:
            self.remove_worker(worker_id)

    def add_worker(self, worker_id: int, config: RuntimeConfig) -> None:
        """The worker may be sent requests, within its capacity."""
        self.line.set_worker(worker_id, capacity_of(config, self._settings.prefill_slots))
        self._settle()

    def suspend(self, worker_id: int, suspended: bool) -> None:
        """The worker did not answer (or may be tried again)."""
        self.line.suspend(worker_id, suspended)
        for ticket in self.line.waiting_for(worker_id) if suspended else ():
            if ticket.pin is None:
                self.line.bind(ticket, None)
        self._settle()

    def remove_worker(self, worker_id: int) -> None:
        """The worker is gone. What it still computes it may finish, for a while."""
        for ticket in self.line.remove_worker(worker_id):
            if ticket.pin is None:
                self.line.bind(ticket, None)
            else:
                self._go_without(ticket, "no_worker")
        if self.line.running_at(worker_id):
            self._loop.call_later(self._settings.prefill_drain_timeout_s, self._lose, worker_id)
        self._settle()

    # -- told by the tickets

    def cancelled(self, ticket: PrefillTicket) -> None:
        """The client has gone: nothing runs or waits for it."""
        self.line.leave(ticket)
        ticket.release()
        self._drain()

    def computed(self, ticket: PrefillTicket) -> None:
        """On to the decode worker."""
        decision, output, order = ticket.decision, ticket.output, ticket.order
        assert decision is not None and output is not None, "a sent ticket has both at its end"
        now_s = time.monotonic()
        ticket.stream = None
        self.line.finish(ticket)
        ticket.release()
        tokens = len(order.request.token_ids)
        self._metrics.computed(*decision[:2], tokens, now_s - ticket.sent_s)
        done = Prefilled(*decision[:4], ticket.sent_s, now_s)
        order.leg.call.prefilled(done)
        order.leg.call.rests()
        request = after_prefill(order.request, output)
        self._dispatch.decode_later(order.leg, request, order.routing, order.headers)
        self._drain()

    def failed(self, ticket: PrefillTicket, error: DynamoError) -> None:
        """Again with another worker, without, or not at all: it depends on the error."""
        self.line.finish(ticket)
        ticket.release()
        ticket.order.leg.call.rests()
        ticket.output = None
        if isinstance(error, WorkerUnavailable):
            self._again(ticket, error)
        elif isinstance(error, InvalidArgument) or _is_clients(error):
            self._refuse(ticket, error, by_worker=True)
        else:
            reason = "overloaded" if isinstance(error, Overloaded) else "engine_error"
            self._go_without(ticket, reason, error)
        self._drain()

    # -- own steps

    def _drain(self) -> None:
        """Send whoever there is a free slot for."""
        if self._draining:
            return
        self._draining = True
        try:
            while (turn := self.line.next()) is not None and self._send(turn):
                pass
        finally:
            self._draining = False
        if self.line.held_up and self._tick is None:
            self._tick = self._loop.call_later(_BUSY_TICK_S, self._look_again)
        self.on_change()

    def _look_again(self) -> None:
        self._tick = None
        self._drain()

    def _settle(self) -> None:
        """The workers have changed."""
        if not self.active:
            for ticket in self.line.take_all():
                self._go_without(ticket, "no_worker")
        self._drain()

    def _send(self, turn: Turn[PrefillTicket]) -> bool:
        """Whether the line may go on; the ticket has left its head then."""
        ticket, order = turn.ticket, turn.ticket.order
        if turn.workers is not None and self._binds(ticket, turn.workers):
            return True
        try:
            decision = self.workers.send(ticket, turn.workers)
        except DynamoError as error:
            return self._unsent(turn, error)
        except Exception:
            log.exception("request %s failed", ticket.booking)
            self._refuse(ticket, DynamoError("a bug in the frontend"))
            return True
        cached_tokens = decision.overlap_blocks * self.block_size
        new_tokens = max(len(order.request.token_ids) - cached_tokens, 1)
        self.line.start(ticket, decision.worker_id, new_tokens)
        ticket.sent_s = order.leg.call.works()
        self._metrics.sent(ticket.sent_s - ticket.arrived_s)
        return True

    def _binds(self, ticket: PrefillTicket, free: list[int]) -> bool:
        """Whether it steps aside, to wait a while for a better worker than the ``free`` ones."""
        patience_s = self._settings.prefill_patience_s
        if not ticket.patient or not patience_s:
            return False
        best = self.workers.best(ticket)
        if best is None or best in free or best not in self.line.workers:
            return False
        ticket.patient = False
        self.line.bind(ticket, best)
        self._loop.call_later(patience_s, self._unbind, ticket)
        return True

    def _unbind(self, ticket: PrefillTicket) -> None:
        self.line.bind(ticket, None)
        self._drain()

    def _unsent(self, turn: Turn[PrefillTicket], error: DynamoError) -> bool:
        """See :meth:`_send`. A pin is the client's word; of other constraints (taints, a rank) a
        decode worker may think differently."""
        ticket = turn.ticket
        if isinstance(error, WorkerUnavailable) and ticket.decision is not None:
            # It is gone, and we are about to be told: the ticket stays first.
            self.suspend(ticket.decision.worker_id, True)
        elif isinstance(error, NoInstances) and turn.workers is None:
            self._go_without(ticket, "no_worker", error)
        elif turn.workers is not None and ticket.pin is None and self.workers.suits_any(ticket):
            return False  # those that suit it have no free slot; the head waits for one
        elif isinstance(error, Overloaded) or ticket.pin is not None:
            self._refuse(ticket, error)
        else:
            self._go_without(ticket, "constraints", error)
        return True

    def _again(self, ticket: PrefillTicket, error: DynamoError) -> None:
        ticket.attempts += 1
        if ticket.attempts > self._settings.prefill_retries:
            self._go_without(ticket, "retries", error)
        elif not self.active or ticket.pin not in (None, *self.line.known_workers):
            self._go_without(ticket, "no_worker", error)
        else:
            log.info("prefill of %s goes back to the head: %s", ticket.booking, error)
            self._metrics.requeued()
            self.line.give_back(ticket, ticket.pin)

    def _go_without(
        self, ticket: PrefillTicket, reason: str, error: DynamoError | None = None
    ) -> None:
        self.line.leave(ticket)
        self._fallback.take(ticket, reason, error)

    def _refuse(self, ticket: PrefillTicket, error: DynamoError, by_worker: bool = False) -> None:
        self.line.leave(ticket)
        self._fallback.refuse(ticket, error, by_worker)

    def _lose(self, worker_id: int) -> None:
        """A worker that left has not finished in time: it hangs, or its host is gone."""
        if self.workers.knows(worker_id):
            return  # it has come back
        for ticket in self.line.running_at(worker_id):
            self.failed(ticket, Disconnected(f"prefill worker {worker_id} left without an answer"))


def _is_clients(error: DynamoError) -> bool:
    return isinstance(error, HttpFailure) and error.status < 500


def _nobody() -> None:
    """Where nobody listens."""
