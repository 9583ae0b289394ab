"""KV events on threads: what the router promises on the loop holds there, too."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from live_kit import CHAINED, Box, Worker, stored
from test_live_router import (
    overlap,
    test_a_dump_on_discovery_then_live_events,
    test_a_gap_is_recovered_from_the_worker,
    test_a_late_subscriber_counts_no_gap,
    test_a_lost_event_of_another_rank_is_found_by_the_next_message,
    test_a_lost_last_event_is_found_by_the_sweep,
    test_a_publisher_that_restarts_is_asked_for_a_dump,
    test_a_silent_worker_is_named_once,
    test_foreign_payloads_are_counted,
    test_ranks_come_from_the_card,
    test_the_loop_runs_while_a_dump_is_applied,
    test_without_local_indexer_no_dump_is_requested,
    test_workers_are_added_and_removed,
)
from until import until

from dynamo.config.option import from_env
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.protocols import codec
from dynamo.protocols.kv import BlocksRemoved, KvEvent, KvEventBatch
from dynamo.router.connect.kv_router import ConnectedKvRouter

__all__ = [
    "test_a_dump_on_discovery_then_live_events",
    "test_a_gap_is_recovered_from_the_worker",
    "test_a_late_subscriber_counts_no_gap",
    "test_a_lost_event_of_another_rank_is_found_by_the_next_message",
    "test_a_lost_last_event_is_found_by_the_sweep",
    "test_a_publisher_that_restarts_is_asked_for_a_dump",
    "test_a_silent_worker_is_named_once",
    "test_foreign_payloads_are_counted",
    "test_ranks_come_from_the_card",
    "test_the_loop_runs_while_a_dump_is_applied",
    "test_without_local_indexer_no_dump_is_requested",
    "test_workers_are_added_and_removed",
]


class ThreadedBox(Box):
    """A box whose router has three threads for events."""

    async def route(self, **settings: object) -> ConnectedKvRouter:
        return await super().route(**{"event_threads": 3, **settings})


@pytest_asyncio.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    """A box on file discovery in its own directory; leaves no thread behind."""
    made = ThreadedBox(RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30))
    yield made
    await made.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("kv-events")]


def counted(live: ConnectedKvRouter, name: str) -> float:
    """The sum of a metric's rows that mention ``name``."""
    text = live._runtime.metrics.render().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#") and name in line
    )


def is_followed(live: ConnectedKvRouter, worker: Worker) -> bool:
    """Whether the router has found the worker and has asked for its blocks."""
    assert live.events is not None
    return worker.id in live.picker.worker_pool.members and not live.events.indexer.recovering()


async def test_events_are_applied_by_a_thread_and_counted(box: Box) -> None:
    worker = await box.worker()
    live = await box.route()
    await until(lambda: is_followed(live, worker))
    assert live.events is not None and live.events.threads is not None
    ingest = live.events.threads.ingest

    def connected() -> bool:
        """Publish a batch without events: subscribers that are not connected miss it."""
        worker.publish()
        return sum(ingest.received()) > 0

    await until(connected)
    worker.publish(stored(1, 0, 2), stored(2, 2, 3))
    worker.publish(KvEvent(3, BlocksRemoved(CHAINED[2:3].tobytes())))
    await until(lambda: overlap(live) == 2)
    await until(lambda: ingest.applied() == {("stored", "ok"): 2, ("removed", "ok"): 1})
    assert counted(live, 'event_type="stored"') == 2


async def test_each_publisher_keeps_its_thread_and_all_are_used(box: Box) -> None:
    live = await box.route()
    workers = [await box.worker() for _ in range(4)]
    await until(lambda: len(live.picker.worker_pool.members) == 4 and overlap(live) == 0)
    assert live.events is not None and live.events.threads is not None
    await until(lambda: live.events is not None and not live.events.indexer.recovering())
    threads, numbers = live.events.threads, itertools.count(1)

    def all_received() -> bool:
        """Publish one more event from each worker: unconnected subscribers miss some."""
        number = next(numbers)
        for worker in workers:
            worker.publish(stored(number, 0, 1))
        return min(threads.ingest.received()) > 0

    await until(all_received)
    index = live.picker.index
    assert index is not None
    await until(lambda: index.blocks() == 4)
    placed = Counter(threads.thread_of(worker.id) for worker in workers)
    assert sorted(placed.values()) == [1, 1, 2]


async def test_events_over_another_transport_are_pushed(box: Box) -> None:
    worker = await box.worker()
    live = await box.route()
    await until(lambda: is_followed(live, worker))
    assert live.events is not None and live.events.threads is not None
    batch = KvEventBatch(worker.id, [stored(1, 0, 3)])
    live.events.threads.push(worker.id, 0, codec.encode(batch))
    await until(lambda: overlap(live) == 3)


async def test_a_worker_that_dies_in_a_storm_leaves_nothing(box: Box) -> None:
    worker = await box.worker()
    live = await box.route()
    await until(lambda: is_followed(live, worker))
    for event_id in range(1, 2000, 2):
        worker.publish(stored(event_id, 0, 4))
        worker.publish(KvEvent(event_id + 1, BlocksRemoved(CHAINED[1:].tobytes())))
    await until(lambda: overlap(live) >= 1)
    live._on_instances([], [worker.id])
    index = live.picker.index
    assert index is not None
    assert index.blocks() == 0
    other = await box.worker()
    await until(lambda: bool(other.queries) and overlap(live) == 0)
    numbers = itertools.count(1)

    def stores() -> bool:
        # An event before the subscription is connected is recovered with the next one.
        other.publish(stored(next(numbers), 0, 2))
        return overlap(live) == 2

    await until(stores)
    assert index.blocks() == 2
    index._check()


async def test_no_thread_has_a_stream_whose_slot_is_freed(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot goes to the next worker: a thread that still has it adds blocks to that one."""
    worker = await box.worker()
    live = await box.route()
    await until(lambda: is_followed(live, worker))
    assert live.events is not None and live.events.threads is not None
    ingest, remove, known = live.events.threads.ingest, live.picker.remove_worker, []

    def free(worker_id: int) -> None:
        known.append(ingest.reclaim(worker_id, 0))
        remove(worker_id)

    monkeypatch.setattr(live.picker, "remove_worker", free)
    live._on_instances([], [worker.id])
    assert known == [None]


async def test_a_publisher_that_left_loses_its_subscriber(box: Box, tmp_path: Path) -> None:
    live = await box.route()
    assert live.events is not None and live.events.threads is not None
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        address = f"ipc://{tmp_path}/left.sock"
        publisher.bind(address)
        live.events.threads.subscriber.connect(address, 7)
        assert publisher.poll(10_000) and publisher.recv()[:1] == b"\x01"
        live.events.threads.subscriber.disconnect(address)
        assert publisher.poll(10_000) and publisher.recv()[:1] == b"\x00"


async def test_predictions_need_no_threads(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    live = await box.route(kv_events=False)
    assert live.events is None
    assert "--router-event-threads" in caplog.text


def test_there_is_a_thread_at_least() -> None:
    with pytest.raises(ConfigError, match="DYN_ROUTER_EVENT_THREADS"):
        from_env(RouterSettings, {"DYN_ROUTER_EVENT_THREADS": "0"})
