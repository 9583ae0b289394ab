"""The way of one engine request from a leg to a worker: wait, choose, book, instruct, open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dynamo.errors import DynamoError, InstanceGone, InvalidArgument, NoInstances
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.router.kv import KvPicker
from dynamo.router.picker import Decision, Picker
from dynamo.router.queue.request_queue import QueuedRequest, RequestQueue
from dynamo.runtime import Client

if TYPE_CHECKING:
    from dynamo.frontend.disagg.router import PrefillRouter
    from dynamo.frontend.requests.engine_request import EngineRequest

__all__ = ["Dispatch", "DispatchJob"]

log = logging.getLogger(__name__)


class DispatchJob(NamedTuple):
    """One engine request: ``leg`` takes the answer, ``headers`` go to the worker.

    ``tried`` are workers that could not be reached, ``error`` what the last of them said.
    """

    leg: EngineRequest
    request: PreprocessedRequest
    routing: Routing | None
    headers: dict[str, str]
    tried: frozenset[int] = frozenset()
    error: DynamoError | None = None


class Dispatch:
    """Sends requests to the workers behind ``client`` that ``picker`` chooses.

    With a ``queue`` before the picker they may wait for a worker. ``prefill`` may have other
    workers compute their prompts first.
    """

    def __init__(self, picker: Picker, client: Client, queue: RequestQueue | None = None) -> None:
        self.picker = picker
        self.client = client
        self.queue = queue
        self.prefill: PrefillRouter | None = None
        self.tracks_output = isinstance(picker, KvPicker) and picker.active.track_output

    def send(self, job: DispatchJob) -> None:
        """Send the job: prefill first where that applies. Raises what :meth:`decode` and
        :meth:`PrefillRouter.take` raise; the leg is released by its call then."""
        prefill = self.prefill
        if prefill is not None and prefill.take(job):
            return
        self.decode(job)

    def decode(self, job: DispatchJob) -> None:
        """The last stretch: to the worker that generates, at once or when it is its turn.

        The leg is still open. Raises what :meth:`Picker.pick` raises, and
        RouterQueueLimitExceeded; what fails later ends the call.
        """
        leg, request = job.leg, job.request
        queue, override = self.queue, request.router_config_override
        routing = self._untried(job) if job.tried else job.routing
        if not job.tried and (queue is not None or request.prefill_result is not None):
            phase = "aggregated" if request.prefill_result is None else "decode"
            leg.call.meter.routed(phase)
        if queue is None:
            decision = self.picker.pick(
                leg.reservation_id, request.token_ids, routing=routing, override=override
            )
            self._open(job, decision)
            return
        found = queue.submit(
            leg.reservation_id,
            request.token_ids,
            routing=routing,
            override=override,
            on_decision=partial(self._its_turn, queue, job),
            on_error=leg.call.fail if job.error is None else partial(_none_left, job),
        )
        if isinstance(found, QueuedRequest):
            leg.pending = found
        else:
            self._open(job, found, len(queue))

    def decode_later(self, job: DispatchJob) -> None:
        """:meth:`decode` from a callback, where nobody catches: an error ends the call.

        A leg that has ended meanwhile is left alone; what it waited for is over either way.
        """
        leg = job.leg
        leg.pending = None
        if leg.open and not leg.call.closed:
            _or_fail(leg, partial(self.decode, job))

    def _its_turn(self, queue: RequestQueue, job: DispatchJob, decision: Decision) -> None:
        _or_fail(job.leg, partial(self._open, job, decision, len(queue)))

    def _open(self, job: DispatchJob, decision: Decision, waiting: int = 0) -> None:
        leg, request = job.leg, job.request
        call = leg.call
        leg.pending = None
        leg.decision = decision
        leg.reroute = partial(self._reroute, job)
        placed_s = call.moved(leg, decision) if job.tried else call.placed(decision, waiting)
        _instruct(request, job.routing, decision)
        try:
            leg.stream = self.client.open(decision.worker_id, encode(request), leg, job.headers)
        except InstanceGone as error:
            self._reroute(job, error)
            return
        call.meter.sent(time.monotonic() - placed_s)

    def _reroute(self, job: DispatchJob, error: DynamoError) -> None:
        """No handler has seen the request: choose again among the workers it has not tried."""
        leg = job.leg
        decision, leg.decision, leg.reroute = leg.decision, None, None
        assert decision is not None, "only a placed leg is routed again"
        self.picker.free(leg.reservation_id)
        leg.call.rests()
        log.info("%s: worker %x: %s; trying another", leg.reservation_id, decision.worker_id, error)
        again = job._replace(tried=job.tried | {decision.worker_id}, error=error)
        try:
            self.decode(again)
        except DynamoError as later:
            _none_left(again, later)
        except BaseException as bug:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            leg.call.crashed(bug)

    def _untried(self, job: DispatchJob) -> Routing:
        routing = job.routing or Routing()
        allowed = routing.allowed_worker_ids
        allowed = list(self.picker.fleet.members) if allowed is None else allowed
        untried = [worker_id for worker_id in allowed if worker_id not in job.tried]
        return msgspec.structs.replace(routing, allowed_worker_ids=untried)


def _or_fail(leg: EngineRequest, step: Callable[[], None]) -> None:
    """Run ``step``; its error ends the leg's call."""
    try:
        step()
    except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
        leg.call.crashed(error)


def _none_left(job: DispatchJob, error: DynamoError) -> None:
    """End the call: by what the last worker said if all were tried, else by ``error``."""
    tried_all = isinstance(error, (InvalidArgument, NoInstances))
    job.leg.call.fail(job.error if tried_all and job.error is not None else error, by_worker=True)


def _instruct(request: PreprocessedRequest, routing: Routing | None, decision: Decision) -> None:
    """Tell the worker what the router decided. Spec 7.4."""
    request.estimated_prefix_hit_num_blocks = decision.overlap_blocks or None
    if decision.dp_rank or (routing is not None and routing.dp_rank):
        routing = msgspec.structs.replace(routing or Routing(), dp_rank=decision.dp_rank)
    request.routing = routing
