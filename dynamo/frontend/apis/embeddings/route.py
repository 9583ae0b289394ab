"""POST /v1/embeddings for models that take tokens: all inputs go to one worker in one message."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from dynamo.errors import DynamoError
from dynamo.frontend.apis.chat.generation import reject_early, reject_large
from dynamo.frontend.apis.chat.headers import request_id, routed
from dynamo.frontend.apis.embeddings.answer import EmbeddingsAnswer
from dynamo.frontend.apis.embeddings.prompt import embedding_inputs, joined, parse_embedding
from dynamo.frontend.apis.relay.request import EmbeddingRequest, RelayedEngineRequest
from dynamo.frontend.models.model import TokenModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Routes
from dynamo.protocols.codec import Tokens, encode
from dynamo.protocols.embedding import EmbeddingBody, PreprocessedEmbeddingRequest
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.runtime.process.tasks import Tasks

_ENDPOINT = "embeddings"
_MODEL_TYPE = "Embedding"
log = logging.getLogger(__name__)


class EmbeddingRoutes:
    """Parse, tokenize, send; the rest is as for every request."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks
        lenient = registry.settings.ignore_unsupported_fields
        self._parse = partial(parse_embedding, ignore_unsupported=lenient)

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        routes.post("/v1/embeddings", self._serve)

    def _serve(self, exchange: Exchange) -> None:
        registry, models = self._registry, self._models
        limited = registry.draining or models.saturation.count
        if limited and reject_early(registry, models, exchange, _ENDPOINT):
            return
        size_bytes, model = len(exchange.body), "unknown"
        try:
            if size_bytes > INLINE_BODY_BYTES:
                self._tasks.spawn(self._serve_large(exchange), name="large body")
                return
            asked = self._parse(exchange.body)
            model = asked.model
            loaded = models.find(model, _MODEL_TYPE)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, _ENDPOINT, error, model)
            return
        request = self._begin(exchange, loaded)
        if size_bytes > loaded.preprocessor.inline_limit_bytes:
            self._tasks.spawn(self._send_off_loop(request, loaded, asked), name="long input")
            return
        try:
            self._send(request, loaded, asked, embedding_inputs(loaded.preprocessor, asked))
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            request.crashed(error)

    async def _serve_large(self, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread."""
        registry, models, model = self._registry, self._models, "unknown"
        threads = registry.off_loop
        registry.enter()
        try:
            with threads.hold(len(exchange.body)):
                if models.saturation.count and await reject_large(
                    registry, models, exchange, _ENDPOINT
                ):
                    return
                asked = await threads.run(self._parse, exchange.body)
                model = asked.model
                if exchange.gone:
                    registry.abandoned(exchange, _ENDPOINT, model, False)
                    return
                loaded = models.find(model, _MODEL_TYPE)
                await self._send_off_loop(self._begin(exchange, loaded), loaded, asked)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, _ENDPOINT, error, model)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also panics in Rust
            log.exception("a request for embeddings failed")
            exchange.crashed(error)
        finally:
            registry.leave()

    def _begin(self, exchange: Exchange, loaded: TokenModel) -> EmbeddingRequest:
        """Admit the request: from here on it ends through its :class:`ActiveRequest`."""
        exchange.body = b""
        info = RequestInfo(_ENDPOINT, *request_id(exchange.headers))
        return EmbeddingRequest(self._registry, exchange, info, loaded.metrics, False)

    async def _send_off_loop(
        self, request: EmbeddingRequest, loaded: TokenModel, asked: EmbeddingBody
    ) -> None:
        try:
            threads = self._registry.off_loop
            inputs = await threads.run(embedding_inputs, loaded.preprocessor, asked)
            if not request.closed:
                self._send(request, loaded, asked, inputs)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            request.crashed(error)

    def _send(
        self,
        request: EmbeddingRequest,
        loaded: TokenModel,
        asked: EmbeddingBody,
        inputs: list[Tokens],
    ) -> None:
        """Choose a worker for all inputs, reserve its load, send."""
        request.metrics.prepared_s = time.monotonic()
        ids, as_base64 = joined(inputs), asked.encoding_format == "base64"
        answer = EmbeddingsAnswer(asked.model, len(inputs), len(ids), as_base64)
        request.generation = answer
        lora = loaded.card.lora_name
        routing = None if lora is None else Routing(lora_name=lora)
        message = PreprocessedEmbeddingRequest(
            model=asked.model,
            token_ids=inputs,
            dimensions=asked.dimensions,
            mdc_sum=loaded.card.checksum or None,
            routing=routing,
        )
        preprocessed = PreprocessedRequest(
            asked.model, ids, routing=routed(routing, request.exchange.headers)
        )
        dispatch = loaded.dispatch
        one = RelayedEngineRequest(request, answer, dispatch, preprocessed, encode(message))
        request.engine_requests = [one]
        dispatch.decode(one)
        if not request.closed:
            request.dispatched(len(ids))
