"""Requests relayed to another HTTP server: what it gets, what the client gets, what is counted."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from http_bench import Bench
from relayed_kit import PATHS, RelaySite, event
from test_request import turn
from text_kit import card

from dynamo.errors import (
    CannotConnect,
    Disconnected,
    EngineFailure,
    NoInstances,
    Overloaded,
)
from dynamo.frontend.apis.operator.routing import ExplainRoutes
from dynamo.frontend.apis.relay.http_answer import HttpAnswer
from dynamo.frontend.prompt.field_rules import FieldRules
from dynamo.http import Exchange
from dynamo.http.api_keys import ApiKey, Grants

ANSWER = b'{"id": 1,  "odd": [1,2], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}'


@pytest.fixture
async def site() -> RelaySite:
    return RelaySite()


def ended(site: RelaySite, error_type: str = "", kind: str = "unary") -> float:
    return site.sample(
        "dynamo_frontend_requests_total",
        endpoint="chat_completions",
        error_type=error_type,
        model="far",
        request_type=kind,
        status="error" if error_type else "success",
    )


async def test_the_body_is_relayed_byte_for_byte(site: RelaySite) -> None:
    body = b'{ "model":"far","messages" : [ ],\n "unheard_of": {"a": 1e400},  "n": "many" }'
    site.post(body, authorization="Bearer k", x_custom="c", accept_encoding="gzip", te="trailers")
    (stream,) = site.relayed
    request = stream.request
    assert (request.method, request.path, request.body) == ("POST", PATHS[0], body)
    sent = dict(request.headers)
    assert sent["authorization"] == "Bearer k" and sent["x-custom"] == "c"
    assert sent["content-type"] == "application/json"
    assert not {"host", "content-length", "accept-encoding", "te"} & sent.keys()
    assert sent["x-request-id"] == stream.engine_id


async def test_the_query_is_relayed(site: RelaySite) -> None:
    site.post({"model": "far", "input": "hi"}, "/v1/embeddings?beta=1%20x")
    assert site.relayed[0].request.path == "/v1/embeddings?beta=1%20x"


async def test_tokenize_is_relayed_where_the_server_has_it(site: RelaySite) -> None:
    site.post({"model": "far", "prompt": "hi"}, "/tokenize")
    site.relayed[0].head()
    site.relayed[0].body(b'{"count": 1}')
    site.relayed[0].sink.on_end()
    assert site.relayed[0].request.path == "/tokenize" and site.answer == {"count": 1}
    labels = {"endpoint": "tokenize", "model": "far", "status": "success"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
    site.settled()


@pytest.mark.parametrize("body", [{"prompt": "hi"}, {"prompt": "hi " * 60_000}])
async def test_tokenize_needs_no_model_where_one_is_served(site: RelaySite, body: Any) -> None:
    site.entries = lambda: [site.far]  # type: ignore[method-assign]
    site.post(body, "/tokenize")
    async with asyncio.timeout(10):
        while not site.relayed:
            await turn()
    assert site.relayed[0].request.body == json.dumps(body).encode()
    site.relayed[0].head()
    site.relayed[0].body(b'{"count": 1}')
    site.relayed[0].sink.on_end()
    await turn()
    assert site.answer == {"count": 1}
    site.settled()
    site.bench = Bench(handler=site.routes)
    del site.entries
    site.far.name, site.entry.relayed = "far", True
    site.post({"prompt": "hi"}, "/tokenize")
    await turn()
    assert site.status == 400 and "name one in 'model': far, tiny" in site.answer["message"]


@pytest.mark.parametrize("body", [{"input": "x"}, {"input": "x", "model": None}])
async def test_the_only_model_with_a_path_needs_no_name(site: RelaySite, body: Any) -> None:
    site.post(body, "/v1/embeddings")  # tiny has no embeddings
    (relayed,) = site.relayed
    assert relayed.request.body == json.dumps(body).encode()
    site.bench.connection.connection_lost(None)


async def test_of_two_models_with_a_path_one_is_named(site: RelaySite) -> None:
    site.far.types = frozenset(("Chat",))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    site.post(chat, "/v1/chat/completions")
    assert site.status == 400 and "name one of far, tiny" in site.answer["message"]
    site.bench = Bench(handler=site.routes)
    site.entry.types = frozenset()
    batch = {"messages": [chat["messages"]]}
    site.post(batch, "/v1/chat/completions/batch")  # far lacks it: no worker is waited for
    assert site.status == 400 and "name one of far" in site.answer["message"]
    assert not site.relayed
    site.settled()


async def test_tokenize_is_refused_where_the_server_lacks_it(site: RelaySite) -> None:
    site.far.paths = frozenset(PATHS[:1])
    site.post({"model": "far", "tokens": [1]}, "/detokenize")
    assert site.status == 404 and "model `far` has no /detokenize" in site.answer["message"]
    site.settled()


async def test_a_json_answer_comes_in_one_piece_with_its_headers(site: RelaySite) -> None:
    stream = site.ask(headers={"x_request_id": "mine"})
    stream.head(content_type="application/json; charset=utf-8", x_ratelimit_remaining="4", date="x")
    stream.body(ANSWER[:20], ANSWER[20:])
    assert site.bench.transport.out == b""
    stream.sink.on_end()
    assert site.status == 200 and site.body == ANSWER
    assert "content-type: application/json; charset=utf-8" in site.head
    assert "x-ratelimit-remaining: 4" in site.head and "date: x" not in site.head
    assert "x-request-id: mine" in site.head and f"content-length: {len(ANSWER)}" in site.head
    assert ended(site) == 1
    assert site.sample("dynamo_frontend_output_tokens_total", model="far") == 5
    assert site.sample("dynamo_frontend_time_to_first_token_seconds_count", model="far") == 1
    assert site.prefilled == [stream.engine_id]
    site.settled()


async def test_events_stream_as_they_come(site: RelaySite) -> None:
    stream = site.ask(stream=True)
    stream.head(content_type="text/event-stream; charset=utf-8", x_one="1")
    assert site.prefilled == []
    first = event({"choices": [{"delta": {"content": "a"}, "odd": None}]})
    stream.body(first)
    await turn()
    assert site.status == 200 and site.bench.transport.out.endswith(first + b"\r\n")
    assert "content-type: text/event-stream; charset=utf-8" in site.head and "x-one: 1" in site.head
    assert site.prefilled == [stream.engine_id]
    rest = event({"choices": [], "usage": {"completion_tokens": 41}}) + event("[DONE]")
    stream.body(rest[:9], rest[9:60], rest[60:])
    stream.sink.on_end()
    await turn()
    assert site.bench.transport.out.partition(b"\r\n\r\n")[2].endswith(b"0\r\n\r\n")
    assert site.body == first + rest
    assert ended(site, kind="stream") == 1
    assert site.sample("dynamo_frontend_output_tokens_total", model="far") == 41
    site.settled()


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
async def test_without_usage_the_events_are_counted(site: RelaySite, end: str) -> None:
    stream = site.ask(stream=True)
    stream.head(content_type="text/event-stream")
    text = b"".join(event({"n": each, "data:": "data: x"}, end) for each in range(7))
    text += event("[DONE]", end)
    for place in range(0, len(text), 3):
        stream.body(text[place : place + 3])
    stream.sink.on_end()
    await turn()
    assert site.body == text
    assert site.sample("dynamo_frontend_output_tokens_total", model="far") == 7
    site.settled()


@pytest.mark.parametrize(
    ("status", "error_type"),
    [(400, "validation"), (404, "not_found"), (429, "overload"), (500, "internal")],
)
async def test_errors_of_the_server_keep_status_and_body(
    site: RelaySite, status: int, error_type: str
) -> None:
    stream = site.ask(stream=True)
    stream.head(status, retry_after="7")
    stream.body(b'{"error": {"message": "no", "param": null}}')
    stream.sink.on_end()
    assert site.status == status and site.answer["error"]["param"] is None
    assert "retry-after: 7" in site.head
    assert ended(site, error_type, "stream") == 1
    site.settled()


@pytest.mark.parametrize("content_type", ["", "audio/wav", "text/plain"])
async def test_other_types_stream(site: RelaySite, content_type: str) -> None:
    stream = site.ask("/v1/audio/speech", input="say this")
    stream.head(content_type=content_type)
    stream.body(b"\0RIFF")
    await turn()
    assert site.status == 200 and b"RIFF" in site.bench.transport.out
    stream.body(b"more")
    stream.sink.on_end()
    await turn()
    assert site.body == b"\0RIFFmore"
    site.settled()


async def test_a_long_json_answer_is_streamed_and_its_usage_is_found(site: RelaySite) -> None:
    stream = site.ask("/v1/embeddings", input=["a"])
    stream.head()
    vector = b'{"data": [' + b"1.5," * 300_000
    for place in range(0, len(vector), 65536):
        stream.body(vector[place : place + 65536])
    await turn()
    assert site.bench.transport.out.startswith(b"HTTP/1.1 200")
    stream.body(b'0], "usa', b'ge": {"prompt_tokens": 3, "completion_tokens": 2}}')
    stream.sink.on_end()
    await turn()
    assert json.loads(site.body)["usage"]["prompt_tokens"] == 3
    assert site.sample("dynamo_frontend_output_tokens_total", model="far") == 2
    site.settled()


async def test_an_answer_without_a_body(site: RelaySite) -> None:
    stream = site.ask()
    stream.head(204, content_type="")
    stream.sink.on_end()
    assert site.status == 204 and site.body == b""
    site.settled()


# -- models and routes


class PoolingSite(RelaySite):
    embeds = True


async def test_another_name_of_a_path_reaches_the_servers_own() -> None:
    site = PoolingSite()
    site.far.paths |= {"/v1/rerank"}
    site.post({"model": "far", "query": "a", "documents": ["b"]}, "/v2/rerank?x=1")
    (relayed,) = site.relayed
    assert relayed.request.path == "/v1/rerank?x=1"
    assert site.sample("dynamo_frontend_requests_started_total", endpoint="rerank") == 1
    site.bench.connection.connection_lost(None)


async def test_models_that_take_tokens_are_not_affected(site: RelaySite) -> None:
    site.chat(max_tokens=5)
    (stream,) = site.streams
    assert stream.request.stop_conditions.max_tokens == 5
    site.post(b"{", "/v1/completions")
    assert not site.relayed


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/rerank", {"model": "far"}, 404, "model `far` has no /v1/rerank, it has /"),
        ("/v1/rerank", {"model": "nope"}, 404, "Model not found: nope"),
        ("/v1/embeddings", {"model": "tiny"}, 404, "has no /v1/embeddings, it has /v1/chat/co"),
        ("/v1/audio/speech", {"input": "x"}, 400, "missing field `model`"),
        ("/v1/embeddings", {"model": 3}, 400, "Expected `str | null`, got `int` - at `$.m"),
        ("/v1/chat/completions", {"model": "nope", "messages": []}, 400, "cannot be empty"),
        ("/v2/embeddings", {"model": "far"}, 404, "Route not found: POST /v2/embeddings"),
    ],
)
async def test_what_is_not_served_is_explained(
    site: RelaySite, path: str, body: Any, status: int, words: str
) -> None:
    site.post(body, path)
    answer = site.answer
    assert site.status == status and words in answer.get("error", answer)["message"]
    assert not site.relayed
    site.settled()


async def test_without_relayed_models_unknown_paths_are_unknown(site: RelaySite) -> None:
    site.relays = False
    site.post({"model": "far"}, "/v1/embeddings")
    assert site.status == 404 and site.answer["message"] == "Route not found: POST /v1/embeddings"


async def test_an_unknown_path_is_no_label(site: RelaySite) -> None:
    site.post({"model": "nope"}, "/v1/made/up/by/the/client")
    assert b"made_up" not in site.registry.render()


def form(site: RelaySite, path: str, body: bytes) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    site.bench.feed(head.encode() + b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + body)


async def test_a_form_is_relayed_by_its_model(site: RelaySite) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nfar\r\n--x--\r\n'
    form(site, PATHS[3], body)
    (stream,) = site.relayed
    assert stream.request.body == body
    assert dict(stream.request.headers)["content-type"] == "multipart/form-data; boundary=x"


async def test_the_server_gets_the_models_own_name_for_an_alias(site: RelaySite) -> None:
    site.aliases = {"near": "far"}
    site.post(b'{ "model": "near", "input": "hi" }', PATHS[2])
    assert site.relayed[0].request.body == b'{"model":"far","input":"hi"}'
    site.bench = Bench(handler=site.routes)
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nnear\r\n--x--\r\n'
    form(site, PATHS[3], body)
    assert site.relayed[1].request.body == body.replace(b"near", b"far")


async def test_the_rules_of_the_graph_change_the_body(site: RelaySite) -> None:
    site.rules = {"far": FieldRules({"temperature": 0.6}, ["odd"])}
    site.post(b'{"model": "far", "messages": [], "odd": 1, "even": 2.50}')
    expected = b'{"model":"far","messages":[],"even":2.50,"temperature":0.6}'
    assert site.relayed[0].request.body == expected


@pytest.mark.parametrize(
    ("status", "content_type", "body", "text"),
    [
        (200, "text/event-stream", event({"choices": []}) + event("[DONE]"), ""),
        (500, "application/json", b'{"error": "out of memory"}', "Internal server error"),
        (429, "application/json", b'{"error": "busy"}', '{"error": "busy"}'),
        (429, "text/event-stream", event({"choices": []}), "responded with status 429"),
        (200, "application/json", b"{}", ""),
    ],
)
async def test_an_answer_after_the_progress_of_the_load(
    site: RelaySite, status: int, content_type: str, body: bytes, text: str
) -> None:
    stream = site.ask(stream=True)
    progress = event({"choices": [{"delta": {"reasoning_content": "loading 43 %"}}]})
    exchange = stream.sink.request.exchange
    exchange.start(200, "text/event-stream")  # before the request had a worker
    exchange.write(progress)
    stream.head(status, content_type)
    stream.body(body)
    stream.sink.on_end()
    await turn()
    assert site.body.startswith(progress) and site.bench.transport.out.endswith(b"0\r\n\r\n")
    if status == 200 and "event" in content_type:
        assert site.body == progress + body
    else:
        assert text in site.events[1]["error"]["message"]
        assert site.events[-1] == "[DONE]"
    site.settled()


async def test_a_form_without_a_model(site: RelaySite) -> None:
    form(site, PATHS[3], b"--x\r\n\r\n--x--")
    assert site.status == 400 and "has no field `model`" in site.answer["message"]


async def test_paths_of_json_take_no_form(site: RelaySite) -> None:
    form(site, PATHS[0], b"--x\r\n\r\n--x--")
    assert site.status == 415 and "takes no multipart body" in site.answer["message"]


async def test_a_model_without_workers(site: RelaySite) -> None:
    site.far.served = False
    site.ask()
    assert site.status == 503 and "retry-after: 1" in site.head


async def test_a_draining_frontend_relays_nothing(site: RelaySite) -> None:
    site.active.refuses = True
    site.ask()
    assert site.status == 503 and not site.relayed


# -- requests whose body names no model


def ask_route(site: RelaySite, line: str, *headers: str, body: bytes = b"") -> None:
    """Send a request on a connection of its own."""
    site.bench = Bench(handler=site.routes)
    head = "\r\n".join((f"{line} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *headers))
    site.bench.feed(head.encode() + b"\r\n\r\n" + body)


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("GET /v1/voices?model=far&b=%20x", b""),
        ("GET /v1/responses/resp_1:a~b", b""),
        ("DELETE /v1/responses/resp_1", b""),
        ("DELETE /v1/responses/resp_1", b"\0any"),
        ("POST /v1/responses/resp_1/cancel?x=1", b"{ }"),
    ],
)
async def test_other_methods_are_relayed(site: RelaySite, line: str, body: bytes) -> None:
    ask_route(site, line, "Content-Type: application/json", "TE: trailers", "X-Mine: 1", body=body)
    (stream,) = site.relayed
    request = stream.request
    assert f"{request.method} {request.path}" == line and request.body == body
    sent = dict(request.headers)
    assert sent["x-mine"] == "1" and "te" not in sent and "host" not in sent
    stream.head(x_one="1")
    stream.body(b'{"id":', b"1}")
    stream.sink.on_end()
    assert site.status == 200 and site.body == b'{"id":1}' and "x-one: 1" in site.head
    site.settled()


async def test_responses_of_a_relayed_model(site: RelaySite) -> None:
    """The body goes to a server that has the route; another one has none, whatever we serve."""
    body: Any = {"input": "hi", "unheard_of": {"deep": 1}, "background": True}
    site.ask("/v1/responses", **body)
    assert (
        site.status == 404 and "model `far` has no /v1/responses, it has" in site.answer["message"]
    )
    site.far.paths = site.far.paths | {"/v1/responses"}
    site.bench = Bench(handler=site.routes)
    stream = site.ask("/v1/responses", **body)
    assert json.loads(stream.request.body) == {"model": "far", **body}
    stream.head()
    stream.body(b'{"id":"resp_1"}')
    stream.sink.on_end()
    assert site.answer == {"id": "resp_1"} and len(site.store) == 0
    assert site.sample("dynamo_frontend_requests_total", endpoint="responses", status="success")
    site.settled()


async def test_an_id_is_no_label(site: RelaySite) -> None:
    ask_route(site, "GET /v1/responses/resp_1")
    site.relayed[0].head()
    site.relayed[0].sink.on_end()
    assert site.sample("dynamo_frontend_requests_total", endpoint="responses_id", model="far") == 1
    assert b"resp_1" not in site.registry.render()


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("GET /v1/other", 404, "Route not found: GET /v1/other"),
        ("GET /v1/responses/a/b", 404, "Route not found"),
        ("GET /v1/responses/..", 404, "Response with id '..' not found"),
        ("GET /v1/responses/a%2fb", 404, "Route not found"),
        ("GET /v1/responses/a%0d%0ax", 404, "not found"),
        ("DELETE /v1/voices", 404, "Route not found"),
        ("PUT /v1/voices", 404, "Route not found"),
        ("GET /v1/embeddings", 404, "Route not found"),
        ("GET /v1/voices?model=nope", 404, "no model `nope` has GET of this path"),
        ("GET /v1/voices?model=a" + "&b=1" * 64, 400, "query"),
        ("POST /v1/responses/a/cancel", 415, "application/json"),
    ],
)
async def test_other_methods_are_refused(
    site: RelaySite, line: str, status: int, words: str
) -> None:
    ask_route(site, line)
    answer = site.answer
    assert site.status == status and words in answer.get("error", answer)["message"]
    assert not site.relayed
    site.settled()


async def test_one_of_several_servers_is_named(site: RelaySite) -> None:
    near = SimpleNamespace(**vars(site.far) | {"name": "near", "workers": {"8": card()}})
    near.workers["8"].instance_id = 8
    site.entries = lambda: [site.entry, site.far, near]  # type: ignore[method-assign]
    ask_route(site, "GET /v1/voices")
    assert site.status == 400 and "one of far, near" in site.answer["message"]
    for line in ("GET /v1/voices?model=near", "GET /v1/responses/near"):
        ask_route(site, line)
        site.relayed[-1].head()
        site.relayed[-1].sink.on_end()
    assert site.status == 200 and len(site.relayed) == 2
    near.workers = site.far.workers  # now both are models of one server
    ask_route(site, "GET /v1/voices")
    assert len(site.relayed) == 3


# -- routing


async def test_equal_beginnings_have_equal_ids(site: RelaySite) -> None:
    system = {"role": "system", "content": "s" * 400}
    for user in ("one", "two"):
        site.ask(messages=[system, {"role": "user", "content": user}], temperature=len(user))
        site.relayed[-1].head()
        site.relayed[-1].sink.on_end()
    first, second = site.tokens
    assert isinstance(first, array) and first.typecode == "I"
    assert 100 < len(first) < 140 and first[:100] == second[:100] and first != second


async def test_an_image_is_not_taken_for_a_million_tokens(site: RelaySite) -> None:
    site.ask(messages=[{"role": "user", "content": [{"image_url": "data:" + "A" * 100_000}]}])
    assert len(site.tokens[0]) == site.far.context_length


async def test_the_tokens_of_the_model_where_it_has_a_tokenizer(site: RelaySite) -> None:
    site.far.preprocessor = site.preprocessor
    site.ask(messages=[{"role": "user", "content": "hello"}], unheard_of=1)
    site.relayed[0].head()
    site.relayed[0].sink.on_end()
    site.ask(messages=[{"role": 7}])  # ours would refuse it: the server judges
    site.relayed[1].head()
    site.relayed[1].sink.on_end()
    assert len(site.tokens[1])
    site.ask("/v1/completions", prompt=["one two", "three"], max_tokens=10**6)
    site.relayed[2].head()
    site.relayed[2].sink.on_end()
    encode = site.preprocessor.tokenizer.encode
    assert site.tokens[2] == encode("one two", True) + encode("three", True)
    site.chat()
    assert site.tokens[0] == site.streams[0].request.token_ids


async def test_the_template_of_a_request_takes_a_thread(site: RelaySite) -> None:
    site.far.preprocessor = site.preprocessor
    site.ask(chat_template="{{ messages[0].content }}")
    assert not site.relayed
    async with asyncio.timeout(10):
        while not site.relayed:
            await turn()
    site.bench.connection.connection_lost(None)


async def test_routing_headers_count(site: RelaySite) -> None:
    site.ask(headers={"x_dynamo_session_id": "s1", "x_worker_instance_id": "9"})
    (routing,) = site.routings
    assert (routing.session_id, routing.backend_instance_id) == ("s1", 9)
    assert "x-dynamo-session-id" not in dict(site.relayed[0].request.headers)


async def test_salt_and_adapter_name_the_blocks(site: RelaySite) -> None:
    site.far_card.lora_name = "far"
    stream = site.ask(cache_salt="s")
    assert (site.routings[0].lora_name, site.routings[0].cache_namespace) == ("far", "s")
    assert json.loads(stream.request.body)["cache_salt"] == "s"


@pytest.mark.parametrize("salt", [None, "s"])
@pytest.mark.parametrize("path", [PATHS[0], PATHS[1], "/v1/embeddings", "/v1/responses"])
async def test_the_server_gets_the_tenant_as_a_salt(
    site: RelaySite, path: str, salt: str | None
) -> None:
    site.far.paths |= {"/v1/responses"}
    salts = {} if salt is None else {"cache_salt": salt}
    stream = site.ask(path, {"x_tenant_id": "T"}, input="hi", **salts)
    namespace = site.routings[0].cache_namespace
    assert namespace not in (None, salt)
    assert json.loads(stream.request.body)["cache_salt"] == namespace


async def test_a_tenant_is_refused_where_the_server_takes_no_salt(site: RelaySite) -> None:
    site.far.paths |= {"/v1/messages"}
    site.post({"model": "far", "messages": []}, "/v1/messages", x_tenant_id="T")
    assert site.status == 400 and b"x-tenant-id" in site.body and not site.relayed
    site.settled()


@pytest.mark.parametrize("error", [Overloaded("busy"), NoInstances()])
async def test_no_worker_can_be_chosen(site: RelaySite, error: Any) -> None:
    site.pick_error = error
    site.ask()
    assert site.status == 503
    site.settled()


async def test_a_large_body_is_read_in_a_thread(site: RelaySite) -> None:
    body = json.dumps({"model": "far", "messages": ["x" * 300_000]}).encode()
    site.post(body)
    assert not site.relayed
    async with asyncio.timeout(10):
        while not site.relayed:
            await turn()
    assert site.relayed[0].request.body == body
    site.relayed[0].head()
    site.relayed[0].body(ANSWER)
    site.relayed[0].sink.on_end()
    assert site.body == ANSWER
    while site.active.admitted:
        await turn()
    site.settled()


async def test_an_end_that_raises_ends_its_request(
    site: RelaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: HttpAnswer) -> None:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(HttpAnswer, "close", breaks)
    stream = site.ask("/v1/embeddings", input=["a"])
    stream.head()
    stream.sink.on_end()
    assert site.status == 500
    site.settled()


async def test_a_large_body_for_tokens_goes_on(site: RelaySite) -> None:
    site.post({"model": "tiny", "messages": [{"role": "user", "content": "x" * 200_000}]})
    async with asyncio.timeout(10):
        while not site.bench.transport.out:
            await turn()
    assert site.status == 400 and "maximum context length" in site.answer["message"]


# -- failures


async def test_a_lost_worker_is_replaced_once_before_the_head(site: RelaySite) -> None:
    site.ask()
    site.relayed[0].sink.on_error(CannotConnect("refused"))
    site.relayed[1].sink.on_error(Disconnected("killed"))
    assert [one.worker_id for one in site.relayed] == [7, 8, 9]
    assert site.relayed[2].request.body == site.relayed[0].request.body
    site.relayed[2].sink.on_error(Disconnected("killed too"))
    assert site.status == 503 and len(site.relayed) == 3
    site.freed = sorted(set(site.freed))
    site.settled()


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_worker_lost_after_the_head_is_replaced(site: RelaySite, content_type: str) -> None:
    """Servers send the head of a stream long before its first token."""
    first = site.ask(stream=True)
    first.head(content_type=content_type, x_worker="1")
    first.sink.on_error(Disconnected("killed"))
    second = site.relayed[1]
    second.head(content_type="text/event-stream", x_worker="2")
    second.body(event({"a": 1}), event("[DONE]"))
    second.sink.on_end()
    await turn()
    assert site.events == [{"a": 1}, "[DONE]"]
    assert "x-worker: 2" in site.head and "x-worker: 1" not in site.head
    site.freed = sorted(set(site.freed))
    site.settled()


async def test_a_server_that_breaks_off_a_json_answer_is_an_error(site: RelaySite) -> None:
    stream = site.ask()
    stream.head()
    stream.body(ANSWER[:20])
    stream.sink.on_error(EngineFailure("the server closed the connection"))
    assert site.status == 500 and len(site.relayed) == 1
    assert ended(site, "internal") == 1
    site.settled()


async def test_after_an_event_the_error_is_an_event(site: RelaySite) -> None:
    stream = site.ask(stream=True)
    stream.head(content_type="text/event-stream")
    stream.body(event({"a": 1}))
    await turn()
    stream.sink.on_error(Disconnected("killed"))
    await turn()
    assert site.events[0] == {"a": 1} and site.events[1]["error"]["code"] == 503
    assert site.events[2] == "[DONE]"
    site.settled()


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/v1/messages", b"event: error\ndata: "),
        ("/v1/responses", b"event: error\ndata: "),
        ("/v1/chat/completions", b"data: [DONE]"),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_of_its_api(
    site: RelaySite, path: str, wanted: bytes
) -> None:
    site.far.paths |= {path}
    stream = site.ask(path, stream=True)
    stream.head(content_type="text/event-stream")
    stream.body(b'event: x\ndata: {"a":1}\n\n')
    await turn()
    stream.sink.on_error(Disconnected("killed"))
    await turn()
    assert wanted in site.body
    assert (b"[DONE]" in site.body) is (path != "/v1/messages")
    assert b'data: {"error"' not in site.body or path == "/v1/chat/completions"
    site.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_closes_at_once_is_named(site: RelaySite, stream: bool) -> None:
    site.far.dispatch.migrations.limit = 1
    site.ask(stream=stream)
    for one in site.relayed:  # grows with each attempt
        one.sink.on_error(Disconnected("closed"))
    assert len(site.relayed) == 2 and site.status == 503
    assert site.answer["message"].startswith("The server of this model closed the connection")


@pytest.mark.parametrize("content_type", ["text/event-stream", "audio/wav"])
async def test_inside_an_event_the_connection_breaks(site: RelaySite, content_type: str) -> None:
    stream = site.ask(stream=True)
    stream.head(content_type=content_type)
    stream.body(b'data: {"a":')
    await turn()
    stream.sink.on_error(Disconnected("killed"))
    assert site.bench.transport.aborted
    site.settled()


@pytest.mark.parametrize("payload", [b"\xc1", b"\x01", b"\x81\xa6status\x64"])
async def test_a_worker_that_speaks_another_protocol(site: RelaySite, payload: bytes) -> None:
    site.ask()
    site.relayed[0].sink.on_data(payload)
    assert site.status == 500
    assert site.relayed[0].calls == ["kill"]
    site.settled()


async def test_an_end_without_a_head(site: RelaySite) -> None:
    site.ask()
    site.relayed[0].sink.on_end()
    assert site.status == 500
    site.settled()


async def test_a_client_that_leaves_ends_the_request(site: RelaySite) -> None:
    stream = site.ask(stream=True)
    stream.head(content_type="text/event-stream")
    stream.body(event({"a": 1}))
    site.bench.connection.connection_lost(None)
    assert stream.calls == ["kill"]
    assert ended(site, "cancelled", "stream") == 1
    site.settled()


async def test_comments_keep_the_connection_alive_between_events() -> None:
    site = RelaySite(sse_keep_alive_ms=10)
    stream = site.ask(stream=True)
    await asyncio.sleep(0.05)
    assert site.bench.transport.out == b""  # the server's status is not known yet
    stream.head(content_type="text/event-stream")
    async with asyncio.timeout(10):
        while b": keep-alive" not in site.bench.transport.out:
            await turn()
    stream.body(b'data: {"a":')
    await turn()
    before = site.bench.transport.out
    await asyncio.sleep(0.05)
    assert site.bench.transport.out == before
    stream.body(b"1}\n\n")
    stream.sink.on_error(Disconnected("killed"))  # too late for another worker
    await turn()
    assert site.events[0] == {"a": 1} and site.events[1]["error"]["code"] == 503
    site.active.close()
    site.settled()


async def test_a_slow_client_pauses_the_worker(site: RelaySite) -> None:
    stream = site.ask(stream=True)
    stream.head(content_type="text/event-stream")
    stream.body(event(1))
    await turn()
    site.bench.connection.pause_writing()
    stream.body(event(2))
    await turn()
    assert stream.calls == ["pause"]
    stream.body(event(3))
    await turn()
    (request,) = site.active._active
    assert request.last_activity_s == float("inf")  # a paused worker is not silent
    site.bench.connection.resume_writing()
    assert stream.calls == ["pause", "resume"] and request.last_activity_s < float("inf")
    stream.sink.on_end()
    await turn()
    assert site.events == [1, 2, 3]
    site.settled()


async def test_what_is_kept_for_a_slow_client_is_bounded() -> None:
    site = RelaySite(slow_client_limit_mb=1)
    stream = site.ask(stream=True)
    stream.head(content_type="text/event-stream")
    stream.body(event(1))
    await turn()
    site.bench.connection.pause_writing()
    for _ in range(3):
        stream.body(event("x" * 600_000))
        await turn()
    assert site.bench.transport.aborted and "kill" in stream.calls
    site.settled()


async def test_a_silent_server_is_timed_out() -> None:
    """It is sent to one more, which is silent, too."""
    site = RelaySite(backend_stream_timeout_s=0.05)
    stream = site.ask()
    async with asyncio.timeout(10):
        while not site.bench.transport.out:
            await turn()
    assert site.status == 500 and stream.calls == ["kill"]
    site.settled()


# -- entrances that count or explain a prompt


async def answered(site: RelaySite, body: dict[str, Any], path: str) -> Any:
    site.bench = Bench(handler=site.routes)
    site.post(body, path)
    async with asyncio.timeout(10):
        while not site.bench.transport.out:
            await turn()
    assert site.status == 200, site.body
    return site.answer


async def test_an_explanation_counts_salt_adapter_and_tenant(site: RelaySite) -> None:
    site.far_card.lora_name = "far"
    seen: list[Any] = []

    def note(tokens: Any, routing: Any, *_: Any) -> dict[str, Any]:
        seen.append(routing)
        return {}

    vars(site)["explain"] = note
    explain = ExplainRoutes(site, site.tasks, 503, site.active.off_loop)  # type: ignore[arg-type]
    explain.install(site.routes)
    await answered(site, {"model": "far", "prompt": "hi", "cache_salt": "s"}, "/v1/route")
    assert (seen[0].lora_name, seen[0].cache_namespace) == ("far", "s")


async def test_every_entrance_counts_by_the_rules_of_the_graph(site: RelaySite) -> None:
    seen: list[Any] = []

    def note(tokens: Any, *_: Any) -> dict[str, Any]:
        seen.append(len(tokens))
        return {}

    vars(site)["explain"] = note
    explain = ExplainRoutes(site, site.tasks, 503, site.active.off_loop)  # type: ignore[arg-type]
    explain.install(site.routes)
    call = {"name": "w", "description": "long " * 50, "parameters": {"type": "object"}}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    tools = {"tools": [{"type": "function", "function": call}]}
    own = {"tools": [{"name": "w", "description": "long " * 50, "input_schema": {}}]}
    flat = {"model": "tiny", "input": "a", "tools": [{"type": "function", **call}]}

    async def counts() -> list[int]:
        await answered(site, {**chat, **tools}, "/v1/route")
        return [
            seen.pop(),
            (await answered(site, {**chat, **tools}, "/tokenize"))["count"],
            (await answered(site, {**chat, **own}, "/v1/messages/count_tokens"))["input_tokens"],
            (await answered(site, flat, "/v1/responses/input_tokens"))["input_tokens"],
        ]

    before = await counts()
    site.rules["tiny"] = FieldRules({}, ["tools"])
    after = await counts()
    assert max(after) < min(before) and max(after) - min(after) <= 1


@pytest.mark.parametrize("model_input", ["Http", "Text"])
async def test_what_a_users_key_grants_counts_for_other_servers(model_input: str) -> None:
    """Some servers prefer low priorities, others high ones."""
    site = RelaySite(model_input)

    def as_alice(exchange: Exchange) -> None:
        exchange.api_key = ApiKey("alice", "user", b"", Grants(priority=2))
        site.routes(exchange)

    site.bench = Bench(handler=as_alice)
    chat = {"model": "far", "messages": [{"role": "user", "content": "a"}]}
    pin: dict[str, Any] = {"nvext": {"backend_instance_id": 7}}
    for more, headers in (
        (pin, {}),
        ({"nvext": {"agent_hints": {"priority": 3}}}, {}),
        ({"priority": -3}, {}),
        ({"priority": 3, "user": " " * 200_000}, {}),
        ({}, {"x_worker_instance_id": "7"}),
        ({}, {"x_data_parallel_rank": "1"}),
    ):
        site.bench.transport.out = b""
        site.post(chat | more, **headers)
        async with asyncio.timeout(10):
            while not site.bench.transport.out:  # noqa: ASYNC110 - a long body is read in a thread
                await asyncio.sleep(0)
        assert site.status == 403 and b"API key 'alice'" in site.bench.transport.out, more
    assert not site.relayed
    site.post(chat | ({} if model_input == "Text" else {"priority": -2}))
    assert len(site.relayed) == 1


async def test_disable_nvext_keeps_ranks_from_servers() -> None:
    site = RelaySite(disable_nvext=True)
    site.post({"model": "far", "prompt": "a"}, PATHS[1], x_data_parallel_rank="1")
    assert "x-data-parallel-rank" not in dict(site.relayed[0].request.headers)


async def test_origins_and_buffering_are_the_frontends(site: RelaySite) -> None:
    """A server allows its own origins, and refuses others; a header that is there twice is wrong
    for a browser."""
    body = {"model": "far", "messages": [], "stream": True}
    site.post(body, origin="http://localhost:3000")
    (stream,) = site.relayed
    assert "origin" not in dict(stream.request.headers)
    given = {"access_control_allow_origin": "*", "x_accel_buffering": "no", "x_more": "kept"}
    stream.head(200, "text/event-stream; charset=utf-8", **given)
    stream.body(b"data: [DONE]\n\n")
    stream.sink.on_end()
    head = site.bench.transport.out.partition(b"\r\n\r\n")[0].lower()
    assert head.count(b"x-accel-buffering: no") == 1 and b"x-more: kept" in head
    assert b"access-control" not in head
