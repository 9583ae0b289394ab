"""The answers to /v1/responses behind the path of requests: events, errors, limits, memory."""

from __future__ import annotations

import functools
import gc
import json
import typing
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from http_bench import error_json
from lazy_module import LazyModule
from migration_kit import MigratingFleet
from test_request import Site, ids, turn

from dynamo.errors import (
    Disconnected,
    DynamoError,
    EngineFailure,
    HttpFailure,
    InvalidArgument,
    Overloaded,
)
from dynamo.frontend.apis.responses.route import ResponseRoutes
from dynamo.frontend.apis.responses.store import ResponseStore
from dynamo.frontend.apis.tokenize import PromptCountRoutes
from dynamo.http import Exchange

response_types = LazyModule("openai.types.responses")

PATH = "/v1/responses"


@functools.cache
def event_types() -> dict[str, Any]:
    """The client's model of each event, by the event's name."""
    models = typing.get_args(typing.get_args(response_types.ResponseStreamEvent)[0])
    return {one.model_fields["type"].annotation.__args__[0]: one for one in models}


class ResponsesSite(Site):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.relayed = False
        self.store = serve(self, lambda exchange: self.relayed)

    def ask(self, **fields: Any) -> None:
        self.bench.transport, self.bench.connection = self.bench.connect()
        self.post({"model": "tiny", "input": "hello", **fields}, PATH)

    def get(self, line: str) -> Any:
        self.bench.transport, self.bench.connection = self.bench.connect()
        self.bench.feed(f"{line} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n".encode())
        return self.answer

    def say(self, text: str, reason: str | None = "stop") -> None:
        self.streams[-1].say(ids(self, text), finish_reason=reason)
        if reason is not None:
            self.streams[-1].sink.on_end()

    @property
    def named(self) -> list[tuple[str, Any]]:
        return named(self)


def named(site: Site) -> list[tuple[str, Any]]:
    """Name and data of each event; the last is [DONE]."""
    *found, done, empty = site.body.decode().split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    parts = [one.removeprefix("event: ").split("\ndata: ") for one in found]
    return [(name, json.loads(data)) for name, data in parts]


def serve(site: Site, has_relay: Callable[[Exchange], bool] = lambda _: False) -> ResponseStore:
    """Add the routes to those of ``site``; return their store."""
    store = ResponseStore(1 << 20)
    counts = PromptCountRoutes(site.active, site, site.tasks)  # type: ignore[arg-type]
    ResponseRoutes(store, has_relay, relay).install(site.routes, site.openai, counts)
    return store


def relay(exchange: Exchange) -> None:
    exchange.refuse(418, "relayed")


@pytest.fixture
async def site() -> ResponsesSite:
    return ResponsesSite()


async def test_events_of_a_text(site: ResponsesSite) -> None:
    site.ask(stream=True)
    site.streams[0].say(ids(site, "good"))
    await turn()
    site.say(" day")
    names = [name.removeprefix("response.") for name, _ in site.named]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    for number, (name, data) in enumerate(site.named):
        event_types()[name].model_validate(data, strict=True)
        assert data["type"] == name and data["sequence_number"] == number
    first, last = site.named[0][1]["response"], site.named[-1][1]["response"]
    response_types.Response.model_validate(last, strict=True)
    assert first["status"] == "in_progress" and first["output"] == [] and first["usage"] is None
    assert last["output"][0]["content"][0]["text"] == "good day"
    assert last["id"] == first["id"] and last["created_at"] == first["created_at"]
    site.settled()
    labels = {"endpoint": "responses", "status": "success", "request_type": "stream"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1


async def test_one_body(site: ResponsesSite) -> None:
    site.ask(instructions="Be brief.", tools=[{"type": "function", "name": "f"}], user="u")
    site.say("good day", "length")
    response_types.Response.model_validate(site.answer, strict=True)
    assert site.status == 200 and site.answer["status"] == "incomplete"
    assert site.answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert site.answer["output"][0]["status"] == "incomplete"
    assert site.answer["usage"]["output_tokens"] == len(ids(site, "good day"))
    assert site.answer["tools"] == [{"type": "function", "name": "f"}]
    stored = site.get(f"GET {PATH}/{site.answer['id']}")
    assert stored["instructions"] == "Be brief." and site.status == 200
    site.settled()


async def test_log_probabilities(site: ResponsesSite) -> None:
    for stream in (False, True):
        site.ask(top_logprobs=1, stream=stream)
        found = ids(site, "good day")
        top = [[{"token_id": each, "logprob": -1.0}] for each in found]
        site.streams[-1].say(found, log_probs=[-0.5] * len(found), top_logprobs=top)
        site.streams[-1].say([], finish_reason="stop")
        site.streams[-1].sink.on_end()
        response = site.named[-1][1]["response"] if stream else site.answer
        response_types.Response.model_validate(response, strict=True)
        shown = response["output"][0]["content"][0]["logprobs"]
        assert [each["logprob"] for each in shown] == [-0.5] * len(found)
        assert "".join(each["token"] for each in shown) == "good day"
        assert shown[0]["top_logprobs"][0]["logprob"] == -1.0
        if stream:
            (delta,) = [data for name, data in site.named if name.endswith("output_text.delta")]
            assert delta["logprobs"] == shown
            event_types()[delta["type"]].model_validate(delta, strict=True)


async def test_errors_before_the_first_output(site: ResponsesSite) -> None:
    site.ask(stream=True)
    site.streams[0].sink.on_error(EngineFailure("cuda"))
    assert site.status == 500
    error = {"message": "Internal server error", "type": "server_error", "param": None}
    assert site.answer == {"error": {**error, "code": "engine_failure"}}
    site.pick_error = Overloaded("over")
    site.ask()
    assert site.status == 503 and site.answer["error"]["code"] == "overloaded"
    assert "retry-after: 1" in site.head.lower()
    site.active.refuses = True
    site.ask()
    assert site.status == 503 and "shutting down" in site.answer["error"]["message"]
    site.settled()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Disconnected("gone"), "server_error"),
        (EngineFailure("cuda"), "server_error"),  # status 500
        (HttpFailure("slow down", 429), "rate_limit_exceeded"),
        (InvalidArgument("too long"), "invalid_prompt"),
    ],
)
async def test_errors_in_the_middle(site: ResponsesSite, error: DynamoError, code: str) -> None:
    site.ask(stream=True)
    site.streams[0].say(ids(site, "good"))
    await turn()
    site.streams[0].sink.on_error(error)
    await turn()
    name, data = site.named[-1]
    assert name == "response.failed"
    event_types()[name].model_validate(data, strict=True)
    failed = data["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == code
    assert failed["output"][0]["content"][0]["text"] == "good"
    assert site.get(f"GET {PATH}/{failed['id']}")["error"]["message"].endswith("not found.")
    site.settled()


async def test_errors_after_comments(site: ResponsesSite) -> None:
    """A stream that began while the request waited gets an error event."""
    site.ask(stream=True)
    (request,) = site.active._active
    request.exchange.start(200, "text/event-stream")
    site.streams[0].sink.on_error(Disconnected("gone"))
    ((name, data),) = site.named
    assert name == "error" and data["code"] == "disconnected" and data["sequence_number"] == 0
    event_types()[name].model_validate(data, strict=True)
    site.settled()


async def test_a_client_that_leaves(site: ResponsesSite) -> None:
    site.ask(stream=True)
    site.streams[0].say(ids(site, "good"))
    await turn()
    site.bench.connection.connection_lost(None)
    assert site.streams[0].killed == 1 and len(site.store) == 0
    labels = {"endpoint": "responses", "error_type": "cancelled"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
    site.settled()


async def test_another_worker_goes_on() -> None:
    """The events go on where they were, with the tokens of both workers counted."""
    fleet = MigratingFleet()
    serve(fleet)
    fleet.post({"model": "tiny", "input": "hello", "stream": True}, PATH)
    fleet.streams[0].say(ids(fleet, "good"))
    await turn()
    fleet.streams[0].sink.on_error(Disconnected("gone"))
    await fleet.opened(2)
    fleet.streams[1].say(ids(fleet, " day"), finish_reason="stop")
    fleet.streams[1].sink.on_end()
    await turn()
    name, last = named(fleet)[-1]
    assert name == "response.completed" and fleet.migrated() == 1
    assert last["response"]["output"][0]["content"][0]["text"] == "good day"
    assert last["response"]["usage"]["output_tokens"] == len(ids(fleet, "good day"))
    assert [data["sequence_number"] for _, data in named(fleet)] == list(range(10))
    fleet.settled()


async def test_earlier_responses_are_the_beginning_of_the_prompt(site: ResponsesSite) -> None:
    site.ask(instructions="Be brief.")
    site.say("good day")
    first = site.answer
    decode = site.preprocessor.tokenizer.decode
    site.ask(input="More", previous_response_id=first["id"])
    prompt = decode(site.streams[-1].request.token_ids)
    assert "Be brief." not in prompt and prompt.index("hello") < prompt.index("good day")
    assert prompt.index("good day") < prompt.index("More")
    site.say("bye")
    site.ask(input=[{"type": "item_reference", "id": first["output"][0]["id"]}])
    assert "good day" in decode(site.streams[-1].request.token_ids)
    site.say("bye")
    many: Any = [{"role": "user", "content": "x"}] * 1024
    site.ask(input=[*many, {"type": "item_reference", "id": "x"}])
    assert site.status == 400 and "takes at most 1024 items" in site.answer["error"]["message"]
    site.settled()


async def test_no_other_client_finds_a_response(site: ResponsesSite) -> None:
    """Without keys all clients are one owner: what they can know or choose leads nowhere."""
    mine = str(uuid.uuid4())
    private = {"role": "user", "content": "secret", "id": "m1"}
    answers = []
    for _ in range(2):  # the second client has read the first one's x-request-id
        site.bench.transport, site.bench.connection = site.bench.connect()
        site.post({"model": "tiny", "input": [private]}, PATH, x_request_id=mine)
        site.say("good day")
        answers.append(site.answer)
    first, second = (answer["id"] for answer in answers)
    assert first != second and len(site.store) == 2
    assert first.rpartition("-")[0] == second.rpartition("-")[0] == f"resp_{mine}"
    shown = repr(list(site.metrics.recent.records)).encode() + site.registry.render()
    assert mine.encode() in shown and first.rpartition("-")[2].encode() not in shown
    for guess in (f"resp_{mine}", first[:-1] + ("0" if first[-1] != "0" else "1")):
        for method in ("GET", "DELETE"):
            site.get(f"{method} {PATH}/{guess}")
            assert site.status == 404
    assert site.get(f"GET {PATH}/{first}") == answers[0]
    assert site.metrics.recent.find(first).info[1] == mine  # as dynamo explain looks it up
    reference = {"type": "item_reference", "id": "m1"}
    site.ask(input=[reference])
    assert site.status == 400 and "no stored item 'm1'" in site.answer["error"]["message"]
    site.ask(input=[reference], previous_response_id=first)
    site.say("bye")
    assert site.status == 200
    site.settled()


async def test_a_long_history_takes_the_detour(site: ResponsesSite) -> None:
    site.ask(input="word " * 200)
    site.say("good day")
    site.preprocessor.inline_limit_bytes = 500
    site.ask(input="More", previous_response_id=site.answer["id"])
    assert len(site.streams) == 1  # in a thread
    while len(site.streams) < 2:
        await turn()
    site.say("bye")
    assert site.status == 200
    site.settled()


async def test_a_large_body_takes_the_detour(site: ResponsesSite) -> None:
    site.ask(input="hello", metadata={"a": "b"}, instructions="word " * 30_000)
    await turn()
    while site.active.admitted:
        await turn()
    assert site.status == 400 and site.answer["error"]["code"] == "context_length_exceeded"
    site.settled()


async def test_other_ids_are_relayed(site: ResponsesSite) -> None:
    missing = site.get(f"GET {PATH}/resp_x")
    assert site.status == 404 and missing["error"]["type"] == "invalid_request_error"
    relayed = error_json("relayed", "I'm a Teapot", 418, ("invalid_request_error", None, None))
    assert site.get(f"GET {PATH}/a/b") == relayed
    site.relayed = True
    for line in (f"GET {PATH}/resp_x", f"DELETE {PATH}/resp_x", f"GET {PATH}/resp_x/input_items"):
        site.get(line)
        assert site.status == 418
    site.ask()
    site.say("good")
    answer = site.answer
    assert site.get(f"GET {PATH}/{answer['id']}") == answer  # ours come first
    assert site.get(f"GET {PATH}/{answer['id']}?stream=true")["error"]["message"].startswith("Val")
    assert site.get(f"GET {PATH}/{answer['id']}/nothing")["error"]["message"].startswith("Route")


async def test_pages_of_input_items(site: ResponsesSite) -> None:
    site.ask(input=[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
    site.say("good")
    path = f"GET {PATH}/{site.answer['id']}/input_items"
    page = site.get(f"{path}?limit=1&order=asc")
    assert page["has_more"] and page["data"][0]["content"][0]["type"] == "output_text"
    after = site.get(f"{path}?order=asc&after={page['last_id']}")
    assert after["data"][0]["content"][0]["text"] == "b" and not after["has_more"]
    assert site.get(f"{path}?after={after['last_id']}")["data"] == page["data"]
    wrong = [
        ("limit=0", "between 1"),
        (f"limit=1{'0' * 5000}", "between 1"),
        (f"limit={'0' * 8}1{'0' * 4}", "between 1"),
        ("order=x", "asc or"),
        ("after=x", "no item"),
        ("&".join(f"a{number}=1" for number in range(101)), "at most 100 fields"),
    ]
    for query, text in wrong:
        for line in (f"{path}?{query}", f"{path.removesuffix('/input_items')}?{query}"):
            if line.startswith(path) or "fields" in text:
                assert text in site.get(line)["error"]["message"]
                assert site.status == 400


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["end", "fail", "leave"])
async def test_no_reference_cycle(site: ResponsesSite, streaming: bool, ending: str) -> None:
    def step() -> None:
        tool = {"type": "custom", "name": "f"}
        site.ask(stream=streaming, tools=[tool], reasoning={"summary": "auto"})
        site.streams[-1].say(ids(site, "good"))
        if ending == "end":
            site.say(" day")
        elif ending == "fail":
            site.streams[-1].sink.on_error(EngineFailure("cuda"))
        site.streams.clear()
        site.bench.connection.connection_lost(None)

    step()
    await turn()
    gc.freeze()  # what exists already takes no part in the collection
    gc.disable()
    try:
        step()
        await turn()
        before = {id(one) for one in gc.get_objects()}
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(one).__name__ for one in gc.garbage if id(one) in before]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    ours = {"ActiveRequest", "ResponsesSite", "ResponsesStream", "ResponseOrigin", "OutputItems"}
    assert not ours & set(left)
