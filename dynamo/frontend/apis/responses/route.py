"""OpenAI's Responses API: POST /v1/responses, and the stored responses below that path.

A response goes the way of a chat; what is different is its body, its events, and that it is stored
for its client to read and to continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, shorten
from dynamo.frontend.answer.sse import json_bytes
from dynamo.frontend.apis.chat.generation import GenerationApi
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.responses.answer import (
    ResponsesStream,
    plain_response_error,
    response_error,
    response_error_event,
)
from dynamo.frontend.apis.responses.input_items import REFERENCE
from dynamo.frontend.apis.responses.prompt import (
    MAX_REFERENCES,
    ResponseChatRequest,
    ResponseOrigin,
    memory_bytes,
    parse_response,
)
from dynamo.frontend.apis.responses.store import ResponseStore, StoredResponse
from dynamo.frontend.apis.tokenize import PromptCountRoutes
from dynamo.frontend.requests.errors import ErrorShape
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.http import Exchange, query_fields
from dynamo.http.routes import Route, Routes
from dynamo.observability.metrics import gauge

log = logging.getLogger(__name__)
_PATH = "/v1/responses"
_BELOW = "/v1/responses/"
_MAX_PAGE = 100
_MAX_FIELDS = 100
_ID_CHARACTERS = 128
_ACTIONS = {("GET", ""), ("DELETE", ""), ("POST", "cancel"), ("GET", "input_items")}
_ERRORS = ErrorShape(response_error, response_error_event)
_RESPONSES = gauge("dynamo_frontend_stored_responses", "Responses that clients may continue")
_BYTES = gauge("dynamo_frontend_stored_response_bytes", "What stored responses take in memory")


class _NotFound(InvalidArgument):
    """The key has no stored response of that id."""

    status = 404


class ResponseRoutes:
    """``store`` has the responses. A request for another id goes to ``relay``, the route of other
    servers, if they have it: ``has_relay``."""

    def __init__(
        self, store: ResponseStore, has_relay: Callable[[Exchange], bool], relay: Route
    ) -> None:
        self._store = store
        self._has_relay = has_relay
        self._relay = relay
        self._api = GenerationApi.of_chat(
            "responses", "resp_", parse_response, ResponsesStream
        )._replace(complete=self._complete, errors=_ERRORS)

    def install(self, routes: Routes, openai: OpenAIRoutes, counts: PromptCountRoutes) -> None:
        """Add the routes to the table."""
        routes.post(_PATH, openai.route(self._api))
        counted = self._api._replace(
            endpoint="responses_input_tokens", complete=partial(self._complete, stores=False)
        )
        route = counts.route(
            counted, lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens}
        )
        routes.post(f"{_PATH}/input_tokens", route)
        routes.below(_BELOW, ("GET", "POST", "DELETE"), self._stored)

    # -- before generation

    def _complete(
        self, request: ResponseChatRequest, exchange: Exchange, stores: bool = True
    ) -> int:
        """Add the earlier responses; return their bytes. Raises InvalidArgument."""
        origin, owner = request.origin, _owner(exchange)
        earlier = None
        if origin.previous_id is not None:
            earlier = self._store.get(owner, origin.previous_id)
            if earlier is None:
                short_id = shorten(origin.previous_id, _ID_CHARACTERS)
                raise InvalidArgument(
                    f"Previous response with id '{short_id}' not found: it was not stored, or "
                    "dropped since; send all items of the conversation as 'input'"
                )
        if origin.messages is None:
            self._resolve(origin, owner, earlier)
        request.add_history([] if earlier is None else earlier.history())
        if origin.stores and stores and self._store.enabled:
            origin.keep = partial(self._keep, owner, earlier)
        return 0 if earlier is None else earlier.total_bytes

    def _resolve(self, origin: ResponseOrigin, owner: str, earlier: StoredResponse | None) -> None:
        """Put the items in place of the references to them."""
        if len(origin.items) > MAX_REFERENCES:
            raise InvalidArgument(
                f"Validation: 'input' with an {REFERENCE} takes at most {MAX_REFERENCES} items, "
                f"got {len(origin.items)}; send the items themselves"
            )
        wanted = {item["id"] for item in origin.items if item.get("type") == REFERENCE}
        stored = self._store.find_items(owner, wanted, earlier)
        items = []
        for number, item in enumerate(origin.items):
            if item.get("type") == REFERENCE:
                if item["id"] not in stored:
                    raise InvalidArgument(
                        f"Validation: input[{number}].id: no stored item "
                        f"{shorten(repr(item['id']))}; send the item itself"
                    )
                item = stored[item["id"]]
            items.append(item)
        origin.items = items
        origin.messages = origin.converted(items)

    def _keep(
        self,
        owner: str,
        earlier: StoredResponse | None,
        origin: ResponseOrigin,
        response_id: str,
        body: bytes,
        output: Sequence[dict[str, Any]],
    ) -> None:
        """Store a response that is complete."""
        messages = (origin.messages or []) + origin.converted(output)
        items_bytes = origin.items_bytes + sum(map(memory_bytes, output))
        stored = StoredResponse(earlier, body, messages, (origin.items, output), items_bytes)
        if not self._store.put(owner, response_id, stored):
            log.warning(
                "response %s is not stored: its conversation has %d bytes, more than "
                "--responses-store-mb",
                *(response_id, stored.total_bytes),
            )

    # -- stored responses

    def _stored(self, exchange: Exchange) -> None:
        """Read, list, delete or cancel a response, by the rest of the path."""
        response_id, _, action = exchange.path[len(_BELOW) :].partition("/")
        stored = self._store.get(_owner(exchange), response_id)
        is_known = (exchange.method, action) in _ACTIONS
        if stored is None and (self._has_relay(exchange) or not is_known):
            self._relay(exchange)
            return
        try:
            if stored is None:
                short_id = shorten(response_id, _ID_CHARACTERS)
                raise _NotFound(f"Response with id '{short_id}' not found.")
            exchange.respond(200, self._answer(exchange, response_id, action, stored))
        except DynamoError as error:
            exchange.respond(error.status, response_error(error.status, error))

    def _answer(
        self, exchange: Exchange, response_id: str, action: str, stored: StoredResponse
    ) -> bytes:
        method = exchange.method
        if method == "DELETE" and not action:
            self._store.delete(_owner(exchange), response_id)
            return json_bytes({"id": response_id, "object": "response", "deleted": True})
        if method == "POST" and action == "cancel":
            raise InvalidArgument("Cannot cancel a synchronous response.")
        if method == "GET" and action == "input_items":
            return _input_items(stored, exchange.query)
        if method != "GET" or action:
            raise _NotFound(f"Route not found: {method} {shorten(exchange.path)}")
        if _query(exchange.query).get("stream", "false") != "false":
            raise InvalidArgument(
                "Validation: 'stream' is for background responses alone; leave it out"
            )
        return stored.body


def responses_error_body(path: str, status: int, message: str) -> bytes | None:
    """The body of an error that no model is concerned with; None for paths of other APIs."""
    own = path == _PATH or path.startswith(_BELOW)
    return plain_response_error(status, message) if own else None


def show_stored_responses(metrics: FrontendMetrics, store: ResponseStore) -> None:
    """Count the responses of ``store`` at a scrape."""
    metrics.child(_RESPONSES).function = store.__len__
    metrics.child(_BYTES).function = lambda: store.size_bytes


def _owner(exchange: Exchange) -> str:
    """The name of the client's API key, "" where none are needed."""
    return "" if exchange.api_key is None else exchange.api_key.name


def _query(query: str) -> dict[str, str]:
    """The fields of a query, the last of each name. Raises InvalidArgument."""
    try:
        return query_fields(query, _MAX_FIELDS)
    except ValueError:
        raise InvalidArgument(
            f"Validation: the query takes at most {_MAX_FIELDS} fields, got more"
        ) from None


def _input_items(stored: StoredResponse, query: str) -> bytes:
    """A page of the items that the response answers, the latest first unless asked otherwise."""
    fields = _query(query)
    order, after = fields.get("order", "desc"), fields.get("after")
    if order not in ("asc", "desc"):
        raise InvalidArgument(f"Validation: 'order' must be asc or desc, got {shorten(order)}")
    limit = fields.get("limit", "20")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidArgument(
            f"Validation: 'limit' must be between 1 and {_MAX_PAGE}, got {shorten(limit)}"
        )
    items: list[dict[str, Any]] = []
    for response in stored.conversation():
        items += response.items
        # The output of earlier turns was input of this one; its own was not.
        if response is not stored:
            items += response.output
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((i for i, item in enumerate(items, 1) if item["id"] == after), 0)
        if not start:
            raise InvalidArgument(f"Validation: 'after': no item {shorten(repr(after))}")
    page = items[start : start + int(limit)]
    data = [_listed(item) for item in page]
    body = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": start + len(page) < len(items),
    }
    return msgspec.json.encode(body)  # orjson refuses integers of more than 64 bits


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """An input item as OpenAI lists it: a message has its content in parts."""
    content = item.get("content")
    if item.get("type") != "message" or not isinstance(content, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    part: dict[str, Any] = {"type": kind, "text": content}
    if kind == "output_text":
        part["annotations"] = []
    return {"status": "completed", **item, "content": [part]}
