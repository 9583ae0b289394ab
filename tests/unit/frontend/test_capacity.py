"""Full workers: another one is asked, each at most once; a rejected request costs nothing."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from http_bench import Bench, error_json
from test_request import Site, ids, turn

from dynamo.config.router import RouterSettings
from dynamo.errors import Disconnected, DynamoError, WorkerAtCapacity
from dynamo.frontend.requests import dispatch as dispatching
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.migration import Migrations
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.kv import KvMetrics
from dynamo.router.eligibility.eligibility_filter import Thresholds
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker
from dynamo.router.queue.classes import QueueMetrics
from dynamo.router.queue.request_queue import RequestQueue

MODES = ["kv", "round-robin", "random", "power-of-two", "least-loaded", "device-aware-weighted"]
BUSY = error_json(
    "Service temporarily unavailable: All workers are busy, please retry later",
    "service_unavailable",
    503,
    ("server_error", None, "overloaded"),
)


class Capacity(Site):
    """Two workers behind a real picker; with ``queue_limit`` a queue before it. Requests may
    migrate ``migrations`` times."""

    def __init__(
        self,
        mode: str = "round-robin",
        queue_limit: int = 0,
        migrations: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        queue: dict[str, Any] = {}
        if queue_limit:
            queue = {"queue_threshold": 0.01, "queue_limit": queue_limit}
        router = RouterSettings(mode=mode, admission_control="token-capacity", **queue)
        self.real = make_picker(router, 16, index=make_index(router))
        for worker_id in (1, 2):
            self.real.add_worker(
                worker_id, RuntimeConfig(max_num_batched_tokens=100, total_kv_blocks=10)
            )
        self.queue = None
        if isinstance(self.real, KvPicker) and queue_limit:
            metrics = partial(QueueMetrics, self.registry, "tiny")
            self.queue = RequestQueue(self.real, router, metrics)
        self.entry.picker = self.real
        self.entry.served = True
        self.entry.name = "tiny"
        self.entry.dispatch = Dispatch(
            self.real,
            self,  # type: ignore[arg-type]
            self.queue,
            Migrations(migrations),
        )
        self.entry.dispatch.report_to(self.saturation)

    def named(self, name: str) -> Any:
        return self.entry if name == "tiny" else None

    def another(self, **more: Any) -> Bench:
        """A request on a connection of its own; the site looks at that one from now on."""
        self.bench = Bench(handler=self.bench.server.handler)
        self.chat(**more)
        return self.bench

    @property
    def asked(self) -> list[int]:
        return [one.worker_id for one in self.streams]

    def refuse(self, number: int) -> None:
        self.streams[number].sink.on_error(
            WorkerAtCapacity("Server overloaded: worker at capacity")
        )

    def load(self, worker_id: int, blocks: int) -> None:
        report = KvMetrics(worker_id, active_decode_blocks=blocks, kv_total_blocks=10)
        self.real.eligibility.busy.report(report)

    def make_busy(self, *workers: int) -> None:
        """Take these workers over the threshold of blocks, the others under it."""
        self.real.eligibility.thresholds = Thresholds(0.5)
        for worker_id in (1, 2):
            self.load(worker_id, 9 if worker_id in workers else 0)

    def rejected(self) -> float:
        name = "dynamo_frontend_model_rejection_total"
        return self.sample(name, model="tiny", endpoint="chat_completions")


@pytest.mark.parametrize("mode", MODES)
async def test_a_full_worker_is_skipped_and_asked_once(mode: str) -> None:
    site = Capacity(mode)
    site.chat()
    first = site.asked[0]
    site.refuse(0)
    assert sorted(site.asked) == [1, 2]
    site.streams[1].say(ids(site, "good"), finish_reason="stop")
    site.streams[1].sink.on_end()
    await turn()
    assert site.status == 200 and site.rejected() == 0
    for _ in range(4):  # the full one is not asked again
        site.another()
        assert site.asked[-1] != first
    site.load(first, 0)  # its next report
    assert not site.real.worker_pool.busy


async def test_all_full_workers_are_asked_once_and_the_next_request_asks_none() -> None:
    site = Capacity()
    site.chat(stream=True)
    site.refuse(0)
    site.refuse(1)
    assert site.asked == [1, 2]
    assert site.status == 503 and site.answer == BUSY and "retry-after: 1" in site.head
    assert site.rejected() == 1 and site.ended("overload", "stream") == 1
    site.another()
    assert site.asked == [1, 2]
    assert site.status == 503 and site.answer == BUSY and "retry-after: 1" in site.head
    assert site.rejected() == 2 and site.ended("overload") == 1
    site.settled()


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_room_at_a_worker_is_noticed_when_a_request_there_ends(mode: str) -> None:
    site = Capacity(mode)
    site.chat()
    running = site.bench
    (busy,) = site.asked
    site.another(nvext={"backend_instance_id": busy})
    site.refuse(1)
    assert site.status == 503 and site.real.worker_pool.busy == {busy}
    site.bench = running
    site.streams[0].say(ids(site, "good"), finish_reason="stop")
    site.streams[0].sink.on_end()
    assert not site.real.worker_pool.busy


async def test_room_is_assumed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "_FULL_S", 0.0)
    site = Capacity()
    site.chat()
    site.refuse(0)
    assert site.real.worker_pool.busy == {1}
    await turn()
    await turn()
    assert not site.real.worker_pool.busy


@pytest.mark.parametrize("migrations", [0, 3])
async def test_a_pin_is_not_left_for_another_worker(migrations: int) -> None:
    site = Capacity(migrations=migrations)
    site.chat(nvext={"backend_instance_id": 2})
    site.refuse(0)
    assert site.asked == [2] and site.status == 503 and site.answer == BUSY
    assert site.real.worker_pool.busy == {2}


async def test_a_request_that_was_accepted_waits_for_room_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has lost its worker in the middle of its answer, and all others are full."""
    monkeypatch.setattr(dispatching, "_FULL_RETRY_S", 0.0)
    site = Capacity(migrations=3)
    site.chat(max_tokens=8)
    site.streams[0].say(ids(site, "good"))
    site.streams[0].sink.on_error(Disconnected("gone"))
    assert site.asked == [1, 2]
    site.refuse(1)
    for _ in range(5):
        await turn()
    assert site.asked == [1, 2, 1], "the first may be back"
    site.refuse(2)
    for _ in range(5):
        await turn()
    assert site.asked == [1, 2, 1], "full workers are not asked again and again"
    assert site.real.worker_pool.all_busy and site.bench.transport.out == b""
    site.real.eligibility.recovered(2)
    for _ in range(5):
        await turn()
    assert site.asked == [1, 2, 1, 2]
    site.streams[-1].say(ids(site, " day"), finish_reason="stop")
    site.streams[-1].sink.on_end()
    await turn()
    assert site.status == 200 and b"good day" in site.body


async def test_a_request_whose_other_workers_are_full_may_return_to_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its connection may have been cut."""
    monkeypatch.setattr(dispatching, "_FULL_RETRY_S", 0.0)
    site = Capacity(migrations=3)
    site.chat(max_tokens=8)
    assert site.asked == [1]
    site.real.eligibility.rejected(2)
    site.streams[0].say(ids(site, "good"))
    site.streams[0].sink.on_error(Disconnected("cut"))
    for _ in range(5):
        await turn()
    assert site.asked == [1, 1]
    site.streams[-1].say(ids(site, " day"), finish_reason="stop")
    site.streams[-1].sink.on_end()
    await turn()
    assert site.status == 200 and b"good day" in site.body


async def test_an_error_of_the_engine_is_not_sent_elsewhere() -> None:
    site = Capacity()
    site.chat()
    site.streams[0].sink.on_error(DynamoError("no"))
    assert site.asked == [1] and site.status == 500
    assert not site.real.worker_pool.busy


# -- rejection before any work


def without_work(monkeypatch: pytest.MonkeyPatch, site: Capacity) -> None:
    """Fail at the first step beyond the name of the model."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the request was prepared")

    monkeypatch.setattr(site.entry, "preprocessor", SimpleNamespace(chat=never))
    monkeypatch.setattr(site, "find", never)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", MODES)
async def test_busy_workers_reject_before_the_body_is_parsed(
    mode: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Capacity(mode)
    site.make_busy(1, 2)
    without_work(monkeypatch, site)
    site.post({"model": "tiny", "messages": 1, "stream": stream}, x_request_id="mine")
    assert site.status == 503 and site.answer == BUSY
    assert "retry-after: 1" in site.head and "x-request-id: mine" in site.head
    assert site.rejected() == 1
    assert site.ended("overload", "stream" if stream else "unary") == 1
    failed = site.sample(
        "dynamo_frontend_failures_total",
        **{"class": "CapacityExhausted", "reason": "capacity.pool_exhausted"},
    )
    assert failed == 1
    site.settled()


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"\xff", b"{}", b'{"model": 7}', b'{"model": "other", "messages": []}', b""],
)
async def test_what_names_no_model_is_explained_as_ever(body: bytes) -> None:
    site = Capacity()
    site.make_busy(1, 2)
    site.post(body)
    assert site.status == 400 and site.rejected() == 0


async def test_one_idle_worker_is_enough() -> None:
    site = Capacity()
    site.make_busy(1)
    for _ in range(3):
        site.another()
    assert site.asked == [2, 2, 2]
    site.make_busy(1, 2)
    assert site.saturation.count == 1
    site.make_busy(2)
    assert site.saturation.count == 0
    site.another()
    assert site.asked[-1] == 1


async def test_a_large_body_is_rejected_by_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Capacity()
    site.make_busy(1, 2)
    without_work(monkeypatch, site)
    text = json.dumps({"model": "tiny", "messages": "x" * 200_000}).encode()
    site.post(text)
    (work,) = asyncio.all_tasks() - {asyncio.current_task()}
    await work
    assert site.status == 503 and site.answer == BUSY and site.rejected() == 1
    assert site.active.admitted == 0


async def test_workers_that_leave_are_not_busy() -> None:
    site = Capacity()
    site.make_busy(1, 2)
    site.real.remove_worker(2)
    assert site.saturation.count == 1
    site.real.remove_worker(1)
    assert site.saturation.count == 0


async def test_with_prefill_workers_the_answer_is_not_known_yet() -> None:
    site = Capacity()
    site.make_busy(1, 2)
    taken: list[Any] = []

    def take(engine_request: Any) -> bool:
        taken.append(engine_request)
        return True

    site.entry.dispatch.prefill = SimpleNamespace(active=True, take=take)
    site.chat()
    assert len(taken) == 1
    site.entry.dispatch.prefill = SimpleNamespace(active=False, take=lambda one: False)
    site.another()
    assert site.status == 503 and len(taken) == 1


async def test_queued_requests_wait_while_workers_are_at_capacity() -> None:
    site = Capacity("kv", queue_limit=4)
    assert site.queue is not None
    clients = [site.another() for _ in range(4)]
    assert len(site.streams) == 2 and len(site.queue) == 2
    site.refuse(0)  # no other worker has room for the first: it is queued again
    assert len(site.queue) == 3
    site.real.eligibility.rejected(site.asked[1])
    await asyncio.sleep(0.15)  # the queue polls
    assert len(site.queue) == 3 and all(one.transport.out == b"" for one in clients)
    site.another()
    assert site.status == 503 and site.answer == BUSY  # a new request is rejected
    for worker_id in (1, 2):
        site.real.eligibility.recovered(worker_id)
    async with asyncio.timeout(20):
        while len(site.streams) == 2 or len(site.queue) == 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_full_queue_rejects_before_the_body_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Capacity("kv", queue_limit=2)
    clients = [site.another() for _ in range(4)]
    assert len(site.streams) == 2 and site.saturation.count == 1
    with monkeypatch.context() as patched:
        without_work(patched, site)
        site.another()
    assert site.status == 503 and "queue requests limit reached" in site.answer["message"]
    name = "dynamo_frontend_router_admission_rejected_total"
    assert site.sample(name, reason="queue_limit") == 1
    assert site.rejected() == 1
    clients[3].connection.connection_lost(None)
    assert site.saturation.count == 0
    site.another()
    assert site.bench.transport.out == b"" and site.saturation.count == 1
