"""The generation routes: /v1/chat/completions and /v1/completions.

Body → typed request → model → prompt and token ids → worker → stream, all in one call of the HTTP
handler; only large bodies are decoded, rendered and tokenized in a thread. Spec 5.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo.errors import DynamoError
from dynamo.frontend.answer.generation import ChatStream, CompletionStream, GenerationStream
from dynamo.frontend.api.headers import request_id, routed
from dynamo.frontend.api.nvext import located, shown
from dynamo.frontend.disagg.prefill_request import Prefilled
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.frontend.requests.dispatch import DispatchJob
from dynamo.frontend.requests.engine_request import EngineRequest, TrackedEngineRequest
from dynamo.frontend.requests.errors import error_response, explained, labels
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest, RequestInfo
from dynamo.http import Exchange
from dynamo.http.routes import Routes
from dynamo.protocols.openai import GenerationRequest
from dynamo.router.picker import Decision
from dynamo.runtime.requests.stream import REQUEST_ID
from dynamo.runtime.tasks import Tasks

if TYPE_CHECKING:
    from dynamo.frontend.models.model import ModelEntry
    from dynamo.frontend.models.registry import Models

__all__ = ["OpenAIRoutes"]

log = logging.getLogger(__name__)
_TOKENS_PER_TURN = 1 << 19  # routed and sent by one request: 5-10 ms
_TOKENS_PER_LEG = 8192  # what routing and sending cost without any tokens, in tokens
_RETRY = ("retry-after", "1")
_LOCATE = "query_instance_id"


class _Kind(NamedTuple):
    """What differs between the routes."""

    endpoint: str
    id_prefix: str
    model_type: str
    parse: Callable[..., Any]
    prepare: Callable[[Preprocessor, Any], Prepared]
    prepare_off_loop: Callable[[Preprocessor, Any, OffLoop], Awaitable[Prepared]]
    stream: type[GenerationStream]


_CHAT = _Kind(
    "chat_completions",
    "chatcmpl-",
    "Chat",
    parse_chat,
    Preprocessor.chat,
    Preprocessor.chat_off_loop,
    ChatStream,
)
_COMPLETION = _Kind(
    "completions",
    "cmpl-",
    "Completions",
    parse_completion,
    Preprocessor.completion,
    Preprocessor.completion_off_loop,
    CompletionStream,
)


class OpenAIRoutes:
    """Starts calls; what becomes of them is theirs (see :class:`ActiveRequest`)."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks
        self._lenient = registry.settings.ignore_unsupported_fields
        self._numbers = itertools.count()

    def install(self, routes: Routes) -> None:
        """Put the routes into the table."""
        routes.post("/v1/chat/completions", partial(self._serve, _CHAT))
        routes.post("/v1/completions", partial(self._serve, _COMPLETION))

    def _serve(self, kind: _Kind, exchange: Exchange) -> None:
        try:
            self._registry.admission.check()
            if len(exchange.body) > INLINE_BODY_BYTES:
                self._tasks.spawn(self._serve_large(kind, exchange), name="large body")
                return
            request = kind.parse(exchange.body, ignore_unsupported=self._lenient)
        except DynamoError as error:
            self._refuse(exchange, kind, error, "unknown")
            return
        found = self._accept(kind, exchange, request)
        if found is None:
            return
        call, entry = found
        preprocessor, size_bytes = entry.preprocessor, len(exchange.body)
        exchange.body = b""
        if size_bytes > preprocessor.inline_limit_bytes:
            later = self._prepare_later(call, entry, kind, request)
            self._tasks.spawn(later, name="long prompt")
            return
        try:
            self._dispatch(call, entry, kind, request, kind.prepare(preprocessor, request))
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            call.crashed(error)

    async def _serve_large(self, kind: _Kind, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread."""
        threads, admission = self._registry.off_loop, self._registry.admission
        admission.enter()
        try:
            with threads.hold(len(exchange.body)):
                body, exchange.body = exchange.body, b""
                request = await threads.run(kind.parse, body, ignore_unsupported=self._lenient)
                del body
                found = None if exchange.gone else self._accept(kind, exchange, request)
                if found is not None:
                    await self._prepare_later(*found, kind, request)
        except DynamoError as error:
            self._refuse(exchange, kind, error, "unknown")
        except asyncio.CancelledError:
            raise
        except BaseException:  # also panics in Rust
            log.exception("a request of %s failed", kind.endpoint)
            self._refuse(exchange, kind, DynamoError("Internal server error"), "unknown")
        finally:
            admission.leave()

    def _accept(
        self, kind: _Kind, exchange: Exchange, request: GenerationRequest
    ) -> tuple[ActiveRequest, ModelEntry] | None:
        """Find the model; None if the request was refused."""
        try:
            entry = self._models.find(request.model, kind.model_type)
        except DynamoError as error:
            self._refuse(exchange, kind, error, request.model)
            return None
        registry = self._registry
        info = RequestInfo(kind.endpoint, *request_id(exchange.headers))
        call = ActiveRequest(registry, exchange, info, entry.metrics, bool(request.stream))
        if registry.settings.disable_nvext:
            request.nvext = None
        return call, entry

    async def _prepare_later(
        self, call: ActiveRequest, entry: ModelEntry, kind: _Kind, request: GenerationRequest
    ) -> None:
        try:
            threads = self._registry.off_loop
            prepared = await kind.prepare_off_loop(entry.preprocessor, request, threads)
            if not call.closed:
                self._dispatch(call, entry, kind, request, prepared)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            call.crashed(error)

    def _refuse(self, exchange: Exchange, kind: _Kind, error: DynamoError, model: str) -> None:
        """The request did not get as far as a model."""
        metrics = self._registry.metrics
        found = labels(error)
        metrics.failures.labels(found.failure_class, found.reason).value += 1
        metrics.outcomes(model).ended(kind.endpoint, "unary", found.error_type)
        echoed = exchange.headers.get("x-request-id")
        headers = [] if echoed is None else [("x-request-id", echoed)]
        if error.status == 503:
            headers.append(_RETRY)
        status, body = error_response(explained(error, model), self._registry.overload_status)
        exchange.respond(status, body, headers=headers)

    def _dispatch(
        self,
        call: ActiveRequest,
        entry: ModelEntry,
        kind: _Kind,
        request: GenerationRequest,
        prepared: Prepared,
    ) -> None:
        """Choose a worker for every choice, book it, send."""
        call.metrics.prepared()
        generation = call.generation = kind.stream(
            request,
            prepared,
            entry.preprocessor.tokenizer,
            kind.id_prefix + call.info.request_id,
            int(time.time()),
            force_usage=self._registry.settings.force_usage,
        )
        if request.nvext is not None:
            # The meter's, not the call's: a call refers to its generation.
            generation.timing = call.metrics.timing
            call.describe = self._worker_id
        routing = routed(prepared.requests[0].routing, call.exchange.headers)
        phase = _location_query(request)
        if phase is not None:
            tokens, ranks = prepared.prompts[0].token_ids, self._models.kv_mode
            generation.worker_id = located(entry.dispatch, tokens, routing, phase, ranks)
            call.located()
            return
        make_leg = TrackedEngineRequest if entry.dispatch.tracks_output else EngineRequest
        legs = call.legs = [
            # Numbered, because clients may send the same id twice at once.
            make_leg(call, index, entry.picker, f"{call.info.request_id}/{next(self._numbers)}")
            for index in range(len(prepared.requests))
        ]
        engine_id = call.engine_id = self._registry.claim_id(call.info.request_id)
        # Each choice has an id of its own, because engines know their requests by it.
        jobs = [
            DispatchJob(
                leg,
                engine_request,
                routing,
                {REQUEST_ID: f"{engine_id}-{leg.index}" if leg.index else engine_id},
            )
            for leg, engine_request in zip(legs, prepared.requests, strict=True)
        ]
        prompt_tokens = prepared.prompt_tokens
        now = 1
        if len(jobs) > 1:
            leg_tokens = _TOKENS_PER_LEG + prompt_tokens // len(prepared.prompts)
            now = max(1, _TOKENS_PER_TURN // leg_tokens)
        for job in jobs[:now]:
            entry.dispatch.send(job)
            if call.closed:  # what the leg was to wait for failed at once
                return
        call.dispatched(prompt_tokens)
        if len(jobs) > now:
            self._tasks.spawn(_send_rest(call, entry, jobs[now:], now), name="many choices")

    def _worker_id(self, decision: Decision, prefilled: Prefilled | None) -> dict[str, Any]:
        return shown(decision, prefilled, self._models.kv_mode)


async def _send_rest(
    call: ActiveRequest, entry: ModelEntry, jobs: list[DispatchJob], per_turn: int
) -> None:
    """Send the choices that one loop turn has no time for, some in each turn."""
    try:
        for number, job in enumerate(jobs):
            if number % per_turn == 0:
                await asyncio.sleep(0)
            if call.closed:
                return
            entry.dispatch.send(job)
    except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
        call.crashed(error)


def _location_query(request: GenerationRequest) -> str | None:
    """The phase after ``query_instance_id:``, often ""; None if the request asks for an answer."""
    nvext = request.nvext
    for annotation in (nvext.annotations if nvext is not None else None) or ():
        name, _, phase = annotation.partition(":")
        if name == _LOCATE:
            return phase
    return None
