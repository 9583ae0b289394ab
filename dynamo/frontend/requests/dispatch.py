"""Send engine requests to workers: queue, choose, reserve, open the stream, reroute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from dynamo.errors import (
    DynamoError,
    InstanceGone,
    InvalidArgument,
    NoInstances,
    Overloaded,
    Unavailable,
    WorkerAtCapacity,
    WorkersLost,
)
from dynamo.frontend.requests.cold_start import ResendQueue, TrialQueue
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.migration import Migration, Migrations
from dynamo.observability.logs import counted
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.eligibility.filters import pinned_worker
from dynamo.router.modes.picker import Picker
from dynamo.router.queue.request_queue import QueuedRequest, RequestQueue
from dynamo.router.worker_pool import Saturation
from dynamo.runtime import Client

Hold = Callable[[EngineRequest, Callable[[EngineRequest], None]], bool]

_FULL_S = 1.0
"""A worker at capacity gets no requests for this long, or until its next load report, or until one
of this frontend's requests there ends."""

log = logging.getLogger(__name__)
_FULL_RETRY_S = 0.1
_FULL_LIMIT_S = 30.0
"""A request that a worker had accepted waits so long for room on another one."""


class PrefillStep(Protocol):
    """The prefill workers of a model; see :class:`PrefillRouter`.

    ``active``: some prefill worker can compute a prompt now.
    """

    @property
    def active(self) -> bool:
        """See the class."""
        ...

    def take(self, engine_request: EngineRequest) -> bool:
        """Have a prefill worker compute the prompt, then call :meth:`Dispatch.decode_later`.

        False: the decode worker computes it, at once.
        """
        ...

    def locate(self, tokens: Tokens, routing: Routing | None) -> Decision | None:
        """The prefill worker that a prompt would go to now, if any."""
        ...


class Dispatch:
    """Send engine requests to the workers behind ``client`` that ``picker`` chooses.

    With a ``queue``, requests may wait for a worker. With a ``prefill`` step, other workers may
    compute their prompts first. ``migrations`` says how often a request may go on elsewhere.
    ``hold`` may let an engine request wait while no worker answers, and sends it later.
    """

    def __init__(
        self,
        picker: Picker,
        client: Client,
        queue: RequestQueue | None = None,
        migrations: Migrations | None = None,
        hold: Hold | None = None,
    ) -> None:
        self.picker = picker
        self.client = client
        self.queue = queue
        self.prefill: PrefillStep | None = None
        self.migrations = migrations or Migrations()
        self._hold = hold
        self._resends = ResendQueue(self.resend)
        # A trial that waited too long goes through the other queue: many may end in one turn.
        self._trials = TrialQueue(self.resend, self._has_trial_room, self._resends.add)
        self.tracks_output = picker.tracks_output

    def use_prefill(self, step: PrefillStep) -> None:
        """Have ``step`` asked for each prompt from now on."""
        self.prefill = step

    def check(self) -> None:
        """Raise Overloaded if every request would be rejected now, whatever its prompt and its
        constraints. O(1), so it precedes the work on the prompt.

        With prefill workers the answer is not known yet: decode workers may be free by the time the
        prompt is computed.
        """
        if self.prefill is not None and self.prefill.active:
            return
        if self.queue is not None:
            self.queue.check()
        elif self.picker.worker_pool.all_busy:
            raise Overloaded("all eligible workers are overloaded")

    @property
    def waiting(self) -> int:
        """The engine requests in its queue, and those that wait to be tried alone on a worker."""
        return self._trials.waiting + (0 if self.queue is None else len(self.queue))

    def report_to(self, saturation: Saturation) -> None:
        """Count there whether :meth:`check` may raise."""
        self.picker.worker_pool.report_to(saturation)
        if self.queue is not None:
            self.queue.report_to(saturation)

    def send(self, engine_request: EngineRequest, prefill: bool = True) -> None:
        """Send an open engine request for the first time: to a worker, or to wait for one.

        With ``prefill`` through a prefill worker, where that applies. Raises what
        :meth:`Picker.pick` and :meth:`PrefillStep.take` raise, and RouterQueueLimitExceeded; its
        request releases it then. A later failure ends the request.
        """
        try:
            self._attempt(engine_request, prefill)
        except InstanceGone as error:
            self._reroute(engine_request, error)
        except NoInstances as error:
            if not self._held(engine_request, error):
                raise

    def resend(
        self, engine_request: EngineRequest, prefill: bool = True, anywhere: bool = True
    ) -> None:
        """Send it again after a worker failed: one attempt after another, until a worker has it or
        it waits for one. An error ends the request.

        ``anywhere``: if no other worker may take it, also to one that failed, which may have lost
        its connection only.
        """
        try:
            while True:
                try:
                    self._attempt(engine_request, prefill)
                    return
                except InstanceGone as error:
                    self._refused(engine_request, error)
                    prefill = anywhere = False
                except DynamoError as error:
                    if self._held(engine_request, error):
                        return
                    excluded = isinstance(error, InvalidArgument | NoInstances)
                    if not (anywhere and excluded and engine_request.retries.tried):
                        self._fail(engine_request, error)
                        return
                    engine_request.retry_anywhere()
        except BaseException as unexpected:  # noqa: BLE001 - also panics in Rust; give_up() logs it
            engine_request.give_up(unexpected)

    def _attempt(self, engine_request: EngineRequest, prefill: bool) -> None:
        """Have its prompt computed, queue it, or choose a worker and open the stream.

        Raises InstanceGone if the worker has just left, else as :meth:`send`.
        """
        if prefill and self.prefill is not None and self.prefill.take(engine_request):
            return
        preprocessed, queue = engine_request.preprocessed, self.queue
        tried, wanted = engine_request.retries.tried, engine_request.request.wants_route
        attempt = None
        if tried:
            attempt = Attempt(partial(self._untried, engine_request), tried, wanted)
        else:
            if queue is not None or preprocessed.prefill_result is not None:
                phase = "aggregated" if preprocessed.prefill_result is None else "decode"
                engine_request.routed(phase)
            if wanted:
                attempt = Attempt(wanted=True)
        if queue is None:
            decision = self.picker.pick(
                engine_request.id,
                preprocessed.token_ids,
                routing=engine_request.routing,
                override=preprocessed.router_config_override,
                attempt=attempt,
            )
            engine_request.open_stream(self.client, decision, 0)
            return
        outcome = queue.submit(
            engine_request.id,
            preprocessed.token_ids,
            routing=engine_request.routing,
            override=preprocessed.router_config_override,
            attempt=attempt,
            on_decision=partial(self._dequeued, queue, engine_request),
            on_error=partial(self._dismissed, engine_request),
        )
        if isinstance(outcome, QueuedRequest):
            engine_request.waits(outcome)
        else:
            engine_request.open_stream(self.client, outcome, len(queue))

    def decode_later(self, engine_request: EngineRequest) -> None:
        """Send it to a decode worker, from a callback of the prefill step: an error ends the
        request.

        Does nothing for an engine request that has ended since.
        """
        engine_request.continues()
        if engine_request.ended:
            return
        if engine_request.retries.tried:  # it goes on elsewhere, and was prefilled again
            self.resend(engine_request, prefill=False)
            return
        try:
            self.send(engine_request, prefill=False)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; give_up() logs it
            engine_request.give_up(error)

    def worker_failed(self, engine_request: EngineRequest, error: DynamoError) -> None:
        """Go on elsewhere, complete the answer, or fail the request of a worker that failed."""
        # The order is the policy of docs/migration.md: what costs nothing comes first, and a
        # request that may have killed two workers ends before its limit is asked.
        if self._is_free(engine_request, error):
            self._reroute(engine_request, error)
        elif not error.retryable or not engine_request.retries.limit:
            engine_request.fail(error)
        elif engine_request.is_complete():
            engine_request.on_end()
        elif (lost := self._lost(engine_request, error)) is not None:
            engine_request.fail(lost)
        elif not engine_request.can_migrate:
            engine_request.fail(error)
        elif engine_request.retries.count():
            self._migrate(engine_request, error)
        else:
            engine_request.fail(engine_request.exhausted(error))

    def _is_free(self, engine_request: EngineRequest, error: DynamoError) -> bool:
        """Whether a choice of another worker costs no migration: this one has not seen the request.

        The pin of a client is not left for free, and not at all because its worker is full.
        """
        if not error.unsent or engine_request.answering or engine_request.decision is None:
            return False
        routing = engine_request.routing
        if isinstance(error, WorkerAtCapacity) or routing is None or not self.migrations.limit:
            return True
        return pinned_worker(routing) is None

    def _lost(self, engine_request: EngineRequest, error: DynamoError) -> WorkersLost | None:
        decision, pool = engine_request.decision, self.picker.worker_pool
        if engine_request.answering:
            return None
        assert decision is not None, "only a request with a worker fails at one"
        return engine_request.retries.lose(decision.worker_id, pool, error)

    def _reroute(self, engine_request: EngineRequest, error: DynamoError) -> None:
        """Choose again among the untried workers: the chosen one has not seen the request.

        Each worker gets the request at most once, so each full worker is asked once.
        """
        self._refused(engine_request, error)
        self.resend(engine_request, prefill=False, anywhere=False)

    def _refused(self, engine_request: EngineRequest, error: DynamoError) -> None:
        worker_id = engine_request.leave_worker(error)
        level = logging.INFO
        if isinstance(error, WorkerAtCapacity):
            level = logging.DEBUG  # expected under overload, and counted by the worker
            avoid_while_full(self.picker, worker_id)
        log.log(level, "%s: worker %x: %s; trying another", engine_request.id, worker_id, error)

    def _migrate(self, engine_request: EngineRequest, error: DynamoError) -> None:
        """Continue the request on another worker, with the tokens so far behind its prompt.

        The prompt goes through a prefill worker again: the blocks that one computed may be gone.
        """
        worker_id = engine_request.migrate(error)
        log.info(
            "%s: worker %x: %s; continuing on another after %s, migration %d",
            engine_request.id,
            worker_id,
            error,
            counted(engine_request.tokens, "token"),
            engine_request.retries.migrations,
        )
        if any(lost.worker_id == worker_id for lost in engine_request.retries.lost):
            self._trials.add(engine_request)
        else:
            self._resends.add(engine_request)

    def trial_over(self, engine_request: EngineRequest) -> None:
        """A request that had lost a worker has a token, or has ended."""
        self._trials.over(engine_request)

    def _has_trial_room(self, engine_request: EngineRequest) -> bool:
        """Whether a worker that answers has no request on trial."""
        pool, on_trial = self.picker.worker_pool, self._trials.workers
        return any(
            worker_id not in on_trial and worker_id not in pool.avoided
            for worker_id in pool.members
            if worker_id not in engine_request.retries.tried
        )

    def _fail(self, engine_request: EngineRequest, error: DynamoError) -> None:
        """End the request: with the last worker's error if all were tried, else with ``error``.

        One that a worker had accepted waits while all others are full.
        """
        retries = engine_request.retries
        last_error = retries.last_error
        if last_error is None:
            engine_request.give_up(error)
            return
        # No worker is left because each was tried: the error of the last one is the reason.
        if isinstance(error, InvalidArgument | NoInstances):
            error = last_error
        waits = isinstance(error, Overloaded) and retries.migrations > 0
        if not waits or _waited_too_long(retries.migration):
            engine_request.fail(error)
            return
        retries.retry_all()
        self._resends.add_later(engine_request, _FULL_RETRY_S)

    def _held(self, engine_request: EngineRequest, error: DynamoError) -> bool:
        """Let the request wait for a worker if none answers and the model is started on demand."""
        if self._hold is None or not isinstance(error, NoInstances):
            return False
        # A worker that was killed is registered until its death is noticed.
        if self.picker.worker_pool.has_answering() or engine_request.ended:
            return False
        try:
            return self._hold(engine_request, self.resend)
        except Unavailable as full:
            engine_request.give_up(full)
            return True

    def _dismissed(self, engine_request: EngineRequest, error: DynamoError) -> None:
        """Handle a queued request that no worker can serve.

        One that migrates may go back to the worker that failed, as in :meth:`resend`.
        """
        migrates = engine_request.retries.migrations and engine_request.retries.tried
        if migrates and isinstance(error, InvalidArgument | NoInstances):
            # Not from inside the queue, which routes now.
            self._resends.add(engine_request, at_once=False)
        elif not self._held(engine_request, error):
            self._fail(engine_request, error)

    def _dequeued(
        self, queue: RequestQueue, engine_request: EngineRequest, decision: Decision
    ) -> None:
        try:
            try:
                engine_request.open_stream(self.client, decision, len(queue))
            except InstanceGone as error:
                self._reroute(engine_request, error)
        except BaseException as unexpected:  # noqa: BLE001 - also panics in Rust; give_up() logs it
            engine_request.give_up(unexpected)

    def _untried(self, engine_request: EngineRequest) -> list[int]:
        routing, retries = engine_request.routing, engine_request.retries
        allowed = None if routing is None else routing.allowed_worker_ids
        allowed = list(self.picker.worker_pool.members) if allowed is None else allowed
        untried = [worker_id for worker_id in allowed if worker_id not in retries.tried]
        if retries.lost:
            on_trial = self._trials.workers
            untried = [worker_id for worker_id in untried if worker_id not in on_trial] or untried
        return untried


def avoid_while_full(picker: Picker, worker_id: int) -> None:
    """Treat a worker as busy that has rejected a request at its capacity."""
    if picker.eligibility.rejected(worker_id):
        # Other frontends may have filled it, and it may report no load: this ends in any case.
        loop = asyncio.get_running_loop()
        loop.call_later(_FULL_S, picker.eligibility.recovered, worker_id)


def _waited_too_long(migration: Migration | None) -> bool:
    """Whether a migration has waited for room on a worker as long as it may."""
    return migration is None or time.monotonic() > migration.since_s + _FULL_LIMIT_S
