"""Requests that wait for a worker, from the client's bytes to the engine's and back."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from functools import partial
from typing import Any

import pytest
from http_bench import Bench, error_json
from test_request import Site, ids, turn

from dynamo.config.router import RouterSettings
from dynamo.errors import Disconnected, Unavailable
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.migration import Migrations
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.queue.classes import QueueMetrics
from dynamo.router.queue.request_queue import RequestQueue


class Queued(Site):
    """A site whose one worker has room for a prompt at a time; connections beside the first."""

    def __init__(self, router: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        chosen: dict[str, Any] = {"queue_threshold": 0.01, "queue_limit": 3, **(router or {})}
        picked = RouterSettings(mode="kv", **chosen)
        self.kv = KvPicker(picked, 16, make_index(picked))
        self.kv.add_worker(7, RuntimeConfig(max_num_batched_tokens=100))
        self.queue = None
        if picked.queue_threshold is not None:
            self.queue = RequestQueue(self.kv, picked, partial(QueueMetrics, self.registry, "tiny"))
        self.entry.picker = self.kv
        self.entry.dispatch = Dispatch(self.kv, self, self.queue)  # type: ignore[arg-type]

    def another(self, **more: Any) -> Bench:
        """A request on a connection of its own; the site looks at that one from now on."""
        self.bench = Bench(handler=self.bench.server.handler)
        self.chat(**more)
        return self.bench

    def settled(self) -> None:
        assert len(self.kv.active) == 0
        assert self.queue is None or len(self.queue) == 0
        super().settled()

    def stage(self, stage: str) -> float:
        return self.sample("dynamo_frontend_stage_requests", stage=stage, phase="aggregated")

    def finish(self, number: int) -> None:
        """Stream ``number`` says one word and ends."""
        self.streams[number].say(ids(self, "x"), finish_reason="stop")
        self.streams[number].sink.on_end()


async def later() -> None:
    """Let the line see what has changed, and the outbox write."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def site() -> Queued:
    return Queued()


async def test_a_request_waits_and_is_served(site: Queued) -> None:
    site.chat()
    first = site.bench
    site.another(stream=True, nvext={"extra_fields": ["worker_id", "timing"]})
    assert len(site.streams) == 1 and len(site.kv.active) == 1
    assert site.sample("dynamo_frontend_router_queue_pending_requests", model="tiny") == 1
    assert site.sample("dynamo_frontend_queued_requests", model="tiny") == 2
    assert site.sample("dynamo_frontend_inflight_requests", model="tiny") == 1
    assert site.sample("dynamo_request_plane_inflight_requests") == 1
    assert (site.stage("route"), site.stage("dispatch")) == (1, 1)
    await asyncio.sleep(0.02)
    site.streams[0].say(ids(site, "a"))  # its first token: the prompt is computed
    await later()
    assert len(site.streams) == 2
    assert (site.stage("route"), site.stage("dispatch")) == (0, 1)
    site.streams[1].say(ids(site, "b"))
    site.finish(1)
    await turn()
    assert site.events[0]["nvext"]["worker_id"]["decode_worker_id"] == 7
    timing = next(one["nvext"]["timing"] for one in site.events if "timing" in str(one))
    assert timing["prefill_wait_time_ms"] >= 20 and timing["router_queue_depth"] == 0
    assert site.sample("dynamo_request_plane_queue_seconds_sum") >= 0.02
    assert site.sample("dynamo_frontend_stage_duration_seconds_count", stage="route") == 2
    assert site.sample("dynamo_frontend_stage_duration_seconds_count", stage="dispatch") == 2
    site.bench = first
    site.finish(0)
    await turn()
    assert site.status == 200
    site.settled()


@pytest.mark.parametrize("joins", [True, False])
async def test_a_request_that_migrates_and_waits_may_go_to_a_worker_that_joins(
    site: Queued, joins: bool
) -> None:
    """The worker that it waited for leaves; another one has joined, or only the lost one is left,
    which may have lost its connection only."""
    site.entry.dispatch.migrations = Migrations(limit=3)
    site.kv.add_worker(8, RuntimeConfig(max_num_batched_tokens=100))
    site.chat(stream=True)
    lost, first = site.streams[0], site.bench
    site.another()
    other = site.streams[1]
    assert {lost.worker_id, other.worker_id} == {7, 8}
    lost.say(ids(site, "a"))
    await turn()
    lost.sink.on_error(Disconnected("gone"))
    await later()
    assert len(site.streams) == 2 and site.queue is not None and len(site.queue) == 1
    if joins:
        site.kv.add_worker(9, RuntimeConfig(max_num_batched_tokens=100))
    site.kv.remove_worker(other.worker_id)
    site.finish(1)
    for _ in range(20):
        await later()
    assert site.streams[2].worker_id == (9 if joins else lost.worker_id)
    site.finish(2)
    site.bench = first
    await turn()
    assert site.status == 200 and site.events[-1] == "[DONE]"
    site.settled()


async def test_hints_and_headers_decide_who_is_next(site: Queued) -> None:
    site.chat()
    site.another(max_tokens=11)
    site.another(max_tokens=12, nvext={"agent_hints": {"latency_sensitivity": 5.0}})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 13}
    site.bench = Bench(handler=site.bench.server.handler)
    site.post(body, x_dynamo_request_strict_priority="1")
    for number in range(4):
        site.finish(number)
        await later()
    limits = [one.request.stop_conditions.max_tokens for one in site.streams]
    assert limits[1:] == [13, 12, 11]
    site.settled()


async def test_the_depth_that_a_request_leaves_behind(site: Queued) -> None:
    site.chat()
    waiting = [site.another(nvext={"extra_fields": ["timing"]}) for _ in range(3)]
    for number in range(4):
        site.finish(number)
        await later()
    depths = []
    for site.bench in waiting:
        depths.append(site.answer["nvext"]["timing"]["router_queue_depth"])
    assert depths == [2, 1, 0]
    site.settled()


async def test_a_full_line_refuses(site: Queued) -> None:
    site.chat()
    for _ in range(3):
        site.another()
    site.another()
    assert site.status == 503
    assert site.answer == error_json(
        'router policy class "default" queue requests limit reached (current=3, limit=3)',
        "service_unavailable",
        503,
        ("server_error", None, "router_queue_limit_exceeded"),
    )
    assert site.ended("overload") == 1
    assert (
        site.sample(
            "dynamo_frontend_failures_total",
            **{"class": "CapacityExhausted", "reason": "capacity.router_queue_full"},
        )
        == 1
    )
    for number in range(4):
        site.finish(number)
        await later()
    site.settled()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_while_it_waits(site: Queued, streaming: bool) -> None:
    site.chat()
    waiting = site.another(stream=streaming)
    waiting.connection.connection_lost(None)
    assert len(site.kv.active) == 1 and site.queue is not None and len(site.queue) == 0
    assert site.ended("cancelled", "stream" if streaming else "unary") == 1
    site.finish(0)
    await later()
    assert len(site.streams) == 1
    site.settled()


async def test_some_choices_run_while_others_wait(site: Queued) -> None:
    site.chat(n=3, stream=True)
    assert len(site.streams) == 1
    assert site.sample("dynamo_request_plane_inflight_requests") == 1
    for number in range(3):
        site.finish(number)
        await later()
    assert site.events[-1] == "[DONE]"
    assert {one["choices"][0]["index"] for one in site.events[:-1]} == {0, 1, 2}
    site.settled()


async def test_too_many_choices_for_the_line(site: Queued) -> None:
    site.chat(n=5)
    assert site.status == 503 and "limit=3" in site.answer["message"]
    assert site.streams[0].killed == 1
    site.settled()


async def test_a_worker_that_goes_ends_the_wait(site: Queued) -> None:
    site.chat()
    site.another()
    site.kv.remove_worker(7)
    await later()
    assert site.status == 503 and "not ready" in site.answer["message"]
    site.finish(0)
    await later()
    site.settled()


async def test_a_worker_that_is_gone_when_it_is_its_turn(site: Queued) -> None:
    site.chat()
    site.another()

    def gone(*args: Any) -> Any:
        raise Unavailable("instance_id=7 not found")

    site.open = gone  # type: ignore[method-assign, assignment]
    site.finish(0)
    await later()
    assert site.status == 503
    site.settled()


async def test_silence_while_queued_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Queued(backend_stream_timeout_s=0.6, sse_keep_alive_ms=20)
    site.chat()
    waiting = site.another(stream=True)
    running = site.streams[0]
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.9:  # the engine's silence would have ended it
        await asyncio.sleep(0.02)
        running.say([])
    assert waiting.transport.out.count(b": keep-alive\n\n") > 2, "keep-alive"
    site.finish(0)
    await later()
    ended = asyncio.Event()
    free = KvPicker.free

    def freed(picker: KvPicker, *request: Any) -> None:
        free(picker, *request)
        ended.set()

    monkeypatch.setattr(KvPicker, "free", freed)
    await asyncio.wait_for(ended.wait(), 20)  # now it is: the second engine says nothing
    await turn()
    assert site.streams[1].killed == 1 and b'"code":503' in site.bench.transport.out
    site.settled()
    site.active.close()


async def test_silence_of_one_leg_while_another_waits_is_the_engines() -> None:
    """The first leg's prompt is at a prefill worker, the second waits for a decode worker."""
    site = Queued(backend_stream_timeout_s=0.3)
    site.chat()
    running = site.streams[0]
    prefilling = asyncio.Event()

    class Prefills:
        active = True

        def take(self, engine_request: Any) -> bool:
            if engine_request.index:
                return False
            engine_request.request.computing(True)
            prefilling.set()
            return True

    site.entry.dispatch.prefill = Prefills()
    site.another(n=2)
    assert prefilling.is_set() and site.queue is not None and len(site.queue) == 1
    async with asyncio.timeout(20):
        while len(site.queue):
            running.say([])
            await asyncio.sleep(0.01)
    await turn()
    assert site.status == 503
    site.finish(0)
    site.settled()
    site.active.close()


async def test_the_end_of_the_drain(site: Queued) -> None:
    site.chat()
    site.another()
    assert not await site.active.drain(0.01)
    site.finish(0)
    await later()
    assert len(site.streams) == 2, "who waits is served while there is time"
    site.another()
    site.active.fail_all(Unavailable("Service is shutting down"))
    assert await site.active.drain(0.01)
    site.settled()


async def test_a_line_that_closes_tells_its_calls(site: Queued) -> None:
    site.chat()
    site.another()
    assert site.queue is not None
    site.queue.close()
    assert site.status == 503 and "shutting down" in site.answer["message"]
    site.finish(0)
    site.settled()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_call_that_waited_needs_no_collector(site: Queued, leaves: bool) -> None:
    site.chat()
    waiting = site.another(stream=True)
    newest = max(site.active._active, key=lambda one: one.exchange.received_at)
    generation = weakref.ref(newest.generation)
    del newest
    gc.disable()
    try:
        if leaves:
            waiting.connection.connection_lost(None)
            site.finish(0)
        else:
            site.finish(0)
            await later()
            site.finish(1)
        await later()
        site.streams.clear()
        site.another()
        assert generation() is None, "something of the request refers to itself"
    finally:
        gc.enable()


async def test_tokens_are_load_as_they_come() -> None:
    site = Queued({"queue_threshold": None, "track_output_blocks": True})
    site.chat(nvext={"agent_hints": {"osl": 64}})
    slot = site.kv.worker_pool.members[7].slots[0]
    prompt = len(site.streams[0].request.token_ids)
    blocks = [site.kv.active.load(slot)[1]]
    for _ in range(4):
        site.streams[0].say([5] * 16)
        blocks.append(site.kv.active.load(slot)[1])
    # Every 16 tokens a block more, and all that are this request's own fade towards 64 tokens.
    full = prompt // 16
    grown = [(prompt + 16 * n) // 16 for n in range(5)]
    assert blocks == [round(grown[n] * (1 - n / 4)) if n else full for n in range(5)]
    assert blocks[2] > 0 and blocks[4] == 0
    site.finish(0)
    site.settled()


@pytest.mark.parametrize("tracked", [False, True])
async def test_each_token_is_reported_once(tracked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Queued({"queue_threshold": None, "track_output_blocks": tracked})
    reported: list[int] = []
    free = KvPicker.free

    def freed(picker: KvPicker, request_id: str, count: int) -> None:
        free(picker, request_id)
        reported.append(count)

    monkeypatch.setattr(KvPicker, "free", freed)
    site.kv.add_output_tokens = lambda request_id, count: reported.append(count)
    site.chat(stop=["zz"])
    texts = ("a b", "c", " zz")
    for text in texts:
        site.streams[0].say(ids(site, text))
    assert sum(reported) == sum(len(ids(site, text)) for text in texts)
    assert [count > 0 for count in reported] == ([True] * 3 + [False] if tracked else [True])
    site.settled()
