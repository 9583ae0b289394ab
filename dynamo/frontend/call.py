"""One generation request, from its arrival to its end, through one exit door.

A call has a leg for each engine request (``n`` choices, lists of prompts), which may wait for a
worker. What a worker sends is
detokenized in the read that brought it and written at the end of the loop turn: no task, queue or
generator is made for a request or a token. However a call ends (finished, failed, client gone,
worker gone, silence, shutdown), :meth:`Call._close` runs exactly once: engines stopped, load freed,
everything counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.errors import Cancelled, DynamoError
from dynamo.frontend.answer.generation import GenerationStream
from dynamo.frontend.answer.sse import KEEP_ALIVE
from dynamo.frontend.failures import Labels, Overwhelmed, error_response, explained, labels
from dynamo.frontend.http import Exchange
from dynamo.frontend.leg import Leg
from dynamo.frontend.metrics import ModelMetrics
from dynamo.router.picker import Decision

if TYPE_CHECKING:
    from dynamo.frontend.flow import Flow
    from dynamo.frontend.prefill.ticket import Prefilled

__all__ = ["Call", "Caption"]

log = logging.getLogger(__name__)
_NEVER = float("inf")
_NO_CACHE = ("cache-control", "no-cache")


class Caption(NamedTuple):
    """How a call is named: ``endpoint`` of the counters, the request's id, and whether the client
    gave an id itself (then it is echoed)."""

    endpoint: str
    request_id: str
    echoed_id: str | None


class Call:
    """``dispatched`` gives it legs; ``generation`` turns their outputs into bytes.

    ``heard_at`` is when an engine last gave a sign of life, infinite while none has anything to do;
    ``text_s`` the time in which engine outputs became text;
    ``describe``, where set, says what ``nvext.worker_id`` shows of the first decision.
    """

    __slots__ = (
        "_accepted",
        "_begun",
        "_dirty",
        "_dispatched_at",
        "_first_at",
        "_held_bytes",
        "_open_legs",
        "_placed_legs",
        "_prefilled",
        "_prepared_at",
        "_prompt_tokens",
        "_queue_depth",
        "caption",
        "closed",
        "describe",
        "exchange",
        "flow",
        "generation",
        "heard_at",
        "legs",
        "model",
        "streaming",
        "text_s",
    )

    generation: GenerationStream

    def __init__(
        self, flow: Flow, exchange: Exchange, caption: Caption, model: ModelMetrics, stream: bool
    ) -> None:
        self.flow = flow
        self.exchange = exchange
        self.caption = caption
        self.model = model
        self.streaming = stream
        self.legs: Sequence[Leg] = ()
        self.closed = False
        self.heard_at = _NEVER
        self.text_s = 0.0
        self.describe: Callable[[Decision, Prefilled | None], dict[str, Any]] | None = None
        self._accepted = False
        self._begun = False
        self._dirty = False
        self._held_bytes = 0
        self._open_legs = 0
        self._placed_legs = 0
        self._prefilled: Prefilled | None = None
        self._prepared_at = 0.0
        self._prompt_tokens = 0
        self._queue_depth = 0
        self._dispatched_at = 0.0
        self._first_at = 0.0
        exchange.on_disconnect = self._client_left
        flow.admission.enter()
        flow.live.add(self)
        model.active.value += 1
        model.started(caption.endpoint, self.request_type)

    @property
    def request_type(self) -> str:
        """``stream`` or ``unary``."""
        return "stream" if self.streaming else "unary"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Response headers of every outcome."""
        echoed = self.caption.echoed_id
        return [] if echoed is None else [("x-request-id", echoed)]

    @property
    def quiet_since(self) -> float:
        """When the client last had news of an engine or began to wait for one; infinite before."""
        waits = self._accepted and self.heard_at == _NEVER
        return self.exchange.received_at if waits else self.heard_at

    def prepared(self) -> None:
        """The engine requests are ready; next, workers are chosen."""
        self._prepared_at = time.monotonic()
        self.flow.metrics.preprocess_stage.observe(self._prepared_at - self.exchange.received_at)

    def dispatched(self, prompt_tokens: int) -> None:
        """The engine requests of ``legs`` are on their way, or wait for a worker."""
        self._accepted = True
        self._prompt_tokens = prompt_tokens
        self._open_legs = len(self.legs)
        self.model.queued.value += 1
        self.model.isl.observe(prompt_tokens)
        if not self._placed_legs:
            self.flow.metrics.routing.value += 1

    def located(self) -> None:
        """The request only asked where it would go."""
        self._begin()
        self.exchange.end(self.generation.located())
        self._close(None)

    # -- told by the legs

    def placed(self, decision: Decision, waiting: int) -> None:
        """A leg is booked and goes out now, with ``waiting`` others left in the router's line."""
        now = self.heard_at = time.monotonic()
        metrics = self.flow.metrics
        metrics.plane_inflight.value += 1
        self._placed_legs += 1
        self._queue_depth = max(self._queue_depth, waiting)
        if self._placed_legs > 1:
            return
        self._dispatched_at = now
        if self.describe is not None:
            self.generation.worker_id = self.describe(decision, self._prefilled)
        metrics.route_stage.observe(now - self._prepared_at)
        metrics.plane_queue.observe(now - self.exchange.received_at)
        metrics.awaiting_first.value += 1
        self.model.inflight.value += 1
        if self._accepted:
            metrics.routing.value -= 1

    def prefilled(self, done: Prefilled) -> None:
        """A prefill worker has computed a leg's prompt; the first of them is shown."""
        self.heard_at = time.monotonic()
        self._prefilled = self._prefilled or done

    def sent(self) -> None:
        """The leg just placed has been written to its worker's connection."""
        seconds = time.monotonic() - self.heard_at
        metrics = self.flow.metrics
        metrics.dispatch_stage.observe(seconds)
        metrics.plane_send.observe(seconds)

    def first_token(self, now: float) -> None:
        """A leg has its first token."""
        if self._first_at:
            return
        self._first_at = now
        self.model.queued.value -= 1
        self.flow.metrics.awaiting_first.value -= 1
        self.model.ttft.observe(now - self.exchange.received_at)
        roundtrip_s = now - self._dispatched_at
        metrics = self.flow.metrics
        metrics.roundtrip_stage.observe(roundtrip_s)
        metrics.plane_roundtrip.observe(roundtrip_s)

    def has_news(self, size_bytes: int) -> None:
        """A leg has pushed an output; it is written at the end of this loop turn.

        While the client is behind, its text gathers in the generation, up to a bound.
        """
        if not self._dirty:
            self._dirty = True
            self.flow.turn.tell(self)
        if self._held_bytes:
            self._held_bytes += size_bytes
            if self._held_bytes > self.flow.held_limit_bytes:
                self.fail(Overwhelmed("the client reads too slowly"))

    def waits(self) -> None:
        """A leg stands in line for a worker: while all that are left do, no engine is silent."""
        if self._accepted and self._placed_legs == len(self.legs) - self._open_legs:
            self.heard_at = _NEVER

    def leg_done(self) -> None:
        """A leg has ended well; after the last one the answer is complete."""
        self._open_legs -= 1
        if self.closed:
            return
        if self._open_legs:
            self.waits()
            return
        if self.streaming:
            if not self._begun:
                self._begin()
            self.exchange.end(self.generation.end())
        else:
            self.exchange.respond(200, self.generation.unary(), headers=self.headers)
        self._close(None)

    # -- told by the turn, the client, the flow

    def flush(self) -> None:
        """Write what has been pushed since the last time, unless the client is behind."""
        self._dirty = False
        if self.closed:
            return
        if not self._begun:
            self._begin()
        exchange = self.exchange
        if exchange.above_high_water:
            self._held_bytes = self._held_bytes or 1
            return
        self._held_bytes = 0
        exchange.write(self.generation.flush())

    def keep_alive(self) -> None:
        """The engine has been silent for a while: tell whoever waits for a stream that it lives.

        It begins the answer if need be; an error that follows is an event then. Spec 5.8.
        """
        if self.streaming and not self.closed and not self.exchange.above_high_water:
            if not self._begun:
                self._begin()
            self.exchange.write(KEEP_ALIVE)

    def fail(self, error: DynamoError, by_worker: bool = False) -> None:
        """End the call with ``error``: as a status if nothing was sent yet, else in the stream."""
        if self.closed:
            return
        found = labels(error, by_worker)
        if found.error_type == "internal":
            log.error("request %s failed: %s", self.caption.request_id, error)
        error = explained(error, self.model.name)
        if isinstance(error, Overwhelmed):
            self.exchange.abort()
        elif self._begun:
            self.exchange.end(self.generation.error(error))
        else:
            status, body = error_response(error, self.flow.overload_status)
            self.exchange.respond(status, body, headers=self.headers)
        self._close(found)

    def timing(self) -> dict[str, Any]:
        """``nvext.timing``. Spec 5.6."""
        received = self.exchange.received_at
        now = time.monotonic()
        first = self._first_at or now
        done = self._prefilled
        found = [leg.decision for leg in self.legs if leg.decision is not None]
        decisions = found if done is None else [done]
        begun, ended = (self._dispatched_at, first) if done is None else (done.sent_s, done.done_s)
        overlap = sum(one.overlap_blocks for one in decisions)
        blocks = sum(one.prompt_blocks for one in decisions)
        return {
            "request_received_ms": int((time.time() - (now - received)) * 1e3),
            "prefill_wait_time_ms": (begun - received) * 1e3,
            "prefill_time_ms": (ended - begun) * 1e3,
            "ttft_ms": (first - received) * 1e3,
            "total_time_ms": (now - received) * 1e3,
            "kv_hit_rate": overlap / blocks if blocks else 0.0,
            "router_queue_depth": self._queue_depth,
        }

    # -- own steps

    def _begin(self) -> None:
        self._begun = True
        exchange = self.exchange
        exchange.on_drain = self.flush
        exchange.start(200, "text/event-stream", [_NO_CACHE, *self.headers])
        exchange.write(self.generation.opening())

    def _client_left(self) -> None:
        if not self.closed:
            self.flow.metrics.disconnected.value += 1
            self._close(labels(Cancelled()))

    def _close(self, failure: Labels | None) -> None:
        """The exit door."""
        self.closed = True
        flow, model = self.flow, self.model
        flow.live.discard(self)
        for leg in self.legs:
            leg.release()
        model.active.value -= 1
        self._no_longer_counted()
        if self._accepted and self._placed_legs:
            self._count_generation()
        self.legs = ()  # they know the call: without a cycle nothing is left for the collector
        if failure is not None:
            flow.metrics.failures.labels(failure.failure_class, failure.reason).value += 1
        error_type = failure.error_type if failure is not None else ""
        model.ended(self.caption.endpoint, self.request_type, error_type)
        model.duration.observe(time.monotonic() - self.exchange.received_at)
        flow.admission.leave()

    def _no_longer_counted(self) -> None:
        """Take the call out of the gauges of what goes on now."""
        model, metrics = self.model, self.flow.metrics
        waits = not self._first_at
        if self._placed_legs:
            model.inflight.value -= 1
            metrics.plane_inflight.value -= self._placed_legs
            metrics.awaiting_first.value -= waits
        if self._accepted:
            model.queued.value -= waits
            metrics.routing.value -= not self._placed_legs

    def _count_generation(self) -> None:
        model, metrics = self.model, self.flow.metrics
        usage = self.generation.usage()
        tokens = usage.completion_tokens
        model.osl.observe(tokens)
        model.output_tokens.value += tokens
        metrics.detokenized(tokens, self.text_s)
        if usage.cached_tokens is not None:
            model.cached.observe(usage.cached_tokens)
            self.legs[0].picker.reused(usage.cached_tokens)
        for leg in self.legs:
            if leg.decision is None:
                continue
            last = metrics.worker(leg.decision.worker_id, leg.decision.dp_rank)
            last.isl.value = self._prompt_tokens
            if leg.tokens:
                last.ttft.value = leg.first_at - self.exchange.received_at
            if leg.tokens > 1:
                last.itl.value = (leg.last_at - leg.first_at) / (leg.tokens - 1)
