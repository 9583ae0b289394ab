"""The generation routes: /v1/chat/completions, its batches, /v1/completions, and other APIs;
``nvext``.

Body → typed request → model → prompt and token ids → worker → stream, all in one call of the HTTP
handler; only large bodies are parsed, rendered and tokenized in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

from dynamo.errors import DynamoError, NoInstances
from dynamo.frontend.apis.chat.batch import CHAT_BATCH, CHAT_BATCH_PATH
from dynamo.frontend.apis.chat.generation import (
    CHAT,
    COMPLETION,
    GenerationApi,
    adapt,
    reject_early,
    reject_large,
    requested_model,
)
from dynamo.frontend.disagg.prefill_request import DECODE_OVERRIDE
from dynamo.frontend.models.model import TokenModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES
from dynamo.frontend.prompt.engine_options import QUERY_ANNOTATION
from dynamo.frontend.prompt.images import ImageFetcher
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.headers import check_fields, request_id, routed
from dynamo.frontend.requests.recent import Prefilled, RequestInfo
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.http import Exchange
from dynamo.http.routes import Route, Routes
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.protocols.openai import CHAT_PATH, COMPLETIONS_PATH, GenerationRequest, NvExt
from dynamo.router.decision.decision import Decision
from dynamo.runtime.process.tasks import Tasks

log = logging.getLogger(__name__)
_TOKENS_PER_TURN = 1 << 19  # routed and sent by one request in one loop turn: 5-10 ms
_TOKENS_PER_CHOICE = 8192  # the cost of routing and sending a choice of no tokens, in tokens
_PREFILL, _DECODE = "prefill", "decode"


def location_phase(nvext: NvExt) -> str | None:
    """The phase after ``query_instance_id:``, often ""; None if the request asks for an answer."""
    for annotation in nvext.annotations or ():
        name, _, phase = annotation.partition(":")
        if name == QUERY_ANNOTATION:
            return phase
    return None


def location(
    dispatch: Dispatch, tokens: Tokens, routing: Routing | None, phase: str, ranks: bool
) -> dict[str, Any]:
    """The workers that the prompt would go to now; reserves nothing.

    ``phase``: prefill or decode alone, else both. Without prefill workers one worker does both.
    Raises what :meth:`Picker.pick` raises.
    """
    fields: dict[str, Any] = {}
    # With a prefill worker the blocks come from there: caches of decode workers count for nothing.
    prefill = dispatch.prefill.locate(tokens, routing) if dispatch.prefill is not None else None
    override = DECODE_OVERRIDE if prefill is not None else None
    if prefill is None or phase != _PREFILL:
        decode = dispatch.picker.pick(None, tokens, routing=routing, override=override)
        fields |= _ids(_DECODE, decode, ranks) if phase != _PREFILL else {}
        prefill = prefill or decode
    return fields if phase == _DECODE else _ids(_PREFILL, prefill, ranks) | fields


def _ids(phase: str, target: Decision | Prefilled, ranks: bool) -> dict[str, Any]:
    ids = {f"{phase}_worker_id": target.worker_id}
    return {**ids, f"{phase}_dp_rank": target.dp_rank} if ranks else ids


class OpenAIRoutes:
    """Parse requests and start them; :class:`ActiveRequest` does the rest."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks
        self._unknown = registry.settings.unknown_field_policy
        domains = registry.settings.allowed_media_domains
        self._images = ImageFetcher(domains) if domains else None
        self._ignores_nvext = registry.settings.disable_nvext
        self._adapt = partial(adapt, models, self._ignores_nvext)

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.post(CHAT_PATH, self.route(CHAT))
        routes.post(CHAT_BATCH_PATH, self.route(CHAT_BATCH))
        routes.post(COMPLETIONS_PATH, self.route(COMPLETION))

    def route(self, api: GenerationApi) -> Route:
        """The route of ``api``, whose errors have its shape from now on."""
        if api.errors is not None:
            self._registry.error_shapes[api.endpoint] = api.errors
        return partial(self._serve, api)

    def _serve(self, api: GenerationApi, exchange: Exchange) -> None:
        registry, models, size_bytes = self._registry, self._models, len(exchange.body)
        limited = registry.refuses or models.saturation.count
        if limited and reject_early(registry, models, exchange, api.endpoint):
            return
        if size_bytes > INLINE_BODY_BYTES:
            self._tasks.spawn(self._serve_large(api, exchange), name="large body")
            return
        model = "unknown"
        try:
            parsed = api.parse(exchange.body, unknown=self._unknown)
            model = requested_model(models, parsed, api.model_type)
            loaded = models.find(model, api.model_type)
            check_fields(parsed, exchange.api_key, self._ignores_nvext)
            if api.complete is not None:
                # Earlier turns are rendered, too: a long history takes a thread.
                size_bytes += api.complete(parsed, exchange)
        except DynamoError as error:
            # Parsed again there: a wait is rare, and nothing of this try is kept.
            if isinstance(error, NoInstances) and models.is_loading(model):
                self._tasks.spawn(self._serve_large(api, exchange), name="wait for the model")
                return
            registry.hold_or_refuse(exchange, api.endpoint, error, model)
            return
        self._adapt(parsed, loaded)
        # While the request waits, its tokens are in memory, but not its body.
        registry.release_body(exchange)
        info = RequestInfo(api.endpoint, *request_id(exchange.headers, parsed.request_id))
        request = ActiveRequest(registry, exchange, info, loaded.metrics, bool(parsed.stream))
        preprocessor = loaded.preprocessor
        images = self._images
        if size_bytes > preprocessor.inline_limit_bytes or (
            api.model_type == "Chat"
            and (
                parsed.chat_template is not None
                or (images is not None and images.wanted(parsed.messages))
            )
        ):
            later = self._prepare_off_loop(request, loaded, api, parsed)
            self._tasks.spawn(later, name="long prompt")
            return
        try:
            self._dispatch(request, loaded, api, parsed, api.prepare(preprocessor, parsed))
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            request.fail(error)

    async def _serve_large(self, api: GenerationApi, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread; wait for a loading model."""
        registry, models = self._registry, self._models
        threads = registry.off_loop
        model = "unknown"
        registry.enter()
        try:
            with threads.hold(len(exchange.body)):
                if models.saturation.count and await reject_large(
                    registry, models, exchange, api.endpoint
                ):
                    return
                parsed = await threads.run(api.parse, exchange.body, unknown=self._unknown)
                model = requested_model(models, parsed, api.model_type)
                loaded = await models.find_loaded(model, api.model_type)
                registry.release_body(exchange)
                # A client that left during the parse has no ActiveRequest yet that would end.
                if exchange.gone:
                    registry.abandoned(exchange, api.endpoint, model, bool(parsed.stream))
                    return
                check_fields(parsed, exchange.api_key, self._ignores_nvext)
                if api.complete is not None:
                    api.complete(parsed, exchange)
                self._adapt(parsed, loaded)
                info = RequestInfo(api.endpoint, *request_id(exchange.headers, parsed.request_id))
                streams = bool(parsed.stream)
                request = ActiveRequest(registry, exchange, info, loaded.metrics, streams)
                await self._prepare_off_loop(request, loaded, api, parsed)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, api.endpoint, error, model)
        except asyncio.CancelledError:
            raise
        except BaseException:  # also panics in Rust
            log.exception("a request to %s failed", api.endpoint)
            failure = DynamoError("Internal server error")
            registry.hold_or_refuse(exchange, api.endpoint, failure, "unknown")
        finally:
            registry.leave()

    async def _prepare_off_loop(
        self, request: ActiveRequest, loaded: TokenModel, api: GenerationApi, parsed: Any
    ) -> None:
        try:
            threads = self._registry.off_loop
            images = self._images if api.model_type == "Chat" else None
            if images is not None and loaded.preprocessor.images is not None:
                await images.fetch(parsed.messages)
                if request.closed:
                    return
            prepared = await api.prepare_off_loop(loaded.preprocessor, parsed, threads)
            if not request.closed:
                self._dispatch(request, loaded, api, parsed, prepared)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            request.fail(error)

    def _dispatch(
        self,
        request: ActiveRequest,
        loaded: TokenModel,
        api: GenerationApi,
        parsed: GenerationRequest,
        prepared: Prepared,
    ) -> None:
        """Choose a worker for every choice, reserve its load, send."""
        registry, dispatch, info = self._registry, loaded.dispatch, request.info
        prepared_s = time.monotonic()
        stream = api.stream if prepared.answer is None else api.parsed_stream
        generation = stream(
            parsed,
            prepared,
            loaded.preprocessor.tokenizer,
            api.id_prefix + info.request_id,
            int(time.time()),
            force_usage=registry.settings.force_usage,
        )
        worker_id_field = None if parsed.nvext is None else self._worker_id_field
        request.prepared(generation, prepared_s, prepared.images, worker_id_field)
        routing, exchange = prepared.requests[0].routing, request.exchange
        routing = routed(routing, exchange.headers, exchange.api_key, self._ignores_nvext)
        if parsed.nvext is not None:
            # A bound method of the metrics: one of the request would make a cycle.
            generation.timing = request.metrics.timing
            phase = location_phase(parsed.nvext)
            if phase is not None:
                tokens = prepared.prompts[0].token_ids
                worker_ids = location(dispatch, tokens, routing, phase, self._models.kv_mode)
                generation.worker_id = worker_ids
                request.respond_location(generation.location())
                return
        engine_requests = []
        for index, preprocessed in enumerate(prepared.requests):
            preprocessed.routing = routing
            # Engines identify requests by id, so each choice has an id of its own.
            choice_id = f"{request.engine_id}-{index}" if index else request.engine_id
            engine_requests.append(EngineRequest(request, index, dispatch, choice_id, preprocessed))
        prompt_tokens = prepared.prompt_tokens
        at_once = 1
        if len(engine_requests) > 1:
            choice_tokens = _TOKENS_PER_CHOICE + prompt_tokens // len(prepared.prompts)
            at_once = max(1, _TOKENS_PER_TURN // choice_tokens)
        request.send(dispatch, engine_requests, prompt_tokens, at_once=at_once)
        if len(engine_requests) > at_once and not request.closed:
            later = _send_rest(request, loaded, engine_requests[at_once:], at_once)
            self._tasks.spawn(later, name="many choices")

    def _worker_id_field(self, decision: Decision, prefilled: Prefilled | None) -> dict[str, Any]:
        """``nvext.worker_id`` of a request; ``prefilled`` by a prefill worker, if any."""
        ranks = self._models.kv_mode
        return _ids(_PREFILL, prefilled or decision, ranks) | _ids(_DECODE, decision, ranks)


async def _send_rest(
    request: ActiveRequest, loaded: TokenModel, engine_requests: list[EngineRequest], per_turn: int
) -> None:
    """Send the choices that exceed the time of one loop turn, ``per_turn`` in each turn."""
    try:
        for number, engine_request in enumerate(engine_requests):
            if number % per_turn == 0:
                await asyncio.sleep(0)
            if request.closed:
                return
            loaded.dispatch.send(engine_request)
    except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
        request.fail(error)
