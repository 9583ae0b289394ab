"""One generation request, from its arrival to its end, through one exit door.

A call has a leg for each engine request (``n`` choices, lists of prompts), which may wait for a
worker. What a worker sends is
detokenized in the read that brought it and written at the end of the loop turn: no task, queue or
generator is made for a request or a token. However a call ends (finished, failed, client gone,
worker gone, silence, shutdown), :meth:`ActiveRequest._close`
runs exactly once: engines stopped, load freed, everything counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.errors import Cancelled, DynamoError, Unavailable
from dynamo.frontend.answer.generation import GenerationStream
from dynamo.frontend.answer.sse import KEEP_ALIVE
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.errors import Labels, Overwhelmed, error_response, explained, labels
from dynamo.frontend.requests.metrics import ModelMetrics
from dynamo.frontend.requests.request_metrics import RequestMetrics
from dynamo.http import Exchange
from dynamo.router.picker import Decision

if TYPE_CHECKING:
    from dynamo.frontend.disagg.prefill_request import Prefilled
    from dynamo.frontend.requests.registry import RequestRegistry

__all__ = ["ActiveRequest", "RequestInfo"]

log = logging.getLogger(__name__)
_NEVER = float("inf")
_NO_CACHE = ("cache-control", "no-cache")


class RequestInfo(NamedTuple):
    """How a call is named: ``endpoint`` of the counters, the request's id, and whether the client
    gave an id itself (then it is echoed)."""

    endpoint: str
    request_id: str
    echoed_id: str | None


class ActiveRequest:
    """``dispatched`` gives it legs; ``generation`` turns their outputs into bytes.

    ``heard_at`` is when an engine last gave a sign of life, infinite while none has anything to do;
    ``text_s`` the time in which engine outputs became text; ``metrics`` counts the rest;
    ``describe``, where set, says what ``nvext.worker_id`` shows of the first decision.
    ``engine_id`` is the id of the first engine request, empty before the legs are made.
    """

    __slots__ = (
        "_begun",
        "_dirty",
        "_held_bytes",
        "_open_legs",
        "_working_legs",
        "closed",
        "describe",
        "engine_id",
        "exchange",
        "generation",
        "heard_at",
        "info",
        "legs",
        "metrics",
        "model",
        "registry",
        "streaming",
        "text_s",
    )

    generation: GenerationStream

    def __init__(
        self,
        registry: RequestRegistry,
        exchange: Exchange,
        info: RequestInfo,
        model: ModelMetrics,
        stream: bool,
    ) -> None:
        self.registry = registry
        self.exchange = exchange
        self.info = info
        self.model = model
        self.streaming = stream
        self.legs: Sequence[EngineRequest] = ()
        self.closed = False
        self.engine_id = ""
        self.heard_at = _NEVER
        self.text_s = 0.0
        self.describe: Callable[[Decision, Prefilled | None], dict[str, Any]] | None = None
        self._begun = False
        self._dirty = False
        self._held_bytes = 0
        self._open_legs = 0
        self._working_legs = 0
        exchange.on_disconnect = self._client_left
        exchange.on_expired = self._expired
        registry.admission.enter()
        registry.live.add(self)
        kind = "stream" if stream else "unary"
        self.metrics = RequestMetrics(
            registry.metrics, model, info.endpoint, kind, exchange.received_at
        )

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Response headers of every outcome."""
        echoed = self.info.echoed_id
        return [] if echoed is None else [("x-request-id", echoed)]

    @property
    def quiet_since(self) -> float:
        """When the client last had news of an engine or began to wait for one; infinite before."""
        waits = self.metrics.accepted and self.heard_at == _NEVER
        return self.exchange.received_at if waits else self.heard_at

    def dispatched(self, prompt_tokens: int) -> None:
        """The engine requests of ``legs`` are on their way, or wait for a worker."""
        self._open_legs = len(self.legs)
        self.exchange.lift_deadline()
        self.metrics.dispatched(prompt_tokens)

    def located(self) -> None:
        """The request only asked where it would go."""
        self._begin()
        self.exchange.end(self.generation.located())
        self._close(None)

    # -- told by the legs

    def works(self) -> float:
        """An engine has something of a leg to do, from now on (monotonic seconds)."""
        self._working_legs += 1
        self.heard_at = time.monotonic()
        return self.heard_at

    def rests(self) -> None:
        """It has not any more: while no leg is at an engine, none is silent."""
        self._working_legs -= 1
        if not self._working_legs:
            self.heard_at = _NEVER

    def placed(self, decision: Decision, waiting: int) -> float:
        """A leg is booked and goes out now (monotonic seconds), with ``waiting`` others left in
        the router's line."""
        self._working_legs += 1
        now_s = self.heard_at = time.monotonic()
        metrics = self.metrics
        if metrics.placed(now_s, decision, waiting) and self.describe is not None:
            self.generation.worker_id = self.describe(decision, metrics.prefilled)
        return now_s

    def moved(self, leg: EngineRequest, decision: Decision) -> float:
        """A leg that was placed goes out to another worker instead, now (monotonic seconds)."""
        if leg is self.legs[0] and self.describe is not None:
            self.generation.worker_id = self.describe(decision, self.metrics.prefilled)
        return self.works()

    def prefilled(self, done: Prefilled) -> None:
        """A prefill worker has computed a leg's prompt; the first of them is shown."""
        self.heard_at = done.done_s
        self.metrics.prefilled = self.metrics.prefilled or done

    def has_news(self, size_bytes: int) -> None:
        """A leg has pushed an output; it is written at the end of this loop turn.

        While the client is behind, its text gathers in the generation, up to a bound.
        """
        if not self._dirty:
            self._dirty = True
            self.registry.write_batch.defer(self)
        if self._held_bytes:
            self._held_bytes += size_bytes
            if self._held_bytes > self.registry.held_limit_bytes:
                self.fail(Overwhelmed("the client reads too slowly"))

    def leg_done(self) -> None:
        """A leg has ended well; after the last one the answer is complete."""
        self._open_legs -= 1
        self.rests()
        if self.closed or self._open_legs:
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
            log.error("request %s failed: %s", self.info.request_id, error)
        error = explained(error, self.model.name)
        if isinstance(error, Overwhelmed):
            self.exchange.abort()
        elif self._begun:
            self.exchange.end(self.generation.error(error))
        else:
            status, body = error_response(error, self.registry.overload_status)
            self.exchange.respond(status, body, headers=self.headers)
        self._close(found)

    def crashed(self, error: BaseException) -> None:
        """End the call after any exception: a DynamoError as it is, others as internal.

        Raises again what is no failure: cancellation, KeyboardInterrupt, SystemExit.
        """
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
            raise error
        if not isinstance(error, DynamoError):
            log.error("request %s failed", self.info.request_id, exc_info=error)
            error = DynamoError("Internal server error")
        self.fail(error)

    # -- own steps

    def _begin(self) -> None:
        self._begun = True
        exchange = self.exchange
        exchange.on_drain = self.flush
        exchange.start(200, "text/event-stream", [_NO_CACHE, *self.headers])
        exchange.write(self.generation.opening())

    def _client_left(self) -> None:
        if not self.closed:
            self.registry.metrics.disconnected.value += 1
            self._close(labels(Cancelled()))

    def _expired(self) -> None:
        self.fail(Unavailable("The prompt was not processed in time, please retry later"))

    def _close(self, failure: Labels | None) -> None:
        """The exit door."""
        self.closed = True
        registry, legs = self.registry, self.legs
        registry.live.discard(self)
        registry.release_id(self.engine_id)
        for leg in legs:
            leg.release()
        if self.metrics.generated:
            self.metrics.generation(self.generation.usage(), legs, self.text_s)
        self.metrics.ended(failure)
        self.legs = ()  # they know the call: without a cycle nothing is left for the collector
        registry.admission.leave()
