"""The prefill workers of one model, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from dynamo.errors import DynamoError, InvalidArgument, NoInstances, Overloaded
from dynamo.frontend.disagg.prefill_request import PrefillRequest, prefill_routing
from dynamo.frontend.requests.dispatch import avoid_while_full
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.modes.picker import Picker
from dynamo.runtime import Client


class PrefillWorkers:
    """``picker`` chooses among the workers behind ``client``; both are None without workers."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.picker: Picker | None = None
        self.client: Client | None = None

    def connect(self, picker: Picker, client: Client) -> None:
        """Choose with ``picker`` among the workers behind ``client`` from now on."""
        self.picker, self.client = picker, client

    def disconnect(self) -> None:
        """No worker is left."""
        self.picker = self.client = None

    def busy(self) -> Collection[int]:
        """The workers over the thresholds of ``--admission-control``."""
        return frozenset() if self.picker is None else self.picker.worker_pool.busy

    def avoid_while_full(self, worker_id: int) -> bool:
        """Skip a worker that has rejected a prompt at its capacity; return whether any other is
        idle enough to take it."""
        if self.picker is None:
            return False
        avoid_while_full(self.picker, worker_id)
        return not self.picker.worker_pool.all_busy

    def __contains__(self, worker_id: int) -> bool:
        return self.picker is not None and worker_id in self.picker.worker_pool.members

    def pin(self, routing: Routing | None) -> int | None:
        """The worker that the request names. Raises InvalidArgument if it is not registered."""
        pin = routing.prefill_worker_id if routing is not None else None
        if pin is not None and self.picker is not None and pin not in self:
            raise InvalidArgument(
                f"InvalidRequest: nvext.prefill_worker_id={pin} does not identify a known worker"
            )
        return pin

    def overloaded(self, pin: int | None, queued_tokens: int) -> bool:
        """Whether all workers (or ``pin`` alone) have more prompt tokens to compute than
        ``--active-prefill-tokens-threshold`` and similar options allow, an equal share of
        ``queued_tokens`` included. O(ranks); O(1) without such thresholds."""
        if self.picker is None or not self.picker.eligibility.busy.thresholds.any:
            return False
        pool, watch = self.picker.worker_pool, self.picker.eligibility.busy
        # What waits in the queue is booked at no worker yet: each will get an equal part of it.
        share = queued_tokens // max(len(pool.candidates), 1)
        workers = pool.members if pin is None else (pin,)
        return bool(workers) and all(
            watch.would_prefill_too_much(worker_id, share) for worker_id in workers
        )

    def locate(self, tokens: Tokens, routing: Routing | None) -> Decision | None:
        """The worker for the prompt if all had a free slot. Raises as :meth:`Picker.pick`."""
        if self.picker is None:
            return None
        return self.picker.pick(None, tokens, routing=prefill_routing(routing))

    def best(self, prefill: PrefillRequest) -> int | None:
        """The worker that has most of the prompt cached; None without an index or a suitable
        worker."""
        if self.picker is None or not self.picker.weighs_overlap:
            return None
        request = prefill.engine_request
        try:
            best = self.locate(request.preprocessed.token_ids, request.routing)
        except DynamoError:
            return None
        return None if best is None else best.worker_id

    def suits_any(self, prefill: PrefillRequest) -> bool:
        """Whether some worker may take the prompt later, although none can now."""
        request = prefill.engine_request
        try:
            self.locate(request.preprocessed.token_ids, request.routing)
        # Busy workers will be free again; other errors hold as long as the prompt and the pool do.
        except Overloaded:
            return True
        except DynamoError:
            return False
        return True

    def send(self, prefill: PrefillRequest, allowed: list[int] | None) -> Decision:
        """Choose one of ``allowed`` (None: of all), reserve its load, open the stream.

        Raises as :meth:`Picker.pick`, and WorkerUnavailable if the worker has just left.
        """
        picker, client, request = self.picker, self.client, prefill.engine_request
        if picker is None or client is None:
            raise NoInstances("no prefill worker is registered")
        preprocessed = request.preprocessed
        among: Callable[[], list[int]] | None = None
        # A pinned prompt comes out of the queue when its own worker has a free slot.
        if allowed is not None and prefill.pin is None:
            among = partial(list, allowed)
        decision = picker.pick(
            prefill.id,
            preprocessed.token_ids,
            routing=prefill_routing(request.routing),
            override=preprocessed.router_config_override,
            attempt=Attempt(among, wanted=request.request.wants_route),
        )
        prefill.open_stream(client, picker, decision)
        return decision
