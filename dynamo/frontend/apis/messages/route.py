"""Anthropic's Messages API on chat's own path: messages, their count of tokens, pages of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson

from dynamo.errors import DynamoError, InvalidArgument, shorten
from dynamo.frontend.answer.events import named_event
from dynamo.frontend.apis.chat.generation import GenerationApi
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.messages.answer import MessagesStream, error_message, error_object
from dynamo.frontend.apis.messages.prompt import MessagesChatRequest, parse_count, parse_messages
from dynamo.frontend.apis.tokenize import PromptCountRoutes
from dynamo.frontend.models.listing import ListedModel
from dynamo.frontend.prompt.messages import ToolImage
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.requests.errors import ErrorShape
from dynamo.frontend.requests.headers import new_request_id
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange, query_fields
from dynamo.http.routes import Route, Routes

_PATH = "/v1/messages"
_COUNT_PATH = f"{_PATH}/count_tokens"
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000


def model_info(model: ListedModel) -> dict[str, Any]:
    """One model."""
    created_at = datetime.fromtimestamp(model.created_s, UTC).isoformat()
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created_at.replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length,
    }


def model_page(listed: Sequence[ListedModel], query: str) -> dict[str, Any]:
    """A page of ``listed``. ``query`` may have limit, after_id and before_id.

    Raises InvalidArgument.
    """
    fields = query_fields(query, 8)
    limit = _limit(fields.get("limit"))
    names = [model.name for model in listed]
    begin, end = 0, len(names)
    if "after_id" in fields:
        begin = _index(names, "after_id", fields["after_id"]) + 1
    if "before_id" in fields:
        end = _index(names, "before_id", fields["before_id"])
    # Backwards: the last models in front of before_id, as in Anthropic's pages.
    if "before_id" in fields and "after_id" not in fields:
        page, more = listed[max(end - limit, 0) : end], end > limit
    else:
        page, more = listed[begin : min(begin + limit, end)], begin + limit < end
    return {
        "data": list(map(model_info, page)),
        "has_more": more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= _MAX_LIMIT:
        raise InvalidArgument(
            f"limit: must be a number from 1 to {_MAX_LIMIT}, got {shorten(repr(text))}"
        )
    return int(text)


def _index(names: list[str], field: str, name: str) -> int:
    if name not in names:
        raise InvalidArgument(f"{field}: no model `{shorten(name)}`")
    return names.index(name)


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
