"""Send queued prompts to prefill workers as slots become free, or serve them without one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

from dynamo.config.router import RouterSettings
from dynamo.errors import (
    DynamoError,
    InvalidArgument,
    NoInstances,
    Overloaded,
    Unavailable,
    WorkerUnavailable,
)
from dynamo.frontend.disagg.metrics import PrefillMetrics
from dynamo.frontend.disagg.prefill_request import PrefillRequest, prefill_routing, to_prefill
from dynamo.frontend.requests.dispatch import Dispatch, avoid_while_full
from dynamo.protocols.codec import Tokens, encode
from dynamo.protocols.engine import Routing
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.modes.picker import Picker
from dynamo.router.queue.prefill import NextPrefill, PrefillQueue
from dynamo.runtime import Client

log = logging.getLogger(__name__)
_BUSY_CHECK_S = 0.1
"""While only busy workers have a free slot, check this often whether they are still busy."""


class Fallback:
    """Pass requests for ``model`` to ``dispatch`` without prefill, or refuse them."""

    def __init__(
        self,
        model: str,
        block_size: int,
        settings: RouterSettings,
        metrics: PrefillMetrics,
        dispatch: Dispatch,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._metrics = metrics
        self._dispatch = dispatch
        self._enforced = settings.enforce_disagg
        self._conditions = settings.conditions
        self._uses_index = settings.uses_index

    def local_reason(self, tokens: Tokens, routing: Routing | None, queued: int) -> str:
        """Why a decode worker should compute this prompt while ``queued`` others wait; "" if a
        prefill worker should."""
        if self._conditions is None:
            return ""
        reason = self._conditions.local_reason(len(tokens), 0, queued)
        if not reason and self._uses_index:
            cached = self._cached_tokens(tokens, routing)
            reason = self._conditions.local_reason(len(tokens), cached, queued)
        return reason

    def no_worker(self, expected: bool) -> None:
        """Count a request for which no prefill worker answers; ``expected``: one did before.

        Raises Unavailable if decode-only serving is forbidden.
        """
        if self._enforced:
            raise self._refusal("no registered one answers")
        if expected:
            self._metrics.fell_back("no_worker")

    def decode_only(
        self, prefill: PrefillRequest, reason: str, error: DynamoError | None = None
    ) -> None:
        """Have the decode worker compute the prompt, or refuse the request if that is forbidden.

        Does nothing for a request that has ended: the failure of another of its choices, which lost
        the same prefill worker, may have ended it just now.
        """
        if not prefill.engine_request.open or prefill.engine_request.request.closed:
            return
        if self._enforced:
            if not isinstance(error, InvalidArgument):  # a fault of the request stays one
                error = self._refusal(str(error or "the last one has left"))
            self.refuse(prefill, error)
            return
        if error is not None:
            log.warning("no prefill for %s (%s): %s", prefill.id, reason, error)
        self._metrics.fell_back(reason)
        prefill.engine_request.request.metrics.routed("aggregated")
        self._dispatch.decode_later(prefill.engine_request)

    def refuse(self, prefill: PrefillRequest, error: DynamoError, by_worker: bool = False) -> None:
        """End the request with ``error``."""
        if isinstance(error, Overloaded):
            self._metrics.refused("overloaded")
        prefill.engine_request.request.fail(error, by_worker)

    def _cached_tokens(self, tokens: Tokens, routing: Routing | None) -> int:
        """Prompt tokens that the best decode worker has cached; 0 if its cache is not indexed."""
        try:
            found = self._dispatch.picker.pick(None, tokens, routing=routing)
        except DynamoError:
            return 0  # the decode phase reports it
        return found.overlap_blocks * self._block_size

    def _refusal(self, why: str) -> Unavailable:
        self._metrics.refused("enforced")
        return Unavailable(
            f"No prefill worker can take a request for model `{self._model}` ({why}), and "
            "--enforce-disagg forbids serving it with decode workers alone. Please retry shortly."
        )


class PrefillWorkers:
    """``picker`` chooses among the workers behind ``client``; both are None without workers."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.picker: Picker | None = None
        self.client: Client | None = None

    @property
    def busy(self) -> Collection[int]:
        """The workers over the thresholds of ``--admission-control``; the set is live."""
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
        share = queued_tokens // max(len(pool.candidates), 1)
        workers = pool.members if pin is None else (pin,)
        return bool(workers) and all(watch.would_prefill_too_much(one, share) for one in workers)

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
            found = self.locate(request.preprocessed.token_ids, request.routing)
        except DynamoError:
            return None
        return None if found is None else found.worker_id

    def suits_any(self, prefill: PrefillRequest) -> bool:
        """Whether some worker may take the prompt later, although none can now."""
        request = prefill.engine_request
        try:
            self.locate(request.preprocessed.token_ids, request.routing)
        except Overloaded:
            return True
        except DynamoError:
            return False
        return True

    def send(self, prefill: PrefillRequest, allowed: list[int] | None) -> Decision:
        """Choose one of ``allowed`` (None: of all), reserve its load, open the stream.

        Raises as :meth:`Picker.pick`, and WorkerUnavailable, with ``prefill.decision`` set, if the
        worker has just left.
        """
        picker, client, request = self.picker, self.client, prefill.engine_request
        if picker is None or client is None:
            raise NoInstances("no prefill worker is registered")
        prefill.decision = None
        preprocessed, routing = request.preprocessed, request.routing
        among: Callable[[], list[int]] | None = None
        if allowed is not None and prefill.pin is None:
            among = partial(list, allowed)
        decision = picker.pick(
            prefill.id,
            preprocessed.token_ids,
            routing=prefill_routing(routing),
            override=preprocessed.router_config_override,
            attempt=Attempt(among, wanted=request.request.wants_route),
        )
        prefill.picker, prefill.decision = picker, decision
        request.prefill_chosen(decision.inputs)
        payload = encode(to_prefill(preprocessed, routing, decision))
        try:
            prefill.stream = client.open(decision.worker_id, payload, prefill, request.headers())
        except WorkerUnavailable:
            prefill.release()
            raise
        return decision


class PrefillSender:
    """Moves requests from ``queue`` to ``workers``, or to ``fallback``.

    A request waits up to ``patience_s`` for its best worker while others have a free slot.
    ``on_change`` is called when the queue or the workers may have changed.
    """

    def __init__(
        self,
        queue: PrefillQueue[PrefillRequest],
        workers: PrefillWorkers,
        fallback: Fallback,
        metrics: PrefillMetrics,
        patience_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self.queue = queue
        self.workers = workers
        self.patience_s = patience_s
        self._on_change = on_change
        self._fallback = fallback
        self._metrics = metrics
        self._sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def active(self) -> bool:
        """Whether a prefill worker can compute a prompt now."""
        return self.workers.picker is not None and bool(self.queue.workers)

    def suspend(self, worker_id: int, suspended: bool) -> None:
        """Send nothing to a worker that does not answer, until ``suspended`` is False again."""
        self.queue.suspend(worker_id, suspended)
        for prefill in self.queue.waiting_for(worker_id) if suspended else ():
            if prefill.pin is None:
                self.queue.bind(prefill, None)
        self.workers_changed()

    def send_next(self) -> None:
        """Send queued requests for as long as a worker has a free slot for the next one."""
        if self._sending:
            return  # a request that ends while it is sent calls this again
        self._sending = True
        try:
            while (found := self.queue.next()) is not None and self._send(found):
                pass
        finally:
            self._sending = False
        if self.queue.is_blocked and self._timer is None:
            self._timer = self._loop.call_later(_BUSY_CHECK_S, self._check_busy)
        self._on_change()

    def workers_changed(self) -> None:
        """Send what fits now; without any worker, empty the queue."""
        if not self.active:
            for prefill in self.queue.pop_all():
                self.decode_only(prefill, "no_worker")
        self.send_next()

    def decode_only(
        self, prefill: PrefillRequest, reason: str, error: DynamoError | None = None
    ) -> None:
        """Remove the request from the queue; the decode worker computes its prompt."""
        self.queue.remove(prefill)
        self._fallback.decode_only(prefill, reason, error)

    def refuse(self, prefill: PrefillRequest, error: DynamoError, by_worker: bool = False) -> None:
        """Remove the request from the queue and end it with ``error``."""
        self.queue.remove(prefill)
        self._fallback.refuse(prefill, error, by_worker)

    def _check_busy(self) -> None:
        self._timer = None
        self.send_next()

    def _send(self, found: NextPrefill[PrefillRequest]) -> bool:
        """Send the first request; False if the queue must wait with it still at its head."""
        prefill, request = found.request, found.request.engine_request
        try:
            if found.workers is not None and self._waits_for_best(prefill, found.workers):
                return True
            decision = self.workers.send(prefill, found.workers)
        except DynamoError as error:
            return self._not_sent(found, error)
        except Exception:
            log.exception("request %s failed", prefill.id)
            self.refuse(prefill, DynamoError("Internal server error"))
            return True
        cached_tokens = decision.overlap_blocks * self.workers.block_size
        new_tokens = max(len(request.preprocessed.token_ids) - cached_tokens, 1)
        self.queue.start(prefill, decision.worker_id, new_tokens)
        prefill.sent_s = request.prefill_started()
        self._metrics.sent(prefill.sent_s - prefill.arrived_s)
        return True

    def _waits_for_best(self, prefill: PrefillRequest, free: list[int]) -> bool:
        """Whether the request now waits for a better worker than the ``free`` ones, for a while."""
        if not prefill.patient or not self.patience_s or len(self.queue) > self.queue.limit:
            return False
        best = self.workers.best(prefill)
        if best is None or best in free or best not in self.queue.workers:
            return False
        prefill.patient = False
        self.queue.bind(prefill, best)
        self._loop.call_later(self.patience_s, self._unbind, prefill)
        return True

    def _unbind(self, prefill: PrefillRequest) -> None:
        self.queue.bind(prefill, None)
        self.send_next()

    def _not_sent(self, found: NextPrefill[PrefillRequest], error: DynamoError) -> bool:
        """See :meth:`_send`.

        A pin is the choice of the client, so its failure is the client's. Other constraints
        (taints, a rank) may exclude every prefill worker and still allow a decode worker.
        """
        prefill = found.request
        if isinstance(error, WorkerUnavailable) and prefill.decision is not None:
            # Discovery will report that the worker left; the request stays first.
            self.suspend(prefill.decision.worker_id, True)
        elif isinstance(error, NoInstances) and found.workers is None:
            self.decode_only(prefill, "no_worker", error)
        elif found.workers is not None and prefill.pin is None and self.workers.suits_any(prefill):
            return False  # the suitable workers have no free slot: wait for one
        elif isinstance(error, Overloaded) or prefill.pin is not None:
            self.refuse(prefill, error)
        else:
            self.decode_only(prefill, "constraints", error)
        return True
