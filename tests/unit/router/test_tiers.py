"""Blocks below the device in decisions: their credit, and the load that is booked."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
from msgspec.structs import astuple

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.cli.route import table
from dynamo.config.router import RouterSettings
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from dynamo.router.caches.indexer import Indexer
from dynamo.router.decision.explanation import overlap_scores, potential_loads
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics

BLOCK = 4
PROMPT = array("I", range(100, 126))  # 26 tokens, six full blocks
LOCAL = block_hashes(PROMPT, BLOCK)
IDS = sequence_hashes(LOCAL)


class Nobody:
    """Counts nothing."""

    def applied(self, event_type: str, status: str) -> None:
        assert status == "ok", (event_type, status)

    def warning(self, kind: str, count: int = 1) -> None:
        raise AssertionError(kind)


class Box:
    """A picker over workers 1..n whose index follows KV events."""

    def __init__(self, workers: int = 2, **settings: Any) -> None:
        chosen = RouterSettings(mode="kv", **settings)
        index = make_index(chosen)
        assert index is not None
        self.picker = KvPicker(chosen, BLOCK, index, None, Random(1))
        self.indexer = Indexer(index, lambda recovery: None, Nobody())  # type: ignore[arg-type]
        self.told: dict[int, int] = {}
        for worker_id in range(1, workers + 1):
            self.picker.add_worker(worker_id, RuntimeConfig())
            slot = self.picker.worker_pool.members[worker_id].slots[0]
            self.indexer.add(worker_id, 0, slot, answers=False)

    def tell(
        self, worker_id: int, data: BlocksStored | BlocksRemoved | BlocksCleared, tier: str
    ) -> None:
        self.told[worker_id] = number = self.told.get(worker_id, 0) + 1
        self.indexer.apply(KvEventBatch(worker_id, [KvEvent(number, data, 0, tier)]))

    def store(self, worker_id: int, begin: int, end: int, tier: str = "device") -> None:
        """Store blocks ``begin`` to ``end`` of the prompt there."""
        parent = IDS[begin - 1] if begin else None
        data = BlocksStored(IDS[begin:end].tobytes(), LOCAL[begin:end].tobytes(), parent)
        self.tell(worker_id, data, tier)

    def costs(self) -> dict[int, float | None]:
        return {row.worker_id: row.cost for row in self.picker.explain(PROMPT).candidates}


def test_lower_tiers_continue_behind_the_device() -> None:
    box = Box()
    box.store(1, 0, 2)
    box.store(1, 0, 4, "host_pinned")
    box.store(1, 4, 5, "disk")
    assert box.costs() == {1: 6.5 - 2 - 0.75 * 2 - 0.25 + 6, 2: 6.5 + 6}
    assert astuple(box.picker.pick(None, PROMPT))[:4] == (1, 0, 2, 6)
    (row, _) = overlap_scores(box.picker.weigh(PROMPT), box.picker.worker_pool)["workers"]
    assert row == {
        "worker_id": 1,
        "dp_rank": 0,
        "device_blocks": 2,
        "host_pinned_blocks": 4,
        "disk_blocks": 5,
        "host_pinned_extension_blocks": 2,
        "disk_extension_blocks": 1,
        "shared_beyond_device_blocks": None,
    }


def test_a_gap_ends_the_blocks_of_a_tier() -> None:
    box = Box(1)
    box.store(1, 0, 1)
    box.store(1, 1, 6, "host_pinned")
    box.store(1, 1, 6, "disk")
    box.tell(1, BlocksRemoved(IDS[2:3].tobytes()), "host_pinned")
    found = box.picker.weigh(PROMPT).inputs
    assert found.tiers(0) == (1, 1, 4, 0)
    box.tell(1, BlocksRemoved(IDS[0:1].tobytes()), "device")
    assert box.picker.weigh(PROMPT).inputs.tiers(0) == (0, 0, 0, 0)


def test_blocks_that_moved_down_still_count_for_less() -> None:
    box = Box(1)
    box.store(1, 0, 6)
    before = box.costs()[1]
    box.store(1, 0, 6, "host_pinned")
    assert box.costs()[1] == before
    box.tell(1, BlocksRemoved(IDS.tobytes()), "device")
    assert box.costs()[1] == 6.5 - 0.75 * 6 + 6


def test_blocks_offloaded_by_id_alone_are_found() -> None:
    box = Box(1)
    box.store(1, 0, 6)
    box.tell(1, BlocksStored(IDS[:3].tobytes(), b""), "host_pinned")
    box.tell(1, BlocksRemoved(IDS[1:].tobytes()), "device")
    assert box.picker.weigh(PROMPT).inputs.tiers(0) == (1, 2, 0, 0)


def test_clearing_the_device_clears_everything() -> None:
    box = Box(1)
    for tier in ("device", "host_pinned", "disk"):
        box.store(1, 0, 3, tier)
    box.tell(1, BlocksCleared(), "host_pinned")
    assert box.picker.weigh(PROMPT).inputs.tiers(0) == (3, 0, 0, 0)
    box.tell(1, BlocksCleared(), "device")
    assert box.picker.weigh(PROMPT).inputs.tiers(0) == (0, 0, 0, 0)


@pytest.mark.parametrize(("given", "counts"), [("none", False), ("hicache", True)])
def test_shared_blocks_count_for_every_worker(given: str, counts: bool) -> None:
    box = Box(shared_cache_type=given, shared_cache_multiplier=0.5)
    box.store(1, 0, 2)
    box.store(2, 0, 4, "external")
    shared = (0.5 * 2, 0.5 * 4) if counts else (0.0, 0.0)
    assert box.costs() == {1: 12.5 - 2 - shared[0], 2: 12.5 - shared[1]}
    scores = overlap_scores(box.picker.weigh(PROMPT), box.picker.worker_pool)
    beyond = [row["shared_beyond_device_blocks"] for row in scores["workers"]]
    assert beyond == ([2, 4] if counts else [None, None])
    ranges = [[0, 4]] if counts else []
    hits = 4 if counts else 0
    assert scores["shared_cache"] == {
        "enabled": counts,
        "total_hit_blocks": hits,
        "ranges": ranges,
        "error": None,
    }


def test_shared_cache_hits_are_counted() -> None:
    registry = Registry()
    settings = RouterSettings(mode="kv", shared_cache_type="hicache")
    metrics = DecisionMetrics(registry, RouterLabels("ns", "backend", "tiny", "7"))
    picker = KvPicker(settings, BLOCK, make_index(settings), metrics, Random(1))
    picker.add_worker(1, RuntimeConfig())
    assert picker.index is not None
    picker.index.store(picker.index.slot(1, 0), None, IDS[:2], LOCAL[:2])
    picker.index.store(picker.index.slot(1, 0, 3), None, IDS[:3], LOCAL[:3])
    picker.pick("a", PROMPT)
    page = registry.render().decode()
    labels = 'dynamo_component="backend",dynamo_namespace="ns",router_id="7",worker_id="7"'
    assert f"dynamo_component_router_shared_cache_beyond_blocks_sum{{{labels}}} 1" in page
    assert f"dynamo_component_router_shared_cache_hit_rate_sum{{{labels}}} 0.5" in page


def test_a_tier_continues_behind_predicted_blocks() -> None:
    box = Box(1, predicted_ttl_s=60.0)
    box.picker.pick("a", PROMPT[: 3 * BLOCK])
    box.store(1, 0, 5, "host_pinned")
    assert box.picker.weigh(PROMPT).inputs.tiers(0) == (3, 2, 0, 0)


def test_shared_blocks_end_with_the_worker_that_reported_them() -> None:
    box = Box(shared_cache_type="hicache", shared_cache_multiplier=1.0)
    box.store(2, 0, 4, "external")
    assert box.costs()[1] == 8.5
    box.indexer.remove(2)
    box.picker.remove_worker(2)
    assert box.costs() == {1: 12.5}
    assert (
        overlap_scores(box.picker.weigh(PROMPT), box.picker.worker_pool)["shared_cache"]["ranges"]
        == []
    )


def test_the_multiplier_of_one_request() -> None:
    box = Box(1, shared_cache_type="hicache")
    box.store(1, 0, 6, "external")
    assert box.costs()[1] == 12.5
    found = box.picker.explain(PROMPT, override={"shared_cache_multiplier": 0.25})
    assert found.candidates[0].cost == 12.5 - 0.25 * 6


def test_only_uncached_tokens_are_booked() -> None:
    """26 tokens; 2 + 0.75 * 1 + 0.25 * 2 blocks of 4 tokens are 13 tokens that are not."""
    box = Box(1)
    box.store(1, 0, 2)
    box.store(1, 2, 3, "host_pinned")
    box.store(1, 3, 5, "disk")
    box.picker.pick("a", PROMPT)
    assert box.picker.active.load(0) == (13, 6, 1)
    inputs = box.picker.weigh(PROMPT).inputs
    (load,) = potential_loads(inputs, box.picker.worker_pool, box.picker.active)
    assert load["potential_prefill_tokens"] == 13 + 13


def test_weights_decide() -> None:
    """Two blocks on the device against four in host memory."""
    for weight, winner in ((0.75, 2), (0.25, 1)):
        box = Box(host_cache_hit_weight=weight)
        box.store(1, 0, 2)
        box.store(2, 0, 4, "host_pinned")
        assert box.picker.pick(None, PROMPT).worker_id == winner


def test_the_table_shows_tiers_where_there_are_any() -> None:
    box = Box(1, shared_cache_type="hicache", shared_cache_multiplier=0.5)
    box.store(1, 0, 2)
    assert "host" not in table(box.picker.explain(PROMPT))
    box.store(1, 2, 3, "host_pinned")
    box.store(1, 3, 5, "external")
    found = box.picker.explain(PROMPT)
    (row,) = found.candidates
    assert (row.overlap_blocks, row.host_pinned_blocks, row.disk_blocks) == (2, 1, 0)
    assert (row.shared_blocks, row.credit_blocks) == (2, 2 + 0.75 + 1.0)
    assert "host" in table(found) and "shared" in table(found)
