"""Counters and timings of one generation request, from its arrival to its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.frontend.answer.generation import Usage
from dynamo.frontend.prompt.images import PromptImages
from dynamo.frontend.requests.errors import Labels
from dynamo.frontend.requests.metrics import (
    PREPROCESS,
    WORKER_WAIT_STAGE,
    FrontendMetrics,
    ModelMetrics,
)
from dynamo.frontend.requests.recent import CLIENT_ID_CHARACTERS, RequestFigures
from dynamo.http import NEVER
from dynamo.protocols.pooling import EMBEDDINGS
from dynamo.protocols.status import RequestRecord
from dynamo.router.decision.decision import Decision

if TYPE_CHECKING:
    from dynamo.frontend.requests.engine_request import EngineRequest


class RequestMetrics(RequestFigures, kw_only=True):
    """Count one request to a model, and collect its figures; ``kind`` is ``stream`` or ``unary``.

    ``prepared_s`` is set when the engine requests are ready; ``accepted`` once each of them is sent
    or queued; ``prefilled`` if a prefill worker computed the prompt; ``engine_requests`` is those
    that a worker has received. ``stage`` is a key of the ``stages`` of the frontend's metrics, None
    from the first token on. ``images`` are those of the prompt. Up to ``lost_until_s`` (monotonic
    seconds) waits for a worker, after one had received it, are counted.
    """

    shared: FrontendMetrics
    of_model: ModelMetrics
    kind: str
    accepted: bool = False
    engine_requests: int = 0
    queue_depth: int = 0
    phase: str = "aggregated"
    stage: tuple[str, str] | None = PREPROCESS
    lost_until_s: float = 0.0
    images: PromptImages | None = None

    def __post_init__(self) -> None:
        """Count its begin, unless that was counted when it began to wait for a worker."""
        model = self.of_model
        model.active.value += 1
        if not self.resumed_s:
            model.started[self.info.endpoint, self.model, self.kind].value += 1

    def routed(self, phase: str) -> None:
        """The request is being routed for ``phase``, one of ``PHASES``."""
        self.phase = phase
        if not self.engine_requests:
            self.stage = phase, "route"

    def waits_for_worker(self) -> None:
        """All workers of its model have left."""
        if not self.engine_requests:
            self.rerouted_s = NEVER
        if not self.first_token_s:
            self.stage = WORKER_WAIT_STAGE

    def waited_for_worker(self, since_s: float, now_s: float) -> None:
        """It has waited since ``since_s``; several of its choices may have at once."""
        if not self.engine_requests:
            return
        # Choices wait side by side: each second counts once.
        lost_s = max(now_s - max(since_s, self.lost_until_s), 0.0)
        self.lost_until_s = now_s
        if self.first_token_s:
            self.lost_decode_s += lost_s
        else:
            self.lost_prefill_s += lost_s
            self.stage = self.phase, "dispatch"

    def has_worker(self) -> None:
        """Its model has a worker again."""
        if not self.engine_requests:
            self.rerouted_s = time.monotonic()

    def prefilling(self) -> None:
        """A prefill worker has the request."""
        if not self.engine_requests:
            self.stage = "prefill", "dispatch"

    def dispatched(self, prompt_tokens: int) -> None:
        """Every engine request is sent or queued."""
        self.accepted = True
        self.prompt_tokens = prompt_tokens
        model = self.of_model
        model.isl.observe(prompt_tokens)
        if self.images is not None:
            model.images[model.name,].observe(len(self.images.hashes))

    def sent(self, decision: Decision, queued: int, chosen_s: float, send_seconds: float) -> bool:
        """Count an engine request that a worker has received; return whether it is the first.

        The worker was chosen at ``chosen_s``, with ``queued`` requests left in the queue; writing
        to its connection took ``send_seconds``.
        """
        shared = self.shared
        shared.dispatch_stage.observe(send_seconds)
        shared.plane_send.observe(send_seconds)
        self.engine_requests += 1
        self.overlap_blocks += decision.overlap_blocks
        self.prompt_blocks += decision.prompt_blocks
        if queued > self.queue_depth:
            self.queue_depth = queued
        if self.engine_requests > 1:
            return False
        self.sent_s = chosen_s
        shared.route_stage.observe(chosen_s - (self.rerouted_s or self.prepared_s))
        shared.plane_queue.observe(chosen_s - self.received_s)
        if not self.first_token_s:
            self.stage = self.phase, "dispatch"
        return True

    def first_token(self, now_s: float) -> None:
        """Observe the time to the first token of all engine requests."""
        if self.first_token_s:
            return
        self.first_token_s = now_s
        self.stage = None
        model = self.of_model
        model.ttft.observe(now_s - self.received_s)
        if self.resumed_s or self.rerouted_s or self.lost_prefill_s:
            model.ttft_worker_wait[model.name,].value += self.worker_wait_s()
        roundtrip_s = now_s - self.sent_s
        self.shared.roundtrip_stage.observe(roundtrip_s)
        self.shared.plane_roundtrip.observe(roundtrip_s)

    def timing(self) -> dict[str, Any]:
        """``nvext.timing``."""
        received = self.received_s
        now = time.monotonic()
        first = self.first_token_s or now
        done = self.prefilled
        begun, ended = self.sent_s, first
        overlap, blocks = self.overlap_blocks, self.prompt_blocks
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
            "router_queue_depth": self.queue_depth,
        }

    def count_output(self, usage: Usage, choices: Sequence[EngineRequest]) -> None:
        """Count the output of the engines, complete or partial."""
        self.usage = usage
        model, shared = self.of_model, self.shared
        tokens = usage.completion_tokens
        model.osl.observe(tokens)
        model.output_tokens.value += tokens
        shared.detokenize_tokens.value += tokens
        cached_tokens = usage.cached_tokens
        if cached_tokens is not None:
            model.cached.observe(cached_tokens)
        if self.images is not None:
            image_tokens = self.images.count_tokens()
            if image_tokens is not None:
                model.image_tokens[model.name,].observe(image_tokens)
        detokenize_s = 0.0
        for choice in choices:
            detokenize_s += choice.detokenize_s
            decision, picker = choice.decision, choice.picker
            if cached_tokens is not None:
                picker.reused_tokens.value += cached_tokens
                cached_tokens = None  # the usage is that of the whole request
            if decision is None or decision.worker_id not in picker.worker_pool.members:
                continue  # the rows of a removed worker stay removed
            last = shared.workers[decision.worker_id, decision.dp_rank, "decode"]
            last.isl.value = self.prompt_tokens
            if choice.tokens:
                last.ttft.value = choice.first_token_s - self.received_s
            if choice.tokens > 1:
                last.itl.value = (choice.last_token_s - choice.first_token_s) / (choice.tokens - 1)
        shared.detokenize_ms.observe(detokenize_s * 1e3)

    def so_far(self, choices: Sequence[EngineRequest]) -> RequestRecord:
        """Return what operators see of it now; its outcome is ``running``."""
        names = RequestFigures.__struct_fields__
        figures = RequestFigures(*(getattr(self, name) for name in names))
        figures.outcome, figures.ended_s = "running", time.monotonic()
        figures.usage = None  # it is known a moment before the end
        if choices:
            first = choices[0]
            figures.decision, figures.inputs = first.decision, first.inputs
            figures.prefill_inputs = first.prefill_inputs
        return figures.explained()

    def ended(self, failure: Labels | None, choices: Sequence[EngineRequest]) -> None:
        """Count the end of the request, and add it to the recent ones.

        ``failure`` is None if it succeeded; then the output is complete. ``choices`` may never have
        got a worker.
        """
        model, shared = self.of_model, self.shared
        if self.prepared_s:
            shared.preprocess_stage.observe(self.prepared_s - (self.resumed_s or self.received_s))
        if failure is None:
            self.outcome = "ok"
            model.requests[self.info.endpoint, "", self.model, self.kind, "success"].value += 1
        else:
            self.outcome = failure.error_type
            shared.failures[failure.failure_class, failure.reason].value += 1
            model.failed(self.info.endpoint, self.kind, failure.error_type)
        model.active.value -= 1
        self.ended_s = time.monotonic()
        if self.resumed_s or self.rerouted_s or self.lost_until_s:
            waited_s = self.worker_wait_s()
            shared.worker_wait_stage.observe(waited_s)
            model.duration_worker_wait[model.name,].value += waited_s
        model.duration.observe(self.ended_s - self.received_s)
        if self.info.endpoint == EMBEDDINGS:
            model.embedding[model.name,].observe(self.ended_s - self.received_s)
        if choices:
            first = choices[0]
            self.inputs, self.prefill_inputs = first.inputs, first.prefill_inputs
            self.decision, self.migrations = first.decision, first.retries.migrations
            self.last_token_s = first.last_token_s
            if len(choices) > 1:
                self.last_token_s = max(choice.last_token_s for choice in choices)
                self.migrations = sum(choice.retries.migrations for choice in choices)
        echoed_id = self.info.echoed_id
        if echoed_id is not None:
            self.info = self.info._replace(echoed_id=echoed_id[:CLIENT_ID_CHARACTERS])
        shared.recent.add(self)


def show_in_progress(shared: FrontendMetrics, requests: Iterable[RequestMetrics]) -> None:
    """Set the gauges of the requests in progress. O(requests + models), before a scrape.

    A request in progress is the only owner of its stage: nothing is counted up and down.
    """
    stages: Counter[tuple[str, str] | None] = Counter()
    inflight, queued = Counter[str](), Counter[str]()
    streams = 0
    for request in requests:
        stages[request.stage] += 1
        streams += request.engine_requests
        inflight[request.model] += request.engine_requests > 0
        waits = request.accepted and not request.first_token_s
        queued[request.model] += waits and request.stage != WORKER_WAIT_STAGE
    for stage, gauge in shared.stages.items():
        gauge.value = stages[stage]
    # Requests that wait before their body is parsed are not in ``requests`` yet.
    waiting = sum(model.cold_start_queue.value for model in shared.models)
    shared.stages[WORKER_WAIT_STAGE].value = waiting
    for model in shared.models:
        model.inflight.value = inflight[model.name]
        model.queued.value = queued[model.name]
    shared.plane_inflight.value = streams
    shared.detokenize_us.value = shared.detokenize_ms.total * 1e3
