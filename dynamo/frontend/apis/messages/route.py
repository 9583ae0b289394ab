"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens, on chat's own path."""

from __future__ import annotations

from functools import partial

import orjson

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.frontend.answer.events import named_event
from dynamo.frontend.apis.chat.generation import GenerationApi
from dynamo.frontend.apis.chat.headers import new_request_id
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.messages.answer import MessagesStream, error_message, error_object
from dynamo.frontend.apis.messages.prompt import parse_count, parse_messages
from dynamo.frontend.apis.tokenize.prompt_count import PromptCountRoutes
from dynamo.frontend.prompt.messages import ToolImage
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.requests.errors import ErrorShape
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Route, Routes
from dynamo.protocols.anthropic import MessagesChatRequest

__all__ = ["MessagesRoutes", "messages_error_body", "prepare_message"]

_PATH = "/v1/messages"
_COUNT_PATH = f"{_PATH}/count_tokens"


def messages_error_body(path: str, status: int, message: str) -> bytes | None:
    """The body of an error that no model is concerned with; None for paths of other APIs."""
    own = path == _PATH or path.startswith(f"{_PATH}/")
    return error_message(status, message) if own else None


def _body(status: int, error: DynamoError) -> bytes:
    return orjson.dumps(error_object(status, error))


def _event(error: DynamoError) -> bytes:
    return named_event("error", error_object(error.status, error))


def _add_id(body: bytes, request_id: str) -> bytes:
    return orjson.dumps({**orjson.loads(body), "request_id": request_id})


def _check_images(preprocessor: Preprocessor, request: MessagesChatRequest) -> None:
    """Refuse images in the words of this API, except those that tools have returned."""
    if preprocessor.images is not None:
        return
    contents = (message.get("content") for message in request.messages)
    if any(
        type(part) is not ToolImage and part["type"] != "text"
        for content in contents
        if type(content) is list
        for part in content
    ):
        raise InvalidArgument("messages: this model takes no images; leave `image` blocks out")


def prepare_message(preprocessor: Preprocessor, request: MessagesChatRequest) -> Prepared:
    """Prepare a request. Raises InvalidArgument."""
    _check_images(preprocessor, request)
    return preprocessor.chat(request)


async def _prepare_off_loop(
    preprocessor: Preprocessor, request: MessagesChatRequest, threads: OffLoop
) -> Prepared:
    _check_images(preprocessor, request)
    return await preprocessor.chat_off_loop(request, threads)


async def _count(
    preprocessor: Preprocessor, request: MessagesChatRequest, threads: OffLoop
) -> Prepared:
    """Count a prompt, which may be longer than the context."""
    _check_images(preprocessor, request)
    ids = await threads.run(preprocessor.chat_tokens, request)
    return Prepared([], [], 1, len(ids))


_RELAYED_ERRORS = ErrorShape(_body, _event)
_ERRORS = ErrorShape(_body, _event, "request-id", _add_id)
_MESSAGES = GenerationApi.of_chat(
    "anthropic_messages", "msg_", parse_messages, MessagesStream
)._replace(prepare=prepare_message, prepare_off_loop=_prepare_off_loop, errors=_ERRORS)
_COUNT_TOKENS = _MESSAGES._replace(
    endpoint="anthropic_count_tokens", parse=parse_count, prepare_off_loop=_count
)


class MessagesRoutes:
    """The routes, whose requests all have an id: Anthropic's clients show it with an error."""

    def __init__(
        self, registry: RequestRegistry, openai: OpenAIRoutes, counts: PromptCountRoutes
    ) -> None:
        self._shapes = registry.error_shapes
        self._strips_preamble = registry.settings.strip_anthropic_preamble
        self._openai = openai
        self._counts = counts

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        messages, count_tokens = (
            api._replace(parse=partial(api.parse, strip_preamble=self._strips_preamble))
            for api in (_MESSAGES, _COUNT_TOKENS)
        )
        count = self._counts.route(count_tokens, lambda tokens: {"input_tokens": tokens})
        for path in (_PATH, _COUNT_PATH):  # of models of other servers
            self._shapes[path] = _RELAYED_ERRORS
        routes.post(_PATH, _identified(self._openai.route(messages)))
        routes.post(_COUNT_PATH, _identified(count))


def _identified(route: Route) -> Route:
    def serve(exchange: Exchange) -> None:
        if "x-request-id" not in exchange.headers:  # a copy: equal heads share their headers
            exchange.headers = {**exchange.headers, "x-request-id": new_request_id()}
        route(exchange)

    return serve
