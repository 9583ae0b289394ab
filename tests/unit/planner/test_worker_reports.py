"""The loads of workers and the prefill queues, over real discovery and event plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.planner.live.sources import WorkerReports
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard, instance_key
from dynamo.protocols.kv import (
    FORWARD_PASS,
    KV_METRICS,
    PREFILL_QUEUE,
    ForwardPass,
    KvMetrics,
    PrefillQueueState,
    QueuedRequests,
    ScheduledRequests,
)
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events import EventPublisher


class Clock:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Box:
    """A planner's reports, and workers that publish what the test says."""

    def __init__(self, tmp_path: Path) -> None:
        self.settings = RuntimeSettings(state_dir=str(tmp_path))
        self.clock = Clock()
        self.made: list[DistributedRuntime] = []
        self.runtime = self.process()
        self.reports = WorkerReports(self.runtime, 3.0, self.clock)

    def process(self) -> DistributedRuntime:
        self.made.append(DistributedRuntime(None, self.settings))
        return self.made[-1]

    async def worker(self, component: str = "backend", kind: str = "Aggregated") -> EventPublisher:
        runtime = self.process()
        worker_id = runtime.instance_id
        publisher = await runtime.publisher("dynamo", component, KV_METRICS)
        card = ModelCard("tiny", "tiny", "/m", "dynamo", component, "generate", worker_id)
        card.worker_type = kind
        card.kv_cache_block_size = 16
        card.runtime_config.total_kv_blocks = 1000
        lease = await runtime.granted()
        key = "v1/mdc/" + instance_key("dynamo", component, "generate", worker_id)
        await runtime.discovery.put(key, msgspec.json.encode(card), lease.id)
        return publisher

    async def received(self, send: Callable[[], object], condition: Callable[[], object]) -> None:
        """Send until the condition holds: a subscriber may miss the first messages."""
        async with asyncio.timeout(10):
            while not condition():
                send()
                await asyncio.sleep(0.01)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    made = Box(tmp_path)
    await made.runtime.start()
    await made.reports.start()
    yield made
    for runtime in made.made:
        await runtime.close()


def load(worker: EventPublisher, rank: int = 0, used: int | None = 10, **more: int) -> KvMetrics:
    return KvMetrics(worker.publisher_id, rank, kv_used_blocks=used, kv_total_blocks=100, **more)


async def known(box: Box, worker: EventPublisher) -> None:
    """Follow ``worker`` as soon as discovery has its card."""
    await box.received(
        lambda: box.reports.follow([worker.publisher_id]), lambda: box.reports._subscriptions
    )


async def test_the_ranks_of_a_worker_are_summed(box: Box) -> None:
    worker = await box.worker()
    await known(box, worker)
    sent = [
        load(worker, 0, 10, num_requests_waiting=2),
        load(worker, 1, 30, num_requests_running=4),
    ]
    ids = [worker.publisher_id]
    await box.received(lambda: worker.publish(codec.encode(sent)), lambda: box.reports.loads(ids))
    [found] = box.reports.loads(ids)
    assert (found.kv_used_blocks, found.kv_total_blocks) == (40, 200)
    assert (found.running, found.waiting, found.kv_usage) == (4, 2, 0.2)


async def test_old_reports_and_those_of_others_do_not_count(box: Box) -> None:
    worker, other = await box.worker(), await box.worker()
    await known(box, worker)
    ids = [worker.publisher_id, other.publisher_id]

    def send() -> None:
        worker.publish(codec.encode([load(worker)]))
        other.publish(codec.encode([load(other)]))

    await box.received(send, lambda: box.reports.loads(ids))
    assert [one.worker_id for one in box.reports.loads(ids)] == [worker.publisher_id]
    box.clock.now_s += 3.5
    assert box.reports.loads(ids) == ()
    await box.received(send, lambda: box.reports.loads(ids))
    box.reports.follow([])
    assert box.reports.loads(ids) == ()


async def test_a_worker_without_kv_use_is_unknown(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await box.worker()
    await known(box, worker)
    report = codec.encode([load(worker, used=None)])
    ids = [worker.publisher_id]
    await box.received(
        lambda: (worker.publish(report), box.reports.loads(ids)),
        lambda: "does not report its KV use" in caplog.text,
    )
    assert box.reports.loads(ids) == ()
    assert caplog.text.count("does not report") == 1
    assert f"{worker.publisher_id:x}" in caplog.text


async def test_bad_reports_are_logged(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    worker = await box.worker()
    await known(box, worker)
    await box.received(
        lambda: worker.publish(b"\xc1"), lambda: "invalid load report of publisher" in caplog.text
    )


async def test_the_queues_of_all_frontends_are_summed(box: Box) -> None:
    worker = await box.worker("prefill", kind="Prefill")
    await known(box, worker)
    assert box.reports.prefill_queue("tiny") is None
    first, second = box.process(), box.process()
    queues = [await one.publisher("dynamo", "prefill", PREFILL_QUEUE) for one in (first, second)]

    def send() -> None:
        for number, queue in enumerate(queues):
            queue.publish(codec.encode(PrefillQueueState("tiny", 3 + number, 1, 1)))
            queue.publish(codec.encode(PrefillQueueState("other", 50)))

    await box.received(send, lambda: box.reports.prefill_queue("tiny") == 7)
    assert box.reports.prefill_queue("none") is None
    await second.close()
    await box.received(
        lambda: queues[0].publish(codec.encode(PrefillQueueState("tiny", 3))),
        lambda: box.reports.prefill_queue("tiny") == 3,
    )
    box.clock.now_s += 3.5
    assert box.reports.prefill_queue("tiny") is None


def passed(rank: int = 0, wall_time: float = 0.01, waiting: int = 0, **done: int) -> bytes:
    queued = QueuedRequests(num_prefill_requests=waiting, sum_prefill_tokens=100 * waiting)
    return codec.encode(
        ForwardPass(
            dp_rank=rank,
            wall_time=wall_time,
            scheduled_requests=ScheduledRequests(**done),
            queued_requests=queued,
        )
    )


async def passing(box: Box) -> tuple[EventPublisher, EventPublisher]:
    """A worker that reports its passes: the publishers of these, and of its load."""
    loads = await box.worker()
    for runtime in box.made:
        if runtime.instance_id == loads.publisher_id:
            passes = await runtime.publisher("dynamo", "backend", FORWARD_PASS)
    await known(box, loads)
    return passes, loads


async def test_forward_passes_alone_are_a_load(box: Box) -> None:
    passes, _ = await passing(box)
    ids = [passes.publisher_id]
    decode = passed(waiting=2, num_decode_requests=3, sum_decode_kv_tokens=300)
    await box.received(lambda: passes.publish(decode), lambda: box.reports.loads(ids))
    [found] = box.reports.loads(ids)
    assert (found.running, found.waiting, found.active_prefill_tokens) == (3, 2, 200)
    assert (found.kv_used_blocks, found.kv_total_blocks) == (19, 1000)  # 300 tokens of 16 a block
    prefill = passed(num_prefill_requests=1, sum_prefill_tokens=50, sum_prefill_kv_tokens=14)
    passes.publish(prefill)  # as an engine that alternates the two
    await box.received(
        lambda: None, lambda: box.reports.loads(ids)[0].active_prefill_tokens == 200
        and box.reports.loads(ids)[0].waiting == 0,
    )  # fmt: skip
    [found] = box.reports.loads(ids)
    assert (found.running, found.kv_used_blocks) == (3, 19)
    await box.received(
        lambda: passes.publish(passed(wall_time=0.0)),
        lambda: not box.reports.loads(ids)[0].running,
    )
    assert box.reports.loads(ids)[0].kv_used_blocks == 0


async def test_passes_complete_a_load_report_until_they_stop(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    passes, loads = await passing(box)
    ids = [passes.publisher_id]

    def send() -> None:
        loads.publish(codec.encode([load(loads, used=40)]))
        passes.publish(passed(waiting=4, num_decode_requests=5, sum_decode_kv_tokens=99))

    await box.received(
        send,
        lambda: [
            (one.kv_used_blocks, one.running, one.waiting) for one in box.reports.loads(ids)
        ] == [(40, 5, 4)],
    )  # fmt: skip
    box.clock.now_s += 3.5
    assert box.reports.loads(ids) == ()
    assert caplog.text.count("no forward-pass metrics for 3.0 s") == 1
    await box.received(
        lambda: loads.publish(codec.encode([load(loads, used=30)])),
        lambda: box.reports.loads(ids),
    )
    [found] = box.reports.loads(ids)
    assert (found.kv_used_blocks, found.running, found.waiting) == (30, 0, 0)


async def test_passes_that_are_none_are_reported_once(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    passes, _ = await passing(box)
    ids = [passes.publisher_id]

    def send() -> None:
        passes.publish(b"\x01")
        passes.publish(codec.encode(ForwardPass(version=2)))
        passes.publish(passed())

    await box.received(send, lambda: box.reports.loads(ids))
    assert caplog.text.count("invalid forward-pass metrics") == 1


def test_a_queue_that_is_reported_after_its_frontend_has_left_does_not_count() -> None:
    runtime: Any = None
    reports = WorkerReports(runtime, 3.0, lambda: 0.0)
    payload = codec.encode(PrefillQueueState("tiny", 3, 1, 1))
    for _ in range(2):  # two components with prefill workers
        reports._on_frontend(7, True)
    reports._on_frontend(7, False)
    reports._on_queue(7, 0, payload)
    assert reports.prefill_queue("tiny") == 3
    reports._on_frontend(7, False)
    reports._on_queue(7, 1, payload)
    assert reports.prefill_queue("tiny") is None
