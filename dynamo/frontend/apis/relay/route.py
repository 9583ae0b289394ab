"""The routes of relayed models: their workers take whole HTTP requests, or whole OpenAI bodies.

``RelayRoutes.install`` takes GET, POST and DELETE of all paths under /v1/ without a route. With the
first relayed model it puts itself in front of the POST routes under /v1/, of /tokenize, of
/detokenize and of the pooling APIs. So one place decides, by the model, how a request is served,
and a frontend without such a model pays nothing for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, NoInstances, shorten
from dynamo.frontend.answer.pooling import BodyEmbeddingsAnswer
from dynamo.frontend.apis.chat.batch import CHAT_BATCH_PATH
from dynamo.frontend.apis.pooling.route import EMBEDDINGS_API
from dynamo.frontend.apis.relay.body import (
    RelayedBody,
    name_only_model,
    peek,
    peek_form,
    prompt_ids,
)
from dynamo.frontend.apis.relay.http_answer import HttpAnswer
from dynamo.frontend.apis.relay.request import (
    HttpResponseWriter,
    PoolingWriter,
    RelayedAnswer,
    RelayedEngineRequest,
)
from dynamo.frontend.apis.relay.text_answer import TextAnswer
from dynamo.frontend.models.model import TEXT_INPUT, LoadedModel, ModelEntry, missing_route
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import DESERIALIZE, INLINE_BODY_BYTES
from dynamo.frontend.prompt.field_rules import rewritten
from dynamo.frontend.prompt.validation import check_json, parse_chat, parse_completion
from dynamo.frontend.requests.headers import (
    NVEXT_HEADERS,
    check_server_priority,
    request_id,
    routed,
)
from dynamo.frontend.requests.recent import RequestInfo
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest, ResponseWriter
from dynamo.http import Exchange
from dynamo.http.routes import Route, RouteMatch, Routes, field_span, is_multipart
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import HttpRequest, PreprocessedRequest
from dynamo.protocols.openai import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH
from dynamo.protocols.pooling import POOLING_PATHS, offered_path
from dynamo.runtime.process.tasks import Tasks

_PREFIX = "/v1/"
_POSTS = (_PREFIX, "/tokenize", "/detokenize", *POOLING_PATHS)
log = logging.getLogger(__name__)
_MAX_QUERY_FIELDS = 64
# Those of the client's connection, the length and the id, which are set here, the choice of a
# worker, an encoding that would hide the usage from the metrics, and the origin of a page, which
# is checked here: servers refuse those that they do not know.
_OWN_HEADERS = frozenset(
    (
        *("connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("accept-encoding", "content-length", "cookie", "host", "x-request-id"),
        "origin",
        *("proxy-authorization", "proxy-connection"),
    )
)
_UNSALTED = frozenset(("/v1/messages", "/v1/messages/count_tokens"))
"""Paths on which vLLM's server takes no ``cache_salt``."""
_ROUTING_PREFIX = "x-dynamo-"
_decode = msgspec.json.Decoder().decode


def http_message(
    target: tuple[str, str], head: tuple[str, Mapping[str, str]], body: bytes, request_id: str
) -> bytes:
    """The ``HttpRequest`` for the server: the client's body unchanged, and its headers but those of
    its connection. ``target`` is the path and the query, ``head`` method and headers. O(bytes)."""
    path, query = target
    method, headers = head
    forwarded = [
        header
        for header in headers.items()
        if header[0] not in _OWN_HEADERS and not header[0].startswith(_ROUTING_PREFIX)
    ]
    forwarded.append(("x-request-id", request_id))
    return encode(HttpRequest(method, f"{path}?{query}" if query else path, forwarded, body))


def text_message(path: str, body: bytes, *, unknown: str, ignore_nvext: bool) -> bytes:
    """The body as MessagePack, for a Python handler that takes it as a dict. O(bytes).

    Raises InvalidArgument, for chat and text completions by the same rules as for other models.
    """
    if path == CHAT_PATH:
        parse_chat(body, unknown=unknown)
    elif path == COMPLETIONS_PATH:
        parse_completion(body, unknown=unknown)
    else:
        check_json(body)
    try:
        request = _decode(body)
        if ignore_nvext:
            request.pop("nvext", None)
        return encode(request)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    except OverflowError:
        raise InvalidArgument(
            "Validation: integers must be between -2**63 and 2**64-1; send a smaller number"
        ) from None


class RouteModel(NamedTuple):
    """A model and the route of it that a request matches whose body names no model."""

    entry: ModelEntry
    match: RouteMatch


def models_with_route(entries: Sequence[ModelEntry], exchange: Exchange) -> list[RouteModel]:
    """The relayed models that have the method and path of the request."""
    candidates = []
    for entry in entries:
        match = entry.patterns.find(exchange.method, exchange.path)
        if match is not None:
            candidates.append(RouteModel(entry, match))
    return candidates


def choose_model(candidates: Sequence[RouteModel], exchange: Exchange) -> RouteModel:
    """The model that the query or a parameter of the path names, else the only one.

    Several models of the same workers count as one: the server sees no difference. Raises
    ModelNotFound and InvalidArgument.
    """
    named = _query_model(exchange.query)
    if named is not None:
        for candidate in candidates:
            if named in (candidate.entry.name, *candidate.entry.card.model_aliases):
                return candidate
        raise ModelNotFound(
            f"Route not found: no model `{shorten(named)}` has {exchange.method} of this path"
        )
    for candidate in candidates:
        if candidate.entry.name in (exchange.path[slice(*span)] for span in candidate.match.spans):
            return candidate
    served = [candidate for candidate in candidates if candidate.entry.served] or candidates
    # Those of the same workers, such as adapters, have one server, which sees no difference.
    if len({_workers(candidate.entry) for candidate in served}) == 1:
        return served[0]
    names = ", ".join(sorted(candidate.entry.name for candidate in served))
    raise InvalidArgument(
        f"Validation: several servers have {exchange.method} of this path; name the model in the "
        f"query, ?model=NAME, one of {shorten(names)}"
    )


def route_label(match: RouteMatch) -> str:
    """The ``endpoint`` label of the metrics, e.g. ``responses_response_id``."""
    path = match.route.partition("/v1/")[2]
    return path.replace("/", "_").replace("{", "").replace("}", "")


def _query_model(query: str) -> str | None:
    if "model=" not in query:
        return None
    try:
        fields = parse_qs(query, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as error:
        raise InvalidArgument(f"Validation: query: {error}") from None
    return fields.get("model", [None])[0]


def _workers(entry: ModelEntry) -> frozenset[int]:
    return frozenset(card.instance_id for card in entry.workers.values())


class _Relay(NamedTuple):
    """A request on its way to its model; ``path`` is that of the server."""

    request: ActiveRequest
    answer: RelayedAnswer
    model: LoadedModel
    asked: RelayedBody
    body: bytes
    path: str


class RelayRoutes:
    """Serve relayed models; pass every other request to the route behind."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks
        self._posts: Sequence[str] = ()

    def install(self, routes: Routes) -> None:
        """Take the paths of /v1/ without a route; remember the POST routes installed so far."""
        rows = routes.paths()
        self._posts = [
            path for path, methods in rows if path.startswith(_POSTS) and "POST" in methods
        ]
        routes.rest(_PREFIX, ("GET", "POST", "DELETE"), self.serve_rest)

    def go_first(self, routes: Routes) -> None:
        """See the requests of these POST routes first: some model is relayed. Idempotent."""
        for path in self._posts:
            routes.wrap(path, ("POST",), self._before)
        self._posts = ()

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
        candidates = models_with_route(models.entries(), exchange) if models.relays else []
        if candidates:
            self._serve_route(candidates, exchange)
        elif exchange.method == "POST" and (models.relays or models.on_demand.relays):
            self._serve(None, exchange)
        else:
            exchange.refuse(404, f"Route not found: {exchange.method} {exchange.path}")

    def _serve_route(self, candidates: Sequence[RouteModel], exchange: Exchange) -> None:
        """Relay a request whose body does not name its model."""
        # That of any, for an error before one is chosen.
        label = route_label(candidates[0].match)
        try:
            entry, match = choose_model(candidates, exchange)
            label = route_label(match)
            model = self._ready(entry, exchange)
        except DynamoError as error:
            self._registry.hold_or_refuse(exchange, label, error, "unknown", "unary")
            return
        fields = RelayedBody(entry.name)
        self._relay(self._begin(exchange, model, fields, label))

    def _serve(self, otherwise: Route | None, exchange: Exchange) -> None:
        """Relay the request, or pass it to ``otherwise``, the route of models that take tokens."""
        if len(exchange.body) > INLINE_BODY_BYTES:
            self._tasks.spawn(self._serve_large(otherwise, exchange), name="large body")
            return
        fields = None
        try:
            fields = self._named(_peek(exchange, otherwise), exchange, otherwise)
            model = self._model(fields, exchange, otherwise)
        except DynamoError as error:
            self._refuse(exchange, error, fields)
            return
        if model is None or fields is None:
            assert otherwise is not None, "without another route an error was raised"
            otherwise(exchange)
            return
        self._relay(self._begin(exchange, model, fields, _label(exchange.path)))

    def _relay(self, relay: _Relay) -> None:
        """Send the request, in a thread if its prompt is long."""
        preprocessor = relay.model.preprocessor
        # A template of the request is compiled for the tokens, which takes as long as a prompt.
        if preprocessor is not None and (
            len(relay.body) > preprocessor.inline_limit_bytes or bytes(relay.asked.chat_template)
        ):
            self._tasks.spawn(self._send_off_loop(relay), name="long prompt")
            return
        try:
            self._send(relay, *self._prepare(relay))
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            relay.request.fail(error)

    async def _serve_large(self, otherwise: Route | None, exchange: Exchange) -> None:
        """As :meth:`_serve`, with all work on the body in a thread."""
        registry = self._registry
        threads = registry.off_loop
        fields = None

        def refuse(error: DynamoError) -> None:
            self._refuse(exchange, error, fields)

        with registry.preparing(exchange, refuse):
            with threads.hold(len(exchange.body)):
                fields = await threads.run(_peek, exchange, otherwise)
                if exchange.gone:
                    if fields is not None:
                        model_name = fields.model or "unknown"
                        registry.abandoned(
                            exchange, _label(exchange.path), model_name, fields.streams
                        )
                    return
                fields = self._named(fields, exchange, otherwise)
                model = self._model(fields, exchange, otherwise)
                if model is not None and fields is not None:
                    label = _label(exchange.path)
                    await self._send_off_loop(self._begin(exchange, model, fields, label))
                    return
            # Behind hold(): the other route counts the body itself.
            assert otherwise is not None, "without another route an error was raised"
            otherwise(exchange)

    def _named(
        self, fields: RelayedBody | None, exchange: Exchange, otherwise: Route | None
    ) -> RelayedBody | None:
        """Return ``fields`` with a model; None if ``otherwise`` finds it or reports the error."""
        if fields is None or name_only_model(fields, exchange.path, self._models.entries()):
            return fields
        if otherwise is None:
            raise InvalidArgument(f"{DESERIALIZE}missing field `model`")
        return None

    def _model(
        self, fields: RelayedBody | None, exchange: Exchange, otherwise: Route | None
    ) -> LoadedModel | None:
        """The relayed model of the request; None if ``otherwise`` serves it, or refuses it.

        Raises ModelNotFound, also for a path that the model does not have, Unavailable while
        draining, NoInstances, and Overloaded while the model can take no request.
        """
        if fields is None:
            return None
        entry = self._models.named(fields.model)
        if otherwise is not None and (entry is None or not entry.relayed):
            return None
        if entry is None:
            raise ModelNotFound(f"Model not found: {shorten(fields.model)}")
        if offered_path(exchange.path, entry.paths) is None:
            raise missing_route(entry.name, exchange.path, entry)
        return self._ready(entry, exchange)

    def _ready(self, entry: ModelEntry, exchange: Exchange) -> LoadedModel:
        self._registry.check(exchange)
        model = entry.loaded
        if not entry.served or model is None:
            raise NoInstances
        if self._models.saturation.count:
            model.dispatch.check()
        return model

    def _begin(
        self, exchange: Exchange, model: LoadedModel, fields: RelayedBody, label: str
    ) -> _Relay:
        """Admit the request: from here on it ends through its :class:`ActiveRequest`."""
        streams, body = fields.streams, exchange.body
        answer: RelayedAnswer
        if model.card.model_input != TEXT_INPUT:
            answer = HttpAnswer()
            writer: ResponseWriter = HttpResponseWriter(answer)
        elif exchange.path == EMBEDDINGS_PATH:
            answer, writer, streams = BodyEmbeddingsAnswer(fields.model), PoolingWriter(), False
        else:
            answer, writer = TextAnswer(streams), ResponseWriter()
        self._registry.release_body(exchange)
        info = RequestInfo(label, *request_id(exchange.headers))
        request = ActiveRequest(self._registry, exchange, info, model.metrics, streams, writer)
        path = exchange.path
        if path in POOLING_PATHS and (entry := self._models.named(fields.model)) is not None:
            path = offered_path(path, entry.paths) or path
        return _Relay(request, answer, model, fields, body, path)

    def _prepare(self, relay: _Relay) -> tuple[PreprocessedRequest, bytes]:
        """The prompt and the constraints for the router, the message for the worker.

        Raises InvalidArgument. Thread-safe. O(bytes).
        """
        model, exchange, settings = relay.model, relay.request.exchange, self._registry.settings
        path, key = relay.path, exchange.api_key
        body, fields = self._adapted(relay)
        is_text, ignores_nvext = model.card.model_input == TEXT_INPUT, settings.disable_nvext
        unknown = settings.unknown_field_policy
        check_server_priority(fields.priority, key)
        reader = None if is_text and ignores_nvext else key  # the handler gets no nvext then
        routing, override = fields.constraints(model.card.lora_name, ignores_nvext, reader)
        routing = routed(routing, exchange.headers, key, ignores_nvext)
        if routing is not None and routing.cache_namespace != fields.cache_salt:  # with the tenant
            if path in _UNSALTED or _is_form(exchange):
                raise InvalidArgument(
                    f"Header 'x-tenant-id' has no effect on {path} of this model, whose server "
                    f"takes no `cache_salt` there; use {CHAT_PATH}"
                )
            body = rewritten(path, body, model.name, None, routing.cache_namespace)
        if isinstance(relay.answer, BodyEmbeddingsAnswer):
            embedding = EMBEDDINGS_API.parse(body, unknown=unknown)
            relay.answer.expect(len(embedding.inputs), embedding.encoding_format == "base64")
        if is_text:
            message = text_message(path, body, unknown=unknown, ignore_nvext=ignores_nvext)
        else:
            target = path, exchange.query
            head = exchange.method, _forwarded(exchange.headers, ignores_nvext)
            message = http_message(target, head, body, relay.request.engine_id)
        ids = prompt_ids(model.preprocessor, path, body, fields, model.context_length)
        preprocessed = PreprocessedRequest(
            relay.asked.model, ids, routing=routing, router_config_override=override
        )
        return preprocessed, message

    def _adapted(self, relay: _Relay) -> tuple[bytes, RelayedBody]:
        """Return the body with the name of the model, which the server has under this name alone,
        and with the fields that the graph decides about; and what counts of it then."""
        model, body, fields, exchange = relay.model, relay.body, relay.asked, relay.request.exchange
        rules = self._models.rules.get(model.name)
        if rules is None and fields.model not in self._models.aliases:
            return body, fields
        if _is_form(exchange):
            span = field_span(body, exchange.headers["content-type"], "model")
            if span is not None:
                body = b"".join((body[: span[0]], model.name.encode(), body[span[1] :]))
            return body, fields
        path = CHAT_PATH if relay.path == CHAT_BATCH_PATH else relay.path
        body = rewritten(path, body, model.name, rules)
        if rules is not None:
            with contextlib.suppress(InvalidArgument):  # not every path needs a model in its body
                fields = peek(body)
        return body, fields

    async def _send_off_loop(self, relay: _Relay) -> None:
        try:
            prepared = await self._registry.off_loop.run(self._prepare, relay)
            if not relay.request.closed:
                self._send(relay, *prepared)
        except BaseException as error:  # noqa: BLE001 - also panics in Rust; fail() logs it
            relay.request.fail(error)

    def _send(self, relay: _Relay, preprocessed: PreprocessedRequest, message: bytes) -> None:
        """Choose a worker, reserve its load, send."""
        request, answer, dispatch = relay.request, relay.answer, relay.model.dispatch
        request.prepared(answer, time.monotonic())
        engine_request = RelayedEngineRequest(request, answer, dispatch, preprocessed, message)
        # Not through a prefill worker, which takes tokens.
        request.send(dispatch, [engine_request], len(preprocessed.token_ids), prefill=False)

    def _refuse(self, exchange: Exchange, error: DynamoError, fields: RelayedBody | None) -> None:
        """Respond to a request that has not reached a model."""
        path = exchange.path
        # Clients choose the path: only those of models become labels.
        has_path = any(offered_path(path, entry.paths) for entry in self._models.entries())
        model = "unknown" if fields is None else fields.model
        kind = "stream" if fields is not None and fields.streams else "unary"
        label = _label(path) if has_path else "unknown"
        self._registry.hold_or_refuse(exchange, label, error, model, kind)


def _peek(exchange: Exchange, otherwise: Route | None) -> RelayedBody | None:
    """Read what counts of the body; None if it is wrong and ``otherwise`` explains how."""
    if _is_form(exchange):
        return peek_form(exchange.body, exchange.headers["content-type"])
    try:
        return peek(exchange.body)
    except InvalidArgument:
        if otherwise is None:
            raise
        return None


def _is_form(exchange: Exchange) -> bool:
    return is_multipart(exchange.headers.get("content-type", ""))


def _forwarded(headers: Mapping[str, str], ignores_nvext: bool) -> Mapping[str, str]:
    """Return ``headers``; with ``ignores_nvext`` without those that choose a rank in servers."""
    if not ignores_nvext or NVEXT_HEADERS.isdisjoint(headers):
        return headers
    return {name: value for name, value in headers.items() if name not in NVEXT_HEADERS}


def _label(path: str) -> str:
    """The ``endpoint`` label of the metrics, e.g. ``chat_completions``."""
    api = POOLING_PATHS.get(path)
    return api or path.removeprefix(_PREFIX).strip("/").replace("/", "_")
