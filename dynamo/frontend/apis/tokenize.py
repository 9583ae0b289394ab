"""POST /tokenize and POST /detokenize, as on vLLM's server: prompts to token ids, and back.

The frontend has the tokenizer, so no worker is asked: a model answers also while its workers sleep.
Other APIs count the tokens of a prompt here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from dynamo.config.frontend import REFUSE
from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, NoInstances, shorten
from dynamo.frontend.answer.sse import json_bytes
from dynamo.frontend.apis.chat.generation import (
    GenerationApi,
    adapt,
    is_chat,
    requested_model,
)
from dynamo.frontend.models.model import LoadedModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import DESERIALIZE, MAX_COUNTED_TOKENS
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import BodyDecoder, check_chat, check_json
from dynamo.frontend.requests.errors import error_response, explained, id_headers, with_retry
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Route, Routes, in_task
from dynamo.protocols.engine import TokenId
from dynamo.protocols.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TemplateText,
)
from dynamo.runtime.process.tasks import Tasks

_INLINE_BYTES = 4 << 10
"""Also `tokenizers`, the slower library, takes little time for so much."""


class PromptCountRoutes:
    """Counts the tokens of a prompt as its generation would have them, in a thread.

    The body is that of the generation API.
    """

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def route(self, api: GenerationApi, body: Callable[[int], dict[str, Any]]) -> Route:
        """The route for prompts of ``api``; ``body`` makes the response of a number of tokens.

        The ``endpoint`` of ``api`` is the label of failures.
        """
        if api.errors is not None:
            self._registry.error_shapes[api.endpoint] = api.errors
        return in_task(self._tasks.spawn, partial(self._serve, api, body))

    async def _serve(
        self, api: GenerationApi, body: Callable[[int], dict[str, Any]], exchange: Exchange
    ) -> None:
        registry, threads = self._registry, self._registry.off_loop
        unknown = registry.settings.unknown_field_policy
        model = "unknown"
        try:
            registry.check(exchange)
            with threads.hold(len(exchange.body)):
                parsed = await threads.run(api.parse, exchange.body, unknown=unknown)
                model = requested_model(self._models, parsed, api.model_type)
                loaded = await self._models.find_loaded(model, api.model_type)
                if api.complete is not None:
                    api.complete(parsed, exchange)
                adapt(self._models, registry.settings.disable_nvext, parsed, loaded)
                prepared = await api.prepare_off_loop(loaded.preprocessor, parsed, threads)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, api.endpoint, error, model)
            return
        if exchange.resumed_at:  # it waited for a worker, and was counted as begun
            ended = registry.metrics.outcomes(model).requests
            ended[api.endpoint, "", model, "unary", "success"].value += 1
        headers = id_headers(api.errors, exchange.headers.get("x-request-id"))
        exchange.respond(200, json_bytes(body(prepared.prompt_tokens)), headers=headers)


# Fields of type None belong to vLLM's own processors: clients may send null.
class TokenizePrompt(msgspec.Struct, kw_only=True):
    """A text to tokenize. Without ``model``: the only one that is served."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct, kw_only=True):
    """A chat to render and tokenize; the fields are those of a chat completion."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None


class TokenizedBody(msgspec.Struct, kw_only=True):
    """The answer: ``max_model_len`` is null where the model does not state its context."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids to turn into text, special tokens included."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizedPrompt(msgspec.Struct):
    """The answer."""

    prompt: str


TokenizeBody = TokenizePrompt | TokenizeChat
Adapt = Callable[[GenerationRequest], None]


_prompt, _chat = BodyDecoder(TokenizePrompt), BodyDecoder(TokenizeChat)
_detokenize = BodyDecoder(DetokenizeBody)
_encode = msgspec.json.Encoder().encode


def parse_tokenize(body: bytes, *, unknown: str = REFUSE) -> TokenizeBody:
    """Decode and check a body of /tokenize. Raises InvalidArgument. O(bytes)."""
    check_json(body)
    try:
        is_text = not is_chat(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    if is_text:
        return _prompt(body, unknown)
    parsed = _chat(body, unknown)
    request = _request(parsed)
    assert isinstance(request, ChatCompletionRequest)
    check_chat(request)
    return parsed


def parse_detokenize(body: bytes, *, unknown: str = REFUSE) -> DetokenizeBody:
    """Decode and check a body of /detokenize. Raises InvalidArgument. O(bytes)."""
    parsed = _detokenize(body, unknown)
    if len(parsed.tokens) > MAX_COUNTED_TOKENS:
        raise InvalidArgument(
            f"Validation: 'tokens' takes at most {MAX_COUNTED_TOKENS} ids, got "
            f"{len(parsed.tokens)}; send fewer"
        )
    return parsed


def tokenized(
    preprocessor: Preprocessor, parsed: TokenizeBody, adapted: Adapt | None = None
) -> bytes:
    """The answer of /tokenize, as JSON; ``adapted`` changes the request as for its generation.

    Thread-safe. Raises InvalidArgument. O(characters).
    """
    request = _request(parsed)
    if adapted is not None:
        adapted(request)
    if isinstance(request, ChatCompletionRequest):
        tokens = preprocessor.chat_tokens(request)
    else:
        special = request.add_special_tokens is not False
        tokens = preprocessor.text_tokens(str(request.prompt), special)
    ids = tokens.tolist()
    texts = None
    if parsed.return_token_strs:
        texts = [preprocessor.tokenizer.vocabulary_entry(token_id) for token_id in ids]
    answer = TokenizedBody(
        count=len(ids), max_model_len=preprocessor.context_length, tokens=ids, token_strs=texts
    )
    return _encode(answer)


def detokenized(preprocessor: Preprocessor, parsed: DetokenizeBody) -> bytes:
    """The answer of /detokenize; as :func:`tokenized`."""
    tokenizer = preprocessor.tokenizer
    largest = max(parsed.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        raise InvalidArgument(
            f"Validation: token id {shorten(largest)} in 'tokens' is out of range, the vocabulary "
            f"has {tokenizer.vocab_size} tokens"
        )
    return _encode(DetokenizedPrompt(tokenizer.decode(parsed.tokens, skip_special_tokens=False)))


def _request(parsed: TokenizeBody) -> ChatCompletionRequest | CompletionRequest:
    if isinstance(parsed, TokenizePrompt):
        special = parsed.add_special_tokens
        return CompletionRequest(model="", prompt=parsed.prompt, add_special_tokens=special)
    return ChatCompletionRequest(
        model=parsed.model or "",
        messages=parsed.messages,
        tools=parsed.tools,
        add_special_tokens=parsed.add_special_tokens,
        add_generation_prompt=parsed.add_generation_prompt,
        continue_final_message=parsed.continue_final_message,
        chat_template=parsed.chat_template,
        chat_template_kwargs=parsed.chat_template_kwargs,
    )


class _Conversion(NamedTuple):
    """The difference between the routes."""

    parse: Callable[..., Any]  # the body, and what becomes of unknown fields
    convert: Callable[[Preprocessor, Any, Adapt], bytes]


_TOKENIZE = _Conversion(parse_tokenize, tokenized)
_DETOKENIZE = _Conversion(
    parse_detokenize, lambda preprocessor, asked, _: detokenized(preprocessor, asked)
)


class TokenizeRoutes:
    """Converts small bodies at once, large ones in a thread."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks
        self._unknown = registry.settings.unknown_field_policy
        self._adapt = partial(adapt, models, registry.settings.disable_nvext)

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.post("/tokenize", in_task(self._tasks.spawn, partial(self._answer, _TOKENIZE)))
        routes.post("/detokenize", in_task(self._tasks.spawn, partial(self._answer, _DETOKENIZE)))

    async def _answer(self, conversion: _Conversion, exchange: Exchange) -> None:
        registry, model = self._registry, "unknown"
        echoed = id_headers(None, exchange.headers.get("x-request-id"))
        is_long = len(exchange.body) > _INLINE_BYTES
        registry.enter()
        try:
            registry.check(exchange)
            with registry.off_loop.hold(len(exchange.body)):
                parse = partial(conversion.parse, unknown=self._unknown)
                parsed = await self._run(is_long, parse, exchange.body)
                model = parsed.model or model
                loaded = await self._loaded(parsed.model)
                model = loaded.name
                adapted = partial(self._adapt, loaded=loaded)
                arguments = loaded.preprocessor, parsed, adapted
                # A template of the request is compiled, which takes longer than a short text.
                compiles = getattr(parsed, "chat_template", None) is not None
                answer = await self._run(is_long or compiles, conversion.convert, *arguments)
            exchange.respond(200, answer, headers=echoed)
        except DynamoError as error:
            error = explained(error, model)
            status, body = error_response(error, registry.overload_status)
            exchange.respond(status, body, headers=with_retry(error, echoed))
        finally:
            registry.leave()

    async def _run(self, in_thread: bool, function: Callable[..., Any], *args: Any) -> Any:
        if in_thread:
            return await self._registry.off_loop.run(function, *args)
        return function(*args)

    async def _loaded(self, name: str | None) -> LoadedModel:
        """The model with a tokenizer called ``name``, by default the only one.

        Raises InvalidArgument, ModelNotFound, and NoInstances for one that has not been loaded.
        """
        models = self._models
        if name is None:
            name = self._only_name()
        # No worker is needed, but the tokenizer, which is among what loads.
        if models.is_loading(name):
            await models.loaded()
        entry = models.named(name)
        relayed = entry is not None and entry.relayed  # its server has the tokenizer
        if entry is not None and entry.loaded is not None and not relayed:
            return entry.loaded
        if not relayed and (not_loaded := models.on_demand.not_loaded(name)) is not None:
            raise not_loaded
        if entry is None:
            raise models.unregistered(name)
        if relayed:
            raise ModelNotFound(f"Model not found: {shorten(name)}")
        raise NoInstances

    def _only_name(self) -> str:
        entries = self._models.entries()
        names = sorted(entry.name for entry in entries) or sorted(self._models.on_demand.models())
        own = [entry.name for entry in entries if not entry.relayed] if entries else names
        if len(own) == 1:
            return own[0]
        if not names:
            raise NoInstances
        raise InvalidArgument(
            f"Validation: several models are served; name one in 'model': "
            f"{shorten(', '.join(names), 256)}"
        )
