"""POST /v1/route: where a chat or completion request would go now, and why. Sends nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.frontend.failures import error_response, explained
from dynamo.frontend.http import Exchange
from dynamo.frontend.models import Models
from dynamo.frontend.request_headers import routed
from dynamo.frontend.routes import Routes
from dynamo.frontend.validation import parse_chat, parse_completion
from dynamo.router.explain import explain
from dynamo.router.kv import KvPicker
from dynamo.runtime.tasks import Tasks

__all__ = ["ExplainRoutes"]


class _Shape(msgspec.Struct):
    """What tells a chat request from a completion."""

    messages: Any = None


_shape = msgspec.json.Decoder(_Shape).decode


class ExplainRoutes:
    """For operators: the same body and headers as the request in question, kv mode only."""

    def __init__(self, models: Models, tasks: Tasks, overload_status: int) -> None:
        self._models = models
        self._tasks = tasks
        self._overload_status = overload_status

    def install(self, routes: Routes) -> None:
        """Put the route into the table."""
        routes.post("/v1/route", self._route)

    def _route(self, exchange: Exchange) -> None:
        self._tasks.spawn(self._answer(exchange), name="route")

    async def _answer(self, exchange: Exchange) -> None:
        try:
            body = await self._explanation(exchange)
        except DynamoError as error:
            status, text = error_response(explained(error, "unknown"), self._overload_status)
            exchange.respond(status, text)
        else:
            exchange.respond(200, body)

    async def _explanation(self, exchange: Exchange) -> bytes:
        try:
            is_chat = _shape(exchange.body).messages is not None
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"Failed to deserialize the JSON body: {error}") from None
        if is_chat:
            chat = parse_chat(exchange.body, ignore_unsupported=True)
            entry = self._models.find(chat.model, "Chat")
            prepared = await entry.preprocessor.chat_off_loop(chat)
        else:
            completion = parse_completion(exchange.body, ignore_unsupported=True)
            entry = self._models.find(completion.model, "Completions")
            prepared = await entry.preprocessor.completion_off_loop(completion)
        if not isinstance(entry.picker, KvPicker):
            raise InvalidArgument("only --router-mode kv weighs candidates, so there is no table")
        request = prepared.requests[0]
        routing = routed(request.routing, exchange.headers)
        override = request.router_config_override
        found = explain(entry.picker, request.token_ids, routing, override)
        return msgspec.json.encode(found)
