"""The router over real discovery, request plane and event plane, in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_kit import CHAINED, PROMPT, Box, Worker, stored
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import NoInstances, Overloaded
from dynamo.protocols import codec
from dynamo.protocols.control import MODEL_CARDS, RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.protocols.kv import (
    KV_METRICS,
    BlocksRemoved,
    KvEvent,
    KvMetrics,
    KvQuery,
    KvQueryAnswer,
)
from dynamo.router.caches import indexer as indexer_module
from dynamo.router.connect import event_feed as recovery_module
from dynamo.router.connect import kv_router as upkeep_module
from dynamo.router.connect.router import ConnectedRouter, WorkerCards
from dynamo.router.modes.kv import KvPicker
from dynamo.runtime.discovery import KeyEvent
from dynamo.runtime.distributed import runtime as distributed_module


@pytest_asyncio.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    """A box on file discovery in its own directory."""
    made = Box(RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30))
    yield made
    await made.close()


def overlap(live: ConnectedRouter) -> int:
    """Blocks of the prompt cached on the best worker; -1 without workers."""
    try:
        return live.picker.pick(None, PROMPT).overlap_blocks
    except NoInstances:
        return -1


async def test_a_dump_on_discovery_then_live_events(box: Box) -> None:
    worker = await box.worker()
    worker.answers = [KvQueryAnswer("tree_dump", [stored(0, 0, 2)], 5)]
    live = await box.route()
    await until(lambda: overlap(live) == 2)
    assert worker.queries == [KvQuery(0, None, None)]
    worker.publish(stored(6, 2, 3))
    await until(lambda: overlap(live) == 3)
    worker.publish(KvEvent(7, BlocksRemoved(CHAINED[1:2].tobytes())))
    await until(lambda: overlap(live) == 1)


async def test_a_gap_is_recovered_from_the_worker(box: Box) -> None:
    worker = await box.worker()
    live = await box.route()
    await until(lambda: overlap(live) == 0 and len(worker.queries) == 1)
    await until(lambda: live.events is not None and not live.events.indexer.recovering())
    worker.answers = [KvQueryAnswer("events", [stored(1, 0, 1), stored(2, 1, 2)], 2)]
    worker.publish(stored(3, 2, 4))
    await until(lambda: overlap(live) == 4)
    assert worker.queries[1] == KvQuery(0, 1, 2)


async def test_a_lost_last_event_is_found_by_the_sweep(box: Box) -> None:
    worker = await box.worker()
    live = await box.route()
    assert live.events is not None
    indexer = live.events.indexer
    assert indexer is not None
    await until(lambda: bool(worker.queries) and not indexer.recovering())
    worker.answers = [
        KvQueryAnswer("events", [stored(1, 0, 2)], 1),
        KvQueryAnswer("too_new", newest_available=1),
    ]
    live.maintenance.sweep()
    await until(lambda: overlap(live) == 2)
    live.maintenance.sweep()
    await until(lambda: len(worker.queries) == 3 and not indexer.recovering())
    assert worker.queries[1:] == [KvQuery(0, 1, None), KvQuery(0, 2, None)]
    assert overlap(live) == 2


async def test_an_event_lost_while_connecting_is_found_soon(box: Box) -> None:
    """ZeroMQ drops what is published before the subscription has arrived at the publisher."""
    box.checks_s = (0.0, 0.1)
    worker = await box.worker()
    worker.answers = [
        KvQueryAnswer("tree_dump"),
        KvQueryAnswer("too_new", newest_available=0),
        KvQueryAnswer("events", [stored(1, 0, 2)], 1),
    ]
    live = await box.route()
    assert live.events is not None
    indexer = live.events.indexer
    await until(lambda: bool(worker.queries) and not indexer.recovering())
    live.events._on_publisher(worker.id, True)  # the dump was answered before it
    await until(lambda: overlap(live) == 2)
    assert worker.queries[-1] == KvQuery(0, 1, None)


async def test_the_cache_of_a_worker_without_events_is_predicted(box: Box) -> None:
    silent = await box.worker(RuntimeConfig(kv_event_publishing_enabled=False), answers=False)
    worker = await box.worker(RuntimeConfig())
    worker.answers = [KvQueryAnswer("tree_dump", [stored(0, 0, 2)], 5)]
    live = await box.route()
    await until(lambda: overlap(live) == 2)
    assert live.events is not None and not live.events.indexer.recovering()
    for worker_id in (silent.id, worker.id):
        request_id = f"r{worker_id}"
        routing = Routing(backend_instance_id=worker_id)
        live.picker.pick(request_id, PROMPT, routing=routing)
        live.picker.mark_prefill_complete(request_id)
        live.picker.free(request_id)
    found = live.picker.pick(None, PROMPT, routing=Routing(backend_instance_id=silent.id))
    assert found.overlap_blocks == 4
    found = live.picker.pick(None, PROMPT, routing=Routing(backend_instance_id=worker.id))
    assert found.overlap_blocks == 2, "its own events count alone"
    live.maintenance.check_silence(live.events.indexer)
    assert not silent.queries
    shown = box.runtime.metrics.render().decode()
    (mismatched,) = re.findall(r"\nd.*source_mismatch_workers{.*} (.*)", shown)
    assert mismatched == "0"
    assert "dynamo_component_router_predicted_memory_bytes{" in shown
    live.picker.remove_worker(silent.id)
    live.picker.remove_worker(worker.id)


async def test_the_loop_runs_while_a_dump_is_applied(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_module, "STEP_BLOCKS", 1)
    worker = await box.worker()
    live = await box.route()
    assert live.events is not None
    index, indexer = live.picker.index, live.events.indexer
    assert indexer is not None
    await until(lambda: bool(worker.queries) and not indexer.recovering())
    worker.answers = [KvQueryAnswer("tree_dump", [stored(n, n, n + 1) for n in range(4)], 4)]
    indexer.publisher_restarted(worker.id)
    sizes = set()
    async with asyncio.timeout(10):
        while indexer.recovering():
            sizes.add(index.blocks())  # type: ignore[union-attr]
            await asyncio.sleep(0)
    assert {0, 1, 2, 3} <= sizes
    worker.publish(stored(5, 0, 1))
    await until(lambda: overlap(live) == 4)


async def test_workers_are_added_and_removed(box: Box) -> None:
    live = await box.route()
    assert overlap(live) == -1
    first = await box.worker()
    await until(lambda: overlap(live) == 0)
    first.answers = [KvQueryAnswer("tree_dump", [stored(0, 0, 4)], 1)]
    second = await box.worker()
    await until(lambda: len(live.picker.worker_pool.members) == 2)
    page = box.runtime.metrics.render().decode()
    assert f'router_worker_id="{second.id}"' in page
    await first.runtime.close()
    await until(lambda: list(live.picker.worker_pool.members) == [second.id])
    page = box.runtime.metrics.render().decode()
    assert f'router_worker_id="{first.id}"' not in page
    assert live.picker.pick(None, PROMPT).worker_id == second.id
    await second.runtime.close()
    await until(lambda: overlap(live) == -1)


async def test_ranks_come_from_the_card(box: Box) -> None:
    await box.worker(RuntimeConfig(data_parallel_size=2, data_parallel_start_rank=2))
    live = await box.route()
    await until(lambda: len(live.picker.worker_pool.candidates) == 2)
    assert {live.picker.pick(str(i), PROMPT).dp_rank for i in range(2)} == {2, 3}


async def test_a_lost_event_of_another_rank_is_found_by_the_next_message(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event ids of one rank do not show what was lost of the other."""
    monkeypatch.setattr(upkeep_module, "SWEEP_S", 3600.0)
    worker = await box.worker(RuntimeConfig(data_parallel_size=2))
    live = await box.route()
    assert live.events is not None
    indexer = live.events.indexer
    await until(lambda: len(worker.queries) == 2 and not indexer.recovering())
    worker.publish(stored(1, 0, 1, rank=1))
    await until(lambda: overlap(live) == 1)
    worker.answers = [KvQueryAnswer("events", [stored(2, 1, 4, rank=1)], 2)]
    worker.publisher._sequence += 1  # type: ignore[attr-defined]
    worker.publish(stored(1, 0, 2, rank=0))
    await until(lambda: overlap(live) == 4 and not indexer.recovering())
    assert KvQuery(1, 2, None) in worker.queries


async def test_events_of_a_worker_without_answers_are_applied(
    box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery_module, "BACKOFF_S", (0.01, 0.01))
    worker = await box.worker(answers=False)
    live = await box.route()
    assert live.events is not None
    indexer = live.events.indexer
    assert indexer is not None
    await until(lambda: overlap(live) == 0 and not indexer.recovering())
    assert "did not report its KV blocks" in caplog.text
    worker.publish(stored(1, 0, 3))
    await until(lambda: overlap(live) == 3)


async def test_without_local_indexer_no_dump_is_requested(box: Box) -> None:
    worker = await box.worker(RuntimeConfig(enable_local_indexer=False))
    live = await box.route()
    await until(lambda: overlap(live) == 0)
    feed = live.events
    assert feed is not None
    await until(lambda: bool(feed._subscription and feed._subscription.publishers()))
    event_id = 0

    def is_cached() -> bool:
        nonlocal event_id
        event_id += 1
        worker.publish(stored(event_id, 0, 3))  # until the subscription receives it
        return overlap(live) == 3

    await until(is_cached)
    assert worker.queries == []


async def test_foreign_payloads_are_counted(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    worker = await box.worker()
    live = await box.route()
    await until(lambda: bool(worker.queries))
    worker.publisher.publish(b"\xc1 nonsense")
    await until(lambda: "invalid KV events" in caplog.text)
    worker.publish(stored(1, 0, 1))
    await until(lambda: overlap(live) == 1)
    page = box.runtime.metrics.render().decode()
    assert 'warning_kind="malformed"' in page
    assert 'event_type="stored",status="ok"' in page


async def test_a_silent_worker_is_named_once(
    box: Box, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "SILENCE_S", 0.05)
    worker = await box.worker()
    live = await box.route()
    await until(lambda: bool(worker.queries) and overlap(live) == 0)
    picker = live.picker
    assert isinstance(picker, KvPicker)
    picker.pick("a", PROMPT)
    picker.mark_prefill_complete("a")
    picker.free("a")
    await until(lambda: "published no KV event" in caplog.text)  # soon after its first token
    live.maintenance.sweep()
    assert caplog.text.count("published no KV event") == 1
    name = "dynamo_component_router_kv_event_source_mismatch_workers"
    page = box.runtime.metrics.render().decode()
    assert [line[-2:] for line in page.splitlines() if line.startswith(name)] == [" 1"]
    worker.publish(stored(1, 0, 1))
    await until(lambda: overlap(live) == 1)
    live.maintenance.sweep()
    page = box.runtime.metrics.render().decode()
    assert [line[-2:] for line in page.splitlines() if line.startswith(name)] == [" 0"]


async def test_a_decode_worker_is_not_expected_to_publish(
    box: Box, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "kind", "Decode")
    worker = await box.worker(RuntimeConfig())
    live = await box.route()
    await until(lambda: bool(worker.queries) and overlap(live) == 0)
    live.picker.pick("a", PROMPT)
    live.picker.mark_prefill_complete("a")
    live.maintenance.sweep()
    assert "published no KV event" not in caplog.text


@pytest.mark.parametrize("mode", ["round-robin", "random"])
async def test_other_modes_need_no_events(
    box: Box, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await box.worker()
    live = await box.route_by_mode(mode=mode, queue_threshold=1.0)
    await until(lambda: overlap(live) == 0)
    assert f"--router-queue-threshold has no effect in mode {mode}" in caplog.text
    assert worker.queries == []
    assert live.picker.pick("a", PROMPT).worker_id == worker.id


async def test_without_events_caches_are_predicted(box: Box) -> None:
    worker = await box.worker(RuntimeConfig(total_kv_blocks=100))
    live = await box.route(kv_events=False, ttl_s=1.0)
    await until(lambda: overlap(live) == 0)
    assert live.events is None
    live.picker.pick("a", PROMPT)
    assert overlap(live) == 4
    assert worker.queries == []
    assert isinstance(live.picker, KvPicker) and live.picker.predicted is not None
    predicted = live.picker.predicted
    await until(lambda: predicted.blocks() == 0)  # by the timer alone
    page = box.runtime.metrics.render().decode()
    assert "dynamo_component_router_predicted_blocks_expired_total{" in page


async def test_the_optimistic_cache_exports_its_size(box: Box) -> None:
    await box.worker()
    live = await box.route(predicted_ttl_s=60.0)
    await until(lambda: overlap(live) == 0)
    live.picker.pick("a", PROMPT)
    assert overlap(live) == 4
    page = box.runtime.metrics.render().decode()
    (line,) = [one for one in page.splitlines() if "router_predicted_memory_bytes{" in one]
    assert float(line.split()[-1]) > 0


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_reported_load_makes_workers_busy(box: Box, mode: str) -> None:
    busy, free = await box.worker(), await box.worker()
    live = await box.route_by_mode(
        mode=mode, admission_control="token-capacity", active_decode_blocks_threshold=0.8
    )
    await until(lambda: len(live.picker.worker_pool.members) == 2)
    loads = await busy.runtime.publisher("ns", "backend", KV_METRICS)

    def report(used: int) -> None:
        state = KvMetrics(busy.id, active_decode_blocks=used, kv_total_blocks=100)
        loads.publish(codec.encode([state]))

    def is_busy() -> bool:
        report(90)  # until the subscription receives it
        return live.picker.worker_pool.busy == {busy.id}

    await until(is_busy)
    assert {live.picker.pick(None, PROMPT).worker_id for _ in range(9)} == {free.id}
    page = box.runtime.metrics.render().decode()
    assert "dynamo_component_router_busy_workers{" in page
    await free.runtime.close()
    await until(lambda: len(live.picker.worker_pool.members) == 1)
    with pytest.raises(Overloaded, match="all eligible workers are overloaded"):
        live.picker.pick("a", PROMPT)
    report(70)
    await until(lambda: not live.picker.worker_pool.busy)
    assert live.picker.pick("a", PROMPT).worker_id == busy.id
    loads.publish(b"\xc1")
    report(85)
    await until(lambda: bool(live.picker.worker_pool.busy))


def mismatched(box: Box) -> list[str]:
    """The gauge of workers whose events cannot be used."""
    name = "dynamo_component_router_kv_event_source_mismatch_workers"
    page = box.runtime.metrics.render().decode()
    return [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(name)]


async def test_a_worker_with_other_blocks_is_refused(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    live = await box.route()
    worker = Worker(box.settings)
    box.workers.append(worker)
    worker.block_size = 16
    await worker.start(RuntimeConfig())
    await until(lambda: "it gets no requests" in caplog.text)
    assert "blocks of 16 tokens, this router hashes blocks of 4" in caplog.text
    assert "--kv-cache-block-size 16" in caplog.text
    assert overlap(live) == -1 and worker.queries == []
    assert mismatched(box) == ["1"]
    assert 'warning_kind="block_size"' in box.runtime.metrics.render().decode()
    good = await box.worker(RuntimeConfig())
    await until(lambda: list(live.picker.worker_pool.members) == [good.id])
    await worker.runtime.close()
    await until(lambda: mismatched(box) == ["0"])


@pytest.mark.parametrize("settings", [{"kv_events": False}, {"overlap_score_weight": 0.0}])
async def test_without_events_block_sizes_may_differ(box: Box, settings: dict[str, object]) -> None:
    live = await box.route(**settings)
    worker = Worker(box.settings)
    box.workers.append(worker)
    worker.block_size = 16
    await worker.start(RuntimeConfig())
    await until(lambda: list(live.picker.worker_pool.members) == [worker.id])


async def test_events_of_another_block_size_are_ignored(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await box.worker(RuntimeConfig())
    worker.answers = [KvQueryAnswer("tree_dump", [stored(0, 0, 2)], 5, block_size=16)]
    live = await box.route()
    await until(lambda: "its cache stays unknown" in caplog.text)
    worker.publish(stored(6, 2, 3))
    assert "publishes KV blocks of 16 tokens, but is registered with blocks of 4" in caplog.text
    assert overlap(live) == 0 and mismatched(box) == ["1"]


async def test_a_worker_that_restarts_under_its_id(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_module.secrets, "randbits", lambda bits: 0xABC)  # type: ignore[attr-defined]
    first = await box.worker()
    monkeypatch.undo()
    live = await box.route()
    await until(lambda: bool(first.queries) and overlap(live) == 0)
    for number in range(4):
        first.publish(stored(1 + number, number, number + 1))
    await until(lambda: overlap(live) == 4)
    await first.runtime.close()
    monkeypatch.setattr(distributed_module.secrets, "randbits", lambda bits: 0xABC)  # type: ignore[attr-defined]
    second = await box.worker()
    monkeypatch.undo()
    assert second.id == first.id
    await until(lambda: bool(second.queries) and overlap(live) == 0)
    second.publish(stored(1, 0, 2))
    await until(lambda: overlap(live) == 2)


async def test_a_late_subscriber_counts_no_gap(box: Box) -> None:
    worker = await box.worker()
    for number in range(3):
        worker.publish(stored(1 + number, number, number + 1))
    worker.answers = [KvQueryAnswer("tree_dump", [stored(3, 0, 3)], 3)]
    live = await box.route()
    await until(lambda: overlap(live) == 3)
    worker.publish(stored(4, 3, 4))
    await until(lambda: overlap(live) == 4)

    def gaps() -> list[str]:
        text = box.runtime.metrics.render().decode()
        return [line.rpartition(" ")[2] for line in text.splitlines() if "sequence_gap" in line]

    assert set(gaps()) <= {"0"}
    worker.publisher._sequence += 7  # type: ignore[attr-defined]
    worker.publish()
    await until(lambda: gaps() == ["7"])


async def test_a_publisher_that_restarts_is_asked_for_a_dump(box: Box) -> None:
    """As when a death and a start under the same id are so close that discovery shows neither."""
    worker = await box.worker()
    live = await box.route()
    assert live.events is not None
    indexer = live.events.indexer
    assert indexer is not None
    await until(lambda: bool(worker.queries) and not indexer.recovering())
    for number in range(3):
        worker.publish(stored(1 + number, number, number + 1))
    await until(lambda: overlap(live) == 3)
    worker.answers = [KvQueryAnswer("tree_dump", [stored(0, 0, 1)], 1)]
    worker.publisher._sequence = 0  # type: ignore[attr-defined]
    worker.publish(stored(1, 0, 1))
    await until(lambda: overlap(live) == 1 and not indexer.recovering())
    worker.publish(stored(2, 1, 2))
    await until(lambda: overlap(live) == 2)
    # and so the sweep notices, should the first message be lost as well
    worker.answers = [
        KvQueryAnswer("too_new", newest_available=1),
        KvQueryAnswer("tree_dump", [stored(0, 0, 1)], 1),
    ]
    indexer.verify()
    await until(lambda: overlap(live) == 1 and not indexer.recovering())


def test_hostile_cards_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    changed: list[int] = []
    cards = WorkerCards(changed.append)
    here = MODEL_CARDS
    nested = b'{"instance_id": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    hostile = [
        (here + "zz", b'{"instance_id": 1}'),
        (here + "zz", None),
        (here + "2", b'{"instance_id": 1}'),
        (here + "1", nested),
        (here + "1", b'{"instance_id": 1, "runtime_config": {"data_parallel_size": 1e9}}'),
    ]
    for key, value in hostile:
        caplog.clear()
        cards._on_key(KeyEvent("put" if value else "delete", key, value))
        (line,) = caplog.records
        assert key in line.getMessage() and line.exc_info is None
    assert not changed
    cards._on_key(KeyEvent("put", here + "1/adapter", b'{"instance_id": 1}'))
    assert changed == [1] and cards.get(1) is not None


@pytest.mark.parametrize("source", ["visible", "engine", "flag"])
async def test_a_gpu_worker_gets_eight_requests_for_each_one_of_a_cpu_worker(
    box: Box, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3" if source == "visible" else "")
    if source == "flag":
        box.settings = dataclasses.replace(box.settings, device_type="cuda")
    gpu = Worker(box.settings)
    if source != "visible":
        gpu.runtime.serving.set_engine_device("cuda" if source == "engine" else "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    box.settings = dataclasses.replace(box.settings, device_type=None)
    box.workers.append(gpu)
    await gpu.start(RuntimeConfig())
    cpu = await box.worker(RuntimeConfig())
    live = await box.route_by_mode(mode="device-aware-weighted")
    await until(lambda: len(live.picker.worker_pool.members) == 2)
    counts = Counter(live.picker.pick(str(i), PROMPT).worker_id for i in range(90))
    assert counts == {gpu.id: 80, cpu.id: 10}
