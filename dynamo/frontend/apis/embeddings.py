"""POST /v1/embeddings for models that take tokens: all inputs go to one worker in one message."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from functools import partial

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, shorten
from dynamo.frontend.answer.embeddings import EmbeddingsAnswer
from dynamo.frontend.apis.chat.generation import reject_early, reject_large
from dynamo.frontend.apis.relay.request import EmbeddingsWriter, RelayedEngineRequest
from dynamo.frontend.models.model import TokenModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import DESERIALIZE, INLINE_BODY_BYTES, check_engine_value
from dynamo.frontend.prompt.engine_options import routing_of
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import check_json
from dynamo.frontend.requests.headers import check_nvext, request_id, routed
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.frontend.requests.request_metrics import EMBEDDINGS
from dynamo.http import Exchange
from dynamo.http.routes import Routes
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.engine import PreprocessedEmbeddingRequest, PreprocessedRequest
from dynamo.protocols.openai import MAX_EMBEDDING_INPUTS, EmbeddingBody, StrictEmbeddingBody
from dynamo.runtime.process.tasks import Tasks

_MODEL_TYPE = "Embedding"
log = logging.getLogger(__name__)
MAX_BATCH_TOKENS = 1 << 20
"""Tokens of all inputs of a request."""
_STRICT = msgspec.json.Decoder(StrictEmbeddingBody)
_LENIENT = msgspec.json.Decoder(EmbeddingBody)


def parse_embedding(body: bytes, *, ignore_unsupported: bool = False) -> EmbeddingBody:
    """Decode and check a request. Raises InvalidArgument. O(bytes)."""
    check_json(body)
    try:
        request = (_LENIENT if ignore_unsupported else _STRICT).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    entries = [request.input] if isinstance(request.input, str) else request.input
    if not entries or any(entry in ("", []) for entry in entries):
        raise InvalidArgument("Validation: 'input' and its entries cannot be empty")
    _check_entries(entries)
    if request.nvext is not None and request.nvext.router_config_override is not None:
        check_engine_value("nvext.router_config_override", request.nvext.router_config_override)
    return request


def embedding_inputs(preprocessor: Preprocessor, request: EmbeddingBody) -> list[Tokens]:
    """Return the token ids of each input. Thread-safe. Raises InvalidArgument. O(characters)."""
    special = request.add_special_tokens is not False
    inputs, total = [], 0
    for number, entry in enumerate(request.inputs):
        ids = _ids(preprocessor, entry, special)
        limit = preprocessor.context_length
        if limit is not None and len(ids) > limit:
            raise InvalidArgument(
                f"This model's maximum context length is {limit} tokens. However, 'input' "
                f"{number} has {len(ids)} tokens. Please shorten it."
            )
        # Checked with each: the inputs behind the limit are not tokenized.
        total += len(ids)
        if total > MAX_BATCH_TOKENS:
            raise InvalidArgument(
                f"Validation: 'input' takes at most {MAX_BATCH_TOKENS} tokens in all, got more; "
                "send fewer inputs in a request"
            )
        inputs.append(ids)
    return inputs


def joined(inputs: list[Tokens]) -> Tokens:
    """The ids of all inputs one after another: what the router counts as the prompt."""
    if len(inputs) == 1:
        return inputs[0]
    ids = array("I")
    for input_ids in inputs:
        ids.extend(input_ids)
    return ids


def _check_entries(entries: Sequence[object]) -> None:
    if len({type(entry) for entry in entries}) > 1:
        raise InvalidArgument(
            "Validation: 'input' must be a string, a list of strings, a list of token ids or a "
            "list of lists of token ids, not a mixture"
        )
    # A list of ints is one input, however many tokens it has.
    if len(entries) > MAX_EMBEDDING_INPUTS and not isinstance(entries[0], int):
        raise InvalidArgument(
            f"Validation: 'input' takes at most {MAX_EMBEDDING_INPUTS} inputs, got {len(entries)}"
        )


def _ids(preprocessor: Preprocessor, entry: str | list[int], special: bool) -> Tokens:
    tokenizer = preprocessor.tokenizer
    if isinstance(entry, str):
        return tokenizer.encode(entry, special)
    largest = max(entry)
    if largest >= tokenizer.vocab_size:
        raise InvalidArgument(
            f"Validation: token id {shorten(largest)} is out of range, the vocabulary has "
            f"{tokenizer.vocab_size} tokens"
        )
    return tokens(entry)


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
        limited = registry.refuses or models.saturation.count
        if limited and reject_early(registry, models, exchange, EMBEDDINGS):
            return
        size_bytes, model = len(exchange.body), "unknown"
        try:
            if size_bytes > INLINE_BODY_BYTES:
                self._tasks.spawn(self._serve_large(exchange), name="large body")
                return
            parsed = self._parse(exchange.body)
            model = parsed.model
            loaded = models.find(model, _MODEL_TYPE)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, EMBEDDINGS, error, model)
            return
        request = self._begin(exchange, loaded)
        if size_bytes > loaded.preprocessor.inline_limit_bytes:
            self._tasks.spawn(self._send_off_loop(request, loaded, parsed), name="long input")
            return
        try:
            self._send(request, loaded, parsed, embedding_inputs(loaded.preprocessor, parsed))
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            request.fail(error)

    async def _serve_large(self, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread."""
        registry, models, model = self._registry, self._models, "unknown"
        threads = registry.off_loop
        registry.enter()
        try:
            with threads.hold(len(exchange.body)):
                if models.saturation.count and await reject_large(
                    registry, models, exchange, EMBEDDINGS
                ):
                    return
                parsed = await threads.run(self._parse, exchange.body)
                model = parsed.model
                if exchange.gone:
                    registry.abandoned(exchange, EMBEDDINGS, model, False)
                    return
                loaded = models.find(model, _MODEL_TYPE)
                await self._send_off_loop(self._begin(exchange, loaded), loaded, parsed)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, EMBEDDINGS, error, model)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also panics in Rust
            log.exception("a request for embeddings failed")
            exchange.crashed(error)
        finally:
            registry.leave()

    def _begin(self, exchange: Exchange, loaded: TokenModel) -> ActiveRequest:
        """Admit the request: from here on it ends through its :class:`ActiveRequest`."""
        self._registry.release_body(exchange)
        info = RequestInfo(EMBEDDINGS, *request_id(exchange.headers))
        writer = EmbeddingsWriter()
        return ActiveRequest(self._registry, exchange, info, loaded.metrics, False, writer)

    async def _send_off_loop(
        self, request: ActiveRequest, loaded: TokenModel, parsed: EmbeddingBody
    ) -> None:
        try:
            threads = self._registry.off_loop
            inputs = await threads.run(embedding_inputs, loaded.preprocessor, parsed)
            if not request.closed:
                self._send(request, loaded, parsed, inputs)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            request.fail(error)

    def _send(
        self,
        request: ActiveRequest,
        loaded: TokenModel,
        parsed: EmbeddingBody,
        inputs: list[Tokens],
    ) -> None:
        """Choose a worker for all inputs, reserve its load, send."""
        prepared_s = time.monotonic()
        ids, as_base64 = joined(inputs), parsed.encoding_format == "base64"
        answer = EmbeddingsAnswer(parsed.model, len(inputs), len(ids), as_base64)
        request.prepared(answer, prepared_s)
        message = PreprocessedEmbeddingRequest(
            model=parsed.model,
            token_ids=inputs,
            dimensions=parsed.dimensions,
            mdc_sum=loaded.card.checksum or None,
        )
        exchange, ignores_nvext = request.exchange, self._registry.settings.disable_nvext
        nvext = None if ignores_nvext else parsed.nvext
        check_nvext(nvext, exchange.api_key)
        routing = routing_of(nvext, loaded.card.lora_name, parsed.cache_salt)
        routing = routed(routing, exchange.headers, exchange.api_key, ignores_nvext)
        override = None if nvext is None else nvext.router_config_override
        preprocessed = PreprocessedRequest(
            parsed.model, ids, routing=routing, router_config_override=override
        )
        dispatch = loaded.dispatch
        engine_request = RelayedEngineRequest(request, answer, dispatch, preprocessed, message)
        # Not through a prefill worker: nothing is generated behind the prompt.
        request.send(dispatch, [engine_request], len(ids), prefill=False)
