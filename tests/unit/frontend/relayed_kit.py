"""Relayed requests with the network taken away: the test plays the worker and the client."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
from http_bench import Bench
from test_request import Site
from text_kit import card

from dynamo.errors import DynamoError
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.invocations import InvocationRoutes
from dynamo.frontend.apis.messages.route import MessagesRoutes
from dynamo.frontend.apis.pooling.route import PoolingRoutes
from dynamo.frontend.apis.relay.request import RelayedEngineRequest
from dynamo.frontend.apis.relay.route import RelayRoutes
from dynamo.frontend.apis.responses.route import ResponseRoutes
from dynamo.frontend.apis.responses.store import ResponseStore
from dynamo.frontend.apis.tokenize import PromptCountRoutes, TokenizeRoutes
from dynamo.frontend.models.model import paths_of, patterns_of
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.http.routes import RoutePatterns, Routes
from dynamo.protocols.codec import plain_decode
from dynamo.protocols.engine import HttpRequest, HttpResponseHead
from dynamo.router.decision.decision import Attempt, Decision

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/audio/speech"]
PATHS += ["/tokenize", "/detokenize"]
ROUTES = [
    "GET /v1/voices",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "POST /v1/responses/{id}/cancel",
]
_decode_request = msgspec.msgpack.Decoder(HttpRequest).decode


class RelayStream:
    """What the worker has of one relayed request."""

    def __init__(self, worker_id: int, payload: bytes, sink: Any, headers: dict[str, str]) -> None:
        self.worker_id = worker_id
        self.payload = payload
        self.sink = sink
        self.headers = headers
        self.engine_id = headers["request-id"]
        self.calls: list[str] = []

    @property
    def request(self) -> HttpRequest:
        return _decode_request(self.payload)

    @property
    def value(self) -> Any:
        return plain_decode(self.payload)

    def kill(self) -> None:
        self.calls.append("kill")

    def give_up(self, error: DynamoError) -> None:
        self.calls.append("kill")
        self.sink.on_error(error)

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def head(self, status: int = 200, content_type: str = "application/json", **more: str) -> None:
        headers = [("content-type", content_type)] if content_type else []
        headers += [(name.replace("_", "-"), value) for name, value in more.items()]
        self.sink.on_data(msgspec.msgpack.encode(HttpResponseHead(status, headers)))

    def body(self, *parts: bytes) -> None:
        for part in parts:
            self.sink.on_data(part)

    def items(self, *items: Any) -> None:
        for item in items:
            self.sink.on_data(msgspec.msgpack.encode(item))


class RelaySite(Site):
    """A site with the relayed model ``far`` beside ``tiny``, which takes tokens."""

    embeds = False
    """Whether /v1/embeddings is a route, as in a frontend."""

    def __init__(
        self,
        model_input: str = "Http",
        model_type: str = "Chat | Completions | Embedding",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.relays = True
        self.workers = [7, 8, 9]
        self.tokens: list[Any] = []
        self.overrides: list[Any] = []
        self.relayed: list[RelayStream] = []
        self.far_card = card(
            display_name="far",
            model_input=model_input,
            model_type=model_type,
            user_data={"routes": [*PATHS, *ROUTES]},
        )
        self.far = SimpleNamespace(
            dispatch=Dispatch(self, self),  # type: ignore[arg-type]
            picker=self,
            client=self,
            prefill=self.entry.prefill,
            name="far",
            card=self.far_card,
            relayed=True,
            served=True,
            paths=paths_of([self.far_card]),
            types=frozenset(),
            patterns=patterns_of([self.far_card]),
            workers={"7": self.far_card},
            preprocessor=None,
            context_length=2048,
        )
        self.far.loaded = self.far
        self.far.metrics = self.metrics.model("far")
        self.entry.relayed, self.entry.name, self.entry.paths = False, "tiny", frozenset()
        self.entry.patterns, self.entry.types = RoutePatterns(), frozenset(("Chat", "Completions"))
        self.worker_pool = SimpleNamespace(members=dict.fromkeys(self.workers), avoided=set())
        routes = Routes()
        of: Any = (self.active, self, self.tasks)
        openai, counts, relay = OpenAIRoutes(*of), PromptCountRoutes(*of), RelayRoutes(*of)
        openai.install(routes)
        self.store = ResponseStore(1 << 20)
        responses = ResponseRoutes(self.store, relay.has_route, relay.serve_rest)
        responses.install(routes, openai, counts)
        MessagesRoutes(self.active, openai, counts).install(routes)
        TokenizeRoutes(*of).install(routes)
        if self.embeds:
            PoolingRoutes(*of).install(routes)
        InvocationRoutes(*of).install(routes)
        relay.install(routes)
        relay.go_first(routes)
        self.routes = routes
        self.bench = Bench(handler=routes)

    def entries(self) -> list[Any]:
        return [self.entry, self.far]

    def named(self, name: str) -> Any:
        return {"tiny": self.entry, "far": self.far}.get(self.aliases.get(name, name))

    def pick(
        self,
        request_id: str | None,
        tokens: Any,
        *,
        routing: Any,
        override: Any = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        super().pick(request_id, tokens, routing=routing, override=override, attempt=attempt)
        self.tokens.append(tokens)
        self.overrides.append(override)
        limited = routing if attempt is None else attempt.limit(routing)
        allowed = None if limited is None else limited.allowed_worker_ids
        return Decision((self.workers if allowed is None else allowed)[0], 0, 2, 4)

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        if not isinstance(sink, RelayedEngineRequest):
            return super().open(worker_id, payload, sink, headers)
        stream = RelayStream(worker_id, payload, sink, headers)
        self.relayed.append(stream)
        return stream

    def ask(self, path: str = PATHS[0], headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Post a body for ``far``; return the worker's end of it."""
        chat = {"messages": [{"role": "user", "content": "hello"}]} if path == PATHS[0] else {}
        self.post({"model": "far", **chat, **body}, path, **(headers or {}))
        return self.relayed[-1] if self.relayed else None

    def settled(self) -> None:
        super().settled()
        for name in ("active_requests", "inflight_requests", "queued_requests"):
            assert self.sample(f"dynamo_frontend_{name}", model="far") == 0


def event(value: Any, end: str = "\n\n") -> bytes:
    """A server-sent event with ``value`` as JSON, or as it is."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}{end}".encode()
