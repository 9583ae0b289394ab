"""Recent requests: every request that ends is among them, with where its time went."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from http_bench import Bench
from test_request import Site, ids

from dynamo.errors import Disconnected, DynamoError, InvalidArgument, ModelNotFound, Overloaded
from dynamo.frontend.apis.operator.status import RecentRoutes
from dynamo.frontend.requests.recent import Prefilled, RecentRequests, RequestFigures, RequestInfo
from dynamo.http import NEVER
from dynamo.http.routes import Routes
from dynamo.protocols.engine import CompletionUsage, PromptTokensDetails
from dynamo.protocols.status import RequestRecord

UUID = "01234567-89ab-4cde-8f01-{:012x}"


def request(number: int, ended_s: float = 0.0, model: str = "m", **more: Any) -> RequestFigures:
    info = RequestInfo("chat_completions", UUID.format(number), None)
    return RequestFigures(info, model, 1.0, "ok", ended_s or float(number), **more)


@pytest.fixture
async def site() -> Site:
    return Site()


def records(site: Site) -> list[RequestRecord]:
    return site.metrics.recent.newest(100)


async def test_a_request_that_succeeds(site: Site) -> None:
    site.chat(max_tokens=5)
    (stream,) = site.streams
    stream.say(ids(site, "good "))
    usage = CompletionUsage(prompt_tokens=9, prompt_tokens_details=PromptTokensDetails(4))
    stream.say(ids(site, "day"), finish_reason="length", completion_usage=usage)
    assert records(site) == []
    stream.sink.on_end()
    (record,) = records(site)
    assert record.request_id == site.answer["id"].removeprefix("chatcmpl-")
    assert (record.model, record.endpoint, record.outcome) == ("tiny", "chat_completions", "ok")
    assert (record.worker, record.dp_rank, record.prefill_worker) == ("7", 1, "")
    assert (record.overlap_blocks, record.prompt_blocks, record.cached_tokens) == (2, 4, 4)
    assert record.completion_tokens == site.answer["usage"]["completion_tokens"]
    assert record.prompt_tokens > 0 and record.migrations == 0
    stages = (record.prepare_s, record.queue_s, record.prefill_s, record.decode_s)
    spent = [one for one in stages if one is not None]
    assert len(spent) == 4 and 0 < sum(spent) <= record.duration_s + 4e-6
    assert record.ttft_s == pytest.approx(sum(spent[:3]), abs=4e-6)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Overloaded("full"), "overload"), (InvalidArgument("no such rank"), "validation")],
)
async def test_a_request_that_gets_no_worker(site: Site, error: DynamoError, outcome: str) -> None:
    site.pick_error = error
    site.chat(stream=True)
    (record,) = records(site)
    assert (record.outcome, record.worker, record.prefill_s) == (outcome, "", None)
    assert record.prepare_s is not None and record.queue_s is not None


async def test_a_request_that_is_refused(site: Site) -> None:
    site.found = ModelNotFound
    messages = [{"role": "user", "content": "hello"}]
    site.post({"model": "x" * 500, "messages": messages}, x_request_id="mine")
    (record,) = records(site)
    assert (record.outcome, record.client_id, len(record.model)) == ("not_found", "mine", 128)
    assert site.metrics.recent.find("mine").info[1] == record.request_id


async def test_a_request_that_its_worker_and_its_client_leave(site: Site) -> None:
    site.chat()
    site.streams[0].sink.on_error(Disconnected("gone"))
    site.bench = Bench(handler=site.bench.server.handler)
    site.chat(stream=True)
    site.bench.connection.connection_lost(None)
    assert [one.outcome for one in records(site)] == ["cancelled", "unavailable"]
    assert [one.worker for one in records(site)] == ["7", "7"]


def test_the_stages_of_a_prefill_worker() -> None:
    done = Prefilled(9, 0, 3, 5, 4.0, 6.0)
    times: dict[str, Any] = {
        "prepared_s": 2.0,
        "sent_s": 6.0,
        "first_token_s": 7.0,
        "last_token_s": 9.0,
    }
    record = request(1, 10.0, **times, prefilled=done).record()
    assert (record.prefill_worker, record.overlap_blocks, record.prompt_blocks) == ("9", 3, 5)
    stages = (record.prepare_s, record.queue_s, record.prefill_s, record.decode_s)
    assert stages == (1.0, 2.0, 3.0, 2.0) and record.duration_s == 9.0


def test_the_stages_of_a_request_without_a_worker() -> None:
    moments: dict[str, Any] = {
        "resumed_s": 3.0,
        "prepared_s": 4.0,
        "rerouted_s": 7.0,
        "sent_s": 7.5,
    }
    record = request(1, 9.0, **moments).record()
    assert (record.worker_wait_s, record.prepare_s, record.queue_s) == (5.0, 1.0, 0.5)
    assert (record.prefill_s, record.decode_s) == (1.5, None)
    waiting = request(1, 9.0, resumed_s=3.0, prepared_s=4.0, rerouted_s=NEVER)
    assert [name for name, _, _ in waiting.stages()] == ["worker_wait", "prepare", "worker_wait"]
    assert waiting.record().worker_wait_s == 7.0 and waiting.record().queue_s is None


def test_the_ring_is_bounded_and_ordered() -> None:
    recent = RecentRequests(routed=3, refused=2)
    exchange: Any = SimpleNamespace(
        headers={"x-request-id": "y" * 500}, received_at=0.0, resumed_at=0.0, api_key=None
    )
    for number in range(1, 6):
        recent.add(request(number, 1e12 + number, model="ab"[number % 2]))
        recent.refuse("completions", "c", "overload", exchange)
    assert [one.model for one in recent.ended()] == ["b", "a", "b", "c", "c"]
    assert [one.model for one in recent.newest(2)] == ["b", "a"]
    assert [one.model for one in recent.newest(9, "b")] == ["b", "b"]
    assert recent.newest(9, "c")[0].client_id == "y" * 128


def test_find() -> None:
    recent = RecentRequests()
    with pytest.raises(ModelNotFound, match="No request has ended"):
        recent.last()
    for number in (0x1A, 0x1B, 0x1B, 0x2C):
        recent.add(request(number))
    whole = UUID.format(0x1B)
    for name in (whole, f"chatcmpl-{whole}", f"resp_{whole}"):
        assert recent.find(name).info[1] == whole
    assert recent.find(UUID.format(0x2C)[:-1]).info[1] == UUID.format(0x2C)
    assert recent.find("01B").info[1] == whole
    assert recent.last().info[1] == UUID.format(0x2C)
    with pytest.raises(
        InvalidArgument, match="4 requests begin or end with 0123: give more digits"
    ):
        recent.find("0123")
    for name in ("ff", "", "chatcmpl-"):
        with pytest.raises(ModelNotFound, match="the last 1000 are kept"):
            recent.find(name)


def test_an_id_that_a_client_sent_twice_names_none_of_its_requests() -> None:
    recent = RecentRequests()
    for number in (1, 2):
        figures = request(number)
        figures.info = figures.info._replace(echoed_id="mine")
        recent.add(figures)
    with pytest.raises(InvalidArgument, match=rf"2 requests have the id mine.*{UUID.format(2)}"):
        recent.find("mine")
    assert recent.find(UUID.format(1)).info.echoed_id == "mine"


class Page:
    """The routes over a ring with one request."""

    def __init__(self) -> None:
        self.recent = RecentRequests()
        self.recent.add(request(1))
        routes = Routes()
        RecentRoutes(self.recent).install(routes)
        self.bench = Bench(routes)

    def get(self, path: str) -> tuple[int, Any]:
        self.bench.transport.out = b""
        out = self.bench.feed(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        return int(out[9:12]), json.loads(out.partition(b"\r\n\r\n")[2])


async def test_the_routes() -> None:
    page = Page()
    status, answer = page.get("/v1/requests?limit=5&model=m")
    assert status == 200 and [one["request_id"] for one in answer["requests"]] == [UUID.format(1)]
    assert page.get("/v1/requests?model=other")[1]["requests"] == []
    cursor = answer["cursor"]
    page.recent.add(request(2))
    page.recent.add(request(3, model="other"))
    status, answer = page.get(f"/v1/requests?limit=1&after={cursor!r}")
    assert [one["request_id"] for one in answer["requests"]] == [UUID.format(3)]
    assert (answer["left_out"], answer["cursor"]) == (1, 3.0)
    assert page.get("/v1/requests?after=3.0")[1] == {
        "requests": [],
        "cursor": 3.0,
        "left_out": 0,
        "problems": [],
    }
    page = Page()
    for name in ("last", UUID.format(1), "chatcmpl-0123"):
        assert page.get(f"/v1/requests/{name}")[1]["request_id"] == UUID.format(1)
    assert page.get("/v1/requests/ff")[0] == 404
    for query in ("limit=0", "limit=1001", "limit=x", "last=3", "after=x", "after=-1", "after=1e9"):
        assert page.get(f"/v1/requests?{query}")[0] == 400


async def test_a_running_request_is_shown_and_its_decision_too(site: Site) -> None:
    before_s = time.monotonic()
    site.chat(max_tokens=5, stream=True)
    ((figures, decision),) = site.active.decided_since(before_s)
    assert (figures.model, decision.worker_id) == ("tiny", 7) and not records(site)
    found = site.active.running(figures.info.request_id)
    assert found is not None
    assert (found.outcome, found.worker, found.dp_rank) == ("running", "7", 1)
    assert found.duration_s > 0 and found.prefill_s is not None
    assert site.active.running("x") is None
    (stream,) = site.streams
    stream.say(ids(site, "day"), finish_reason="length")
    stream.sink.on_end()
    assert [one.outcome for one, _ in site.active.decided_since(before_s)] == ["ok"]
    assert not list(site.active.decided_since(time.monotonic()))
    assert site.active.running(figures.info.request_id) is None
