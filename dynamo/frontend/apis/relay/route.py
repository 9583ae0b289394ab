"""The routes of relayed models: their workers take whole HTTP requests, or whole OpenAI bodies.

``RelayRoutes.install`` puts itself in front of the POST routes under /v1/ that exist by then, and
of /tokenize and /detokenize. It takes GET, POST and DELETE of all paths under /v1/ without a route.
So one place decides, by the model, how a request is served. While no relayed model is known, this
costs a request one call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, NoInstances, shorten
from dynamo.frontend.api.relay_lookup import (
    RouteModel,
    choose_model,
    models_with_route,
    route_label,
)
from dynamo.frontend.apis.chat.headers import request_id, routed
from dynamo.frontend.apis.relay.body import (
    EMBEDDINGS,
    RelayedBody,
    peek,
    peek_form,
    prompt_ids,
)
from dynamo.frontend.apis.relay.http_answer import HttpAnswer
from dynamo.frontend.apis.relay.request import (
    RelayedActiveRequest,
    RelayedAnswer,
    RelayedEngineRequest,
    RelayedHttpRequest,
)
from dynamo.frontend.apis.relay.text_answer import TextAnswer
from dynamo.frontend.models.inputs import TEXT_INPUT, missing_route
from dynamo.frontend.models.model import ModelEntry
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES
from dynamo.frontend.prompt.relayed_message import http_message, text_message
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import RequestInfo
from dynamo.http import Exchange
from dynamo.http.multipart import is_multipart
from dynamo.http.routes import Route, Routes
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.runtime.process.tasks import Tasks

__all__ = ["RelayRoutes"]

_PREFIX = "/v1/"
_MODEL_OPTIONAL = ("/tokenize", "/detokenize")
_POSTS = (_PREFIX, *_MODEL_OPTIONAL)
log = logging.getLogger(__name__)


class _Relay(NamedTuple):
    """A request on its way to its model."""

    request: RelayedActiveRequest
    answer: RelayedAnswer
    entry: ModelEntry
    asked: RelayedBody
    body: bytes


class RelayRoutes:
    """Serve relayed models; pass every other request to the route behind."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Take the POST routes of models installed so far, and paths of /v1/ without a route."""
        for prefix in _POSTS:
            routes.wrap_posts(prefix, self._before)
        routes.rest(_PREFIX, ("GET", "POST", "DELETE"), self.serve_rest)

    def _before(self, route: Route) -> Route:
        models, serve = self._models, self._serve

        def choose(exchange: Exchange) -> None:
            if models.relays:
                serve(route, exchange)
            else:
                route(exchange)

        return choose

    def has_route(self, exchange: Exchange) -> bool:
        """Whether a relayed model has the method and path of the request."""
        models = self._models
        return models.relays and bool(models_with_route(models.entries(), exchange))

    def serve_rest(self, exchange: Exchange) -> None:
        """Relay a request to a path that only other servers have, or let it wait for the first
        worker of its model."""
        models = self._models
        found = models_with_route(models.entries(), exchange) if models.relays else []
        if found:
            self._serve_route(found, exchange)
        elif exchange.method == "POST" and (models.relays or models.on_demand.relays):
            self._serve(None, exchange)
        else:
            exchange.refuse(404, f"Route not found: {exchange.method} {exchange.path}")

    def _serve_route(self, found: Sequence[RouteModel], exchange: Exchange) -> None:
        """Relay a request whose body does not name its model."""
        label = route_label(found[0].match)
        try:
            entry, match = choose_model(found, exchange)
            label = route_label(match)
            self._check(entry)
        except DynamoError as error:
            self._registry.refuse(exchange, label, error, "unknown", "unary")
            return
        asked = RelayedBody(entry.name)
        self._relay(self._begin(exchange, entry, asked, label))

    def _serve(self, otherwise: Route | None, exchange: Exchange) -> None:
        """Relay the request, or pass it to ``otherwise``, the route of models that take tokens."""
        if len(exchange.body) > INLINE_BODY_BYTES:
            self._tasks.spawn(self._serve_large(otherwise, exchange), name="large body")
            return
        asked = None
        try:
            asked = _peek(exchange, otherwise) or self._only_model(exchange)
            entry = self._entry(asked, exchange.path, otherwise)
        except DynamoError as error:
            self._refuse(exchange, error, asked)
            return
        if entry is None or asked is None:
            assert otherwise is not None, "without another route an error was raised"
            otherwise(exchange)
            return
        self._relay(self._begin(exchange, entry, asked, _label(exchange.path)))

    def _relay(self, relay: _Relay) -> None:
        """Send the request, in a thread if its prompt is long."""
        entry = relay.entry
        limit_bytes = entry.preprocessor.inline_limit_bytes if entry.has_preprocessor else None
        if limit_bytes is not None and len(relay.body) > limit_bytes:
            self._tasks.spawn(self._send_off_loop(relay), name="long prompt")
            return
        try:
            self._send(relay, *self._prepare(relay))
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            relay.request.crashed(error)

    async def _serve_large(self, otherwise: Route | None, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread."""
        registry = self._registry
        threads = registry.off_loop
        asked = None
        registry.enter()
        try:
            with threads.hold(len(exchange.body)):
                asked = await threads.run(_peek, exchange, otherwise)
                if exchange.gone:
                    if asked is not None:
                        registry.abandoned(
                            exchange, _label(exchange.path), asked.model, asked.streams
                        )
                    return
                asked = asked or self._only_model(exchange)
                entry = self._entry(asked, exchange.path, otherwise)
                if entry is not None and asked is not None:
                    label = _label(exchange.path)
                    await self._send_off_loop(self._begin(exchange, entry, asked, label))
                    return
            assert otherwise is not None, "without another route an error was raised"
            otherwise(exchange)
        except DynamoError as error:
            self._refuse(exchange, error, asked)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also panics in Rust
            log.exception("a request to %s failed", exchange.path)
            exchange.crashed(error)
        finally:
            registry.leave()

    def _only_model(self, exchange: Exchange) -> RelayedBody | None:
        """The only model, for a path whose body need not name one; None if it is not relayed."""
        entries = self._models.entries()
        if exchange.path not in _MODEL_OPTIONAL or len(entries) != 1 or not entries[0].relayed:
            return None
        return RelayedBody(entries[0].name)

    def _entry(
        self, asked: RelayedBody | None, path: str, otherwise: Route | None
    ) -> ModelEntry | None:
        """The relayed model of the request; None if ``otherwise`` serves it, or refuses it.

        Raises ModelNotFound, also for a path that the model does not have, Unavailable while
        draining, NoInstances, and Overloaded while the model can take no request.
        """
        if asked is None:
            return None
        entry = self._models.named(asked.model)
        if otherwise is not None and (entry is None or not entry.relayed):
            return None
        if entry is None:
            raise ModelNotFound(f"Model not found: {shorten(asked.model)}")
        if path not in entry.paths:
            raise missing_route(entry.name, path, entry.paths, entry.types)
        self._check(entry)
        return entry

    def _check(self, entry: ModelEntry) -> None:
        self._registry.check()
        if not entry.served:
            raise NoInstances
        if self._models.saturation.count:
            entry.dispatch.check()

    def _begin(
        self, exchange: Exchange, entry: ModelEntry, asked: RelayedBody, label: str
    ) -> _Relay:
        """Admit the request: from here on it ends through its :class:`ActiveRequest`."""
        text = entry.card.model_input == TEXT_INPUT
        kind = RelayedActiveRequest if text else RelayedHttpRequest
        streams = asked.streams and exchange.path != EMBEDDINGS
        answer: RelayedAnswer = TextAnswer(streams) if text else HttpAnswer()
        body, exchange.body = exchange.body, b""
        info = RequestInfo(label, *request_id(exchange.headers))
        request = kind(self._registry, exchange, info, entry.metrics, streams)
        request.generation = answer
        return _Relay(request, answer, entry, asked, body)

    def _prepare(self, relay: _Relay) -> tuple[Tokens, bytes]:
        """The prompt for the router and the message for the worker. Raises InvalidArgument.

        Thread-safe. O(bytes).
        """
        entry, body, exchange = relay.entry, relay.body, relay.request.exchange
        path, settings = exchange.path, self._registry.settings
        preprocessor = entry.preprocessor if entry.has_preprocessor else None
        if entry.card.model_input == TEXT_INPUT:
            message = text_message(
                path,
                body,
                ignore_unsupported=settings.ignore_unsupported_fields,
                ignore_nvext=settings.disable_nvext,
            )
        else:
            target = path, exchange.query
            head = exchange.method, exchange.headers
            message = http_message(target, head, body, relay.request.engine_id)
        ids = prompt_ids(preprocessor, path, body, relay.asked, entry.context_length)
        return ids, message

    async def _send_off_loop(self, relay: _Relay) -> None:
        try:
            ids, message = await self._registry.off_loop.run(self._prepare, relay)
            if not relay.request.closed:
                self._send(relay, ids, message)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; crashed() logs it
            relay.request.crashed(error)

    def _send(self, relay: _Relay, ids: Tokens, message: bytes) -> None:
        """Choose a worker, reserve its load, send."""
        request, answer, entry, asked, _ = relay
        request.metrics.prepared_s = time.monotonic()
        lora_name = entry.card.lora_name
        routing = None if lora_name is None else Routing(lora_name=lora_name)
        preprocessed = PreprocessedRequest(
            asked.model, ids, routing=routed(routing, request.exchange.headers)
        )
        dispatch = entry.dispatch
        one = RelayedEngineRequest(request, answer, dispatch, preprocessed, message)
        request.engine_requests = [one]
        dispatch.decode(one)  # not through a prefill worker, which takes tokens
        if not request.closed:
            request.dispatched(len(ids))

    def _refuse(self, exchange: Exchange, error: DynamoError, asked: RelayedBody | None) -> None:
        """Respond to a request that has not reached a model."""
        path = exchange.path
        known = any(path in entry.paths for entry in self._models.entries())
        model = "unknown" if asked is None else asked.model
        kind = "stream" if asked is not None and asked.streams else "unary"
        label = _label(path) if known else "unknown"
        self._registry.refuse(exchange, label, error, model, kind)


def _peek(exchange: Exchange, otherwise: Route | None) -> RelayedBody | None:
    """Read what counts of the body; None if it is wrong and ``otherwise`` explains how."""
    content_type = exchange.headers.get("content-type")
    if content_type is not None and is_multipart(content_type):
        return peek_form(exchange.body, content_type)
    try:
        return peek(exchange.body)
    except InvalidArgument:
        if otherwise is None:
            raise
        return None


def _label(path: str) -> str:
    """The ``endpoint`` label of the metrics, e.g. ``chat_completions``."""
    return path.removeprefix(_PREFIX).strip("/").replace("/", "_")
