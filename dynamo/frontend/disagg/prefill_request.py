"""One request on its way through a prefill worker: what it waits for, sends and gets. Spec 7.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from dynamo.errors import DynamoError, EngineFailure
from dynamo.protocols.codec import decoder
from dynamo.protocols.engine import (
    EngineOutput,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
)
from dynamo.router.picker import Decision, Picker
from dynamo.runtime.requests import ClientStream

if TYPE_CHECKING:
    from dynamo.frontend.requests.dispatch import DispatchJob

__all__ = [
    "DECODE_OVERRIDE",
    "PrefillRequest",
    "Prefilled",
    "after_prefill",
    "to_prefill",
    "wanted_place",
]

_decode = decoder(EngineOutput).decode
DECODE_OVERRIDE: dict[str, Any] = {
    "overlap_score_weight": 0.0,
    "assume_kv_reuse": False,
    "track_prefill_tokens": False,
}
"""A decode worker gets the blocks sent: neither is its cache worth anything to the choice, nor does
the prompt weigh as prefill, and the blocks that arrive are shared with nobody. Spec 7.5."""


class Prefilled(NamedTuple):
    """Who computed the prompt, what it held of it (blocks), and when it got it and was done
    (monotonic seconds)."""

    worker_id: int
    dp_rank: int
    overlap_blocks: int
    prompt_blocks: int
    sent_s: float
    done_s: float


class Prefills(Protocol):
    """Who is told what becomes of a ticket."""

    def cancelled(self, ticket: PrefillRequest) -> None:
        """The client has gone."""

    def computed(self, ticket: PrefillRequest) -> None:
        """``ticket.output`` is there and the worker has finished."""

    def failed(self, ticket: PrefillRequest, error: DynamoError) -> None:
        """The worker, or the way to it, failed."""


class PrefillRequest:
    """What a leg waits for, and the sink of its prefill request.

    ``pin`` is the worker it insists on; it is ``patient`` while it would wait for the one that is
    best for it; ``decision`` and ``stream`` are the latest attempt's. Times
    are monotonic seconds.
    """

    __slots__ = (
        "_prefills",
        "arrived_s",
        "attempts",
        "decision",
        "job",
        "output",
        "patient",
        "picker",
        "pin",
        "sent_s",
        "stream",
    )

    def __init__(
        self, prefills: Prefills, job: DispatchJob, pin: int | None, arrived_s: float
    ) -> None:
        self._prefills = prefills
        self.job = job
        self.pin = pin
        self.arrived_s = arrived_s
        self.sent_s = arrived_s
        self.attempts = 0
        self.patient = pin is None
        self.picker: Picker | None = None
        self.decision: Decision | None = None
        self.stream: ClientStream | None = None
        self.output: EngineOutput | None = None

    @property
    def reservation_id(self) -> str:
        """The id under which the prefill router has booked it."""
        return self.job.leg.reservation_id

    def cancel(self) -> None:
        """See :class:`dynamo.frontend.requests.engine_request.Pending`."""
        self._prefills.cancelled(self)

    def release(self) -> None:
        """Stop the worker if it computes, free what is booked. Idempotent."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.kill()
        picker, self.picker = self.picker, None
        if picker is not None:
            picker.free(self.reservation_id)

    def on_data(self, payload: bytes) -> None:
        """An item of the prefill worker: the one with ``disaggregated_params`` counts."""
        try:
            output = _decode(payload)
        except msgspec.MsgspecError as error:
            self._prefills.failed(self, EngineFailure(f"not an engine output: {error}"))
            return
        reason = output.finish_reason or ""
        if reason.startswith("error"):
            self._prefills.failed(self, EngineFailure(reason.removeprefix("error").lstrip(": ")))
            return
        if output.token_ids and self.picker is not None:
            self.picker.mark_prefill_complete(self.reservation_id)
        if self.output is None or output.disaggregated_params is not None:
            self.output = output

    def on_end(self) -> None:
        """The prefill worker has finished."""
        if self.output is None or self.output.disaggregated_params is None:
            self._prefills.failed(self, EngineFailure("no disaggregated_params in the answer"))
        else:
            self._prefills.computed(self)

    def on_error(self, error: DynamoError) -> None:
        """It failed, or the way to it did."""
        self._prefills.failed(self, error)


def to_prefill(
    request: PreprocessedRequest, routing: Routing | None, decision: Decision
) -> PreprocessedRequest:
    """What the prefill worker is asked: one token, of which only the KV blocks matter."""
    one = msgspec.structs.replace(request.stop_conditions, max_tokens=1, min_tokens=1)
    place = wanted_place(routing) or Routing()
    return msgspec.structs.replace(
        request,
        stop_conditions=one,
        output_options=OutputOptions(),
        backend_instance_id=None,
        routing=msgspec.structs.replace(place, dp_rank=decision.dp_rank),
        estimated_prefix_hit_num_blocks=decision.overlap_blocks or None,
    )


def after_prefill(request: PreprocessedRequest, output: EngineOutput) -> PreprocessedRequest:
    """What the decode worker is asked once the prompt is computed."""
    result: dict[str, Any] = {"disaggregated_params": output.disaggregated_params}
    details = output.completion_usage and output.completion_usage.prompt_tokens_details
    if isinstance(details, PromptTokensDetails):
        result["prompt_tokens_details"] = msgspec.to_builtins(details)
    override = {**(request.router_config_override or {}), **DECODE_OVERRIDE}
    return msgspec.structs.replace(request, prefill_result=result, router_config_override=override)


def wanted_place(routing: Routing | None, allowed: list[int] | None = None) -> Routing | None:
    """``routing`` as the prefill workers' router reads it.

    ``prefill_worker_id`` and ``prefill_dp_rank`` are its pin; the allow-list and the other pins
    name decode workers, and are left out. Taints, session and cache names hold for both.
    """
    if routing is None:
        return None if allowed is None else Routing(allowed_worker_ids=allowed)
    return msgspec.structs.replace(
        routing,
        backend_instance_id=routing.prefill_worker_id,
        dp_rank=routing.prefill_dp_rank,
        decode_worker_id=None,
        prefill_worker_id=None,
        prefill_dp_rank=None,
        allowed_worker_ids=allowed,
    )
