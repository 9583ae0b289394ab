"""``dynamo.llm.KvRouter`` over real workers in one process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError, InvalidArgument
from dynamo.llm import (
    KvRouter,
    KvRouterConfig,
    RadixTree,
    RouterConfig,
    RouterMode,
    RoutingConstraints,
)
from dynamo.llm.router_config import WITHOUT_EFFECT
from dynamo.runtime import DistributedRuntime

PROMPT = list(range(100, 114))  # 14 tokens, three full blocks of 4


class TwoWorkers:
    """Two workers that count to three, and a runtime that routes to them."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self.workers = [DistributedRuntime(None, settings) for _ in range(2)]
        self.runtime = DistributedRuntime(None, settings)
        self.requests: list[Any] = []
        self.proceed = asyncio.Event()
        self.proceed.set()

    async def start(self) -> None:
        for worker in self.workers:
            endpoint = worker.endpoint("ns.backend.generate")
            worker.tasks.spawn(endpoint.serve_endpoint(self._generate), name="worker")
        client = await self.runtime.endpoint("ns.backend.generate").client()
        changed = asyncio.Event()
        client.on_change(lambda added, removed: changed.set())
        while len(client.instance_ids()) < 2:
            changed.clear()
            await changed.wait()

    async def close(self) -> None:
        self.proceed.set()
        await self.runtime.close()
        for worker in self.workers:
            await worker.close()

    def router(self, **config: Any) -> KvRouter:
        config = {"use_kv_events": False, **config}
        endpoint = self.runtime.endpoint("ns.backend.generate")
        return KvRouter(endpoint, 4, KvRouterConfig(**config))

    async def _generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        yield {"token_ids": [1]}
        await self.proceed.wait()
        yield {"token_ids": [2]}
        yield {"token_ids": [3], "finish_reason": "stop"}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[TwoWorkers]:
    made = TwoWorkers(RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30))
    await made.start()
    yield made
    await made.close()


async def test_load_is_reserved_and_freed(cluster: TwoWorkers) -> None:
    """Check the numbers observed in Dynamo."""
    router = cluster.router(use_kv_events=True)
    worker_id, rank, overlap = await router.best_worker(PROMPT, request_id="a")
    assert (rank, overlap) == (0, 0) and worker_id in [w.instance_id for w in cluster.workers]

    async def load() -> tuple[int, int, int]:
        rows = await router.get_potential_loads(list(range(8)))
        (row,) = [row for row in rows if row["worker_id"] == worker_id]
        return (
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
            row["active_requests"],
        )

    assert await load() == (22, 5, 1)
    await router.mark_prefill_complete("a")
    assert await load() == (8, 5, 1)
    with pytest.raises(DynamoError, match="failed to book scheduler state: Request a already"):
        await router.best_worker(PROMPT, request_id="a")
    await router.free("a")
    assert await load() == (8, 2, 0)
    for call in (router.free, router.mark_prefill_complete):
        with pytest.raises(DynamoError, match="Request a not found"):
            await call("a")
    assert (await router.best_worker([]))[1:] == (0, 0)
    await router.close()


async def test_a_request_over_the_threshold_is_queued(cluster: TwoWorkers) -> None:
    router = cluster.router(router_queue_threshold=1e-6)  # 10 of ten million tokens

    async def book(name: str) -> None:
        await router.best_worker([ord(name)] * 14, request_id=name)

    await book("a")
    await book("b")
    waiting = asyncio.create_task(book("c"))
    given_up = asyncio.create_task(book("d"))
    await router.best_worker(PROMPT)  # reserves nothing
    await asyncio.sleep(0)
    assert not waiting.done()
    given_up.cancel()
    await router.mark_prefill_complete("a")
    await waiting
    await asyncio.wait([given_up])
    with pytest.raises(DynamoError, match="Request d not found"):
        await router.free("d")
    last = asyncio.create_task(book("e"))
    await asyncio.sleep(0)
    await router.close()
    with pytest.raises(DynamoError, match="shutting down"):
        await last


async def test_predicted_overlap(cluster: TwoWorkers) -> None:
    router = cluster.router()
    await router.best_worker(PROMPT)
    assert (await router.best_worker(PROMPT))[2] == 0
    home, _, _ = await router.best_worker(PROMPT, update_indexer=True)
    assert (await router.best_worker(PROMPT))[::2] == (home, 3)
    scores = await router.get_overlap_scores([*PROMPT[:8], 1, 2, 3, 4])
    assert (scores["block_size"], scores["num_blocks"]) == (4, 3)
    held = {row["worker_id"]: row["device_blocks"] for row in scores["workers"]}
    assert sorted(held.values()) == [0, 2] and held[home] == 2
    tree = RadixTree()
    for event in json.loads(await router.dump_events()):
        assert (event["storage_tier"], event["residency_domain"]) == ("device", "worker")
        tree.apply_event(event["worker_id"], json.dumps(event["event"]).encode())
    assert len(tree.dump_tree_as_events()) == 1
    await router.close()


async def test_weight_zero_has_no_index(cluster: TwoWorkers) -> None:
    router = cluster.router(overlap_score_weight=0)
    await router.best_worker(PROMPT, request_id="a")
    assert await router.dump_events() == "[]"
    assert [row["device_blocks"] for row in (await router.get_overlap_scores(PROMPT))["workers"]]
    await router.close()


async def test_generate(cluster: TwoWorkers) -> None:
    router = cluster.router()
    items = [item async for item in await router.generate(PROMPT, "m", {"max_tokens": 3})]
    assert [item["token_ids"] for item in items] == [[1], [2], [3]]
    home = items[0]["routing_data"]["worker_id"]["decode_worker_id"]
    assert items[-1]["routing_data"]["timing"]["kv_hit_rate"] == 0.0
    assert cluster.requests[0]["stop_conditions"]["max_tokens"] == 3
    assert (await router.best_worker(PROMPT))[::2] == (home, 3)
    others = [worker.instance_id for worker in cluster.workers if worker.instance_id != home]
    items = [item async for item in await router.generate(PROMPT, "m", worker_id=others[0])]
    assert items[0]["routing_data"]["worker_id"]["decode_worker_id"] == others[0]
    with pytest.raises(InvalidArgument, match="does not identify a known worker"):
        async for _ in await router.generate(PROMPT, "m", worker_id=5):
            pass
    with pytest.raises(InvalidArgument, match="not a preprocessed request"):
        await router.generate_from_request({"model": "m"})
    await router.close()


async def test_only_allowed_workers(cluster: TwoWorkers) -> None:
    router = cluster.router()
    for worker in cluster.workers:
        allowed = [worker.instance_id, 12345]
        assert (await router.best_worker(PROMPT, allowed_worker_ids=allowed))[0] in allowed[:1]
    with pytest.raises(InvalidArgument, match="no worker has the required taints: gpu"):
        constraints = RoutingConstraints(required_taints=["gpu"])
        await router.best_worker(PROMPT, routing_constraints=constraints)
    await router.close()


async def test_an_abandoned_stream_frees_its_load(cluster: TwoWorkers) -> None:
    router = cluster.router()
    cluster.proceed.clear()
    stream = await router.generate(PROMPT, "m")
    assert (await anext(stream))["token_ids"] == [1]
    loads = await router.get_potential_loads(list(range(8)))
    assert sorted(row["active_requests"] for row in loads) == [0, 1]
    await stream.aclose()  # type: ignore[attr-defined]
    loads = await router.get_potential_loads(list(range(8)))
    assert [row["active_requests"] for row in loads] == [0, 0]
    await router.close()


def test_configurations_become_settings() -> None:
    made = KvRouterConfig(2.0, router_temperature=0.5, router_ttl_secs=7).settings()
    assert (made.mode, made.prefill_weight, made.temperature, made.ttl_s) == ("kv", 2.0, 0.5, 7)
    assert made.admission_control == "none"
    config = RouterConfig(RouterMode.LeastLoaded, None, 0.8, session_affinity_ttl_secs=60)
    made = config.settings()
    assert (made.mode, made.admission_control) == ("least-loaded", "token-capacity")
    assert (made.active_decode_blocks_threshold, made.session_affinity_ttl_s) == (0.8, 60)
    with pytest.raises(ConfigError):
        KvRouterConfig(router_temperature=-1).settings()
    made = KvRouterConfig(
        host_cache_hit_weight=0.5,
        disk_cache_hit_weight=0.1,
        decode_active_request_weight=2.0,
        shared_cache_multiplier=0.3,
        shared_cache_type="hicache",
    ).settings()
    assert (made.host_cache_hit_weight, made.disk_cache_hit_weight) == (0.5, 0.1)
    assert (made.shared_cache_multiplier, made.shared_cache_type) == (0.3, "hicache")
    assert made.decode_active_request_weight == 2.0
    assert "router_replica_sync" not in WITHOUT_EFFECT
