"""The prefill workers of a model as they can be reached now: who chooses, and who sends."""

from __future__ import annotations

from collections.abc import Collection

from dynamo.errors import DynamoError, InvalidArgument, NoInstances, Overloaded, WorkerUnavailable
from dynamo.frontend.disagg.prefill_request import PrefillRequest, to_prefill, wanted_place
from dynamo.protocols.codec import Tokens, encode
from dynamo.protocols.engine import Routing
from dynamo.router.picker import Decision, Picker
from dynamo.runtime import Client

__all__ = ["PrefillWorkers"]


class PrefillWorkers:
    """``picker`` chooses among the workers behind ``client``; both are None while there is none."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.picker: Picker | None = None
        self.client: Client | None = None

    @property
    def busy(self) -> Collection[int]:
        """Those over the thresholds of ``--admission-control``, kept up to date."""
        return frozenset() if self.picker is None else self.picker.worker_pool.busy

    def knows(self, worker_id: int) -> bool:
        """Whether it is one of them."""
        return self.picker is not None and worker_id in self.picker.worker_pool.members

    def pin(self, routing: Routing | None) -> int | None:
        """The worker that the request insists on. Raises InvalidArgument if there is no such."""
        pin = routing.prefill_worker_id if routing is not None else None
        if pin is not None and self.picker is not None and not self.knows(pin):
            raise InvalidArgument(
                f"InvalidRequest: nvext.prefill_worker_id={pin} does not identify a known worker"
            )
        return pin

    def overloaded(self, pin: int | None, waiting_tokens: int) -> bool:
        """Whether all of them (or the one that the request insists on) have more prompt tokens to
        compute than ``--active-prefill-tokens-threshold`` and its like allow, each with its share
        of what waits. O(ranks), O(1) without such thresholds."""
        if self.picker is None or not self.picker.eligibility.busy.thresholds.any:
            return False
        worker_pool, watch = self.picker.worker_pool, self.picker.eligibility.busy
        share = waiting_tokens // max(len(worker_pool.candidates), 1)
        workers = worker_pool.members if pin is None else (pin,)
        return bool(workers) and all(watch.would_prefill_too_much(one, share) for one in workers)

    def locate(self, tokens: Tokens, routing: Routing | None) -> Decision | None:
        """Where the prompt would be computed if all had a free slot. Raises as
        :meth:`Picker.pick`."""
        if self.picker is None:
            return None
        return self.picker.pick(None, tokens, routing=wanted_place(routing))

    def best(self, ticket: PrefillRequest) -> int | None:
        """The worker it would go to if all had a free slot; None where caches don't matter, or
        where none would do."""
        if self.picker is None or not self.picker.weighs_overlap:
            return None
        try:
            found = self.locate(ticket.job.request.token_ids, ticket.job.routing)
        except DynamoError:
            return None
        return None if found is None else found.worker_id

    def suits_any(self, ticket: PrefillRequest) -> bool:
        """Whether one of them might take it some time, if none does now."""
        try:
            self.locate(ticket.job.request.token_ids, ticket.job.routing)
        except Overloaded:
            return True
        except DynamoError:
            return False
        return True

    def send(self, ticket: PrefillRequest, allowed: list[int] | None) -> Decision:
        """Choose one of ``allowed`` (None: of all), book, send; the ticket has decision and stream.

        Raises as :meth:`Picker.pick`, and WorkerUnavailable, with ``ticket.decision`` set, if the
        worker has just gone.
        """
        picker, client, job = self.picker, self.client, ticket.job
        if picker is None or client is None:
            raise NoInstances("no prefill worker is registered")
        ticket.decision = None
        decision = picker.pick(
            ticket.reservation_id,
            job.request.token_ids,
            routing=wanted_place(job.routing, allowed if ticket.pin is None else None),
            override=job.request.router_config_override,
        )
        ticket.picker, ticket.decision = picker, decision
        payload = encode(to_prefill(job.request, job.routing, decision))
        try:
            ticket.stream = client.open(decision.worker_id, payload, ticket, job.headers)
        except WorkerUnavailable:
            ticket.release()
            raise
        return decision
