"""Compute prompts on prefill workers first, while there are some.

A request waits in a queue until a prefill worker has a free slot. That worker computes the prompt;
the decode worker then gets the parameters it needs to fetch the KV blocks. If this fails, the
decode worker computes the prompt itself, unless ``--enforce-disagg`` forbids it.
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
    Unavailable,
    WorkerAtCapacity,
    WorkersLost,
    WorkerUnavailable,
)
from dynamo.frontend.disagg.metrics import PrefillMetrics, QueueStatePublisher
from dynamo.frontend.disagg.prefill_request import PrefillRequest, after_prefill
from dynamo.frontend.disagg.workers import PrefillWorkers
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.recent import Prefilled
from dynamo.protocols.codec import Tokens
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.decision.decision import Decision
from dynamo.router.modes.picker import Picker
from dynamo.router.queue.prefill import NextPrefill, PrefillQueue, capacity_of
from dynamo.router.queue.waiting import priority_of
from dynamo.runtime import Client

log = logging.getLogger(__name__)
_BUSY_CHECK_S = 0.1
"""While only busy workers have a free slot, check this often whether they are still busy."""


class PrefillRouter:
    """The prefill step of one model, in front of ``dispatch`` to the decode workers.

    It is *active* while a prefill worker answers. :class:`PrefillPool` reports the workers by
    :meth:`attach`, :meth:`add_worker`, :meth:`remove_worker` and :meth:`detach`.
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
        self.workers = PrefillWorkers(block_size)
        self.queue: PrefillQueue[PrefillRequest] = PrefillQueue(
            settings.prefill_queue_limit, _prompt_tokens, self.workers.busy
        )
        self._settings = settings
        self._metrics = metrics
        self._dispatch = dispatch
        self._sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._publisher: QueueStatePublisher | None = None
        self._had_workers = False
        self._loop = asyncio.get_running_loop()
        if settings.enforce_disagg:
            dispatch.use_prefill(self)  # also without a worker: it refuses the requests

    @property
    def active(self) -> bool:
        """Whether a prefill worker can compute a prompt now."""
        return self.workers.picker is not None and bool(self.queue.workers)

    @property
    def patient(self) -> bool:
        """Whether a prompt waits for its best worker while others have a free slot."""
        return self._settings.prefill_patience_s > 0

    def take(self, engine_request: EngineRequest) -> bool:
        """Queue the prompt for a prefill worker; False: the decode worker computes it at once.

        Raises InvalidArgument for a pin to an unknown worker, Overloaded when the queue is full or
        the workers exceed a threshold of prefill tokens with the queued ones, Unavailable without
        a prefill worker when decode-only serving is forbidden.
        """
        if not self.active:
            if self._settings.enforce_disagg:
                raise self._refusal("no registered one answers")
            if self._had_workers:
                self._metrics.fell_back("no_worker")
            return False
        routing = engine_request.routing
        reason = self.local_reason(engine_request.preprocessed.token_ids, routing)
        if reason:
            self._metrics.kept_local(reason)
            return False
        now_s = time.monotonic()
        pin = self.workers.pin(routing)
        prefill = PrefillRequest(self, engine_request, pin, now_s)
        if self.workers.overloaded(pin, self.queue.waiting_tokens):
            self._metrics.refused("overloaded")
            raise Overloaded("all prefill workers have too many prompt tokens to compute")
        strict, boost_s = priority_of(routing)
        try:
            self.queue.add(
                prefill, now_s, strict=strict, priority_boost_s=max(boost_s, 0.0), pin=pin
            )
        except Overloaded:
            self._metrics.refused("queue_full")
            raise
        engine_request.waits(prefill)
        engine_request.routed("prefill")
        self._send_next()
        return True

    def local_reason(self, tokens: Tokens, routing: Routing | None) -> str:
        """Why a decode worker computes the prompt although there are prefill workers (``short``,
        ``cached``, ``queue``), or "". A prefill worker that the client names always gets it."""
        if routing is not None and routing.prefill_worker_id is not None:
            return ""
        conditions, queued = self._settings.conditions, len(self.queue)
        if conditions is None:
            return ""
        reason = conditions.local_reason(len(tokens), 0, queued)
        if not reason and self._settings.uses_index:
            cached = self._cached_tokens(tokens, routing)
            reason = conditions.local_reason(len(tokens), cached, queued)
        return reason

    def locate(self, tokens: Tokens, routing: Routing | None) -> Decision | None:
        """The prefill worker for a prompt now; None: the decode worker computes it. Raises as
        :meth:`Picker.pick`."""
        if not self.active or self.local_reason(tokens, routing):
            return None
        return self.workers.locate(tokens, routing)

    def attach(self, picker: Picker, client: Client) -> None:
        """Choose with ``picker`` among the workers behind ``client`` from now on."""
        self.workers.connect(picker, client)
        self._had_workers = True
        # Only now: without a prefill worker, requests skip the call of take().
        self._dispatch.use_prefill(self)
        self._metrics.show(self.queue)
        client.on_inhibited(self.suspend)

    def detach(self) -> None:
        """Serve queued requests decode-only; running prefills may finish."""
        self.workers.disconnect()
        for worker_id in self.queue.all_workers:
            self.remove_worker(worker_id)
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def publish(self, publish: Callable[[bytes], object]) -> None:
        """Publish the state of the queue by ``publish`` until :meth:`detach`."""
        self._publisher = QueueStatePublisher(self.model, self.queue, publish)

    def add_worker(self, worker_id: int, config: RuntimeConfig) -> None:
        """Send prompts to the worker, within its capacity."""
        self.queue.set_worker(worker_id, capacity_of(config, self._settings.prefill_slots))
        self._workers_changed()

    def suspend(self, worker_id: int, suspended: bool) -> None:
        """Send nothing to a worker that does not answer, until ``suspended`` is False again."""
        self.queue.suspend(worker_id, suspended)
        for prefill in self.queue.waiting_for(worker_id) if suspended else ():
            if prefill.pin is None:
                self.queue.bind(prefill, None)
        self._workers_changed()

    def remove_worker(self, worker_id: int) -> None:
        """Send nothing more to the worker; running prefills may finish within the drain timeout."""
        for prefill in self.queue.remove_worker(worker_id):
            if prefill.pin is None:
                self.queue.bind(prefill, None)
            else:
                self._decode_only(prefill, "no_worker")
        if self.queue.running_at(worker_id):
            self._loop.call_later(self._settings.prefill_drain_timeout_s, self._expire, worker_id)
        self._workers_changed()

    # -- called by prefill requests

    def cancelled(self, prefill: PrefillRequest) -> None:
        """Remove the request: its client has disconnected, or it has failed."""
        self.queue.remove(prefill)
        prefill.release()
        self._send_next()

    def computed(self, prefill: PrefillRequest) -> None:
        """Send the request with its computed prompt to a decode worker."""
        decision, output = prefill.decision, prefill.output
        engine_request = prefill.engine_request
        assert decision is not None and output is not None, "a sent prompt has both at its end"
        now_s = time.monotonic()
        self.queue.finish(prefill)
        prefill.ended()
        seconds = now_s - prefill.sent_s
        self._metrics.computed(seconds)
        # The rows of a worker that has left were removed, and must not come back.
        if decision.worker_id in self.workers:
            tokens = _prompt_tokens(prefill)
            self._metrics.last_of(decision.worker_id, decision.dp_rank, tokens, seconds)
        done = Prefilled(
            worker_id=decision.worker_id,
            dp_rank=decision.dp_rank,
            overlap_blocks=decision.overlap_blocks,
            prompt_blocks=decision.prompt_blocks,
            sent_s=prefill.sent_s,
            done_s=now_s,
        )
        engine_request.prefilled(done, after_prefill(engine_request.preprocessed, output))
        self._dispatch.decode_later(engine_request)
        self._send_next()

    def failed(self, prefill: PrefillRequest, error: DynamoError) -> None:
        """Retry with another worker, serve decode-only, or fail: it depends on the error."""
        # First: failed() below drops the picker, whose pool says which workers are left.
        lost = _lost_worker(prefill, error)
        self.queue.finish(prefill)
        prefill.failed()
        if lost is not None:
            self._refuse(prefill, lost, by_worker=True)
        elif isinstance(error, WorkerUnavailable) or self._fits_another(prefill, error):
            self._retry(prefill, error)
        elif isinstance(error, InvalidArgument) or _is_client_error(error):
            self._refuse(prefill, error, by_worker=True)
        else:
            reason = "overloaded" if isinstance(error, Overloaded) else "engine_error"
            self._decode_only(prefill, reason, error)
        self._send_next()

    def _send_next(self) -> None:
        """Send queued requests for as long as a worker has a free slot for the next one."""
        if self._sending:
            return  # a request that ends while it is sent calls this again
        self._sending = True
        try:
            while (head := self.queue.next()) is not None and self._send(head):
                pass
        finally:
            self._sending = False
        if self.queue.is_blocked and self._timer is None:
            self._timer = self._loop.call_later(_BUSY_CHECK_S, self._check_busy)
        if self._publisher is not None:
            self._publisher.check()

    def _workers_changed(self) -> None:
        """Send what fits now; without any worker, empty the queue."""
        if not self.active:
            for prefill in self.queue.pop_all():
                self._decode_only(prefill, "no_worker")
        self._send_next()

    def _decode_only(
        self, prefill: PrefillRequest, reason: str, error: DynamoError | None = None
    ) -> None:
        """Have the decode worker compute the prompt, or refuse the request if that is forbidden.

        Does nothing for a request that has ended: the failure of another of its choices, which lost
        the same prefill worker, may have ended it just now.
        """
        self.queue.remove(prefill)
        if prefill.engine_request.ended:
            return
        if self._settings.enforce_disagg:
            if not isinstance(error, InvalidArgument):  # a fault of the request stays one
                error = self._refusal(str(error or "the last one has left"))
            self._refuse(prefill, error)
            return
        if error is not None:
            log.warning("no prefill for %s (%s): %s", prefill.id, reason, error)
        self._metrics.fell_back(reason)
        prefill.engine_request.routed("aggregated")
        self._dispatch.decode_later(prefill.engine_request)

    def _refuse(self, prefill: PrefillRequest, error: DynamoError, by_worker: bool = False) -> None:
        """Remove the request from the queue and end it with ``error``."""
        self.queue.remove(prefill)
        if isinstance(error, Overloaded):
            self._metrics.refused("overloaded")
        prefill.engine_request.give_up(error, by_worker)

    def _cached_tokens(self, tokens: Tokens, routing: Routing | None) -> int:
        """Prompt tokens that the best decode worker has cached; 0 if its cache is not indexed."""
        try:
            decision = self._dispatch.picker.pick(None, tokens, routing=routing)
        except DynamoError:
            return 0  # the decode phase reports it
        return decision.overlap_blocks * self.block_size

    def _refusal(self, why: str) -> Unavailable:
        self._metrics.refused("enforced")
        return Unavailable(
            f"No prefill worker can take a request for model `{self.model}` ({why}), and "
            "--enforce-disagg forbids serving it with decode workers alone. Please retry shortly."
        )

    def _check_busy(self) -> None:
        self._timer = None
        self._send_next()

    def _send(self, head: NextPrefill[PrefillRequest]) -> bool:
        """Send the first request; False if the queue must wait with it still at its head."""
        prefill = head.request
        try:
            if head.workers is not None and self._waits_for_best(prefill, head.workers):
                return True
            decision = self.workers.send(prefill, head.workers)
        except DynamoError as error:
            return self._not_sent(head, error)
        except Exception:
            log.exception("request %s failed", prefill.id)
            self._refuse(prefill, DynamoError("Internal server error"))
            return True
        cached_tokens = decision.overlap_blocks * self.block_size
        new_tokens = max(_prompt_tokens(prefill) - cached_tokens, 1)
        self.queue.start(prefill, decision.worker_id, new_tokens)
        self._metrics.sent(prefill.sent_s - prefill.arrived_s)
        return True

    def _waits_for_best(self, prefill: PrefillRequest, free: list[int]) -> bool:
        """Whether the request now waits for a better worker than the ``free`` ones, for a while."""
        if not (prefill.patient and self.patient) or len(self.queue) > self.queue.limit:
            return False
        best = self.workers.best(prefill)
        if best is None or best in free or best not in self.queue.workers:
            return False
        # Once per prompt: after the wait any worker will do.
        prefill.lose_patience()
        self.queue.bind(prefill, best)
        self._loop.call_later(self._settings.prefill_patience_s, self._unbind, prefill)
        return True

    def _unbind(self, prefill: PrefillRequest) -> None:
        self.queue.bind(prefill, None)
        self._send_next()

    def _not_sent(self, head: NextPrefill[PrefillRequest], error: DynamoError) -> bool:
        """See :meth:`_send`.

        A pin is the choice of the client, so its failure is the client's. Other constraints
        (taints, a rank) may exclude every prefill worker and still allow a decode worker.
        """
        prefill = head.request
        if isinstance(error, WorkerUnavailable) and prefill.decision is not None:
            # Discovery will report that the worker left; the request stays first.
            self.suspend(prefill.decision.worker_id, True)
        elif isinstance(error, NoInstances) and head.workers is None:
            self._decode_only(prefill, "no_worker", error)
        elif head.workers is not None and prefill.pin is None and self.workers.suits_any(prefill):
            return False  # the suitable workers have no free slot: wait for one
        elif isinstance(error, Overloaded) or prefill.pin is not None:
            self._refuse(prefill, error)
        else:
            self._decode_only(prefill, "constraints", error)
        return True

    def _fits_another(self, prefill: PrefillRequest, error: DynamoError) -> bool:
        """Whether a worker rejected the prompt at its capacity and another may have room for it."""
        if not isinstance(error, WorkerAtCapacity) or prefill.decision is None:
            return False
        another = self.workers.avoid_while_full(prefill.decision.worker_id)
        return another and prefill.pin is None

    def _retry(self, prefill: PrefillRequest, error: DynamoError) -> None:
        if prefill.attempts > self._settings.prefill_retries:
            self._decode_only(prefill, "retries", error)
        elif not self.active or prefill.pin not in (None, *self.queue.all_workers):
            self._decode_only(prefill, "no_worker", error)
        elif not prefill.engine_request.retries.count_prefill(error):
            self._decode_only(prefill, "retries", error)
        else:
            log.info("prefill of %s returns to the head of the queue: %s", prefill.id, error)
            self._metrics.requeued()
            prefill.lose_patience()
            prefill.engine_request.waits(prefill)
            prefill.engine_request.routed("prefill")
            self.queue.requeue(prefill, prefill.pin)

    def _expire(self, worker_id: int) -> None:
        """Fail the prompts of a removed worker that has not finished in time."""
        if worker_id in self.workers:
            return  # it is registered again
        for prefill in self.queue.running_at(worker_id):
            self.failed(
                prefill, Disconnected(f"prefill worker {worker_id:x} left without an answer")
            )


def _prompt_tokens(prefill: PrefillRequest) -> int:
    return len(prefill.engine_request.preprocessed.token_ids)


def _lost_worker(prefill: PrefillRequest, error: DynamoError) -> WorkersLost | None:
    """Note the loss of the prefill worker; return what then ends the request."""
    picker, decision = prefill.picker, prefill.decision
    if picker is None or decision is None:
        return None
    retries = prefill.engine_request.retries
    return retries.lose(decision.worker_id, picker.worker_pool, error)


def _is_client_error(error: DynamoError) -> bool:
    return isinstance(error, HttpFailure) and error.status < 500
