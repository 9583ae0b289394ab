"""The Messages API with the network taken away: errors, ids, cancellation, models of others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from relayed_kit import RelaySite
from test_request import Site, ids, turn

from dynamo.errors import Disconnected, NoInstances, Overloaded
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.apis.messages.route import MessagesRoutes, messages_error_body
from dynamo.frontend.apis.relay.route import RelayRoutes
from dynamo.frontend.apis.tokenize import PromptCountRoutes
from dynamo.http.routes import Routes

PATH = "/v1/messages?beta=true"


def serve(site: Site) -> None:
    """Serve the Messages API on ``site``, with relayed models as in the frontend."""
    routes, models = Routes(), site
    openai = OpenAIRoutes(site.active, models, site.tasks)  # type: ignore[arg-type]
    counts = PromptCountRoutes(site.active, models, site.tasks)  # type: ignore[arg-type]
    MessagesRoutes(site.active, openai, counts).install(routes)
    relay = RelayRoutes(site.active, models, site.tasks)  # type: ignore[arg-type]
    relay.install(routes)
    relay.go_first(routes)
    site.bench.server.handler = routes
    site.bench.server.error_bodies = messages_error_body


@pytest.fixture
async def site() -> Site:
    made = Site()
    serve(made)
    return made


def ask(site: Site, model: str = "tiny", **fields: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    site.post({"model": model, "max_tokens": 50, "messages": messages, **fields}, PATH)


def header(site: Site, name: str) -> str:
    lines = dict(line.split(": ", 1) for line in site.head.split("\r\n")[1:])
    return lines[name]


async def test_every_response_has_an_id(site: Site) -> None:
    ask(site)
    (stream,) = site.streams
    stream.say(ids(site, "good day"), finish_reason="stop")
    stream.sink.on_end()
    assert site.status == 200 and site.answer["content"] == [{"type": "text", "text": "good day"}]
    assert site.answer["id"] == f"msg_{header(site, 'request-id')}"
    assert header(site, "x-request-id") == stream.engine_id
    site.settled()


async def test_equal_requests_have_ids_of_their_own(site: Site) -> None:
    for _ in range(2):
        ask(site)
        site.streams[-1].say(ids(site, "good day"), finish_reason="stop")
        site.streams[-1].sink.on_end()
    assert len({stream.engine_id for stream in site.streams}) == 2
    site.settled()


async def test_a_clients_own_id(site: Site) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    site.post(body, PATH, x_request_id="mine", stream="x")
    site.streams[0].sink.on_error(Disconnected("gone"))
    assert header(site, "request-id") == "mine"
    assert site.answer["request_id"] == "mine" and site.answer["error"]["type"] == "api_error"
    site.settled()


@pytest.mark.parametrize(
    ("settings", "error", "status", "kind"),
    [
        ({}, Overloaded("busy"), 503, "overloaded_error"),
        ({"overload_status": 529}, Overloaded("busy"), 529, "overloaded_error"),
        ({"overload_status": 429}, Overloaded("busy"), 429, "overloaded_error"),
        ({}, NoInstances(""), 503, "api_error"),
    ],
)
async def test_a_request_that_no_worker_takes(
    settings: dict[str, Any], error: Any, status: int, kind: str
) -> None:
    site = Site(**settings)
    serve(site)
    site.pick_error = error
    ask(site)
    assert site.status == status and site.answer["type"] == "error"
    assert site.answer["error"]["type"] == kind and header(site, "retry-after") == "1"
    assert site.answer["request_id"] == header(site, "request-id")
    site.settled()


async def test_a_prompt_that_is_too_long(site: Site) -> None:
    """Claude Code compacts the conversation when it reads this."""
    length = len(ids(site, "hello " * 5000))
    ask(site, messages=[{"role": "user", "content": "hello " * 5000}])
    assert site.status == 400 and site.answer["error"]["type"] == "invalid_request_error"
    text = site.answer["error"]["message"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", text)
    tokens, limit = map(int, re.findall(r"\d+", text))
    assert limit < length <= tokens
    site.settled()


async def test_a_worker_lost_in_mid_stream(site: Site) -> None:
    ask(site, stream=True)
    (stream,) = site.streams
    stream.say(ids(site, "good "))
    await turn()
    site.active.fail_all(NoInstances("gone"))
    last = site.body.split(b"\n\n")[-2]
    assert last.startswith(b"event: error\ndata: ")
    assert json.loads(last.partition(b"data: ")[2])["error"]["type"] == "api_error"
    assert b"[DONE]" not in site.body
    site.settled()


async def test_a_client_that_leaves_stops_the_engine(site: Site) -> None:
    ask(site, stream=True)
    (stream,) = site.streams
    stream.say(ids(site, "good "))
    await turn()
    site.bench.connection.connection_lost(None)
    assert stream.killed == 1
    site.settled()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/messages", 415), ("GET", "/v1/messages/batches", 404)],
)
async def test_errors_before_the_route(site: Site, method: str, path: str, status: int) -> None:
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
    site.bench.feed(head.encode() + b"{}")
    assert site.status == status and site.answer["type"] == "error"


async def test_a_model_of_another_server_is_relayed() -> None:
    site = RelaySite()
    serve(site)
    site.far.paths = frozenset(("/v1/messages",))
    ask(site, model="far", unheard_of=1)
    (stream,) = site.relayed
    assert stream.request.path == PATH and b"unheard_of" in stream.request.body
    stream.head(request_id="req_1")
    stream.body(b'{"type": "message", "usage": {"input_tokens": 3, "output_tokens": 5}}')
    stream.sink.on_end()
    assert site.status == 200 and header(site, "request-id") == "req_1"
    labels = {"endpoint": "messages", "model": "far", "status": "success"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
    site.settled()


async def test_another_server_without_messages() -> None:
    site = RelaySite()
    serve(site)
    ask(site, model="far")
    assert site.status == 404 and site.answer["error"]["type"] == "not_found_error"
    assert "model `far` has no /v1/messages" in site.answer["error"]["message"]
