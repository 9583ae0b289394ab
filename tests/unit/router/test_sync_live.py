"""Routers of the same workers over real planes: bookings of one are load of the other."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_kit import BLOCK, PROMPT, Box, Worker
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import Unavailable
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.connect import replicas as sync
from dynamo.router.connect.kv_router import ConnectedKvRouter
from dynamo.router.connect.replicas import ReplicaSync
from dynamo.router.load.replica_loads import ACTIVE_SEQUENCES
from dynamo.router.modes.kv import KvPicker
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events.channels import Publishers

Load = tuple[int, int, int]


class Replicas:
    """Routers with a runtime each, as processes have."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.boxes: list[Box] = []
        self.workers: list[Worker] = []

    async def worker(self, config: RuntimeConfig | None = None) -> Worker:
        worker = Worker(self.settings)
        self.workers.append(worker)
        await worker.start(config or RuntimeConfig())
        return worker

    async def router(self, workers: int = 1, **settings: object) -> ConnectedKvRouter:
        box = Box(self.settings)
        self.boxes.append(box)
        live = await box.route(replica_sync=True, **settings)
        await until(lambda: len(live.picker.worker_pool.members) == workers)
        return live

    def page(self, number: int) -> str:
        return self.boxes[number].runtime.metrics.render().decode()

    async def close(self) -> None:
        for box in self.boxes:
            await box.close()
        for worker in self.workers:
            await worker.runtime.close()


@pytest_asyncio.fixture
async def replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replicas]:
    monkeypatch.setattr(sync, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(sync, "REPEAT_QUERY_S", 0.01)
    made = Replicas(RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30))
    yield made
    await made.close()


def kv(live: ConnectedKvRouter) -> KvPicker:
    assert isinstance(live.picker, KvPicker)
    return live.picker


def sync_of(live: ConnectedKvRouter) -> ReplicaSync:
    assert live._sync is not None
    return live._sync


def load(live: ConnectedKvRouter, worker: Worker) -> Load:
    picker = kv(live)
    return picker.active.load(picker.worker_pool.members[worker.id].slots[0])


async def wait_until_in_sync(*lives: ConnectedKvRouter) -> None:
    """Wait until all routers have discovered each other and have no gap."""
    remotes = [sync_of(live).remote for live in lives]
    others = len(lives) - 1
    await until(lambda: all(len(one) == others and one.is_in_sync() for one in remotes))


async def test_load_is_shared_from_the_decision_to_the_end(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    assert load(first, worker) == (16, 4, 1)
    await until(lambda: load(second, worker) == (16, 4, 1))
    second.picker.pick("a", PROMPT)  # the same id there is another request
    assert load(second, worker) == (32, 4, 2)  # its blocks are shared
    await until(lambda: load(first, worker) == (32, 4, 2))
    first.picker.mark_prefill_complete("a")
    await until(lambda: load(second, worker) == (16, 4, 2))
    assert "router_replica_requests{" in replicas.page(1)
    second.picker.free("a")
    first.picker.free("a")
    await until(lambda: load(first, worker) == load(second, worker) == (0, 0, 0))
    kv(first).active._check()


async def test_a_late_replica_gets_the_running_requests(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first = await replicas.router()
    first.picker.pick("a", PROMPT)
    first.picker.mark_prefill_complete("a")
    first.picker.pick("b", array("I", range(100, 110)))
    second = await replicas.router()
    await until(lambda: load(second, worker) == (10, 6, 2) == load(first, worker))
    third = await replicas.router()
    await until(lambda: load(third, worker) == (10, 6, 2))
    assert "dynamo_component_router_replica_resyncs_total" in replicas.page(1)


async def test_a_router_that_cannot_register_yet_serves_and_shares_its_load_later(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that starts on a full disk."""
    monkeypatch.setattr("dynamo.runtime.distributed.runtime.REGISTER_AGAIN_S", 0.01)
    register, is_full = Publishers.get, True

    async def get(self: Publishers, channel: tuple[str, str, str]) -> Any:
        if is_full:
            raise Unavailable("cannot register: No space left on device")
        return await register(self, channel)

    worker = await replicas.worker()
    first = await replicas.router()
    monkeypatch.setattr(Publishers, "get", get)
    second = await replicas.router()
    second.picker.pick("a", PROMPT)
    first.picker.pick("b", PROMPT)
    await asyncio.sleep(0)
    assert load(first, worker) == load(second, worker) == (16, 4, 1)
    assert not sync_of(second).local.take_pending()  # it would grow
    is_full = False
    await until(lambda: load(first, worker) == load(second, worker) == (32, 4, 2))
    await wait_until_in_sync(first, second)


async def test_the_load_of_an_exited_replica_is_removed(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    await until(lambda: load(second, worker) == (16, 4, 1))
    await replicas.boxes[0].runtime.close()
    await until(lambda: load(second, worker) == (0, 0, 0))
    remote = sync_of(second).remote
    await until(lambda: len(remote) == 0)


async def test_lost_messages_are_repaired(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    await until(lambda: load(second, worker) == (16, 4, 1))
    first.picker.free("a")
    first.picker.pick("b", PROMPT)
    assert len(sync_of(first).local.take_pending()) == 1  # lost
    remote = sync_of(second).remote
    await until(lambda: remote.gaps == 1 and remote.is_in_sync())
    assert load(second, worker) == (16, 4, 1)
    first.picker.free("b")
    await until(lambda: load(second, worker) == (0, 0, 0))


async def test_old_queries_are_forgotten(replicas: Replicas) -> None:
    await replicas.worker()
    made = sync_of(await replicas.router())
    now_s = asyncio.get_running_loop().time()
    made._queried_s = {7: now_s - sync.REPEAT_QUERY_S, 8: now_s}
    made._request_snapshot(9)
    assert made._queried_s.keys() == {8, 9}


async def test_load_of_a_worker_that_is_not_known_yet(replicas: Replicas) -> None:
    await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    late = await replicas.worker()
    await until(lambda: late.id in first.picker.worker_pool.members)
    await until(lambda: late.id in second.picker.worker_pool.members)
    for number in range(4):
        first.picker.pick(str(number), PROMPT)
    both = [load(first, worker) for worker in replicas.workers]
    await until(lambda: [load(second, worker) for worker in replicas.workers] == both)
    second._remove(late.id)  # as if discovered late
    second._add(late.id)
    assert [load(second, worker) for worker in replicas.workers] == both


async def test_predicted_blocks_of_a_replica_are_held_until_its_request_ends(
    replicas: Replicas,
) -> None:
    await replicas.worker(RuntimeConfig(total_kv_blocks=100))
    chosen: dict[str, Any] = {"kv_events": False, "approximate_cache_policy": "lru"}
    first, second = await replicas.router(**chosen), await replicas.router(**chosen)
    await wait_until_in_sync(first, second)
    predicted = kv(second).predicted
    assert predicted is not None
    first.picker.pick("a", PROMPT)
    await until(lambda: predicted.leases() == 1)
    first.picker.free("a")
    await until(lambda: predicted.leases() == 0)


async def test_predictions_are_shared(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first = await replicas.router(kv_events=False)
    second = await replicas.router(kv_events=False)
    await wait_until_in_sync(first, second)
    assert second.picker.pick(None, PROMPT).overlap_blocks == 0
    first.picker.pick("a", PROMPT)
    await until(lambda: second.picker.pick(None, PROMPT).overlap_blocks == 4)
    first.picker.free("a")
    await until(lambda: load(second, worker) == (0, 0, 0))
    assert second.picker.pick(None, PROMPT).overlap_blocks == 4


async def test_optimistic_predictions_are_shared(replicas: Replicas) -> None:
    await replicas.worker()
    first = await replicas.router(predicted_ttl_s=60.0)
    second = await replicas.router(predicted_ttl_s=60.0)
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    await until(lambda: second.picker.pick(None, PROMPT).overlap_blocks == 4)


async def test_a_runtime_that_closes_first_ends_the_sync(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    await until(lambda: load(second, worker) == (16, 4, 1))
    await replicas.boxes[0].runtime.close()
    assert kv(first).local_requests is None
    first.picker.free("a")
    await until(lambda: load(second, worker) == (0, 0, 0))


async def test_a_router_that_closes_sends_the_ends_of_its_requests(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runtime goes on, and with it the publisher that the others follow."""
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    await until(lambda: load(second, worker) == (16, 4, 1))
    monkeypatch.setattr(sync, "HEARTBEAT_S", 3600.0)  # no missing heartbeat ends them
    await asyncio.sleep(0.1)
    first.picker.free("a")
    sync_of(first).close()
    await until(lambda: load(second, worker) == (0, 0, 0))


async def test_requests_of_a_worker_that_exits_are_forgotten_everywhere(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    for number in range(10):
        first.picker.pick(str(number), PROMPT)
    local, remote = sync_of(first).local, sync_of(second).remote
    await until(lambda: remote.requests() == 10)
    await worker.runtime.close()
    await until(lambda: len(local) == 0 and remote.requests() == 0)


async def test_forgotten_requests_expire_everywhere(replicas: Replicas) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    first.picker.pick("a", PROMPT)
    await until(lambda: load(second, worker) == (16, 4, 1))
    assert kv(first).expire(0.0) == ["a"]
    await until(lambda: load(second, worker) == (0, 0, 0))


async def test_replicas_with_another_block_size_are_ignored(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    sync_of(first).local.block_size = 2 * BLOCK
    first.picker.pick("a", PROMPT)
    await until(lambda: "its load is ignored" in caplog.text)
    assert load(second, worker) == (0, 0, 0)


async def test_without_the_flag_nothing_is_published(replicas: Replicas) -> None:
    await replicas.worker()
    box = Box(replicas.settings)
    replicas.boxes.append(box)
    live = await box.route()
    assert kv(live).local_requests is None
    other = DistributedRuntime(None, replicas.settings)
    subscription = other.subscribe("ns", "backend", ACTIVE_SEQUENCES, lambda *_: None)
    await other.start()
    await subscription.ready()
    assert subscription.publishers() == []
    await other.close()


async def test_a_closed_router_shows_no_replicas(replicas: Replicas) -> None:
    await replicas.worker()
    first, second = await replicas.router(), await replicas.router()
    await wait_until_in_sync(first, second)
    known = re.compile(r"^dynamo_component_router_replicas\S* (\d)", re.MULTILINE)
    assert known.findall(replicas.page(0)) == ["1"]
    await first.close()
    assert known.findall(replicas.page(0)) == ["0"]
    assert known.findall(replicas.page(1)) == ["1"]
