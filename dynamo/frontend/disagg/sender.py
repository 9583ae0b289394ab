"""Gives those who wait for a prefill worker to one, each when it is its turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo.errors import DynamoError, NoInstances, Overloaded, WorkerUnavailable
from dynamo.frontend.disagg.fallback import Fallback
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.prefill_request import PrefillRequest
from dynamo.frontend.disagg.workers import PrefillWorkers
from dynamo.router.queue.prefill import NextPrefill, PrefillQueue

__all__ = ["PrefillSender"]

log = logging.getLogger(__name__)
_BUSY_TICK_S = 0.1
"""While a slot is free only at busy workers, look this often whether they still are."""


class PrefillSender:
    """Between ``queue`` and ``workers``; ``fallback`` gets who has to go without.

    A request waits up to ``patience_s`` for the worker that is best for it while others have a free
    slot. ``on_change`` is called when the line or the workers may have changed.
    """

    def __init__(
        self,
        queue: PrefillQueue[PrefillRequest],
        workers: PrefillWorkers,
        fallback: Fallback,
        metrics: PrefillMetrics,
        patience_s: float,
    ) -> None:
        self.queue = queue
        self.workers = workers
        self.patience_s = patience_s
        self.on_change: Callable[[], None] = _nobody
        self._fallback = fallback
        self._metrics = metrics
        self._draining = False
        self._tick: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def active(self) -> bool:
        """Whether a prompt can be computed by a prefill worker now."""
        return self.workers.picker is not None and bool(self.queue.workers)

    def suspend(self, worker_id: int, suspended: bool) -> None:
        """The worker did not answer (or may be tried again)."""
        self.queue.suspend(worker_id, suspended)
        for ticket in self.queue.waiting_for(worker_id) if suspended else ():
            if ticket.pin is None:
                self.queue.bind(ticket, None)
        self.settle()

    def drain(self) -> None:
        """Send whoever there is a free slot for."""
        if self._draining:
            return
        self._draining = True
        try:
            while (turn := self.queue.next()) is not None and self._send(turn):
                pass
        finally:
            self._draining = False
        if self.queue.is_blocked and self._tick is None:
            self._tick = self._loop.call_later(_BUSY_TICK_S, self._look_again)
        self.on_change()

    def _look_again(self) -> None:
        self._tick = None
        self.drain()

    def settle(self) -> None:
        """The workers have changed."""
        if not self.active:
            for ticket in self.queue.pop_all():
                self.go_without(ticket, "no_worker")
        self.drain()

    def _send(self, turn: NextPrefill[PrefillRequest]) -> bool:
        """Whether the line may go on; the ticket has left its head then."""
        ticket, job = turn.request, turn.request.job
        try:
            if turn.workers is not None and self._binds(ticket, turn.workers):
                return True
            decision = self.workers.send(ticket, turn.workers)
        except DynamoError as error:
            return self._unsent(turn, error)
        except Exception:
            log.exception("request %s failed", ticket.reservation_id)
            self.refuse(ticket, DynamoError("Internal server error"))
            return True
        cached_tokens = decision.overlap_blocks * self.workers.block_size
        new_tokens = max(len(job.request.token_ids) - cached_tokens, 1)
        self.queue.start(ticket, decision.worker_id, new_tokens)
        ticket.sent_s = job.leg.call.works()
        job.leg.call.meter.prefilling()
        self._metrics.sent(ticket.sent_s - ticket.arrived_s)
        return True

    def _binds(self, ticket: PrefillRequest, free: list[int]) -> bool:
        """Whether it steps aside, to wait a while for a better worker than the ``free`` ones."""
        if not ticket.patient or not self.patience_s or len(self.queue) > self.queue.limit:
            return False
        best = self.workers.best(ticket)
        if best is None or best in free or best not in self.queue.workers:
            return False
        ticket.patient = False
        self.queue.bind(ticket, best)
        self._loop.call_later(self.patience_s, self._unbind, ticket)
        return True

    def _unbind(self, ticket: PrefillRequest) -> None:
        self.queue.bind(ticket, None)
        self.drain()

    def _unsent(self, turn: NextPrefill[PrefillRequest], error: DynamoError) -> bool:
        """See :meth:`_send`. A pin is the client's word; of other constraints (taints, a rank) a
        decode worker may think differently."""
        ticket = turn.request
        if isinstance(error, WorkerUnavailable) and ticket.decision is not None:
            # It is gone, and we are about to be told: the ticket stays first.
            self.suspend(ticket.decision.worker_id, True)
        elif isinstance(error, NoInstances) and turn.workers is None:
            self.go_without(ticket, "no_worker", error)
        elif turn.workers is not None and ticket.pin is None and self.workers.suits_any(ticket):
            return False  # those that suit it have no free slot; the head waits for one
        elif isinstance(error, Overloaded) or ticket.pin is not None:
            self.refuse(ticket, error)
        else:
            self.go_without(ticket, "constraints", error)
        return True

    def go_without(
        self, ticket: PrefillRequest, reason: str, error: DynamoError | None = None
    ) -> None:
        self.queue.remove(ticket)
        self._fallback.take(ticket, reason, error)

    def refuse(self, ticket: PrefillRequest, error: DynamoError, by_worker: bool = False) -> None:
        self.queue.remove(ticket)
        self._fallback.refuse(ticket, error, by_worker)


def _nobody() -> None:
    """Where nobody listens."""
