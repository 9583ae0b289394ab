"""Every metric of the router is exported, with the values of real workers and requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_kit import PROMPT, Box, stored
from metric_specs import declared_in, kind_of
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.llm import KvEventPublisher
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.protocols.kv import KvQueryAnswer
from dynamo.router.caches import indexer, predicted
from dynamo.router.connect import kv_router
from dynamo.router.connect.kv_router import ConnectedKvRouter
from dynamo.router.decision.explanation import overlap_scores
from dynamo.router.eligibility import eligibility_filter
from dynamo.router.load import active_load as active
from dynamo.router.modes import kv_metrics
from dynamo.router.modes.kv import KvPicker
from dynamo.router.queue import classes


@pytest_asyncio.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    """A box on file discovery in a directory of its own."""
    made = Box(RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30))
    yield made
    await made.close()


ROUTER = "dynamo_component_router"
OVERHEAD = "dynamo_router_overhead"
QUEUE = ("dynamo_frontend_router_queue_", "dynamo_frontend_router_admission_")
"""Metrics of the queue before a router, which these have not."""
SPECS = {
    spec.name: spec
    for spec in declared_in(
        kv_metrics, classes, active, indexer, predicted, kv_router, eligibility_filter
    )
    if not spec.name.startswith(QUEUE)
}
PREDICTED = [name for name in SPECS if re.search("_predicted_|_approximate_", name)]


class Page:
    """The samples of a scrape."""

    def __init__(self, box: Box) -> None:
        self._lines = box.runtime.metrics.render().decode().splitlines()

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples (histograms: of their counts) that have ``labels``; none is an error."""
        name += "_count" if kind_of(SPECS[name]) == "histogram" else ""
        lines = [line for line in self._lines if re.match(rf"{re.escape(name)}[{{ ]", line)]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if all(pair in line for pair in wanted)]
        assert found, f"{name} {labels} is not on the page"
        return sum(float(line.rpartition(" ")[2]) for line in found)


def served(live: ConnectedKvRouter, name: str, **asked: Any) -> None:
    """One request from the choice to the end."""
    picker = live.picker
    picker.pick(name, PROMPT, routing=Routing(**asked))
    picker.mark_prefill_complete(name)
    picker.add_output_tokens(name, 5)
    picker.reused_tokens.value += 7
    picker.free(name)


async def test_with_events(box: Box) -> None:
    settings = {
        "session_affinity_ttl_s": 60.0,
        "session_limit": 1,
        "admission_control": "token-capacity",
        "active_prefill_tokens_threshold": 1_000_000,
    }
    worker, other = await box.worker(), await box.worker()
    worker.answers = [KvQueryAnswer("tree_dump", [stored(0, 0, 2)], 5)]
    live = await box.route(shared_cache_type="hicache", **settings)
    await until(lambda: len(live.picker.worker_pool.members) == 2)
    await until(lambda: live.picker.pick(None, PROMPT).overlap_blocks == 2)
    worker.publish(stored(6, 2, 3), stored(6, 2, 3))
    await until(lambda: live.picker.pick(None, PROMPT).overlap_blocks == 3)
    served(live, "hit", backend_instance_id=worker.id)
    served(live, "miss", allowed_worker_ids=[other.id], session_id="a")
    served(live, "again", session_id="a")
    served(live, "next", session_id="b")
    live.picker.pick("running", PROMPT, routing=Routing(backend_instance_id=other.id))
    live.picker.pick("lost", PROMPT, override={"overlap_score_credit": -9})
    live.picker.worker_pool.set_busy(other.id, True)
    page = Page(box)
    for name in {*SPECS} - {*PREDICTED}:
        page.sum(name)
    assert page.sum(f"{ROUTER}_requests_started_total") == 6
    assert page.sum(f"{ROUTER}_requests_total") == 4
    for step in ("total", "scheduling", "block_hashing", "indexer_find_matches"):
        assert page.sum(f"{OVERHEAD}_{step}_ms") == 6
    assert page.sum(f"{ROUTER}_time_to_first_token_seconds") == 4
    assert page.sum(f"{ROUTER}_output_sequence_tokens") == 4
    assert page.sum(f"{ROUTER}_inter_token_latency_seconds") == 16
    cache = "dynamo_component_kv_cache"
    assert page.sum(f"{cache}_events_applied", event_type="stored", status="ok") >= 2
    assert page.sum(f"{cache}_event_warnings", warning_kind="duplicate") == 1
    assert page.sum(f"{ROUTER}_worker_registered", worker_type="decode") == 2
    assert page.sum(f"{ROUTER}_index_blocks") == 3
    assert page.sum(f"{ROUTER}_index_dropped_blocks") == 0
    assert page.sum(f"{ROUTER}_index_memory_bytes") > 0
    reused = f"{ROUTER}_kv_worker_reused_tokens_total"
    assert page.sum(reused, model="tiny", phase="aggregated") == 28
    selected = page.sum(f"{ROUTER}_kv_selected_cached_prefix_tokens_total")
    assert selected <= page.sum(f"{ROUTER}_kv_best_eligible_cached_prefix_tokens_total")
    moved = page.sum(f"{ROUTER}_non_max_overlap_selections_total")
    assert moved == page.sum(f"{ROUTER}_overlap_blocks_lost")
    assert page.sum(f"{ROUTER}_busy_workers") == 1 and page.sum(f"{ROUTER}_sessions") == 1
    assert page.sum(f"{ROUTER}_session_requests_total", outcome="kept") == 1
    assert page.sum(f"{ROUTER}_sessions_dropped_total") == 1


@pytest.mark.parametrize("policy", ["ttl", "lru"])
async def test_with_predictions(box: Box, policy: str) -> None:
    await box.worker(RuntimeConfig(total_kv_blocks=5))
    live = await box.route(kv_events=False, approximate_cache_policy=policy, max_tree_size=5)
    await until(lambda: len(live.picker.worker_pool.members) == 1)
    served(live, "a")
    for number in range(3):
        prompt = PROMPT[:]
        prompt[0] = 100 + number
        live.picker.pick(str(number), prompt)
        live.picker.free(str(number))
    page = Page(box)
    for name in PREDICTED:
        page.sum(name)
    assert page.sum(f"{ROUTER}_approximate_cache_configured_policy", policy=policy) == 1
    assert page.sum(f"{ROUTER}_predicted_memory_bytes") > 0
    lost = "approximate_lru_evicted_blocks" if policy == "lru" else "predicted_blocks_pruned"
    assert page.sum(f"{ROUTER}_{lost}_total") > 0


@pytest.mark.parametrize("threads", [1, 2])
async def test_tiers_survive_a_new_router(box: Box, threads: int) -> None:
    """A real worker's event log restores them, and live events follow."""
    worker = await box.worker(answers=False)
    publisher = KvEventPublisher(worker.runtime.endpoint("ns.backend.generate"), kv_block_size=4)
    publisher.publish_stored(PROMPT, [4] * 4, [11, 12, 13, 14])
    publisher.publish_stored([], [], [12, 13], medium="CPU")
    publisher.publish_stored(PROMPT[12:], [4], [14], 13, medium="NVME")
    publisher.publish_removed([12, 13, 14])
    live = await box.route(event_threads=threads)
    picker = live.picker
    assert isinstance(picker, KvPicker)

    def row() -> tuple[int, ...]:
        rows = overlap_scores(picker.weigh(PROMPT), picker.worker_pool)["workers"]
        tiers = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        return tuple(rows[0][tier] for tier in tiers) if rows else ()

    await until(lambda: row() == (1, 3, 4))
    publisher.publish_removed([13], "CPU")
    await until(lambda: row() == (1, 2, 2))
    publisher.publish_stored(PROMPT[4:8], [4], [12], 11)
    publisher.publish_stored([], [], [11], medium="CPU")
    publisher.publish_removed([11, 12])
    await until(lambda: row() == (0, 2, 2))
    publisher.publish_stored(PROMPT[8:12], [4], [13], 12, medium="SHARED")
    publisher.publish_stored(PROMPT[8:], [4, 4], [13, 14], 12, medium="DISK")
    await until(lambda: row() == (0, 2, 4))
