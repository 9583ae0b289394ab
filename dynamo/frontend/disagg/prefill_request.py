"""One prompt on its way through a prefill worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.errors import DynamoError, EngineFailure, WorkerUnavailable
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import (
    EngineOutput,
    InvalidOutput,
    OutputOptions,
    PreprocessedRequest,
    PromptTokensDetails,
    Routing,
    decode_output,
)
from dynamo.router.decision.decision import Decision
from dynamo.router.modes.picker import Picker
from dynamo.runtime import Client
from dynamo.runtime.requests import ClientStream

if TYPE_CHECKING:
    from dynamo.frontend.disagg.router import PrefillRouter

DECODE_OVERRIDE: dict[str, Any] = {
    "overlap_score_weight": 0.0,
    "assume_kv_reuse": False,
    "track_prefill_tokens": False,
}
"""Routing of the decode phase. The decode worker receives the blocks: its own cache saves nothing,
the prompt is no prefill load, and no other request shares the blocks that arrive."""


class PrefillRequest:
    """The prompt of ``engine_request`` on its way through a prefill worker; sink of its stream.

    ``pin`` is the worker that the client chose; a ``patient`` request may still wait for its best
    worker; ``decision`` and ``stream`` are those of the latest attempt. Times are monotonic
    seconds.
    """

    __slots__ = (
        "_owner",
        "arrived_s",
        "attempts",
        "decision",
        "engine_request",
        "output",
        "patient",
        "picker",
        "pin",
        "sent_s",
        "stream",
    )

    def __init__(
        self, owner: PrefillRouter, engine_request: EngineRequest, pin: int | None, arrived_s: float
    ) -> None:
        self._owner = owner
        self.engine_request = engine_request
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
    def id(self) -> str:
        """The id of the reservation at the picker of the prefill workers."""
        return self.engine_request.id

    def open_stream(self, client: Client, picker: Picker, decision: Decision) -> None:
        """Send the prompt to the worker that ``picker`` chose.

        Raises WorkerUnavailable, with nothing reserved, if it has just left.
        """
        request = self.engine_request
        # Before the message is sent: release() frees the reservation by them, also if that fails.
        self.picker, self.decision = picker, decision
        request.prefill_chosen(decision.inputs)
        payload = encode(to_prefill(request.preprocessed, request.routing, decision))
        try:
            self.stream = client.open(decision.worker_id, payload, self, request.headers())
        except WorkerUnavailable:
            self.release()
            raise
        self.sent_s = request.prefill_started()

    def lose_patience(self) -> None:
        """Wait for its best worker for the last time, or take any."""
        self.patient = False

    def ended(self) -> None:
        """The worker has finished: free its reservation."""
        self.stream = None  # it has ended: release() must not kill it
        self.release()

    def failed(self) -> None:
        """The worker has failed: free its reservation."""
        self.attempts += 1
        self.output = None
        self.release()
        self.engine_request.prefill_failed()

    def cancel(self) -> None:
        """See :class:`dynamo.frontend.requests.engine_request.Pending`."""
        self._owner.cancelled(self)

    def release(self) -> None:
        """Stop the worker if it still computes, free the reservation. Idempotent."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.kill()
        picker, self.picker = self.picker, None
        if picker is not None:
            picker.free(self.id)

    def on_data(self, payload: bytes) -> None:
        """Keep the output that carries ``disaggregated_params``."""
        try:
            output = decode_output(payload, self.engine_request.original)
        except InvalidOutput as error:
            assert self.decision is not None, "items arrive from a worker"
            self._owner.failed(self, error.at(self.decision.worker_id))
            return
        # Engines end a request that they cannot serve with the reason "error: TEXT".
        reason = output.finish_reason or ""
        if reason.startswith("error"):
            self._owner.failed(self, EngineFailure(reason.removeprefix("error").lstrip(": ")))
            return
        if output.token_ids and self.picker is not None:
            self.picker.mark_prefill_complete(self.id)
        # Engines differ in which output has the parameters: the last one that has them counts.
        if self.output is None or output.disaggregated_params is not None:
            self.output = output

    def on_end(self) -> None:
        """The prefill worker has finished."""
        if self.output is None or self.output.disaggregated_params is None:
            self._owner.failed(self, EngineFailure("no disaggregated_params in the answer"))
        else:
            self._owner.computed(self)

    def on_error(self, error: DynamoError) -> None:
        """The worker, or the connection to it, failed."""
        self._owner.failed(self, error)


def to_prefill(
    request: PreprocessedRequest, routing: Routing | None, decision: Decision
) -> PreprocessedRequest:
    """The request for the prefill worker: one token, of which only the KV blocks matter."""
    one_token = msgspec.structs.replace(request.stop_conditions, max_tokens=1, min_tokens=1)
    constraints = prefill_routing(routing) or Routing()
    return msgspec.structs.replace(
        request,
        stop_conditions=one_token,
        output_options=OutputOptions(),
        backend_instance_id=None,
        routing=msgspec.structs.replace(constraints, dp_rank=decision.dp_rank),
        estimated_prefix_hit_num_blocks=decision.overlap_blocks or None,
    )


def after_prefill(request: PreprocessedRequest, output: EngineOutput) -> PreprocessedRequest:
    """The request for the decode worker once the prompt is computed."""
    result: dict[str, Any] = {"disaggregated_params": output.disaggregated_params}
    details = output.completion_usage and output.completion_usage.prompt_tokens_details
    if isinstance(details, PromptTokensDetails):
        result["prompt_tokens_details"] = msgspec.to_builtins(details)
    # DECODE_OVERRIDE last: a client must not undo it, the blocks come from the prefill worker.
    override = {**(request.router_config_override or {}), **DECODE_OVERRIDE}
    return msgspec.structs.replace(request, prefill_result=result, router_config_override=override)


def prefill_routing(routing: Routing | None) -> Routing | None:
    """``routing`` for the router of the prefill workers.

    ``prefill_worker_id`` and ``prefill_dp_rank`` become its pin. The allow-list and the other pins
    name decode workers and are dropped. Taints, session and cache names apply to both.
    """
    if routing is None:
        return None
    return msgspec.structs.replace(
        routing,
        backend_instance_id=routing.prefill_worker_id,
        dp_rank=routing.prefill_dp_rank,
        decode_worker_id=None,
        prefill_worker_id=None,
        prefill_dp_rank=None,
        allowed_worker_ids=None,
    )
