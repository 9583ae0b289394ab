"""The flow of a request with the network taken away: a real preprocessor, a worker in our hands."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import json
import re
import threading
import uuid
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from http_bench import Bench, error_json
from prometheus_client.parser import text_string_to_metric_families

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import (
    Cancelled,
    Disconnected,
    DynamoError,
    EngineFailure,
    HttpFailure,
    InvalidArgument,
    ModelNotFound,
    NoInstances,
    Overloaded,
)
from dynamo.frontend.apis.chat.route import OpenAIRoutes
from dynamo.frontend.prompt.field_rules import FieldRules
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.requests import engine_request
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http.routes import Routes
from dynamo.observability.metrics import Counter, Registry
from dynamo.protocols.codec import decoder, encode
from dynamo.protocols.control import ModelCard
from dynamo.protocols.engine import (
    CompletionUsage,
    EngineOutput,
    PreprocessedRequest,
    PromptTokensDetails,
)
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.worker_pool import Saturation
from dynamo.runtime.process.tasks import Tasks

MODEL_DIR = Path(__file__).parents[3] / "examples" / "model"
_decode_request = decoder(PreprocessedRequest).decode


class Stream:
    """What the worker has of one engine request."""

    def __init__(
        self, worker_id: int, request: PreprocessedRequest, sink: Any, headers: dict[str, str]
    ) -> None:
        self.worker_id = worker_id
        self.request = request
        self.sink = sink
        self.engine_id = headers["request-id"]
        self.killed = self.stopped = 0

    def keep_tokens(self) -> None:
        """All items go to ``on_data`` anyway."""

    def pass_tokens(self, *args: Any) -> None:
        """Leave all items to ``on_data``."""

    def stop(self) -> None:
        self.stopped += 1

    def kill(self) -> None:
        self.killed += 1

    def give_up(self, error: DynamoError) -> None:
        self.killed += 1
        self.sink.on_error(error)

    def say(self, ids: list[int], **more: Any) -> None:
        self.sink.on_data(encode(EngineOutput(token_ids=ids, **more)))


@functools.cache
def _loaded() -> Preprocessor:
    """The preprocessor of ``tiny``, loaded once: that takes most of the time of a short test."""
    return Preprocessor(
        ModelCard(
            display_name="tiny",
            slug="tiny",
            source_path=str(MODEL_DIR),
            namespace="n",
            component="c",
            endpoint="e",
            instance_id=7,
            context_length=4096,
        )
    )


class Site:
    """Everything behind the HTTP server; the test plays picker, worker and client."""

    tracks_output = False
    relays = False

    def __init__(self, **settings: Any) -> None:
        self.registry = Registry()
        self.metrics = FrontendMetrics(self.registry)
        self.active = RequestRegistry(FrontendSettings(**settings), self.metrics)
        self.preprocessor = copy.copy(_loaded())  # tests change it
        self.preprocessor.tokenizer = copy.copy(self.preprocessor.tokenizer)
        self.entry = SimpleNamespace(
            name="tiny",
            types=frozenset(("Chat", "Completions")),
            relayed=False,
            card=self.preprocessor.card,
            preprocessor=self.preprocessor,
            metrics=self.metrics.model("tiny"),
            picker=self,
            client=self,
            dispatch=Dispatch(self, self),  # type: ignore[arg-type, arg-type]
            prefill=SimpleNamespace(router=None),
        )
        self.entry.loaded = self.entry
        self.kv_mode = True
        self.saturation = Saturation()
        self.rules: dict[str, FieldRules] = {}
        self.aliases: dict[str, str] = {}
        self.on_demand = SimpleNamespace(not_loaded={}.get, models=set, relays=False)
        self.worker_pool = SimpleNamespace(members={7: None}, avoided=set())
        self.tasks = Tasks("test")
        self.streams: list[Stream] = []
        self.booked: dict[str, int] = {}
        self.freed: list[str] = []
        self.reused_tokens = Counter()
        self.prefilled: list[str] = []
        self.routings: list[Any] = []
        self.pick_error: DynamoError | None = None
        self.found: type[DynamoError] | None = None
        self.routes = Routes()
        self.openai = OpenAIRoutes(self.active, self, self.tasks)  # type: ignore[arg-type]
        self.openai.install(self.routes)
        self.bench = Bench(handler=self.routes)

    # models, picker, client

    def entries(self) -> list[Any]:
        return [self.entry]

    def find(self, name: str, model_type: str) -> Any:
        if self.found is not None:
            raise self.found("Model not found")
        return self.entry

    async def find_loaded(self, name: str, model_type: str) -> Any:
        return self.find(name, model_type)

    def is_loading(self, name: str) -> bool:
        return False

    def pick(
        self,
        request_id: str | None,
        tokens: Any,
        *,
        routing: Any,
        override: Any = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        if self.pick_error is not None:
            raise self.pick_error
        self.routings.append(routing if attempt is None else attempt.limit(routing))
        if request_id is not None:
            if request_id in self.freed:  # the client uses its id again
                self.freed.remove(request_id)
                del self.booked[request_id]
            assert request_id not in self.booked
            self.booked[request_id] = 0
        return Decision(7, 1, 2, 4)

    def explain(self, *_: Any) -> Any:
        raise InvalidArgument("this picker weighs nothing")

    def mark_prefill_complete(self, request_id: str) -> None:
        self.prefilled.append(request_id)

    def add_output_tokens(self, request_id: str, count: int) -> None:
        self.booked[request_id] += count

    def free(self, request_id: str, output_tokens: int = 0) -> None:
        self.booked[request_id] += output_tokens
        self.freed.append(request_id)

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        stream = Stream(worker_id, _decode_request(payload), sink, headers)
        self.streams.append(stream)
        return stream

    # the client

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{extra}"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        self.bench.feed(head.encode() + raw)

    def chat(self, **more: Any) -> None:
        self.post({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **more})

    @property
    def status(self) -> int:
        return int(self.bench.transport.out[9:12])

    @property
    def head(self) -> str:
        return self.bench.transport.out.partition(b"\r\n\r\n")[0].decode()

    @property
    def body(self) -> bytes:
        head, _, body = self.bench.transport.out.partition(b"\r\n\r\n")
        return unchunk(body) if b"chunked" in head else body

    @property
    def answer(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        data = [one[6:] for one in self.body.split(b"\n\n") if one.startswith(b"data: ")]
        return [one.decode() if one == b"[DONE]" else json.loads(one) for one in data]

    # counters

    def sample(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.registry.render().decode()):
            for one in family.samples:
                if one.name == name and labels.items() <= one.labels.items():
                    return one.value
        return 0

    def settled(self) -> None:
        """Whatever happened: nothing is left open, nothing counted twice."""
        assert sorted(self.freed) == sorted(self.booked)
        assert self.active.admitted == 0
        for name in ("active_requests", "inflight_requests", "queued_requests"):
            assert self.sample(f"dynamo_frontend_{name}", model="tiny") == 0
        assert self.sample("dynamo_request_plane_inflight_requests") == 0
        page = self.registry.render().decode().splitlines()
        stages = [line for line in page if line.startswith("dynamo_frontend_stage_requests{")]
        assert len(stages) == 8 and all(line.endswith(" 0") for line in stages)

    def ended(self, error_type: str, request_type: str = "unary", model: str = "tiny") -> float:
        return self.sample(
            "dynamo_frontend_requests_total",
            endpoint="chat_completions",
            error_type=error_type,
            model=model,
            request_type=request_type,
            status="error" if error_type else "success",
        )


def unchunk(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        out += data[:count]
        data = data[count + 2 :]
    return out


@pytest.fixture
async def site() -> Site:
    return Site()


def ids(site: Site, text: str) -> list[int]:
    return site.preprocessor.tokenizer.encode(text, False).tolist()


async def turn() -> None:
    """Let the outbox write."""
    await asyncio.sleep(0)


async def test_a_unary_answer(site: Site) -> None:
    site.chat(max_tokens=5)
    (stream,) = site.streams
    assert stream.request.stop_conditions.max_tokens == 5
    assert stream.request.routing.dp_rank == 1  # type: ignore[union-attr]
    assert stream.request.estimated_prefix_hit_num_blocks == 2
    stream.say(ids(site, "good "))
    usage = CompletionUsage(prompt_tokens=9, prompt_tokens_details=PromptTokensDetails(4))
    stream.say(ids(site, "day"), finish_reason="length", completion_usage=usage)
    assert site.bench.transport.out == b""
    stream.sink.on_end()
    assert site.status == 200
    answer = site.answer
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "good day"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 9
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert site.reused_tokens.value == 4
    assert re.fullmatch(r"chatcmpl-[0-9a-f-]{36}", answer["id"])
    assert "x-request-id" not in site.head
    assert stream.killed == 0
    site.settled()
    assert site.ended("") == 1
    tokens = answer["usage"]["completion_tokens"]
    assert list(site.booked.values()) == [tokens] and len(site.prefilled) == 1
    assert site.sample("dynamo_frontend_output_tokens_total") == tokens
    assert site.sample("dynamo_frontend_time_to_first_token_seconds_count") == 1
    assert site.sample("dynamo_frontend_inter_token_latency_seconds_count") == tokens - len(
        ids(site, "good ")
    )
    assert site.sample("dynamo_frontend_cached_tokens_sum") == 4
    assert site.sample("dynamo_frontend_requests_started_total", request_type="unary") == 1
    assert site.sample("dynamo_frontend_worker_last_input_sequence_tokens", worker_id="7") > 0


async def test_a_worker_that_has_left_gets_no_rows(site: Site) -> None:
    name = "dynamo_frontend_worker_last_input_sequence_tokens"
    site.chat(stream=True)
    (stream,) = site.streams
    stream.say(ids(site, "good "))
    await turn()
    site.worker_pool.members.clear()
    site.metrics.workers.forget(7)
    stream.say(ids(site, "day"), finish_reason="stop")
    stream.sink.on_end()
    await turn()
    assert site.events[-1] == "[DONE]"
    assert f"{name}{{" not in site.registry.render().decode()
    site.settled()


async def test_a_streamed_answer_one_event_a_turn(site: Site) -> None:
    site.chat(stream=True, stream_options={"include_usage": True})
    (stream,) = site.streams
    assert site.bench.transport.out == b""  # the status waits for the first item
    for id in ids(site, "good day to"):
        stream.say([id])
    await turn()
    assert "x-accel-buffering: no" in site.head
    assert "text/event-stream" in site.head and "transfer-encoding: chunked" in site.head
    assert len(site.events) == 1
    assert site.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "good day to"}
    stream.say(ids(site, " you"))
    await turn()
    assert len(site.events) == 2
    stream.say([], finish_reason="stop")
    stream.sink.on_end()
    await turn()
    last, usage, done = site.events[-3:]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 3
    assert done == "[DONE]"
    assert site.bench.transport.out.endswith(b"0\r\n\r\n")
    site.settled()
    assert site.ended("", "stream") == 1
    site.chat(max_tokens=1)  # the connection lives on
    assert len(site.streams) == 2


async def test_several_choices(site: Site) -> None:
    site.chat(n=3, seed=5)
    assert [one.request.sampling_options.seed for one in site.streams] == [5, 6, 7]
    for stream, text in zip(reversed(site.streams), "abc", strict=True):
        stream.say(ids(site, text), finish_reason="stop")
        stream.sink.on_end()
    contents = [one["message"]["content"] for one in site.answer["choices"]]
    assert contents == ["c", "b", "a"]
    site.settled()
    assert len(site.freed) == 3 and site.ended("") == 1


async def test_one_failed_choice_fails_all_and_stops_the_rest(site: Site) -> None:
    site.chat(n=2)
    site.streams[0].say(ids(site, "a"))
    site.streams[1].sink.on_error(EngineFailure("cuda"))
    assert site.status == 500
    assert site.answer == error_json(
        "Internal server error",
        "Internal Server Error",
        500,
        ("server_error", None, "engine_failure"),
        details={"backend_status": 500},
    )
    assert [one.killed for one in site.streams] == [1, 0]
    site.streams[0].say(ids(site, "late"))
    site.settled()
    assert site.ended("internal") == 1


async def test_a_stop_string_ends_the_engine(site: Site) -> None:
    site.chat(stop=["day"])
    (stream,) = site.streams
    stream.say(ids(site, "good day to you"))
    # The worker gets an orderly end first, and then the end of its client.
    assert (stream.stopped, stream.killed) == (1, 1)
    assert site.answer["choices"][0]["message"]["content"] == "good "
    assert site.answer["choices"][0]["finish_reason"] == "stop"
    stream.sink.on_end()
    site.settled()
    assert site.ended("") == 1


OVERLOADED = error_json(
    "Service temporarily unavailable: All workers are busy, please retry later",
    "service_unavailable",
    503,
    ("server_error", None, "overloaded"),
)
NOT_READY = error_json(
    "Model `tiny` is not ready to serve requests yet. It has no worker now: the last "
    "one was unloaded, stopped or put to sleep, or the first one is still starting. "
    "Please retry shortly.",
    "Service Unavailable",
    503,
    ("server_error", None, "no_instances"),
)


@pytest.mark.parametrize(
    ("error", "status", "body", "error_type"),
    [
        (Overloaded("x"), 503, OVERLOADED, "overload"),
        (NoInstances("x"), 503, NOT_READY, "unavailable"),
        (
            InvalidArgument("dp_rank 9 is out of range"),
            400,
            error_json(
                "dp_rank 9 is out of range",
                "Bad Request",
                400,
                ("invalid_request_error", None, None),
            ),
            "validation",
        ),
    ],
)
async def test_the_router_refuses(
    site: Site, error: DynamoError, status: int, body: Any, error_type: str
) -> None:
    site.pick_error = error
    site.chat(stream=True)
    assert (site.status, site.answer) == (status, body)
    site.settled()
    assert site.ended(error_type, "stream") == 1
    rejected = site.sample("dynamo_frontend_model_rejection_total", endpoint="chat_completions")
    assert rejected == (error_type == "overload")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Disconnected("gone"), 503, "Service temporarily unavailable"),
        (InvalidArgument("ValueError: boom"), 400, "ValueError: boom"),
        (Overloaded("at capacity"), 503, OVERLOADED["message"]),
        (EngineFailure("secret"), 500, "Internal server error"),
        (HttpFailure("short and stout", 418), 418, "short and stout"),
        (HttpFailure("secret", 503), 503, "Service temporarily unavailable"),
        (HttpFailure("secret", 500), 500, "Internal server error"),
        (HttpFailure("no error at all", 200), 500, "Internal server error"),
        (Cancelled("Request cancelled"), 499, "Request cancelled"),
    ],
)
async def test_a_first_error_from_the_worker_is_a_status(
    site: Site, streaming: bool, error: DynamoError, status: int, message: str
) -> None:
    site.chat(stream=streaming)
    site.streams[0].sink.on_error(error)
    assert site.status == status
    assert site.answer["message"] == message and site.answer["code"] == status
    assert site.streams[0].killed == 0
    site.settled()


@pytest.mark.parametrize(
    ("status", "kind", "error_type"),
    [
        (404, "Not Found", "not_found"),
        (418, "I'm a Teapot", "validation"),
        (429, "Too Many Requests", "overload"),
        (499, "Client Closed Request", "cancelled"),
        (500, "Internal Server Error", "internal"),
        (501, "Not Implemented", "not_implemented"),
        (503, "Service Unavailable", "unavailable"),
    ],
)
async def test_a_status_of_the_engine_is_named_and_counted(
    site: Site, status: int, kind: str, error_type: str
) -> None:
    site.chat()
    site.streams[0].sink.on_error(HttpFailure("text", status))
    assert (site.status, site.answer["type"], site.answer["code"]) == (status, kind, status)
    assert ("details" in site.answer) == (status in (500, 501))
    assert site.ended(error_type, "unary") == 1
    site.settled()


async def test_an_error_in_the_middle_is_an_event(site: Site) -> None:
    site.chat(stream=True)
    site.streams[0].say(ids(site, "good"))
    await turn()
    site.streams[0].say(ids(site, " day"))
    site.streams[0].sink.on_error(Disconnected("gone"))
    await turn()
    error, done = site.events[-2:]
    assert error == {
        "error": {
            "message": "Service temporarily unavailable",
            "type": "service_unavailable",
            "param": None,
            "code": 503,
        }
    }
    assert done == "[DONE]"
    assert site.events[1]["choices"][0]["delta"]["content"] == " day"
    site.settled()
    assert site.ended("unavailable", "stream") == 1
    assert site.sample("dynamo_frontend_failures_total", reason="transport.disconnected") == 1


async def test_finish_reason_error_and_garbage(site: Site) -> None:
    site.chat()
    site.streams[0].say([], finish_reason="error: out of memory")
    assert site.status == 500
    site.settled()
    other = Site()
    other.chat()
    other.streams[0].sink.on_data(b"\xc1 nonsense")
    assert other.status == 500
    other.settled()


@pytest.mark.parametrize(
    "item",
    [
        {"token_ids": [64, -1]},
        {"token_ids": [2**32]},
        {"token_ids": [64], "completion_usage": {"prompt_tokens": -5}},
        {"completion_usage": {"prompt_tokens_details": {"cached_tokens": -1}}},
    ],
)
async def test_negative_ids_and_counts_never_reach_the_client(
    site: Site, item: dict[str, Any]
) -> None:
    site.chat()
    site.streams[0].sink.on_data(encode(item))
    assert site.status == 500
    site.settled()
    assert site.ended("internal") == 1


async def test_a_stream_without_finish_reason(site: Site) -> None:
    site.chat()
    site.streams[0].say(ids(site, "good"))
    site.streams[0].sink.on_end()
    assert site.status == 200 and site.answer["choices"][0]["finish_reason"] is None
    site.settled()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_stops_the_engine(site: Site, streaming: bool) -> None:
    site.chat(stream=streaming, n=2)
    site.streams[0].say(ids(site, "good"))
    await turn()
    site.bench.connection.connection_lost(None)
    assert [one.killed for one in site.streams] == [1, 1]
    site.streams[0].say(ids(site, " day"))
    site.streams[0].sink.on_end()
    site.settled()
    kind = "stream" if streaming else "unary"
    assert site.ended("cancelled", kind) == 1
    assert (
        site.sample(
            "dynamo_frontend_model_cancellation_total",
            model="tiny",
            endpoint="chat_completions",
            request_type=kind,
        )
        == 1
    )
    assert site.sample("dynamo_frontend_disconnected_clients") == 1


async def test_before_any_model(site: Site) -> None:
    site.post(b"{")
    assert site.status == 400 and site.answer["type"] == "Bad Request"
    assert site.ended("validation", model="unknown_model") == 1
    site = Site()
    site.found = ModelNotFound
    site.chat()
    assert site.status == 404
    assert site.answer == error_json(
        "Model not found",
        "Not Found",
        404,
        ("invalid_request_error", "model", "model_not_found"),
    )
    assert site.ended("not_found") == 1
    site = Site()
    site.found = NoInstances
    site.chat()
    assert site.answer == NOT_READY
    site = Site()
    site.active.refuses = True
    site.post(b"not even parsed")
    assert site.status == 503 and site.ended("unavailable", model="unknown_model") == 1


async def test_names_nobody_serves_fold_into_one_label(site: Site) -> None:
    site.found = ModelNotFound
    for number in range(5):
        site.post({"model": f"x{number}", "messages": [{"role": "user", "content": "a"}]})
    assert site.ended("not_found", model="unknown_model") == 5
    assert b'model="x' not in site.registry.render()


async def test_overload_status_can_be_chosen() -> None:
    site = Site(overload_status=529)
    site.pick_error = Overloaded("x")
    site.chat()
    assert site.answer == error_json(
        "Service temporarily overloaded",
        "Overloaded",
        529,
        ("server_error", None, "overloaded"),
    )
    site = Site(overload_status=429)
    site.pick_error = Overloaded("x")
    site.chat()
    assert site.status == 429 and site.answer["code"] == 429


async def test_request_ids(site: Site) -> None:
    given = str(uuid.uuid4())
    site.post({"model": "tiny", "messages": [{"role": "user", "content": "a"}]}, x_request_id=given)
    site.streams[0].say([], finish_reason="stop")
    site.streams[0].sink.on_end()
    assert f"x-request-id: {given}" in site.head
    assert site.answer["id"] == f"chatcmpl-{given}"
    site = Site()
    site.post({"model": "tiny", "messages": [{"role": "user", "content": "a"}]}, x_request_id="me")
    assert site.streams[0].engine_id == "me"
    site.streams[0].sink.on_error(Disconnected())
    assert "x-request-id: me" in site.head
    assert site.metrics.recent.find("me").info.request_id == "me"
    site = Site()
    site.chat()
    for odd in ("a b", "x" * 129, "\x1b[2J"):
        site.bench = Bench(handler=site.bench.server.handler)
        site.post({"model": "tiny", "prompt": "a"}, "/v1/completions", x_request_id=odd)
        assert str(uuid.UUID(site.streams[-1].engine_id)) == site.streams[-1].engine_id


async def test_the_same_id_twice_at_once(site: Site) -> None:
    given = str(uuid.uuid4())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    site.post(body, x_request_id=given)
    first = site.bench
    site.bench = Bench(handler=first.server.handler)
    site.post(body, x_request_id=given)
    assert len(site.booked) == 2
    one, two = site.streams
    assert one.engine_id == given and two.engine_id == f"{given}.1"
    for stream in (one, two):
        stream.say([], finish_reason="stop")
        stream.sink.on_end()
    assert site.answer["id"] == f"chatcmpl-{given}"
    site.post(body, x_request_id=given)  # it runs no longer
    assert site.streams[-1].engine_id == given


@pytest.mark.parametrize("ending", ["answer", "error", "disconnect", "refused"])
async def test_each_engine_request_has_its_own_id(site: Site, ending: str) -> None:
    given = str(uuid.uuid4())
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2}
    for _ in range(2):
        site.bench = Bench(handler=site.bench.server.handler)
        site.streams.clear()
        if ending == "refused":
            site.pick_error = NoInstances("none")
            site.post(body, "/v1/completions", x_request_id=given)
            assert site.status == 503
            site.pick_error = None
        site.post(body, "/v1/completions", x_request_id=given)
        found = [stream.engine_id for stream in site.streams]
        assert found == [given, f"{given}-1", f"{given}-2", f"{given}-3"]
        if ending == "disconnect":
            site.bench.connection.connection_lost(None)
        for stream in site.streams:
            if ending == "error":
                stream.sink.on_error(Disconnected())
            elif ending != "disconnect":
                stream.say(ids(site, "x"), finish_reason="stop")
                stream.sink.on_end()
        if ending == "answer":
            assert site.answer["id"] == f"cmpl-{given}"
    site.settled()


@pytest.mark.parametrize("pin", [{}, {"dp_rank": 0}, {"dp_rank": 3}, {"decode_worker_id": 7}])
async def test_rank_0_is_sent(
    site: Site, monkeypatch: pytest.MonkeyPatch, pin: dict[str, int]
) -> None:
    monkeypatch.setattr(site, "pick", lambda *_, **__: Decision(7, 0))
    site.chat(nvext=pin)
    assert site.streams[0].request.routing.dp_rank == 0  # type: ignore[union-attr]


async def test_headers_route(site: Site) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    site.post(body, x_worker_instance_id="12", x_dp_rank="3", X_Dynamo_Session_ID="s")
    routing = site.routings[0]
    assert (routing.backend_instance_id, routing.dp_rank, routing.session_id) == (12, 3, "s")
    site = Site()
    site.post(body, x_dp_rank="-1")
    assert site.status == 400 and "x-dp-rank" in site.answer["message"]
    site.settled()


async def test_nvext(site: Site) -> None:
    site.chat(nvext={"extra_fields": ["worker_id", "timing"], "annotations": ["request_id"]})
    site.streams[0].say(ids(site, "a"), finish_reason="stop")
    site.streams[0].sink.on_end()
    nvext = site.answer["nvext"]
    assert nvext["worker_id"] == {
        "prefill_worker_id": 7,
        "decode_worker_id": 7,
        "prefill_dp_rank": 1,
        "decode_dp_rank": 1,
    }
    timing = nvext["timing"]
    assert timing["kv_hit_rate"] == 0.5 and timing["total_time_ms"] >= timing["ttft_ms"] >= 0
    site = Site(disable_nvext=True)
    site.chat(nvext={"extra_fields": ["worker_id"]})
    site.streams[0].say(ids(site, "a"), finish_reason="stop")
    site.streams[0].sink.on_end()
    assert "nvext" not in site.answer


async def test_asking_where_a_request_would_go(site: Site) -> None:
    site.chat(stream=True, nvext={"annotations": ["query_instance_id:"]})
    assert not site.streams and not site.booked
    chunk, done = site.events
    assert chunk["nvext"]["worker_id"]["decode_worker_id"] == 7
    assert len(chunk["nvext"]["token_ids"]) > 0 and done == "[DONE]"
    site.settled()


async def test_a_long_prompt_takes_the_detour(site: Site) -> None:
    text = "word " * 40_000
    site.preprocessor.context_length = None
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    site.post(body)
    if not site.streams:
        while len(site.tasks):
            await turn()
    assert len(site.streams[0].request.token_ids) > 10_000
    site.streams[0].say([], finish_reason="stop")
    site.streams[0].sink.on_end()
    site.settled()
    site = Site()
    site.post(body)
    site.bench.connection.connection_lost(None)
    while len(site.tasks):
        await turn()
    site.settled()
    await site.tasks.close()


async def test_a_panic_leaves_nothing_behind(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    class Panic(BaseException):
        """What a library in Rust raises when it panics."""

    def panic(*_: Any) -> None:
        raise Panic

    site.preprocessor.tokenizer.encode = panic  # type: ignore
    site.chat()
    assert site.status == 500 and "Panic" in caplog.text
    site.settled()


async def test_the_deadline_holds_until_the_request_is_sent(site: Site) -> None:
    go_on = threading.Event()
    encode = site.preprocessor.tokenizer.encode

    def encode_when_told(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return encode(*arguments)

    site.preprocessor.tokenizer.encode = encode_when_told  # type: ignore
    site.chat(stream=True, user="long " * 100_000)
    while not site.active._active:  # its body is decoded in a thread
        await turn()
    site.bench.later(61)
    assert site.status == 503 and "not processed in time" in site.answer["message"]
    go_on.set()
    while len(site.tasks):
        await turn()
    site.settled()
    assert site.ended("unavailable", "stream") == 1
    await site.tasks.close()
    site = Site()
    site.chat()
    site.bench.later(10_000)
    assert site.bench.transport.out == b"" and not site.streams[0].killed
    site.streams[0].say([1], finish_reason="stop")
    site.streams[0].sink.on_end()
    assert site.status == 200
    site.settled()


async def test_a_slow_client_gathers_one_delta_and_is_cut_off_at_the_bound(site: Site) -> None:
    site.chat(stream=True)
    (stream,) = site.streams
    stream.say(ids(site, "good"))
    await turn()
    before = site.bench.transport.out
    site.bench.connection.pause_writing()
    for _ in range(10):
        stream.say(ids(site, " day"))
        await turn()
    assert site.bench.transport.out == before
    site.bench.connection.resume_writing()
    assert site.events[1]["choices"][0]["delta"]["content"] == " day" * 10
    site.bench.connection.pause_writing()
    site.active.held_limit_bytes = 1000
    for _ in range(200):
        stream.say(ids(site, " day"))
        await turn()
    assert site.bench.transport.aborted and stream.killed == 1
    site.settled()
    assert site.ended("cancelled", "stream") == 1


async def test_a_client_that_has_caught_up_begins_a_new_bound(site: Site) -> None:
    """What was sent since does not count: a long answer to a client that was slow once goes on."""
    site.active.held_limit_bytes = 1000
    site.chat(stream=True)
    (stream,) = site.streams
    stream.say(ids(site, "good"))
    await turn()
    site.bench.connection.pause_writing()
    stream.say(ids(site, " day"))
    await turn()
    site.bench.connection.resume_writing()
    for _ in range(200):
        stream.say(ids(site, " day"))
        await turn()
    assert not site.bench.transport.aborted
    stream.say(ids(site, " day"), finish_reason="stop")
    stream.sink.on_end()
    await turn()
    site.settled()


async def test_a_client_that_reads_nothing_gets_no_comments(site: Site) -> None:
    """They would gather for as long as it does not read."""
    site.chat(stream=True)
    site.streams[0].say(ids(site, "good"))
    await turn()
    request = site.streams[0].sink.request
    request.keep_alive()
    sent = site.bench.transport.out
    assert sent.endswith(b": keep-alive\n\n\r\n")
    site.bench.connection.pause_writing()
    request.keep_alive()
    await turn()
    assert site.bench.transport.out == sent
    site.bench.connection.connection_lost(None)
    site.settled()


async def test_a_drain_ends_with_the_last_request(site: Site) -> None:
    """Not with its timeout."""
    site.chat()
    draining = asyncio.ensure_future(site.active.drain(3600.0))
    await turn()
    site.streams[0].say(ids(site, "good"), finish_reason="stop")
    site.streams[0].sink.on_end()
    assert await asyncio.wait_for(draining, 20)
    site.settled()


async def test_tokens_of_one_output_share_the_time_of_its_gap(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(engine_request, "time", SimpleNamespace(monotonic=lambda: now_s))
    site.chat(stream=True)
    (stream,) = site.streams
    stream.say(ids(site, "good"))
    now_s += 6.0
    stream.say([5, 6, 7], finish_reason="stop")
    stream.sink.on_end()
    await turn()
    name = "dynamo_frontend_inter_token_latency_seconds"
    assert (site.sample(f"{name}_count"), site.sample(f"{name}_sum")) == (3, 6.0)
    site.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_waiting_client_hears_that_its_stream_lives(stream: bool) -> None:
    site = Site(sse_keep_alive_ms=10)
    site.chat(stream=stream)
    beats = b": keep-alive\n\n"
    await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        while stream and site.bench.transport.out.count(beats) < 2:
            await turn()
    assert stream or beats not in site.bench.transport.out
    site.streams[0].say(ids(site, "good"), finish_reason="stop")
    site.streams[0].sink.on_end()
    await turn()
    assert site.status == 200
    site.settled()
    site.active.close()


async def test_a_silent_engine_ends_the_request() -> None:
    site = Site(backend_stream_timeout_s=0.05)
    site.chat()
    ended = asyncio.Event()
    site.free = lambda request_id, tokens: (site.freed.append(request_id), ended.set())  # type: ignore
    await asyncio.wait_for(ended.wait(), 20)
    await turn()
    assert site.status == 503 and site.streams[0].killed == 1
    site.settled()
    assert site.ended("response_timeout") == 1
    site.active.close()


async def test_the_end_of_the_drain(site: Site) -> None:
    site.chat(stream=True)
    assert not await site.active.drain(0.01)
    site.active.fail_all(NoInstances())
    assert await site.active.drain(0.01)
    site.settled()


async def test_text_completions_with_several_prompts(site: Site) -> None:
    site.post({"model": "tiny", "prompt": ["a", "b"], "n": 2}, "/v1/completions")
    assert len(site.streams) == 4
    for stream in site.streams:
        stream.say(ids(site, "x"), finish_reason="stop")
        stream.sink.on_end()
    assert [one["index"] for one in site.answer["choices"]] == [0, 1, 2, 3]
    assert site.answer["object"] == "text_completion"
    site.settled()
    site = Site()
    site.post({"model": "tiny", "prompt": ["a"] * 1000, "n": 2}, "/v1/completions")
    assert site.status == 400 and "1024" in site.answer["message"]
    site.settled()


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_ended_call_needs_no_collector(site: Site, streaming: bool) -> None:
    site.chat(stream=streaming)
    (stream,) = site.streams
    stream.say([1, 2])
    stream.say([3], finish_reason="length")
    call = weakref.ref(stream.sink.request.generation)
    gc.disable()
    try:
        stream.sink.on_end()
        await turn()
        site.streams.clear()
        del stream
        assert call() is None, "something of the request refers to itself"
    finally:
        gc.enable()
