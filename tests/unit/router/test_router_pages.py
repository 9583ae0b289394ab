"""Every metric of the router is exported, with the values of real workers and requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_kit import PROMPT, Box, stored, until

from dynamo.config.runtime import RuntimeSettings
from dynamo.llm import KvEventPublisher
from dynamo.observability.names import MetricSpec, Router
from dynamo.observability.names_router import Hits, Predictions, RouterGate, RouterIndex
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.protocols.kv import KvQueryAnswer
from dynamo.router.api_views import overlap_scores
from dynamo.router.discovery.kv_router import ConnectedKvRouter
from dynamo.router.kv import KvPicker


@pytest_asyncio.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    """A box on file discovery in a directory of its own."""
    made = Box(RuntimeSettings(namespace="ns", state_dir=str(tmp_path), lease_ttl_s=30))
    yield made
    await made.close()


class Page:
    """The samples of a scrape."""

    def __init__(self, box: Box) -> None:
        self._lines = box.runtime.metrics.render().decode().splitlines()

    def sum(self, spec: MetricSpec, **labels: str) -> float:
        """Of all samples (histograms: of their counts) that have ``labels``; none is an error."""
        name = spec.name + ("_count" if spec.kind == "histogram" else "")
        lines = [line for line in self._lines if re.match(rf"{re.escape(name)}[{{ ]", line)]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if all(pair in line for pair in wanted)]
        assert found, f"{spec.name} {labels} is not on the page"
        return sum(float(line.rpartition(" ")[2]) for line in found)


def specs(room: type) -> list[MetricSpec]:
    """The metrics of one class."""
    return [value for value in vars(room).values() if isinstance(value, MetricSpec)]


def served(live: ConnectedKvRouter, name: str, **asked: Any) -> None:
    """One request from the choice to the end."""
    picker = live.picker
    picker.pick(name, PROMPT, routing=Routing(**asked))
    picker.mark_prefill_complete(name)
    picker.add_output_tokens(name, 5)
    picker.add_reused_tokens(7)
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
    for room in (Router, RouterIndex, Hits, RouterGate):
        for spec in specs(room):
            page.sum(spec)
    assert page.sum(Router.STARTED) == 6 and page.sum(Router.REQUESTS) == 4
    assert page.sum(Router.TOTAL_MS) == page.sum(Router.SCHEDULING_MS) == 6
    assert page.sum(Router.BLOCK_HASHING_MS) == page.sum(Router.FIND_MATCHES_MS) == 6
    assert page.sum(Router.TTFT) == page.sum(Router.OSL) == 4
    assert page.sum(Router.ITL) == 16
    assert page.sum(Router.EVENTS_APPLIED, event_type="stored", status="ok") >= 2
    assert page.sum(Router.EVENT_WARNINGS, warning_kind="duplicate") == 1
    assert page.sum(Router.WORKER_REGISTERED, worker_type="decode") == 2
    assert page.sum(RouterIndex.BLOCKS) == 3 and page.sum(RouterIndex.DROPPED_BLOCKS) == 0
    assert page.sum(RouterIndex.MEMORY_BYTES) > 0
    assert page.sum(Hits.REUSED_TOKENS, model="tiny", phase="aggregated") == 28
    assert page.sum(Hits.SELECTED_TOKENS) <= page.sum(Hits.BEST_TOKENS)
    assert page.sum(Hits.NON_MAX) == page.sum(Hits.LOST_BLOCKS)
    assert page.sum(RouterGate.BUSY_WORKERS) == 1 and page.sum(RouterGate.SESSIONS) == 1
    assert page.sum(RouterGate.SESSION_REQUESTS, outcome="kept") == 1
    assert page.sum(RouterGate.SESSIONS_DROPPED) == 1


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
    for spec in specs(Predictions):
        page.sum(spec)
    assert page.sum(Predictions.CONFIGURED_POLICY, policy=policy) == 1
    assert page.sum(Predictions.MEMORY_BYTES) > 0
    forgotten = Predictions.LRU_EVICTED if policy == "lru" else Predictions.PRUNED
    assert page.sum(forgotten) > 0


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
        rows = overlap_scores(picker, PROMPT)["workers"]
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
