"""Counters and timings of one generation request, from its arrival to its end.

Every gauge that goes up here goes down in :meth:`RequestMetrics.ended`, however the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.requests.errors import Labels
from dynamo.frontend.requests.metrics import FrontendMetrics, ModelMetrics
from dynamo.frontend.requests.recent import CLIENT_ID_CHARACTERS, EndedRequest, Prefilled
from dynamo.observability.metrics import Gauge
from dynamo.router.explanations.receipt import DecisionInputs
from dynamo.router.picker import Decision, Picker


class ServedChoice(Protocol):
    """The figures of one engine request; see :class:`EngineRequest`."""

    picker: Picker
    decision: Decision | None
    tokens: int
    first_token_s: float
    last_token_s: float
    migrations: int
    inputs: DecisionInputs | None
    prefill_inputs: DecisionInputs | None


class RequestOutput(NamedTuple):
    """The output of a request, complete or partial; ``detokenize_s`` went into its text."""

    usage: Usage
    choices: Sequence[ServedChoice]
    detokenize_s: float


class RequestMetrics:
    """Of one request to ``endpoint``; ``kind`` is ``stream`` or ``unary``.

    ``prepared_s`` is set when the engine requests are ready; ``accepted`` once each of them is sent
    or queued; ``prefilled`` if a prefill worker computed the prompt; ``engine_requests`` is those
    that a worker has received. Times are monotonic seconds.
    """

    __slots__ = (
        "_endpoint",
        "_first_token_s",
        "_kind",
        "_metrics",
        "_model",
        "_overlap_blocks",
        "_phase",
        "_prompt_blocks",
        "_prompt_tokens",
        "_queue_depth",
        "_received_s",
        "_sent_s",
        "_stage",
        "accepted",
        "engine_requests",
        "prefilled",
        "prepared_s",
    )

    def __init__(
        self,
        metrics: FrontendMetrics,
        model: ModelMetrics,
        endpoint: str,
        kind: str,
        received_s: float,
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._endpoint = endpoint
        self._kind = kind
        self._received_s = received_s
        self._sent_s = 0.0
        self._first_token_s = 0.0
        self._phase = "aggregated"
        self.engine_requests = 0
        self._overlap_blocks = 0
        self._prompt_blocks = 0
        self._prompt_tokens = 0
        self._queue_depth = 0
        self.accepted = False
        self.prefilled: Prefilled | None = None
        self.prepared_s = 0.0
        model.active.value += 1
        model.started[endpoint, model.name, kind].value += 1
        self._stage: Gauge | None = metrics.preprocessing
        metrics.preprocessing.value += 1

    def routed(self, phase: str) -> None:
        """Count the request as being routed for ``phase``, one of ``PHASES``."""
        self._phase = phase
        if not self.engine_requests:
            self._enter(self._metrics.routing[phase])

    def prefilling(self) -> None:
        """Count the request as dispatched to a prefill worker."""
        if not self.engine_requests:
            self._enter(self._metrics.dispatching["prefill"])

    def dispatched(self, prompt_tokens: int) -> None:
        """Every engine request is sent or queued."""
        self.accepted = True
        self._prompt_tokens = prompt_tokens
        self._model.queued.value += 1
        self._model.isl.observe(prompt_tokens)

    def sent(self, decision: Decision, queued: int, chosen_s: float, send_seconds: float) -> bool:
        """Count an engine request that a worker has received; return whether it is the first.

        The worker was chosen at ``chosen_s``, with ``queued`` requests left in the queue; writing
        to its connection took ``send_seconds``.
        """
        metrics = self._metrics
        metrics.plane_inflight.value += 1
        metrics.dispatch_stage.observe(send_seconds)
        metrics.plane_send.observe(send_seconds)
        self.engine_requests += 1
        self._overlap_blocks += decision.overlap_blocks
        self._prompt_blocks += decision.prompt_blocks
        if queued > self._queue_depth:
            self._queue_depth = queued
        if self.engine_requests > 1:
            return False
        self._sent_s = chosen_s
        metrics.route_stage.observe(chosen_s - self.prepared_s)
        metrics.plane_queue.observe(chosen_s - self._received_s)
        self._model.inflight.value += 1
        if self._stage is not None:
            self._stage.value -= 1
        self._stage = metrics.dispatching[self._phase]
        self._stage.value += 1
        return True

    def first_token(self, now: float) -> None:
        """Observe the time to the first token of all engine requests."""
        if self._first_token_s:
            return
        self._first_token_s = now
        metrics, model = self._metrics, self._model
        model.queued.value -= 1
        if self._stage is not None:
            self._stage.value -= 1
            self._stage = None
        model.ttft.observe(now - self._received_s)
        roundtrip_s = now - self._sent_s
        metrics.roundtrip_stage.observe(roundtrip_s)
        metrics.plane_roundtrip.observe(roundtrip_s)

    def timing(self) -> dict[str, Any]:
        """``nvext.timing``."""
        received = self._received_s
        now = time.monotonic()
        first = self._first_token_s or now
        done = self.prefilled
        begun, ended = self._sent_s, first
        overlap, blocks = self._overlap_blocks, self._prompt_blocks
        if done is not None:
            begun, ended = done.sent_s, done.done_s
            overlap, blocks = done.overlap_blocks, done.prompt_blocks
        return {
            "request_received_ms": int((time.time() - (now - received)) * 1e3),
            "prefill_wait_time_ms": (begun - received) * 1e3,
            "prefill_time_ms": (ended - begun) * 1e3,
            "ttft_ms": (first - received) * 1e3,
            "total_time_ms": (now - received) * 1e3,
            "kv_hit_rate": overlap / blocks if blocks else 0.0,
            "router_queue_depth": self._queue_depth,
        }

    def ended(
        self,
        failure: Labels | None,
        output: RequestOutput | None,
        info: tuple[str, str, str | None],
        choices: Sequence[ServedChoice],
    ) -> EndedRequest:
        """Count the end of the request, and its output if an engine was asked for any.

        Return its record.

        ``failure`` is None if it succeeded; then the output is complete. ``info`` and ``choices``,
        which may never have got a worker, are for the recent requests.
        """
        model, metrics = self._model, self._metrics
        if output is not None:
            self._count_output(output)
        if self.prepared_s:
            metrics.preprocess_stage.observe(self.prepared_s - self._received_s)
        if self.engine_requests:
            model.inflight.value -= 1
            metrics.plane_inflight.value -= self.engine_requests
        if self.accepted and not self._first_token_s:
            model.queued.value -= 1
        if self._stage is not None:
            self._stage.value -= 1
            self._stage = None
        if failure is None:
            model.requests[self._endpoint, "", model.name, self._kind, "success"].value += 1
        else:
            metrics.failures[failure.failure_class, failure.reason].value += 1
            model.failed(self._endpoint, self._kind, failure.error_type)
        model.active.value -= 1
        now_s = time.monotonic()
        model.duration.observe(now_s - self._received_s)
        outcome = "ok" if failure is None else failure.error_type
        usage = None if output is None else output.usage
        return self._keep(info, outcome, now_s, usage, choices)

    def _keep(
        self,
        info: tuple[str, str, str | None],
        outcome: str,
        now_s: float,
        usage: Usage | None,
        choices: Sequence[ServedChoice],
    ) -> EndedRequest:
        """Add the request to the recent ones."""
        last_token_s, migrations = 0.0, 0
        decision = inputs = prefill_inputs = None
        if choices:
            first = choices[0]
            inputs, prefill_inputs = first.inputs, first.prefill_inputs
            decision, migrations = first.decision, first.migrations
            last_token_s = first.last_token_s
            if len(choices) > 1:
                last_token_s = max(choice.last_token_s for choice in choices)
                migrations = sum(choice.migrations for choice in choices)
        if info[2] is not None:
            info = (*info[:2], info[2][:CLIENT_ID_CHARACTERS])
        ended = EndedRequest(
            info=info,
            model=self._model.name,
            outcome=outcome,
            received_s=self._received_s,
            ended_s=now_s,
            prepared_s=self.prepared_s,
            sent_s=self._sent_s,
            first_token_s=self._first_token_s,
            last_token_s=last_token_s,
            prompt_tokens=self._prompt_tokens,
            overlap_blocks=self._overlap_blocks,
            prompt_blocks=self._prompt_blocks,
            usage=usage,
            decision=decision,
            prefilled=self.prefilled,
            migrations=migrations,
            inputs=inputs,
            prefill_inputs=prefill_inputs,
        )
        self._metrics.recent.add(ended)
        return ended

    def _count_output(self, output: RequestOutput) -> None:
        usage, choices, detokenize_s = output
        model, metrics = self._model, self._metrics
        tokens = usage.completion_tokens
        model.osl.observe(tokens)
        model.output_tokens.value += tokens
        metrics.detokenize_ms.observe(detokenize_s * 1e3)
        metrics.detokenize_tokens.value += tokens
        metrics.detokenize_us.value += detokenize_s * 1e6
        cached_tokens = usage.cached_tokens
        if cached_tokens is not None:
            model.cached.observe(cached_tokens)
        for choice in choices:
            decision, picker = choice.decision, choice.picker
            if cached_tokens is not None:
                picker.reused_tokens.value += cached_tokens
                cached_tokens = None  # the usage is that of the whole request
            if decision is None or decision.worker_id not in picker.worker_pool.members:
                continue  # the rows of a removed worker stay removed
            last = metrics.workers[decision.worker_id, decision.dp_rank, "decode"]
            last.isl.value = self._prompt_tokens
            if choice.tokens:
                last.ttft.value = choice.first_token_s - self._received_s
            if choice.tokens > 1:
                last.itl.value = (choice.last_token_s - choice.first_token_s) / (choice.tokens - 1)

    def _enter(self, stage: Gauge) -> None:
        """Count the request in this stage and no other."""
        if self._stage is not None:
            self._stage.value -= 1
        stage.value += 1
        self._stage = stage
