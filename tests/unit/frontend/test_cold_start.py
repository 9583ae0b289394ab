"""Requests of a model without a worker wait, if a planner starts it: a real frontend, real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from until import Changes, until

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.frontend.models import graph, on_demand, registry
from dynamo.frontend.requests import cold_start, metrics
from dynamo.frontend.requests.cold_start import ColdStartQueue
from dynamo.frontend.service import Frontend
from dynamo.observability.metrics import Gauge
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard, OnDemandModel
from dynamo.protocols.engine import HTTP_INPUT, ROUTES, HttpResponseHead
from dynamo.protocols.kv import ON_DEMAND_STATE, OnDemandState
from dynamo.protocols.status import RequestRecord
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import run_dir
from dynamo.runtime.process.stop_order import write_stop_stage
from dynamo.runtime.requests import ServerStream
from dynamo.serve.state.document import Document
from dynamo.serve.state.statefile import Statefile

MODEL_DIR = Path(__file__).parents[3] / "examples" / "model"
_STATE = codec.decoder(OnDemandState).decode


_NOW_WAITING = 'dynamo_frontend_stage_requests{phase="",stage="worker_wait"}'
_WAITED = 'dynamo_frontend_stage_duration_seconds_sum{stage="worker_wait"}'
_STARTED = "dynamo_frontend_requests_started_total"
_WAITED_TTFT = 'dynamo_frontend_time_to_first_token_worker_wait_seconds_total{model="tiny"}'
_WAITED_DURATION = 'dynamo_frontend_request_worker_wait_seconds_total{model="tiny"}'
_PREPARED = 'dynamo_frontend_stage_duration_seconds_sum{stage="preprocess"}'


class Planner:
    """Writes the record of ``tiny``, and collects the states of its queue."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.runtime = DistributedRuntime(None, settings)
        self.states: list[OnDemandState] = []
        self._changes = Changes()

    async def start(self) -> None:
        self.runtime.subscribe("ns", "planner", ON_DEMAND_STATE, self._on_event)
        await self.announce(OnDemandModel("ns", "tiny", ["small"], context_length=2048))

    async def announce(self, record: OnDemandModel) -> None:
        lease = await self.runtime.granted()
        key = f"v1/on_demand/ns/Worker/{self.runtime.instance_id:x}"
        await self.runtime.discovery.put(key, msgspec.json.encode(record), lease.id)

    async def until(self, waiting: int) -> None:
        """Wait until the last state has ``waiting`` requests."""
        await self._changes.until(lambda: self.states and self.states[-1].waiting == waiting)

    def _on_event(self, publisher: int, sequence: int, payload: bytes) -> None:
        self.states.append(_STATE(payload))
        self._changes.changed()


class Worker:
    """Answers each request with three tokens; ``order`` has the prompts as they arrived.

    Unless it ``answers``, requests get the tokens ``begun``, if any, and nothing more.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self.runtime = DistributedRuntime(None, settings)
        self.order: list[Any] = []
        self.limits: list[Any] = []
        self.answers = True
        self.begun: list[int] = []

    async def start(self, **changes: Any) -> None:
        await self.card(**changes)
        relays = changes.get("model_input") == HTTP_INPUT
        answer = self._relay if relays else self._answer
        endpoint = self.runtime.endpoint("ns.backend.generate")
        self.runtime.tasks.spawn(endpoint.serve_push(answer), name="serve")

    async def card(self, tail: str = "", **changes: Any) -> None:
        """Write the card of the model, or one with another ``tail`` of its key."""
        card = ModelCard(
            display_name="tiny",
            slug="tiny",
            source_path=str(MODEL_DIR),
            namespace="ns",
            component="backend",
            endpoint="generate",
            instance_id=self.runtime.instance_id,
            context_length=2048,
        )
        card = msgspec.structs.replace(card, **changes)
        lease = await self.runtime.granted()
        key = f"v1/mdc/ns/backend/generate/{self.runtime.instance_id:x}{tail}"
        await self.runtime.discovery.put(key, msgspec.json.encode(card), lease.id)

    def _answer(self, stream: ServerStream, payload: bytes) -> None:
        request = codec.plain_decode(payload)
        self.order.append(request["token_ids"])
        self.limits.append(request["stop_conditions"].get("max_tokens"))
        if not self.answers:
            if self.begun:
                stream.send(codec.encode({"token_ids": self.begun}))
            return
        stream.send(codec.encode({"token_ids": [5, 6, 7], "finish_reason": "stop"}))
        stream.end()

    def _relay(self, stream: ServerStream, payload: bytes) -> None:
        self.order.append(codec.plain_decode(payload)["path"])
        stream.send(codec.encode(HttpResponseHead(200, [("content-type", "application/json")])))
        stream.send(b"{}")
        stream.end()


class Site:
    """A frontend, its planner, and workers of it."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.settings = RuntimeSettings(state_dir=str(tmp_path), namespace="ns")
        self.runtime = DistributedRuntime(None, self.settings)
        self.frontend = Frontend(
            self.runtime, FrontendSettings(http_port=0, **settings), RouterSettings()
        )
        self.planner = Planner(self.settings)
        self.workers: list[Worker] = []
        self.client: httpx.AsyncClient

    async def worker(self, **changes: Any) -> Worker:
        worker = Worker(self.settings)
        self.workers.append(worker)
        await worker.start(**changes)
        return worker

    async def known_worker(self, **changes: Any) -> Worker:
        """A worker that the frontend has found: without inotify that takes a second."""
        worker = await self.worker(**changes)
        number = worker.runtime.instance_id
        instances = self.frontend.models.instances
        await until(lambda: any(one.instance_id == number for one in instances()))
        return worker

    async def complete(self, prompt: Any = "hello", model: str = "tiny") -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": 3}
        return await self.client.post("/v1/completions", json=body)

    def metric(self, name: str) -> float:
        text = self.runtime.metrics.exposition("")[0].decode()
        whole = name if "{" in name else name + "{"
        lines = [one for one in text.splitlines() if one.startswith(whole)]
        return sum(float(one.rpartition(" ")[2]) for one in lines)

    def last(self) -> RequestRecord:
        """The request that ended last."""
        return self.frontend._requests.metrics.recent.last().record()


@asynccontextmanager
async def running(tmp_path: Path, planner: bool = True, **settings: Any) -> AsyncIterator[Site]:
    site = Site(tmp_path, **settings)
    await site.runtime.start()
    if planner:
        await site.planner.start()
    try:
        host, port = await site.frontend.start()
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            site.client = client
            yield site
    finally:
        await site.frontend.close()
        for one in (site.runtime, site.planner.runtime, *(one.runtime for one in site.workers)):
            await one.close()


def serves(site: Site, name: str) -> bool:
    entry = site.frontend.models.named(name)
    return entry is not None and entry.served


def lacks_workers(site: Site, name: str) -> bool:
    entry = site.frontend.models.named(name)
    return entry is not None and not entry.workers


def forgot(site: Site, name: str) -> bool:
    return site.frontend.models.named(name) is None


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with running(tmp_path) as made:
        yield made


async def test_a_model_without_a_worker_is_listed_and_healthy(site: Site) -> None:
    models = (await site.client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["context_window"]) for one in models] == [
        ("tiny", 2048),
        ("small", 2048),
    ]
    health = await site.client.get("/health")
    assert health.status_code == 200
    assert health.json()["models"] == ["tiny", "small"]


async def test_a_request_waits_for_the_first_worker(site: Site) -> None:
    asked = asyncio.ensure_future(site.complete())
    await site.planner.until(1)
    assert site.metric("dynamo_frontend_cold_start_queue_requests") == 1
    assert site.metric(_NOW_WAITING) == 1
    assert site.metric(_STARTED) == 1
    seen_s = time.monotonic()
    await site.worker()
    waited_s = time.monotonic() - seen_s
    answer = await asked
    record = site.last()
    # All of the wait is in its own stage, and none of it in that of the preparation.
    assert record.worker_wait_s is not None and record.worker_wait_s >= waited_s - 1e-6
    stages = (record.prepare_s, record.queue_s, record.prefill_s, record.decode_s)
    rest_s = sum(one for one in stages if one is not None)
    # Each figure of a record is rounded to microseconds.
    assert record.worker_wait_s + rest_s <= record.duration_s + 5e-6
    assert site.metric(_NOW_WAITING) == 0
    for name in (_WAITED, _WAITED_TTFT, _WAITED_DURATION):
        assert site.metric(name) == pytest.approx(record.worker_wait_s, abs=1e-6)
    assert site.metric(_PREPARED) == pytest.approx(record.prepare_s, abs=1e-6)
    assert site.metric(_STARTED) == 1  # counted when it came, and once
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    await site.planner.until(0)
    assert site.metric("dynamo_frontend_cold_start_queue_requests") == 0


async def test_a_request_without_a_model_starts_the_only_one(site: Site) -> None:
    request = site.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
    answer = asyncio.ensure_future(request)
    async with asyncio.timeout(20):
        await site.planner.until(1)
    await site.worker()
    body = (await answer).json()
    assert body["model"] == "tiny" and body["usage"]["completion_tokens"] == 3


async def test_requests_go_in_their_order(site: Site) -> None:
    asked = []
    for number in range(30):
        asked.append(asyncio.ensure_future(site.complete([number + 1] * 3)))
        await asyncio.sleep(0.002)
    await site.planner.until(30)
    worker = await site.worker()
    answers = await asyncio.gather(*asked)
    assert {one.status_code for one in answers} == {200}
    assert [prompt[0] for prompt in worker.order] == list(range(1, 31))


async def test_an_alias_a_chat_and_an_unknown_model(site: Site) -> None:
    alias = asyncio.ensure_future(site.complete(model="small"))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chat = asyncio.ensure_future(site.client.post("/v1/chat/completions", json=body))
    await site.planner.until(2)
    other = await site.complete(model="unknown")
    assert other.status_code in (404, 503)
    await site.worker(model_aliases=["small"])
    assert (await alias).status_code == 200
    assert (await chat).status_code == 200


async def test_a_stream_gets_comments(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "_COMMENT_EVERY_S", 0.05)
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 3, "stream": True}
    headers = {"x-request-id": "mine"}
    request = site.client.stream("POST", "/v1/completions", json=body, headers=headers)
    async with request as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-request-id"] == "mine"
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(": loading, ")
        await site.worker()
        rest = [line async for line in lines if line and not line.startswith(":")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["text"]


async def test_an_error_after_comments_is_an_event(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "_COMMENT_EVERY_S", 0.05)
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    body = {"model": "tiny", "prompt": "word " * 4000, "stream": True}
    async with site.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(": loading")
        await site.worker()
        rest = [line async for line in lines if line.startswith("data: ")]
    error = json.loads(rest[0].removeprefix("data: "))["error"]
    assert error["code"] == 400
    assert "maximum context length" in error["message"]
    assert rest[1:] == ["data: [DONE]"]


async def test_a_client_that_leaves_is_forgotten(site: Site) -> None:
    asked = asyncio.ensure_future(site.complete())
    await site.planner.until(1)
    asked.cancel()
    await site.planner.until(0)
    record = site.last()
    assert record.outcome == "cancelled" and record.prepare_s is None
    assert record.worker_wait_s == record.duration_s
    worker = await site.worker()
    assert (await site.complete("later")).status_code == 200
    assert len(worker.order) == 1


async def test_the_queue_is_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, cold_start_queue_limit=2) as site:
        asked = [asyncio.ensure_future(site.complete()) for _ in range(2)]
        await site.planner.until(2)
        full = await site.complete()
        assert full.status_code == 503
        assert full.headers["retry-after"] == "1"
        assert "2 requests wait for its first one already" in full.json()["message"]
        await site.worker()
        assert [(await one).status_code for one in asked] == [200, 200]


async def test_a_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    async with running(tmp_path, cold_start_timeout_s=0.2) as site:
        answer = await site.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "got no worker within" in answer.json()["message"]
        record = site.last()
        assert record.worker_wait_s == record.duration_s and record.prepare_s is None
        assert site.metric(_WAITED) == pytest.approx(record.worker_wait_s, abs=1e-6)


async def test_a_clock_that_is_set_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        size_bytes = 0
        failed = False

        def fail(self, error: DynamoError) -> None:
            self.failed = True

        def show_progress(self) -> bool:
            return True

    queue = ColdStartQueue("tiny", 4, Gauge(), lambda queue: None)
    waiting: Any = Waiting()
    queue.add(waiting)
    set_to = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: set_to)
    queue.tick(0.5, 30.0)
    assert not waiting.failed and len(queue) == 1 and queue.oldest_s() < 30
    queue.tick(0.5, 0.0)
    assert waiting.failed and len(queue) == 0


def announced(site: Site) -> OnDemandModel:
    """The record of the model that the frontend has read last."""
    record = site.frontend.models.on_demand.record("tiny")
    assert record is not None
    return record


async def test_the_reason_of_a_wait_is_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_WAITING_TICK_S", 0.05)
    async with running(tmp_path, cold_start_timeout_s=0.3) as site:
        reason = "1 request waits for a first worker, which needs 1 GPU, and other models hold it"
        await site.planner.announce(OnDemandModel("ns", "tiny", waits_for=reason))
        await until(lambda: bool(announced(site).waits_for))
        answer = await site.complete()
        assert answer.status_code == 503
        assert answer.json()["message"].endswith(f" s: {reason}.")


async def test_a_model_that_an_operator_stopped_answers_at_once(site: Site) -> None:
    asked = asyncio.ensure_future(site.complete())
    await site.planner.until(1)
    reason = "ns_Worker was stopped by a command; start it again with: dynamo load tiny"
    await site.planner.announce(OnDemandModel("ns", "tiny", waits_for=reason, stopped=True))
    for answer in (await asked, await site.complete()):
        assert answer.status_code == 503
        assert answer.json()["message"] == f"Model `tiny` has no worker: {reason}."
    await site.planner.announce(OnDemandModel("ns", "tiny"))
    await until(lambda: not announced(site).stopped)
    asked = asyncio.ensure_future(site.complete())
    await site.planner.until(1)
    await site.worker()
    assert (await asked).status_code == 200


async def test_without_a_planner_nothing_waits(tmp_path: Path) -> None:
    async with running(tmp_path, planner=False) as site:
        assert (await site.complete()).status_code == 503


async def test_a_planner_may_restart(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.ensure_future(site.complete())
    await site.planner.until(1)
    await site.planner.runtime.close()
    site.planner = Planner(site.settings)
    await site.planner.start()
    await site.planner.until(1)  # the new one gets the state
    await site.worker()
    assert (await asked).status_code == 200


async def test_a_model_stays_when_its_planner_is_back_in_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, models = OnDemandModel("ns", "tiny"), site.frontend.models.on_demand
    # Without inotify the record is read once a second.
    monkeypatch.setattr(on_demand, "_PLANNER_RESTART_S", 2.0)
    discovery = site.planner.runtime.discovery
    await discovery.delete(f"v1/on_demand/ns/Worker/{site.planner.runtime.instance_id:x}")
    await until(lambda: bool(models._expiries))
    await site.planner.announce(record)
    await until(lambda: not models._expiries)
    await asyncio.sleep(2.2)  # longer than a planner may be away
    assert models.record("tiny") == record


async def test_a_planner_that_stays_away_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_PLANNER_RESTART_S", 0.1)
    async with running(tmp_path) as site:
        asked = asyncio.ensure_future(site.complete())
        await site.planner.until(1)
        await site.planner.runtime.close()
        answer = await asked
        assert answer.status_code == 503
        assert "the planner that starts it does not run" in answer.json()["message"]
        assert (await site.complete()).status_code == 503


async def test_a_wait_ends_after_the_planner_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_PLANNER_RESTART_S", 0.05)
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    async with running(tmp_path, cold_start_timeout_s=0.3) as site:
        await site.planner.runtime.close()
        models = site.frontend.models.on_demand
        await until(lambda: models.record("tiny") is None and models._timer is None)
        site.planner = Planner(site.settings)
        await site.planner.start()
        await until(lambda: models.record("tiny") is not None)
        asked = asyncio.ensure_future(site.complete())
        await site.planner.until(1)
        answer = await asked
        assert answer.status_code == 503
        assert "got no worker within" in answer.json()["message"]


def write_graph(tmp_path: Path, *services: str, lease: int | None = None, args: Any = None) -> None:
    """Write a statefile whose ``services`` serve ``tiny``, with these ``ServiceArgs``."""
    argv = ["python", "-m", "dynamo.mocker", "--model-name", "tiny"]
    entry = {"cmd": "", "argv": argv, "processes": [], "lease": lease}
    config: dict[str, Any] = {name: {"ServiceArgs": args or {}} for name in services}
    written = {
        "namespace": "ns",
        "circus_endpoint": "ipc:///nowhere",
        "components": {f"ns_{name}": {**entry, "service": name} for name in services},
        "environment": {"DYNAMO_SERVICE_CONFIG": json.dumps(config)},
    }
    Statefile(tmp_path, "ns").create(Document.of(written))


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_model_that_a_reload_removed_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    monkeypatch.setattr(graph, "_POLL_S", 0.02)
    write_graph(tmp_path, "Worker", "Other")
    async with running(tmp_path) as site:
        models = site.frontend.models
        worker = await site.worker() if loaded else None
        asked = asyncio.ensure_future(site.complete())
        if worker is None:
            await site.planner.until(1)
        else:
            assert (await asked).status_code == 200
            assert site.metric("dynamo_frontend_model_ready") == 1
        write_graph(tmp_path, "Worker")  # another service of the model is left
        await asyncio.sleep(0.1)
        write_graph(tmp_path)
        if worker is not None:
            await worker.runtime.close()
        await site.planner.runtime.close()  # its record ends
        if worker is None:
            answer = await asked
            assert (answer.status_code, answer.json()["message"]) == (404, "Model not found: tiny")
        await until(lambda: models.named("tiny") is None and not models.listed())
        for name in ("tiny", "small"):
            answer = await site.complete(model=name)
            assert (answer.status_code, answer.json()["code"]) == (404, 404)
        text = site.runtime.metrics.exposition("")[0].decode()
        assert "dynamo_frontend_model_ready" not in text
        assert "dynamo_frontend_cold_start_queue_requests{" not in text
        if loaded:
            assert 'dynamo_frontend_requests_total{endpoint="completions"' in text
        await site.worker()  # a later reload has it again
        await until(lambda: bool(models.listed()))
        assert (await site.complete()).status_code == 200


async def test_a_model_that_left_between_two_looks_at_the_graph_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "_POLL_S", 600)  # events alone
    write_graph(tmp_path)
    async with running(tmp_path, planner=False) as site:
        models = site.frontend.models
        write_graph(tmp_path, "Worker")
        await until(lambda: models._graph.has("tiny"))
        worker = await site.worker()
        await until(lambda: models.named("tiny") is not None)
        write_graph(tmp_path)
        await worker.runtime.close()
        await until(lambda: models.named("tiny") is None)
        assert (await site.complete()).status_code == 404


async def test_a_model_whose_worker_died_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "_POLL_S", 0.02)
    write_graph(tmp_path, "Worker")
    async with running(tmp_path, planner=False) as site:
        mine = await site.worker(display_name="person's")  # not one of the graph's
        worker = await site.worker()
        models = site.frontend.models
        await until(lambda: len(models.listed()) == 2)
        await asyncio.sleep(0.1)
        write_graph(tmp_path, "Worker", lease=3)
        for one in (mine, worker):
            await one.runtime.close()
        await until(lambda: not models.listed())
        await asyncio.sleep(0.1)
        assert {one.name for one in models.entries()} == {"tiny", "person's"}
        assert (await site.complete()).status_code == 503


async def drain(site: Site) -> asyncio.Future[None]:
    """Stop the frontend; return what ends when it has drained."""
    site.frontend.stop()
    drained = asyncio.ensure_future(site.frontend.run_until_stopped())
    await until(lambda: site.frontend._requests.draining)
    return drained


@pytest.mark.parametrize("relayed", [False, True])
async def test_requests_wait_on_while_the_frontend_drains(tmp_path: Path, relayed: bool) -> None:
    path = "/v1/images/generations" if relayed else "/v1/completions"
    card: dict[str, Any] = {}
    if relayed:
        card = {"model_input": HTTP_INPUT, "model_type": "Chat", "user_data": {ROUTES: [path]}}
    async with running(tmp_path, graceful_shutdown_timeout_s=60) as site:
        if relayed:
            await site.planner.announce(OnDemandModel("ns", "tiny", model_input=HTTP_INPUT))
            await until(lambda: site.frontend.models.on_demand.relays)

        def ask(padding: int = 0) -> asyncio.Future[httpx.Response]:
            body = {"model": "tiny", "prompt": [1], "metadata": {"x": "y" * padding}}
            return asyncio.ensure_future(site.client.post(path, json=body))

        asked, leaves = [ask(), ask(200_000)], ask()
        await site.planner.until(3)
        drained = await drain(site)
        leaves.cancel()
        await site.planner.until(2)  # the planner goes on receiving the demand
        assert (await ask()).status_code == 503
        worker = await site.worker(**card)
        assert [(await one).status_code for one in asked] == [200, 200]
        async with asyncio.timeout(60):
            await drained
        assert len(worker.order) == 2


@pytest.mark.parametrize("ends", ["timeout", "second signal", "deployment"])
async def test_the_end_of_a_drain_ends_the_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setenv("DYN_WATCHER_NAME", "ns_Frontend")
    timeout_s = 0.3 if ends == "timeout" else 600.0
    async with running(tmp_path, graceful_shutdown_timeout_s=timeout_s) as site:
        asked = asyncio.ensure_future(site.complete())
        await site.planner.until(1)
        drained = await drain(site)
        if ends == "second signal":
            site.frontend.stop()
        elif ends == "deployment":
            write_stop_stage(run_dir(site.settings), workers=False)
        async with asyncio.timeout(60):
            await drained
            answer = await asked
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["message"] == (
            "Service is shutting down before model `tiny` has a worker, please retry elsewhere"
        )


async def test_a_request_for_the_worker_that_just_left_waits(site: Site) -> None:
    first = await site.known_worker()
    asked = asyncio.ensure_future(site.complete("one"))
    assert (await asked).status_code == 200
    entry = site.frontend.models.named("tiny")
    assert entry is not None and entry.loaded is not None
    pool = entry.loaded.picker.worker_pool
    await first.runtime.close()
    await until(lambda: not pool.members)
    entry.served = True  # as in the moment in which only its instance is removed
    asked = asyncio.ensure_future(site.complete("two"))
    await site.planner.until(1)
    entry.served = False
    assert site.last().worker_wait_s is None
    second = await site.worker()
    assert (await asked).status_code == 200
    assert len(second.order) == 1
    record = site.last()  # it was prepared before it waited
    assert record.worker_wait_s and record.prepare_s and record.queue_s is not None
    assert site.metric(_WAITED) == pytest.approx(record.worker_wait_s, abs=1e-6)


@pytest.mark.parametrize("begun", [[], [5]])
async def test_requests_of_the_only_worker_wait_when_it_is_killed(
    tmp_path: Path, begun: list[int]
) -> None:
    async with running(tmp_path, migration_limit=3) as site:
        first = await site.known_worker()
        first.answers, first.begun = False, begun
        asked = asyncio.ensure_future(site.complete())
        tokens = site.frontend._requests.open_tokens
        await until(lambda: len(first.order) == 1 and tokens()["tiny"] == len(begun))
        await first.runtime.server.close()
        await site.planner.until(1)
        assert site.frontend.models.instances()  # its lease is still there
        assert site.metric(_NOW_WAITING) == 1
        assert site.metric("dynamo_frontend_queued_requests") == 0  # no load for the planner
        (shown,) = [one for one in site.frontend._status.status().models if one.model == "tiny"]
        assert (shown.in_flight, shown.queued) == (0, 1)
        seen_s = time.monotonic()
        second = await site.worker()
        waited_s = time.monotonic() - seen_s
        answer = await asked
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == len(begun) + 3
        assert [len(one) for one in second.order] == [len(first.order[0]) + len(begun)]
        record = site.last()
        assert record.worker_wait_s is not None and record.worker_wait_s >= waited_s - 1e-6
        stages = (record.prepare_s, record.queue_s, record.prefill_s, record.decode_s)
        rest_s = sum(one for one in stages if one is not None)
        assert record.worker_wait_s + rest_s <= record.duration_s + 5e-6
        # The wait is no cost of the request: neither of its first token nor of the next ones.
        wait_s = pytest.approx(record.worker_wait_s, abs=5e-6)
        assert site.metric(_WAITED) == site.metric(_WAITED_DURATION) == wait_s
        assert site.metric(_WAITED_TTFT) == (0 if begun else wait_s)
        gaps_s = site.metric("dynamo_frontend_inter_token_latency_seconds_sum")
        assert gaps_s + record.worker_wait_s <= record.duration_s + 5e-6


async def test_requests_wait_for_the_only_worker_that_was_cut_off(site: Site) -> None:
    worker = await site.worker()
    assert (await site.complete()).status_code == 200
    server = worker.runtime.server
    assert server._socket_path is not None
    path, _ = server._socket_path
    await server.close()
    entry = site.frontend.models.named("tiny")
    assert entry is not None and entry.loaded is not None
    pool = entry.loaded.picker.worker_pool
    await until(lambda: bool(pool.avoided))
    asked = asyncio.ensure_future(site.complete())
    await site.planner.until(1)
    server.draining = False  # it was cut off, it does not stop
    await server.start(f"uds:{path}")
    assert (await asked).status_code == 200
    assert len(worker.order) == 2


async def test_the_planner_sees_how_long_a_model_is_idle(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    await site.worker()
    assert (await site.complete()).status_code == 200
    site.planner.states.clear()
    await until(lambda: bool(site.planner.states) and site.planner.states[-1].idle_s > 0.2)
    before = len(site.planner.states)
    assert (await site.complete()).status_code == 200
    await until(lambda: any(one.idle_s == 0 for one in site.planner.states[before:]))


async def test_the_idle_time_begins_when_a_worker_serves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load or a wake of an operator comes without requests."""
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    first = await site.worker()
    assert (await site.complete()).status_code == 200
    await first.runtime.close()
    await until(lambda: not site.frontend.models.instances())
    await until(lambda: bool(site.planner.states) and site.planner.states[-1].idle_s > 0.3)
    idle_s = site.planner.states[-1].idle_s
    before = len(site.planner.states)
    await site.worker()
    await until(lambda: any(one.idle_s < idle_s for one in site.planner.states[before:]))
    (shown,) = [one for one in site.frontend._status.status().models if one.model == "tiny"]
    counted = site.frontend.models.on_demand.idle_s("tiny")
    assert shown.idle_s is not None and counted is not None and shown.idle_s <= counted


async def test_a_model_that_was_loaded_keeps_its_aliases(site: Site) -> None:
    worker = await site.known_worker(model_aliases=["other"], context_length=1024)
    assert (await site.complete(model="other")).status_code == 200
    await worker.runtime.close()
    await until(lambda: not site.frontend.models.instances())
    models = (await site.client.get("/v1/models")).json()["data"]
    assert {one["id"]: one["context_window"] for one in models} == {
        "tiny": 1024,
        "other": 1024,
        "small": 2048,
    }
    asked = asyncio.ensure_future(site.complete(model="other"))
    await site.planner.until(1)
    await site.worker(model_aliases=["other"], context_length=1024)
    assert (await asked).status_code == 200


async def test_requests_of_an_adapter_use_and_start_the_model(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_TICK_S", 0.05)
    models = site.frontend.models
    worker = await site.known_worker()
    assert (await site.complete(model="pirate")).status_code == 404
    await worker.card("/pirate", display_name="pirate", lora_name="pirate")
    await until(lambda: (entry := models.named("pirate")) is not None and entry.served)
    worker.answers = False
    asked = asyncio.ensure_future(site.complete(model="pirate"))
    await until(lambda: len(worker.order) == 1)
    before = len(site.planner.states)
    await until(lambda: len(site.planner.states) > before + 2)
    assert {one.idle_s for one in site.planner.states[before + 1 :]} == {0}
    shown = {one.model: one.idle_s for one in site.frontend._status.status().models}
    assert shown["tiny"] == shown["pirate"] == 0
    asked.cancel()
    await worker.runtime.close()
    await until(lambda: not models.instances())
    assert {"tiny", "pirate"} <= {one[0] for one in models.listed()}
    asked = asyncio.ensure_future(site.complete(model="pirate"))
    await site.planner.until(1)
    second = Worker(site.settings)
    site.workers.append(second)
    await second.card("/pirate", display_name="pirate", lora_name="pirate")
    await second.start()
    assert (await asked).status_code == 200


async def test_an_adapter_whose_card_follows_that_of_its_model_is_waited_for(site: Site) -> None:
    worker = await site.worker()
    await worker.card("/pirate", display_name="pirate", lora_name="pirate")
    await until(lambda: site.frontend.models.named("pirate") is not None)
    await worker.runtime.close()
    await until(lambda: not site.frontend.models.instances())
    asked = asyncio.ensure_future(site.complete(model="pirate"))
    await site.planner.until(1)
    second = await site.worker()
    assert (await site.complete()).status_code == 200  # the model serves
    assert not asked.done()
    await second.card("/pirate", display_name="pirate", lora_name="pirate")
    assert (await asked).status_code == 200


async def test_an_adapter_that_a_model_has_no_longer_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ADAPTER_WAIT_S", 0.2)
    worker = await site.worker()
    await worker.card("/pirate", display_name="pirate", lora_name="pirate")
    assert (await site.complete()).status_code == 200
    await until(lambda: site.frontend.models.named("pirate") is not None)
    await worker.runtime.close()
    await until(lambda: not site.frontend.models.instances())
    asked = asyncio.ensure_future(site.complete(model="pirate"))
    await site.planner.until(1)
    await site.worker()  # after a reload without the adapter
    assert (await asked).status_code == 503
    assert "pirate" not in {one[0] for one in site.frontend.models.listed()}


async def test_of_models_without_workers_the_last_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_GONE_MODELS", 2)
    names = [f"m-{number}" for number in range(3)]
    async with running(tmp_path, planner=False) as site:
        for name in names:
            worker = await site.worker(display_name=name)
            await until(partial(serves, site, name))
            await worker.runtime.close()
            await until(partial(lacks_workers, site, name))
        statuses = [(await site.complete(model=name)).status_code for name in names]
        assert statuses == [404, 503, 503]


async def test_an_adapter_that_left_before_the_end_of_its_frontend_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ADAPTER_GONE_S", 1.0)
    loop, errors = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with running(tmp_path, planner=False) as site:
        worker = await site.worker()
        await worker.card("/ad", display_name="ad", lora_name="ad")
        await until(partial(serves, site, "ad"))
        key = f"v1/mdc/ns/backend/generate/{worker.runtime.instance_id:x}/ad"
        await worker.runtime.discovery.delete(key)
        await until(partial(lacks_workers, site, "ad"))
        later = loop.create_future()
        loop.call_later(1.0, later.set_result, None)  # after the frontend's own timer
    await later
    assert errors == []


async def test_what_adapters_leave_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ADAPTER_GONE_S", 0.05)
    monkeypatch.setattr(metrics, "GONE_MODELS", 2)
    async with running(tmp_path, planner=False) as site:
        models = site.frontend.models
        worker = await site.worker()
        for name in (names := [f"ad-{number}" for number in range(3)]):
            await worker.card(f"/{name}", display_name=name, lora_name=name)
            await until(partial(serves, site, name))
            assert (await site.complete(model=name)).status_code == 200
            key = f"v1/mdc/ns/backend/generate/{worker.runtime.instance_id:x}/{name}"
            await worker.runtime.discovery.delete(key)
            await until(partial(forgot, site, name))
            assert (await site.complete(model=name)).status_code == 404
        lines = site.runtime.metrics.exposition("")[0].decode().split("\n")
        series = {name: [line for line in lines if f'"{name}"' in line] for name in names}
        assert series[names[0]] == []
        for name in names[1:]:
            assert 0 < len(series[name]) < 10
            assert not any("active_requests" in line for line in series[name])
        assert "dynamo_frontend_models_dropped_total 1" in lines
        assert models.on_demand.together("tiny") in (("tiny",), {"tiny"})
        assert (await site.complete()).status_code == 200


async def test_a_model_returns_after_zero_workers(site: Site) -> None:
    for _ in range(2):
        asked = asyncio.ensure_future(site.complete())
        await site.planner.until(1)
        worker = await site.worker()
        assert (await asked).status_code == 200
        await worker.runtime.close()
        await until(lambda: not site.frontend.models.instances())
    assert "tiny" in [one[0] for one in site.frontend.models.listed()]


async def test_a_large_body_waits_too(site: Site) -> None:
    body = {"model": "tiny", "prompt": [1], "max_tokens": 3, "metadata": {"x": "y" * 200_000}}
    asked = asyncio.ensure_future(site.client.post("/v1/completions", json=body))
    await site.planner.until(1)
    await site.worker()
    answer = await asked
    assert answer.status_code == 200, answer.text


async def test_a_path_of_another_server_waits_for_its_first_worker(site: Site) -> None:
    body = {"model": "tiny", "query": "which?", "documents": ["this"]}
    unknown = await site.client.post("/v1/images/generations", json=body)
    assert unknown.status_code == 404
    await site.planner.announce(OnDemandModel("ns", "tiny", model_input=HTTP_INPUT))
    await until(lambda: site.frontend.models.on_demand.relays)
    asked = asyncio.ensure_future(site.client.post("/v1/images/generations", json=body))
    await site.planner.until(1)
    other = await site.client.post("/v1/images/generations", json={**body, "model": "other"})
    assert (other.status_code, other.json()["message"]) == (404, "Model not found: other")
    worker = await site.worker(
        model_input=HTTP_INPUT, model_type="Chat", user_data={ROUTES: ["/v1/images/generations"]}
    )
    assert (await asked).status_code == 200
    assert worker.order == ["/v1/images/generations"]


async def test_what_the_graph_says_about_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "_POLL_S", 0.02)
    rules = {"defaults": {"max_tokens": 2}, "forbid": ["stop"]}
    write_graph(tmp_path, "Worker", args={"aliases": ["big", "tiny"], "hidden": "aliases", **rules})
    async with running(tmp_path) as site:
        models = (await site.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in models] == ["tiny"]
        assert (await site.client.get("/v1/models/big")).status_code == 200
        body = {"model": "big", "prompt": "hi", "stop": []}
        asked = asyncio.ensure_future(site.client.post("/v1/completions", json=body))
        await site.planner.until(1)
        worker = await site.worker()
        answer = await asked
        assert answer.status_code == 200 and answer.json()["model"] == "big"
        assert worker.limits == [2]
        write_graph(tmp_path, "Worker", args={"aliases": ["huge"], "hidden": True})  # a reload
        await until(lambda: "huge" in site.frontend.models.aliases)
        assert (await site.complete(model="big")).status_code == 404
        assert (await site.complete(model="huge")).status_code == 200
        assert worker.limits == [2, 3]
        assert (await site.client.get("/v1/models")).json()["data"] == []
        assert "tiny" in (await site.client.get("/health")).json()["models"]


async def chunks(lines: Any) -> list[Any]:
    texts = [line.removeprefix("data: ") async for line in lines if line.startswith("data: {")]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_shows_the_progress_of_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(on_demand, "_WAITING_TICK_S", 0.02)
    monkeypatch.setattr(cold_start, "_PROGRESS_EVERY_S", 0.01)
    write_graph(tmp_path, "Worker", args={"show_loading": True})
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    name = "reasoning" if fails else "reasoning_content"
    timeout_s = 2.0 if fails else 600.0
    async with running(tmp_path, cold_start_timeout_s=timeout_s, reasoning_field_name=name) as site:
        since = time.time() - 4
        record = OnDemandModel("ns", "tiny", load_s=10.0, loading_since=since)
        await site.planner.announce(record)
        models = site.frontend.models.on_demand
        await until(lambda: (seen := models.record("tiny")) is not None and seen.load_s == 10)
        unary = asyncio.ensure_future(site.client.post("/v1/chat/completions", json=body))
        request = site.client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 3}
        )
        async with request as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            delta = first["choices"][0]["delta"]
            percent = re.fullmatch(r"loading (\d+) %\n", delta[name])
            assert percent is not None and 40 <= int(percent[1]) <= 99
            if not fails:
                await site.worker()
            rest = await chunks(lines)
        if fails:
            assert rest[-1]["error"]["code"] == 503
            assert (await unary).status_code == 503
        else:
            assert {one["id"] for one in rest} == {first["id"]}
            assert rest[-1]["choices"][0]["finish_reason"] == "stop"
            assert "loading" not in (await unary).text


async def test_comments_follow_when_the_progress_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_WAITING_TICK_S", 0.02)
    monkeypatch.setattr(cold_start, "_COMMENT_EVERY_S", 0.05)
    write_graph(tmp_path, "Worker", args={"show_loading": True})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with running(tmp_path) as site:
        since = time.time() - 500
        await site.planner.announce(OnDemandModel("ns", "tiny", load_s=1.0, loading_since=since))
        models = site.frontend.models.on_demand
        await until(lambda: (seen := models.record("tiny")) is not None and seen.load_s == 1)
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            async with asyncio.timeout(60):
                shown = []
                async for line in lines:
                    shown.append(line)
                    if line.startswith(": loading, "):
                        break
        assert "loading 99 %" in shown[0]


async def shown(lines: AsyncIterator[str], text: str) -> None:
    while text not in await anext(lines):
        pass


async def test_progress_without_a_known_load_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_WAITING_TICK_S", 0.02)
    monkeypatch.setattr(cold_start, "_PROGRESS_EVERY_S", 0.01)
    write_graph(tmp_path, "Worker", args={"show_loading": True})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with (
        running(tmp_path) as site,
        site.client.stream("POST", "/v1/chat/completions", json=body) as answer,
        asyncio.timeout(60),
    ):
        lines = answer.aiter_lines()
        record = OnDemandModel("ns", "tiny", loading_since=time.time() - 1200)
        await shown(lines, "waiting for a GPU, ")
        await site.planner.announce(record)
        await shown(lines, "loading, 12")
        await site.planner.announce(msgspec.structs.replace(record, load_s=3.0))
        await shown(lines, "loading 99 %")


async def test_a_typo_before_the_first_worker_is_no_model(tmp_path: Path) -> None:
    """Clients repeat a request after 503: only a name that will be served is worth it."""
    models = graph.GraphModels(Statefile(tmp_path, "ns"), is_alone=True)
    shared = graph.GraphModels(Statefile(tmp_path, "ns"))
    write_graph(tmp_path, "Worker")
    for one in (models, shared):
        await one.load()
    assert models.names == ["tiny"] and shared.names == [] and models.has("tiny")
    async with running(tmp_path) as site:
        site.frontend.models._graph = models
        await site.planner.runtime.close()
        answer = await site.complete(model="tinny")
        assert answer.status_code == 404
        text = "Model not found: tinny; this deployment loads tiny"
        assert answer.json()["message"] == text
        assert (await site.complete(model="tiny")).status_code == 503
        site.frontend.models._graph = shared
        assert (await site.complete(model="tinny")).status_code == 503
    write_graph(tmp_path, "Worker")
    path = tmp_path / "ns.json"
    path.write_text(path.read_text().replace('"--model-name"', '"--enable-lora", "--model-name"'))
    await models.load()
    assert models.names == []


async def ask_about(site: Site, path: str, model: str | None = "tiny") -> httpx.Response:
    body = {"tokens": [1]} if path == "/detokenize" else {"prompt": "hi"}
    return await site.client.post(path, json=body if model is None else {"model": model, **body})


async def test_a_model_of_the_graph_is_known_to_every_route(tmp_path: Path) -> None:
    """Before its first worker: 503, which clients repeat, not 404."""
    models = graph.GraphModels(Statefile(tmp_path, "ns"), is_alone=True)
    write_graph(tmp_path, "Worker")
    await models.load()
    async with running(tmp_path, planner=False) as site:
        site.frontend.models._graph = models
        ready = "/v1/models/{}/ready"
        for path in ("/tokenize", "/detokenize", "/v1/route"):
            assert (await ask_about(site, path)).status_code == 503, path
            assert (await ask_about(site, path, "tinny")).status_code == 404, path
        answer = await site.client.get(ready.format("tiny"))
        assert (answer.status_code, answer.json()) == (503, {"id": "tiny", "ready": False})
        assert (await site.client.get(ready.format("tinny"))).status_code == 404


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/route"])
@pytest.mark.parametrize("other", [False, True])
async def test_what_starts_no_worker_says_how_to_start_one(
    site: Site, path: str, other: bool
) -> None:
    if other:  # then the model is not the only one that may come
        await site.known_worker(display_name="other", slug="other")
        await until(lambda: serves(site, "other"))
    for model in ("tiny", "small", *(() if other or path == "/v1/route" else (None,))):
        answer = await ask_about(site, path, model)
        said = answer.json()["message"]
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert f"`{model or 'tiny'}` is not loaded" in said and "dynamo load tiny" in said
    assert (await ask_about(site, path, "absent")).status_code in (404, 503)
    assert not site.planner.states or not site.planner.states[-1].waiting  # nothing is started
    reason = "ns_Worker was stopped by a command; start it again with: dynamo load tiny"
    await site.planner.announce(OnDemandModel("ns", "tiny", waits_for=reason, stopped=True))
    await until(lambda: announced(site).stopped)
    answer = await ask_about(site, path)
    assert answer.status_code == 503 and answer.json()["message"].endswith(f": {reason}.")


async def test_get_route_names_the_only_model(site: Site) -> None:
    answer = await site.client.get("/v1/route?prompt=hi")
    assert answer.status_code == 503 and "`tiny` is not loaded" in answer.json()["message"]


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_a_count_waits_for_the_tokenizer(site: Site, path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "tiny", **(chat if "messages" in path else {"input": "hi"})}
    asked = asyncio.ensure_future(site.client.post(path, json=body))
    await site.planner.until(1)
    await site.worker()
    answer = await asked
    assert answer.status_code == 200 and answer.json()["input_tokens"] > 0
    counts = (
        site.metric(f"dynamo_frontend_requests_{name}") for name in ("started_total", "total")
    )
    assert list(counts) == [1, 1]
    reason = "ns_Worker was stopped by a command; start it again with: dynamo load large"
    await site.planner.announce(OnDemandModel("ns", "large", waits_for=reason, stopped=True))
    await until(lambda: site.frontend.models.on_demand.record("large") is not None)
    answer = await site.client.post(path, json={**body, "model": "large"})
    assert answer.status_code == 503 and reason in answer.text
