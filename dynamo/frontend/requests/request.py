"""One generation request, from its arrival to its end.

A request has an engine request for each choice (``n``, lists of prompts). The output of a worker is
detokenized in the read that received it and written at the end of the loop turn: a request or a
token creates no task, queue or generator. However a request ends (finished, failed, client
disconnected, worker lost, silence, shutdown), :meth:`ActiveRequest.close` runs exactly once: it
stops the engines, frees the load and counts the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.errors import Cancelled, DynamoError, Unavailable
from dynamo.frontend.answer.generation import Answer
from dynamo.frontend.answer.sse import KEEP_ALIVE
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.errors import (
    ErrorShape,
    Labels,
    SlowClient,
    error_response,
    explained,
    id_headers,
    labels,
    with_retry,
)
from dynamo.frontend.requests.headers import ROUTE_HEADER, route_header
from dynamo.frontend.requests.metrics import ModelMetrics
from dynamo.frontend.requests.recent import Prefilled, RequestInfo, begin_trace, end_trace
from dynamo.frontend.requests.request_metrics import RequestMetrics
from dynamo.http import NEVER, Exchange
from dynamo.observability.tracing import OpenSpan
from dynamo.router.decision.decision import Decision

if TYPE_CHECKING:
    from dynamo.frontend.prompt.images import PromptImages
    from dynamo.frontend.requests.dispatch import Dispatch
    from dynamo.frontend.requests.registry import RequestRegistry

log = logging.getLogger(__name__)
_NO_CACHE = ("cache-control", "no-cache")
WorkerIdField = Callable[[Decision, Prefilled | None], dict[str, Any]]
"""Returns ``nvext.worker_id``, by the prefill worker, if any, and the decision."""


class ResponseWriter:
    """Sends the answer of a request: here one that is generated, in one body or as events.

    It keeps nothing of the request: one serves all of its kind.
    """

    def may_comment(self, request: ActiveRequest) -> bool:
        """Whether a comment may follow what was sent."""
        return True

    def start(self, request: ActiveRequest) -> None:
        """Begin a streamed response, if comments have not begun it."""
        if not request.exchange.started:
            headers = [_NO_CACHE, *request.headers]
            request.exchange.start(200, "text/event-stream", headers)

    def complete(self, request: ActiveRequest) -> None:
        """Send the end of the answer and close the request."""
        if request.streaming:
            request.start()
            request.exchange.end(request.generation.end())
        else:
            request.exchange.respond(200, request.generation.unary(), headers=request.headers)
        request.close(None)

    def break_off(self, request: ActiveRequest, error: DynamoError) -> None:
        """End a response that has begun. The rest of its text may be what cannot be written."""
        try:
            last = request.generation.error(error)
        except Exception:
            log.exception("request %s: the rest of its output is lost", request.info.request_id)
            last = request.error_shape.event(error)
        request.exchange.end(last)


_GENERATED = ResponseWriter()


class ActiveRequest:
    """``engine_requests`` are set when it is sent; ``generation`` renders their outputs, and
    ``writer`` sends them with ``headers``.

    ``last_activity_s`` is when an engine last sent anything, infinite while none computes; its
    engine requests set it, for every token. ``metrics`` counts the rest. ``wants_route``: a header
    of the response explains the first decision. ``trace`` is the span of the request, if it has
    one. ``engine_id`` is the id of the first engine request.
    """

    __slots__ = (
        "_held_bytes",
        "_open",
        "_shared",
        "_started",
        "_worker_id_field",
        "_working",
        "_writer",
        "closed",
        "engine_id",
        "engine_requests",
        "exchange",
        "generation",
        "headers",
        "info",
        "last_activity_s",
        "metrics",
        "model",
        "output_deferred",
        "streaming",
        "trace",
        "wants_route",
    )

    generation: Answer

    def __init__(
        self,
        shared: RequestRegistry,
        exchange: Exchange,
        info: RequestInfo,
        model: ModelMetrics,
        stream: bool,
        writer: ResponseWriter = _GENERATED,
    ) -> None:
        self.exchange = exchange
        self.info = info
        self.model = model
        self.streaming = stream
        self.engine_requests: Sequence[EngineRequest] = ()
        self.closed = False
        self.last_activity_s = NEVER
        self.trace: OpenSpan | None = None
        if shared.tracing is not None or "traceparent" in exchange.headers:
            self.trace = begin_trace(shared.tracing, exchange)
        self.wants_route = ROUTE_HEADER in exchange.headers and shared.shows_routes
        self._worker_id_field: WorkerIdField | None = None
        echoed = info.echoed_id
        self.headers: Sequence[tuple[str, str]] = ()
        if echoed is not None:
            self.headers = id_headers(shared.error_shapes.get(info.endpoint), echoed)
        self._shared = shared
        self._writer = writer
        self._started = False  # the streamed response has begun
        self.output_deferred = False  # it is written at the end of this loop turn
        self._held_bytes = 0
        # Engine requests without an end, and those that a worker computes now: one that waits in a
        # queue or migrates is open, and no worker computes it.
        self._open = 0
        self._working = 0
        exchange.on_disconnect = self._client_disconnected
        exchange.on_expired = self._expired
        self.engine_id = shared.add(self)
        kind = "stream" if stream else "unary"
        self.metrics = RequestMetrics(
            info,
            model.name,
            exchange.received_at,
            resumed_s=exchange.resumed_at,
            key="" if exchange.api_key is None else exchange.api_key.name,
            shared=shared.metrics,
            of_model=model,
            kind=kind,
        )

    @property
    def idle_since(self) -> float:
        """When an engine last sent anything, or the request began to wait for one; infinite
        before dispatch."""
        waiting = self.metrics.accepted and self.last_activity_s == NEVER
        return self.exchange.received_at if waiting else self.last_activity_s

    # -- called by the route

    def prepared(
        self,
        answer: Answer,
        prepared_s: float,
        images: PromptImages | None = None,
        worker_id_field: WorkerIdField | None = None,
    ) -> None:
        """Its prompt, with ``images``, was ready at ``prepared_s``; ``answer`` renders outputs.

        ``worker_id_field``, if given, makes ``nvext.worker_id`` of the first decision.
        """
        self.generation, self._worker_id_field = answer, worker_id_field
        self.metrics.prepared_s = prepared_s
        self.metrics.images = images

    def send(
        self,
        dispatch: Dispatch,
        engine_requests: Sequence[EngineRequest],
        prompt_tokens: int,
        *,
        at_once: int = 1,
        prefill: bool = True,
    ) -> None:
        """Send the first ``at_once`` of its engine requests; the route sends the others later.

        With ``prefill`` through a prefill worker, where that applies. Raises as
        :meth:`Dispatch.send`.
        """
        # Before the first is sent: if that fails, close() releases all of them.
        self.engine_requests = engine_requests
        for engine_request in engine_requests[:at_once]:
            dispatch.send(engine_request, prefill)
            if self.closed:  # its queue or its prefill step failed at once
                return
        self._open = len(engine_requests)
        self.exchange.deadline = NEVER  # from now on the timeouts of the registry apply
        self.metrics.dispatched(prompt_tokens)

    def respond_location(self, stream: bytes) -> None:
        """Respond with ``stream`` alone: the client only asked where the request would go."""
        self.start()
        self.exchange.end(stream)
        self.close(None)

    # -- called by engine requests

    def sent(
        self,
        engine_request: EngineRequest,
        decision: Decision,
        queued: int,
        chosen_s: float,
        first: bool,
    ) -> None:
        """``engine_request`` went to a worker, its ``first``, chosen at ``chosen_s`` (monotonic
        seconds) with ``queued`` others left in the router's queue."""
        self._working += 1
        now_s = self.last_activity_s = time.monotonic()
        if first:
            is_first = self.metrics.sent(decision, queued, chosen_s, now_s - chosen_s)
        else:
            is_first = engine_request is self.engine_requests[0]  # after a reroute, the new worker
        # Only the first choice has a place in the answer's nvext and in its header.
        if is_first and self._worker_id_field is not None:
            self.generation.worker_id = self._worker_id_field(decision, self.metrics.prefilled)
        if self.wants_route and engine_request is self.engine_requests[0]:
            self._show_route(engine_request, decision, chosen_s)

    def computing(self, starts: bool) -> None:
        """A worker ``starts`` to compute for an engine request, or stops; while none does, the
        request cannot be silent."""
        self._working += 1 if starts else -1
        if starts:
            self.last_activity_s = time.monotonic()
        elif not self._working:
            self.last_activity_s = NEVER

    def decide_streaming(self, streams: bool) -> None:
        """The head of a relayed answer says whether it streams."""
        self.streaming = streams

    def output_ready(self, size_bytes: int) -> None:
        """Write the new output at the end of this loop turn.

        While the client reads too slowly, its text accumulates in the generation, up to a bound.
        """
        if not self.output_deferred:
            self.output_deferred = True
            self._shared.write_batch.defer(self.flush)
        if self._held_bytes:
            self._held_bytes += size_bytes
            if self._held_bytes > self._shared.held_limit_bytes:
                self.fail(SlowClient("the client reads too slowly"))

    def engine_request_done(self) -> None:
        """An engine request has ended without an error; after the last one, complete the answer."""
        self._open -= 1
        self.computing(False)
        if not self.closed and not self._open:
            try:
                self._writer.complete(self)
            except BaseException as error:  # noqa: BLE001 - fail() logs it
                self.fail(error)

    # -- called by the write batch and the registry

    def silent(self, error: DynamoError) -> None:
        """Its workers have sent nothing for too long: end their streams with ``error``.

        A prefill worker's stream is not among them: without others the request fails.
        """
        streams = [choice.stream for choice in self.engine_requests if choice.stream is not None]
        for stream in streams:
            if not self.closed:
                stream.give_up(error)
        if not streams:
            self.fail(error)

    def flush(self) -> None:
        """Write the output since the last flush, unless the client reads too slowly."""
        self.output_deferred = False
        if self.closed:
            return
        try:
            if not self._started:
                self.start()
            exchange = self.exchange
            if exchange.above_high_water:
                if not self._held_bytes:
                    # Held from now on, with the size of each further output; on_drain flushes.
                    self._held_bytes = 1
                    for choice in self.engine_requests:
                        choice.client_reads(False)
                return
            if self._held_bytes:
                self._held_bytes = 0
                for choice in self.engine_requests:
                    choice.client_reads(True)
            exchange.write(self.generation.flush())
        except BaseException as error:  # noqa: BLE001 - fail() logs it
            self.fail(error)

    def keep_alive(self, comment: bytes = KEEP_ALIVE) -> None:
        """Send a comment, so that a client does not take a silent engine for a dead server.

        It starts the response if necessary; a later error is an event then.
        """
        if not self._writer.may_comment(self):
            return
        if self.streaming and not self.closed and not self.exchange.above_high_water:
            if not self._started:
                self.flush()
            if not self.closed:
                self.exchange.write(comment)

    def fail(self, error: BaseException, by_worker: bool = False) -> None:
        """End the request with ``error``: as a status if nothing was sent, else in the stream.

        Whatever raises in the course of a request (its output, its end, a callback of its worker)
        ends here, so that it costs no other request anything: what is no DynamoError is logged, and
        is an internal error to the client. Raises the following again: cancellation,
        KeyboardInterrupt, SystemExit.
        """
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
            raise error
        if not isinstance(error, DynamoError):
            log.error("request %s failed", self.info.request_id, exc_info=error)
            error = DynamoError("Internal server error")
        if self.closed:
            return
        failure = labels(error, by_worker)
        if failure.error_type == "internal":
            log.error("request %s failed: %s", self.info.request_id, error)
        try:
            self._send_error(explained(error, self.model.name))
        except Exception as unexpected:  # for example a message that UTF-8 cannot hold
            log.exception("request %s: its error cannot be sent", self.info.request_id)
            self.exchange.on_disconnect = None
            self.exchange.crashed(unexpected)
        self.close(failure)

    # -- called by its writer

    @property
    def error_shape(self) -> ErrorShape:
        """The shape of its errors."""
        return self._shared.error_shape(self.info.endpoint, self.exchange)

    def start(self) -> None:
        """Begin the streamed response. Idempotent."""
        if self._started:
            return
        self._writer.start(self)
        self._started = True
        self.exchange.on_drain = self.flush
        self.exchange.write(self.generation.opening())

    def close(self, failure: Labels | None) -> None:
        """End the request, whose response is sent: every path ends here, once."""
        # First of all: what the steps below call back must find the request closed.
        self.closed = True
        engine_requests, metrics = self.engine_requests, self.metrics
        for choice in engine_requests:
            if not choice.released:
                choice.release()
        try:
            if metrics.accepted and metrics.engine_requests:
                usage = self.generation.final_usage or self.generation.usage()
                metrics.count_output(usage, engine_requests)
            metrics.ended(failure, engine_requests)
            if self.trace is not None and self.trace.recording:
                end_trace(self.trace, metrics)
            for record in self._shared.recordings:
                record(self)
        finally:
            self.engine_requests = ()  # they refer to the request: a cycle would need the collector
            self._shared.remove(self)

    def _send_error(self, error: DynamoError) -> None:
        """Send ``error``, a result of :func:`explained`: as a status if nothing was sent."""
        shape = self.error_shape
        if isinstance(error, SlowClient):
            self.exchange.abort()
        elif self._started:
            self._writer.break_off(self, error)
        elif self.exchange.started:  # with comments, before it reached the model
            self.exchange.end(shape.event(error))
        else:
            status, body = error_response(
                error, self._shared.overload_status, shape, self.info.echoed_id
            )
            self.exchange.respond(status, body, headers=with_retry(error, self.headers))

    def _show_route(
        self, engine_request: EngineRequest, decision: Decision, chosen_s: float
    ) -> None:
        """Set the header of the route, also after a change of the worker."""
        inputs = engine_request.inputs, engine_request.prefill_inputs
        queued_s = chosen_s - (self.metrics.rerouted_s or self.metrics.prepared_s)
        operator = self._shared.admits_operator(self.exchange)
        header = route_header(self.info.request_id, decision, inputs, queued_s, operator)
        self.headers = (*(pair for pair in self.headers if pair[0] != ROUTE_HEADER), header)

    def _client_disconnected(self) -> None:
        if not self.closed:
            self._shared.metrics.disconnected.value += 1
            self.close(labels(Cancelled()))

    def _expired(self) -> None:
        self.fail(Unavailable("The prompt was not processed in time, please retry later"))
