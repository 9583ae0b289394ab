"""/v1/route: where a chat or completion request would go now, and why. Sends nothing.

POST takes the body of the request in question, GET ``?prompt=…`` and ``model=…``, which may be left
out where there is only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, NoInstances
from dynamo.frontend.api.headers import routed
from dynamo.frontend.api.prefill_route import explain_both
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.validation import check_json, parse_chat, parse_completion
from dynamo.frontend.requests.errors import error_response, explained
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.router.kv import KvPicker
from dynamo.runtime.tasks import Tasks

__all__ = ["ExplainRoutes"]


class _Shape(msgspec.Struct):
    """What tells a chat request from a completion."""

    messages: Any = None


_shape = msgspec.json.Decoder(_Shape).decode


class ExplainRoutes:
    """For operators: the same body and headers as the request in question, kv mode only."""

    def __init__(
        self, models: Models, tasks: Tasks, overload_status: int, threads: OffLoop
    ) -> None:
        self._models = models
        self._tasks = tasks
        self._overload_status = overload_status
        self._threads = threads

    def install(self, routes: Routes) -> None:
        """Put the route into the table."""
        route = in_task(self._tasks, self._answer)
        routes.post("/v1/route", route)
        routes.get("/v1/route", route)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            posted = exchange.method == "POST"
            body = exchange.body if posted else self._asked(exchange.query)
            found = await self._explanation(body, exchange.headers)
        except DynamoError as error:
            status, text = error_response(explained(error, "unknown"), self._overload_status)
            exchange.respond(status, text)
        else:
            exchange.respond(200, found)

    def _asked(self, query: str) -> bytes:
        """The completion request that the query stands for. Raises InvalidArgument."""
        given = {name: values[-1] for name, values in parse_qs(query).items()}
        unknown = ", ".join(f"`{name}`" for name in sorted(given.keys() - {"model", "prompt"}))
        if unknown or "prompt" not in given:
            what = f"not {unknown}" if unknown else "`prompt` is missing"
            raise InvalidArgument(f"The query takes `prompt` and `model`: {what}")
        names = [entry.name for entry in self._models.entries() if entry.served]
        if not names:
            raise NoInstances
        if "model" not in given and len(names) > 1:
            raise InvalidArgument(f"The query needs `model`, one of: {', '.join(names)}")
        return msgspec.json.encode({"model": names[0], **given})

    async def _explanation(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        threads = self._threads
        with threads.hold(len(body)):
            parsed = await threads.run(_parse, body)
            if isinstance(parsed, ChatCompletionRequest):
                entry = self._models.find(parsed.model, "Chat")
                prepared = await entry.preprocessor.chat_off_loop(parsed, threads)
            else:
                entry = self._models.find(parsed.model, "Completions")
                prepared = await entry.preprocessor.completion_off_loop(parsed, threads)
        if not isinstance(entry.picker, KvPicker):
            raise InvalidArgument("only --router-mode kv weighs candidates, so there is no table")
        request = prepared.requests[0]
        routing = routed(request.routing, headers)
        dispatch = entry.dispatch
        found = explain_both(entry.picker, dispatch.prefill, request, routing, dispatch.line or ())
        return msgspec.json.encode(found)


def _parse(body: bytes) -> ChatCompletionRequest | CompletionRequest:
    check_json(body)
    try:
        is_chat = _shape(body).messages is not None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"Failed to deserialize the JSON body: {error}") from None
    parse = parse_chat if is_chat else parse_completion
    return parse(body, ignore_unsupported=True)
