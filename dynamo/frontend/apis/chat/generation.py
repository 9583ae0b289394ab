"""What differs between the APIs that generate text; ``apis/chat/route`` serves them.

An API that is not OpenAI's chat converts its body to a subclass of ChatCompletionRequest, which may
carry what the answer needs of the body, and has an :class:`EventStream` of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, NoInstances, Overloaded, shorten
from dynamo.frontend.answer.completions import ChatStream, CompletionStream
from dynamo.frontend.answer.events import ParsedChatStream
from dynamo.frontend.answer.generation import GenerationStream
from dynamo.frontend.models.model import LoadedModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import DESERIALIZE, INLINE_BODY_BYTES
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.frontend.requests.errors import ErrorShape
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.protocols.openai import GenerationRequest
from dynamo.protocols.pooling import AnyPoolingBody


class _Named(msgspec.Struct):
    """The members that count; the others stay undecoded."""

    model: str
    # Of any type: the route explains what is wrong with it.
    stream: Any = None


class _Shape(msgspec.Struct):
    """The field that distinguishes a chat from a text."""

    messages: Any = None


_decode = msgspec.json.Decoder(_Named).decode
_shape = msgspec.json.Decoder(_Shape).decode


def reject_early(
    registry: RequestRegistry, models: Models, exchange: Exchange, endpoint: str
) -> bool:
    """Respond with 503 while the frontend drains or the model takes no request; return True then.

    Call it while ``registry.refuses`` or ``models.saturation.count`` is set. Large bodies are left
    to :func:`reject_large`. A body that is no JSON, or names no model that is served, is left to
    the route, which explains what is wrong with it. Of the body only the model's name is read,
    about 1 µs a kilobyte: no JSON tree, no chat template, no tokens. O(bytes).
    """
    if registry.refuses:
        try:
            registry.check(exchange)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, endpoint, error, "unknown")
            return True
    if len(exchange.body) > INLINE_BODY_BYTES:
        return False
    return _reject(registry, models, exchange, endpoint, named_model(exchange.body))


async def reject_large(
    registry: RequestRegistry, models: Models, exchange: Exchange, endpoint: str
) -> bool:
    """As :func:`reject_early` for a large body, which a thread reads."""
    fields = await registry.off_loop.run(named_model, exchange.body)
    return _reject(registry, models, exchange, endpoint, fields)


def named_model(body: bytes) -> _Named | None:
    """Read the model's name, and whether to stream; None without a name."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_chat(body: bytes) -> bool:
    """Whether a body is a chat. Raises the errors of msgspec."""
    return _shape(body).messages is not None


def requested_model(models: Models, request: Any, model_type: str) -> str:
    """Return the model of a request; one without it gets the only model of ``model_type``.

    Before the first model registers it gets the only one that is started on demand. Raises
    InvalidArgument if there are several, NoInstances before the first. Adapters do not count as
    models.
    """
    if not request.model:
        entries = models.entries()
        if not entries:
            on_demand = sorted(models.on_demand.models())
            if len(on_demand) != 1:
                raise NoInstances  # the first model may still register
            request.model = on_demand[0]
            return on_demand[0]
        named = {
            entry.name: entry
            for entry in entries
            if model_type in entry.types and entry.card.lora_name is None
        }
        only = next(iter(named.values())) if len(named) == 1 else None
        # The routes of relayed models come first: here such a model lacks the path.
        if only is None or only.relayed:
            choice = f"; name one of {shorten(', '.join(sorted(named)))}" if named else ""
            raise InvalidArgument(f"{DESERIALIZE}missing field `model`{choice}")
        request.model = only.name
    return str(request.model)


def _reject(
    registry: RequestRegistry,
    models: Models,
    exchange: Exchange,
    endpoint: str,
    fields: _Named | None,
) -> bool:
    entry = None if fields is None else models.named(fields.model)
    loaded = None if entry is None or not entry.served else entry.loaded
    if fields is None or loaded is None:
        return False
    try:
        loaded.dispatch.check()
    except Overloaded as error:
        kind = "stream" if fields.stream is True else "unary"
        registry.hold_or_refuse(exchange, endpoint, error, loaded.name, kind)
        return True
    return False


def adapt(
    models: Models,
    ignores_nvext: bool,
    request: GenerationRequest | AnyPoolingBody,
    loaded: LoadedModel,
) -> None:
    """Set and remove the fields that the operator decides about, in every API."""
    if ignores_nvext:
        request.nvext = request.priority = request.session_id = None
    if models.rules and (rules := models.rules.get(loaded.name)) is not None:
        rules.apply(request)


class GenerationApi(NamedTuple):
    """One API.

    ``endpoint`` is the label of the metrics. ``parse`` gets the body and ``unknown``, in
    a thread if the body is large; it raises InvalidArgument. ``complete``, if set, follows it on
    the event loop: it adds what the body does not have (headers, key, earlier responses),
    and returns how many bytes of prompt it added; it raises DynamoError. ``stream`` renders answers
    that are content alone, ``parsed_stream`` those of models with a parser.
    """

    endpoint: str
    id_prefix: str
    model_type: str
    parse: Callable[..., Any]
    prepare: Callable[[Preprocessor, Any], Prepared]
    prepare_off_loop: Callable[[Preprocessor, Any, OffLoop], Awaitable[Prepared]]
    stream: type[GenerationStream]
    parsed_stream: type[GenerationStream]
    complete: Callable[[Any, Exchange], int] | None = None
    errors: ErrorShape | None = None

    @classmethod
    def of_chat(
        cls,
        endpoint: str,
        id_prefix: str,
        parse: Callable[..., Any],
        stream: type[GenerationStream],
    ) -> GenerationApi:
        """An API whose ``parse`` returns a chat request, and whose stream parses answers itself."""
        prepare, off_loop = Preprocessor.chat, Preprocessor.chat_off_loop
        return cls(endpoint, id_prefix, "Chat", parse, prepare, off_loop, stream, stream)


CHAT = GenerationApi.of_chat("chat_completions", "chatcmpl-", parse_chat, ChatStream)._replace(
    parsed_stream=ParsedChatStream
)
COMPLETION = GenerationApi(
    "completions",
    "cmpl-",
    "Completions",
    parse_completion,
    Preprocessor.completion,
    Preprocessor.completion_off_loop,
    CompletionStream,
    CompletionStream,
)
