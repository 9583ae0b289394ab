"""POST /v1/embeddings, /v1/rerank, /v1/score, /classify and /pooling, for models that take tokens.

All inputs of a request go to one worker in one message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import msgspec

from dynamo.config.frontend import REFUSE
from dynamo.errors import DynamoError, InvalidArgument, NoInstances, shorten
from dynamo.frontend.answer.pooling import (
    ClassifyAnswer,
    EmbeddingsAnswer,
    PoolingAnswer,
    PoolingOrigin,
    RerankAnswer,
    ScoreAnswer,
    VectorsAnswer,
)
from dynamo.frontend.apis.chat.generation import adapt, reject_early, reject_large, requested_model
from dynamo.frontend.apis.pooling.inputs import Inputs, pair_inputs, text_inputs
from dynamo.frontend.apis.relay.request import PoolingWriter, RelayedEngineRequest
from dynamo.frontend.models.model import TokenModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES, check_engine_value
from dynamo.frontend.prompt.engine_options import request_routing
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import BodyDecoder
from dynamo.frontend.requests.headers import check_fields, request_id, routed
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.http import Exchange
from dynamo.http.routes import Routes
from dynamo.protocols.control import ModelCard
from dynamo.protocols.engine import PreprocessedEmbeddingRequest, PreprocessedRequest
from dynamo.protocols.openai import MAX_EMBEDDING_INPUTS
from dynamo.protocols.pooling import (
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    POOLING_BODIES,
    POOLING_KEY,
    POOLING_PATHS,
    POOLING_TYPES,
    RERANK,
    SCORE,
    AnyPoolingBody,
    InputBody,
    PoolingBody,
    PoolingFacts,
    RerankBody,
)
from dynamo.runtime.process.tasks import Tasks

log = logging.getLogger(__name__)
_INLINE_TEXTS = 64
"""Pairs of more texts are tokenized in a thread, however short these are."""


class PoolingApi(NamedTuple):
    """One API. ``inputs`` are made in a thread for long bodies; ``answer`` makes the body."""

    name: str
    inputs: Callable[[Preprocessor, PoolingFacts, Any], Inputs]
    answer: Callable[[Any, PoolingFacts, PoolingOrigin], PoolingAnswer]

    @property
    def model_type(self) -> str:
        """The type of the models that have it."""
        return POOLING_TYPES[self.name]

    def parse(self, body: bytes, *, unknown: str = REFUSE) -> Any:
        """Decode and check a request. Raises InvalidArgument. O(bytes)."""
        request = _decoder(POOLING_BODIES[self.name])(body, unknown)
        if isinstance(request, InputBody):
            _check_inputs(request)
        if request.nvext is not None and request.nvext.router_config_override is not None:
            override = request.nvext.router_config_override
            check_engine_value("nvext.router_config_override", override)
        return request


@cache
def _decoder(kind: type[AnyPoolingBody]) -> BodyDecoder[Any]:
    return BodyDecoder(kind)


def facts_of(card: ModelCard) -> PoolingFacts:
    """Return what the worker of ``card`` says about its model. O(classes)."""
    stored = card.runtime_config.runtime_data.get(POOLING_KEY)
    try:
        return PoolingFacts() if stored is None else msgspec.convert(stored, PoolingFacts)
    except msgspec.ValidationError:
        return PoolingFacts()


def _check_inputs(request: InputBody) -> None:
    if (request.input is None) == (request.messages is None):
        raise InvalidArgument("Validation: give either 'input' or 'messages'")
    if request.messages is not None:
        if not request.messages or not all(request.messages):
            raise InvalidArgument("Validation: 'messages' and its entries cannot be empty")
        _check_entries("messages", request.messages)
        return
    entries = [request.input] if isinstance(request.input, str) else request.input or []
    if not entries or any(entry in ("", []) for entry in entries):
        raise InvalidArgument("Validation: 'input' and its entries cannot be empty")
    _check_entries("input", entries)


def _check_entries(field: str, entries: Sequence[object]) -> None:
    if len({type(entry) for entry in entries}) > 1:
        forms = "a string, a list of strings, a list of token ids or a list of lists of token ids"
        if field == "messages":
            forms = "a list of messages or a list of lists of messages"
        raise InvalidArgument(f"Validation: '{field}' must be {forms}, not a mixture")
    # A list of ints is one input, however many tokens it has; a list of objects is one chat.
    if len(entries) > MAX_EMBEDDING_INPUTS and not isinstance(entries[0], int | dict):
        raise InvalidArgument(
            f"Validation: '{field}' takes at most {MAX_EMBEDDING_INPUTS} inputs, got {len(entries)}"
        )


def _vectors_inputs(preprocessor: Preprocessor, facts: PoolingFacts, body: PoolingBody) -> Inputs:
    if body.task not in (None, facts.task):
        raise InvalidArgument(
            f"Validation: 'task' {shorten(repr(body.task))} is not that of model "
            f"`{shorten(body.model)}`, which computes {facts.task!r}; leave 'task' out, or start "
            "the worker with --pooler-config"
        )
    return text_inputs(preprocessor, facts, body)


def _rerank_answer(body: RerankBody, facts: PoolingFacts, origin: PoolingOrigin) -> PoolingAnswer:
    documents = None if body.return_documents is False else body.pair_texts[1]
    return RerankAnswer(origin, documents, body.top_n or 0)


EMBEDDINGS_API = PoolingApi(
    EMBEDDINGS,
    text_inputs,
    lambda body, facts, origin: EmbeddingsAnswer(origin, body.encoding_format == "base64"),
)
APIS = (
    EMBEDDINGS_API,
    PoolingApi(RERANK, pair_inputs, _rerank_answer),
    PoolingApi(SCORE, pair_inputs, lambda body, facts, origin: ScoreAnswer(origin)),
    PoolingApi(
        CLASSIFY,
        text_inputs,
        lambda body, facts, origin: ClassifyAnswer(origin, facts.labels),
    ),
    PoolingApi(
        POOLING,
        _vectors_inputs,
        lambda body, facts, origin: VectorsAnswer(origin, body.encoding_format == "base64"),
    ),
)
"""Every API of ``POOLING_PATHS``."""


class _PoolingCall(NamedTuple):
    """An admitted request and all that its message is made of."""

    api: PoolingApi
    request: ActiveRequest
    model: TokenModel
    body: Any  # one of AnyPoolingBody, whose common fields have the names of other requests
    facts: PoolingFacts

    @property
    def is_long(self) -> bool:
        """Whether there are many texts, or a template renders them: both belong in a thread."""
        if isinstance(self.body, InputBody):
            return self.body.messages is not None
        values = msgspec.structs.astuple(self.body)
        many = any(isinstance(value, list) and len(value) > _INLINE_TEXTS for value in values)
        return many or bool(self.model.card.custom_template_path)

    def inputs(self) -> Inputs:
        """Tokenize. Thread-safe. Raises InvalidArgument."""
        return self.api.inputs(self.model.preprocessor, self.facts, self.body)


class PoolingRoutes:
    """Parse, tokenize, send; the rest is as for every request."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks
        self._unknown = registry.settings.unknown_field_policy
        self._ignores_nvext = registry.settings.disable_nvext

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        apis = {api.name: api for api in APIS}
        for path, name in POOLING_PATHS.items():
            routes.post(path, partial(self._serve, apis[name]))

    def _serve(self, api: PoolingApi, exchange: Exchange) -> None:
        registry, models = self._registry, self._models
        limited = registry.refuses or models.saturation.count
        if limited and reject_early(registry, models, exchange, api.name):
            return
        size_bytes, model = len(exchange.body), "unknown"
        try:
            if size_bytes > INLINE_BODY_BYTES:
                self._tasks.spawn(self._serve_large(api, exchange), name="large body")
                return
            parsed = api.parse(exchange.body, unknown=self._unknown)
            model = requested_model(models, parsed, api.model_type)
            loaded = models.find(model, api.model_type)
            check_fields(parsed, exchange.api_key, self._ignores_nvext)
        except DynamoError as error:
            # Parsed again there: a wait is rare, and nothing of this try is kept.
            if isinstance(error, NoInstances) and models.is_loading(model):
                self._tasks.spawn(self._serve_large(api, exchange), name="wait for the model")
                return
            registry.hold_or_refuse(exchange, api.name, error, model)
            return
        call = self._begin(api, exchange, loaded, parsed)
        if size_bytes > loaded.preprocessor.inline_limit_bytes or call.is_long:
            self._tasks.spawn(self._send_off_loop(call), name="long input")
            return
        try:
            self._send(call, call.inputs())
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            call.request.fail(error)

    async def _serve_large(self, api: PoolingApi, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread; wait for a loading model."""
        registry, models, model = self._registry, self._models, "unknown"
        threads = registry.off_loop

        def refuse(error: DynamoError) -> None:
            registry.hold_or_refuse(exchange, api.name, error, model)

        with registry.preparing(exchange, refuse), threads.hold(len(exchange.body)):
            if models.saturation.count and await reject_large(registry, models, exchange, api.name):
                return
            parsed = await threads.run(api.parse, exchange.body, unknown=self._unknown)
            model = requested_model(models, parsed, api.model_type)
            if exchange.gone:
                registry.abandoned(exchange, api.name, model, False)
                return
            loaded = await models.find_loaded(model, api.model_type)
            check_fields(parsed, exchange.api_key, self._ignores_nvext)
            await self._send_off_loop(self._begin(api, exchange, loaded, parsed))

    def _begin(
        self, api: PoolingApi, exchange: Exchange, loaded: TokenModel, parsed: Any
    ) -> _PoolingCall:
        """Admit the request: from here on it ends through its :class:`ActiveRequest`."""
        adapt(self._models, self._ignores_nvext, parsed, loaded)
        self._registry.release_body(exchange)
        info = RequestInfo(api.name, *request_id(exchange.headers, parsed.request_id))
        writer = PoolingWriter()
        request = ActiveRequest(self._registry, exchange, info, loaded.metrics, False, writer)
        return _PoolingCall(api, request, loaded, parsed, facts_of(loaded.card))

    async def _send_off_loop(self, call: _PoolingCall) -> None:
        try:
            inputs = await self._registry.off_loop.run(call.inputs)
            if not call.request.closed:
                self._send(call, inputs)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            call.request.fail(error)

    def _send(self, call: _PoolingCall, inputs: Inputs) -> None:
        """Choose a worker for all inputs, reserve its load, send."""
        prepared_s = time.monotonic()
        api, request, loaded, parsed, facts = call
        ids = inputs.joined
        origin = PoolingOrigin(
            parsed.model, inputs.vectors, len(ids), f"{api.name}-{request.engine_id}"
        )
        answer = api.answer(parsed, facts, origin)
        request.prepared(answer, prepared_s)
        message = PreprocessedEmbeddingRequest(
            model=parsed.model,
            token_ids=inputs.token_ids,
            dimensions=getattr(parsed, "dimensions", None),
            mdc_sum=loaded.card.checksum or None,
            task=None if api.name == EMBEDDINGS else facts.task,
            use_activation=parsed.use_activation,
            queries=inputs.queries,
            type_one_at=inputs.type_one_at,
        )
        exchange, nvext = request.exchange, parsed.nvext
        routing = request_routing(parsed, loaded.card.lora_name)
        routing = routed(routing, exchange.headers, exchange.api_key, self._ignores_nvext)
        override = None if nvext is None else nvext.router_config_override
        preprocessed = PreprocessedRequest(
            parsed.model, ids, routing=routing, router_config_override=override
        )
        dispatch = loaded.dispatch
        engine_request = RelayedEngineRequest(request, answer, dispatch, preprocessed, message)
        # Not through a prefill worker: nothing is generated behind the prompt.
        request.send(dispatch, [engine_request], len(ids), prefill=False)
