"""What is counted and timed of one generation request, from its arrival to its end.

Every gauge that goes up here goes down in :meth:`RequestMetrics.ended`, however the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo.frontend.answer.usage import Usage
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.errors import Labels
from dynamo.frontend.requests.metrics import FrontendMetrics, ModelMetrics
from dynamo.observability.metrics import Gauge

if TYPE_CHECKING:
    from dynamo.frontend.disagg.prefill_request import Prefilled
    from dynamo.router.picker import Decision

__all__ = ["RequestMetrics"]


class RequestMetrics:
    """Of one request to ``endpoint``; ``kind`` is ``stream`` or ``unary``.

    ``accepted``: its engine requests are on their way or wait; ``prefilled``: who computed its
    prompt, if somebody else did. Times are monotonic seconds.
    """

    __slots__ = (
        "_dispatched_at",
        "_endpoint",
        "_first_at",
        "_kind",
        "_metrics",
        "_model",
        "_overlap_blocks",
        "_phase",
        "_placed",
        "_prepared_at",
        "_prompt_blocks",
        "_prompt_tokens",
        "_queue_depth",
        "_received_at",
        "_stage",
        "accepted",
        "prefilled",
    )

    def __init__(
        self,
        metrics: FrontendMetrics,
        model: ModelMetrics,
        endpoint: str,
        kind: str,
        received_at: float,
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._endpoint = endpoint
        self._kind = kind
        self._received_at = received_at
        self._prepared_at = 0.0
        self._dispatched_at = 0.0
        self._first_at = 0.0
        self._phase = "aggregated"
        self._placed = 0
        self._overlap_blocks = 0
        self._prompt_blocks = 0
        self._prompt_tokens = 0
        self._queue_depth = 0
        self.accepted = False
        self.prefilled: Prefilled | None = None
        model.active.value += 1
        model.started(endpoint, kind)
        self._stage: Gauge | None = metrics.preprocessing
        metrics.preprocessing.value += 1

    @property
    def generated(self) -> bool:
        """Whether an engine was asked for an answer."""
        return self.accepted and self._placed > 0

    def prepared(self) -> None:
        """The engine requests are ready; next, workers are chosen."""
        self._prepared_at = time.monotonic()
        self._metrics.preprocess_stage.observe(self._prepared_at - self._received_at)

    def routed(self, phase: str) -> None:
        """A worker is being chosen for ``phase``, one of ``PHASES``."""
        self._phase = phase
        if not self._placed:
            self._enter(self._metrics.routing[phase])

    def prefilling(self) -> None:
        """A prefill worker has a leg's prompt."""
        if not self._placed:
            self._enter(self._metrics.dispatching["prefill"])

    def dispatched(self, prompt_tokens: int) -> None:
        """The engine requests are on their way, or wait for a worker."""
        self.accepted = True
        self._prompt_tokens = prompt_tokens
        self._model.queued.value += 1
        self._model.isl.observe(prompt_tokens)

    def placed(self, now: float, decision: Decision, waiting: int) -> bool:
        """A leg has its worker, ``waiting`` others are left in line; whether it is the first."""
        metrics = self._metrics
        metrics.plane_inflight.value += 1
        self._placed += 1
        self._overlap_blocks += decision.overlap_blocks
        self._prompt_blocks += decision.prompt_blocks
        self._queue_depth = max(self._queue_depth, waiting)
        if self._placed > 1:
            return False
        self._dispatched_at = now
        metrics.route_stage.observe(now - self._prepared_at)
        metrics.plane_queue.observe(now - self._received_at)
        self._enter(metrics.dispatching[self._phase])
        self._model.inflight.value += 1
        return True

    def sent(self, seconds: float) -> None:
        """It took ``seconds`` to write a request to its worker's connection."""
        self._metrics.dispatch_stage.observe(seconds)
        self._metrics.plane_send.observe(seconds)

    def first_token(self, now: float) -> None:
        """A leg has its first token."""
        if self._first_at:
            return
        self._first_at = now
        metrics, model = self._metrics, self._model
        model.queued.value -= 1
        self._enter(None)
        model.ttft.observe(now - self._received_at)
        metrics.roundtrip_stage.observe(now - self._dispatched_at)
        metrics.plane_roundtrip.observe(now - self._dispatched_at)

    def timing(self) -> dict[str, Any]:
        """``nvext.timing``. Spec 5.6."""
        received = self._received_at
        now = time.monotonic()
        first = self._first_at or now
        done = self.prefilled
        begun, ended = self._dispatched_at, first
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

    def generation(self, usage: Usage, legs: Sequence[EngineRequest], text_s: float) -> None:
        """What came out, be it all of the answer or a part; ``text_s`` went into its text."""
        model, metrics = self._model, self._metrics
        tokens = usage.completion_tokens
        model.osl.observe(tokens)
        model.output_tokens.value += tokens
        metrics.detokenize_ms.observe(text_s * 1e3)
        metrics.detokenize_tokens.value += tokens
        metrics.detokenize_us.value += text_s * 1e6
        if usage.cached_tokens is not None:
            model.cached.observe(usage.cached_tokens)
            legs[0].picker.reused(usage.cached_tokens)
        for leg in legs:
            if leg.decision is None or leg.decision.worker_id not in leg.picker.fleet.members:
                continue  # a worker that has left has no rows, also if it finished its requests
            last = metrics.worker(leg.decision.worker_id, leg.decision.dp_rank)
            last.isl.value = self._prompt_tokens
            if leg.tokens:
                last.ttft.value = leg.first_at - self._received_at
            if leg.tokens > 1:
                last.itl.value = (leg.last_at - leg.first_at) / (leg.tokens - 1)

    def ended(self, failure: Labels | None) -> None:
        """The request is over, well or with ``failure``."""
        model, metrics = self._model, self._metrics
        waits = not self._first_at
        if self._placed:
            model.inflight.value -= 1
            metrics.plane_inflight.value -= self._placed
        if self.accepted:
            model.queued.value -= waits
        if self._stage is not None:
            self._enter(None)
        if failure is not None:
            metrics.failures.labels(failure.failure_class, failure.reason).value += 1
        model.active.value -= 1
        model.ended(self._endpoint, self._kind, "" if failure is None else failure.error_type)
        model.duration.observe(time.monotonic() - self._received_at)

    def _enter(self, stage: Gauge | None) -> None:
        """Count the request in this stage and no other; None: in none."""
        if self._stage is not None:
            self._stage.value -= 1
        if stage is not None:
            stage.value += 1
        self._stage = stage
