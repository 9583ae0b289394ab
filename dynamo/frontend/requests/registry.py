"""The active requests of a frontend: admission, drain, silent engines, keep-alive comments."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import Cancelled, DynamoError, ModelNotFound, NoInstances, Unavailable
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.requests.errors import (
    DYNAMO_ERRORS,
    BackendSilent,
    ErrorShape,
    Labels,
    error_response,
    explained,
    id_headers,
    labels,
    with_retry,
)
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.recent import RequestFigures, trace_refused
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.frontend.requests.request_metrics import show_in_progress
from dynamo.http import Exchange, WriteBatch
from dynamo.http.access import OperatorGuard
from dynamo.protocols.status import RequestRecord
from dynamo.router.decision.decision import Decision

if TYPE_CHECKING:
    from dynamo.frontend.requests.content import ContentRecording
    from dynamo.observability.otel import OtelTracing

log = logging.getLogger(__name__)
_MIB = 1024 * 1024
HoldExchange = Callable[["RequestRegistry", Exchange, str, DynamoError, str], bool]
"""``hold(registry, exchange, endpoint, error, model)`` may let a request wait that no model serves
now."""


class RequestRegistry:
    """Create it on the running loop; :meth:`close` stops its timers.

    ``admitted`` counts the requests in progress, those whose large body is still being parsed
    included. The limit on connections bounds it: a connection has one request at a time. While
    ``draining``, /health says so; new requests are refused once ``refuses`` is set.
    ``error_shapes`` are those of the endpoints whose errors have a shape of their own, or of their
    paths, which relayed models may serve too. ``guard`` identifies operators; without one no client
    is. ``recordings`` read each request at its end, and ``content`` copies their bodies, if an
    operator asks for it. ``tracing`` exports a span of each.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        write_batch: WriteBatch | None = None,
        *,
        hold: HoldExchange | None = None,
        guard: OperatorGuard | None = None,
        tracing: OtelTracing | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.overload_status = settings.overload_status
        self.shows_routes = not settings.disable_nvext
        self.tracing = tracing
        self.held_limit_bytes = settings.slow_client_limit_mb * _MIB
        self.off_loop = OffLoop()
        self.write_batch = write_batch or WriteBatch()
        self.draining = False
        self.refuses = False
        self.admitted = 0
        self.recordings: list[Callable[[ActiveRequest], None]] = []
        self.content: ContentRecording | None = None
        self.error_shapes: dict[str, ErrorShape] = {}
        self._hold = hold
        self._guard = guard
        self._active: set[ActiveRequest] = set()
        metrics.registry.before_render.append(self._show_in_progress)
        self._engine_ids: set[str] = set()
        self._duplicates = itertools.count(1)
        self._drained: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()
        self._silence_s = settings.backend_stream_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        if self._silence_s is not None:
            self._sweep()
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        if settings.sse_keep_alive_ms is not None:
            self._keep_alive(settings.sse_keep_alive_ms / 1e3)

    def close(self) -> None:
        """Stop the timers; drop large requests that have not begun."""
        self.off_loop.close()
        for timer in (self._timer, self._keep_alive_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._keep_alive_timer = None

    def check(self, exchange: Exchange) -> None:
        """Raise Unavailable once requests are refused. It is free, so it precedes the parsing.

        One that has waited for a worker is not new.
        """
        if self.refuses and not exchange.resumed_at:
            raise Unavailable("Service is shutting down, please retry elsewhere")

    def enter(self) -> None:
        """Admit one more request. Every enter needs one :meth:`leave`."""
        self.admitted += 1

    def leave(self) -> None:
        """An admitted request has ended."""
        self.admitted -= 1
        if not self.admitted and self._drained is not None:
            self._drained.set()

    @contextmanager
    def preparing(
        self, exchange: Exchange, refuse: Callable[[DynamoError], None]
    ) -> Iterator[None]:
        """Admit a request while its body is read in a thread, and respond if that fails."""
        self.enter()
        try:
            yield
        except DynamoError as error:
            refuse(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also panics in Rust
            log.exception("a request to %s failed", exchange.path)
            exchange.crashed(error)
        finally:
            self.leave()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the admitted ones; False if some outlast the timeout."""
        self.draining = self.refuses = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle()
        except TimeoutError:
            return not self.admitted
        return True

    async def idle(self) -> None:
        """Wait until no request is admitted."""
        while self.admitted:
            self._drained = asyncio.Event()
            await self._drained.wait()

    def hold_or_refuse(
        self,
        exchange: Exchange,
        endpoint: str,
        error: DynamoError,
        model: str,
        request_type: str = "unary",
    ) -> None:
        """Let a request for a model that is started on demand wait; refuse others with ``error``.

        ``request_type`` is ``stream`` or ``unary``.
        """
        if self._hold is not None and isinstance(error, NoInstances | ModelNotFound):
            try:
                self.check(exchange)
                if self._hold(self, exchange, endpoint, error, model):
                    return
            except Unavailable as full:
                error = full
        self.refuse(exchange, endpoint, error, (model, request_type))

    def refuse(
        self, exchange: Exchange, endpoint: str, error: DynamoError, request: tuple[str, str]
    ) -> None:
        """Respond with ``error`` to a request that has not reached its model; count it.

        ``request`` is the model and ``request_type``.
        """
        self._count_refused(exchange, endpoint, request, labels(error))
        model, _ = request
        answer, shape = explained(error, model), self.error_shape(endpoint, exchange)
        if exchange.started:  # with comments, while it waited
            exchange.end(shape.event(answer))
            return
        echoed = exchange.headers.get("x-request-id")
        headers = id_headers(shape, echoed)
        status, body = error_response(answer, self.overload_status, shape, echoed)
        exchange.respond(status, body, headers=with_retry(error, headers))

    def error_shape(self, endpoint: str, exchange: Exchange) -> ErrorShape:
        """The shape of the errors of a request."""
        shapes = self.error_shapes
        return shapes.get(endpoint) or shapes.get(exchange.path) or DYNAMO_ERRORS

    def abandoned(self, exchange: Exchange, endpoint: str, model: str, streams: bool) -> None:
        """Count a request whose client has disconnected while its body was parsed in a thread."""
        self.metrics.disconnected.value += 1
        request = (model, "stream" if streams else "unary")
        self._count_refused(exchange, endpoint, request, labels(Cancelled()))

    def _count_refused(
        self, exchange: Exchange, endpoint: str, request: tuple[str, str], failure: Labels
    ) -> None:
        model, request_type = request
        self.metrics.failures[failure.failure_class, failure.reason].value += 1
        self.metrics.outcomes(model).failed(endpoint, request_type, failure.error_type)
        ended = self.metrics.recent.refuse(endpoint, model, failure.error_type, exchange)
        if ended.resumed_s:
            self.metrics.worker_wait_stage.observe(ended.worker_wait_s())
        if self.tracing is not None:
            trace_refused(self.tracing, exchange, ended)

    def admits_operator(self, exchange: Exchange) -> bool:
        """Whether the client may see what operators see."""
        return self._guard is not None and not self._guard.problem(exchange)

    def add(self, request: ActiveRequest) -> str:
        """Admit and register ``request``; return an id for the engine, which no other one has.

        This is the request's own id, or with a suffix while another request of that id is active:
        clients may use one id for two requests at once, and engines refuse an id that they already
        serve.
        """
        self.admitted += 1
        self._active.add(request)
        engine_id = request.info.request_id
        if engine_id in self._engine_ids:
            engine_id = f"{engine_id}.{next(self._duplicates)}"
        self._engine_ids.add(engine_id)
        return engine_id

    def recorded_content(self, request_id: str) -> bytes | None:
        """Return the bodies of a request as JSON, if they are recorded now."""
        return None if self.content is None else self.content.find(request_id)

    def release_body(self, exchange: Exchange) -> None:
        """Free the body of a request: it is parsed."""
        if self.content is not None:
            self.content.begin(exchange)
        exchange.body = b""

    def remove(self, request: ActiveRequest) -> None:
        """Forget ``request``, which has ended, and release its engine id."""
        self._active.discard(request)
        self._engine_ids.discard(request.engine_id)
        self.leave()

    def open_tokens(self) -> Counter[str]:
        """Return the output tokens of the active requests so far, by model. O(requests)."""
        tokens: Counter[str] = Counter()
        for request in self._active:
            for engine_request in request.engine_requests:
                tokens[request.model.name] += engine_request.tokens
        return tokens

    def in_flight_by_worker(self) -> Counter[int]:
        """Return the engine requests that each worker has now. O(requests)."""
        return Counter(
            choice.decision.worker_id
            for request in self._active
            for choice in request.engine_requests
            if choice.decision is not None
        )

    def in_flight_by_model(self) -> Counter[str]:
        """Return the requests that a worker has now, not those that wait for one. O(requests)."""
        return Counter(
            request.model.name
            for request in self._active
            if any(choice.decision is not None for choice in request.engine_requests)
        )

    def decided_since(self, after_s: float) -> Iterator[tuple[RequestFigures, Decision]]:
        """Yield the requests that got their worker after ``after_s`` (monotonic seconds).

        O(requests in progress, and those that ended since).
        """
        for request in self._active:
            figures, choices = request.metrics, request.engine_requests
            if figures.sent_s > after_s and choices and choices[0].decision is not None:
                yield figures, choices[0].decision
        ended = reversed(self.metrics.recent.records)
        for figure in itertools.takewhile(lambda figure: figure.ended_s > after_s, ended):
            if figure.sent_s > after_s and figure.decision is not None:
                yield figure, figure.decision

    def running(self, request_id: str) -> RequestRecord | None:
        """Return a request in progress with its routes; None if there is none of this id."""
        for request in self._active:
            if request.info.request_id == request_id:
                return request.metrics.so_far(request.engine_requests)
        return None

    def fail_all(self, error: DynamoError) -> None:
        """End every request with ``error``: the drain timeout has passed."""
        # A copy: each that fails removes itself.
        for request in list(self._active):
            request.fail(error)

    def _show_in_progress(self) -> None:
        show_in_progress(self.metrics, [request.metrics for request in self._active])
        self.metrics.show_used_blocks(
            (request.model.name, len(choice.original.token_ids) + choice.tokens)
            for request in self._active
            for choice in request.engine_requests
            if choice.decision is not None
        )

    def _sweep(self) -> None:
        assert self._silence_s is not None, "armed only with a timeout"
        limit_s = time.monotonic() - self._silence_s
        for request in [active for active in self._active if active.last_activity_s < limit_s]:
            request.silent(BackendSilent(f"the engine was silent for {self._silence_s:g} s"))
        self._timer = self._loop.call_later(min(1.0, self._silence_s / 4), self._sweep)

    def _keep_alive(self, interval_s: float) -> None:
        before = time.monotonic() - interval_s
        for request in [active for active in self._active if active.idle_since < before]:
            request.keep_alive()
        self._keep_alive_timer = self._loop.call_later(interval_s, self._keep_alive, interval_s)
