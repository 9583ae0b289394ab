"""Predictions beside KV events, and the price of a second copy."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.config.router import RouterSettings
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.caches.predicted import OptimisticCache
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo_lab.routing.replay import Arrival, replay

BLOCK = 4


class Box:
    """A picker that follows events, over four workers, and a clock."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        chosen = RouterSettings(mode="kv", **settings)
        self.index = make_index(chosen)
        self.picker = KvPicker(chosen, BLOCK, self.index, clock=lambda: self.now_s)
        for worker_id in (1, 2, 3, 4):
            self.picker.add_worker(worker_id, RuntimeConfig())

    def hold(self, worker_id: int, tokens: array[int]) -> None:
        """An event: the worker has computed the prompt."""
        assert self.index is not None
        local = block_hashes(tokens, BLOCK)
        slot = self.picker.worker_pool.members[worker_id].slots[0]
        self.index.store(slot, None, sequence_hashes(local), local)

    def burst(self, count: int) -> set[int]:
        """Workers of ``count`` prompts with one long beginning, before any event; all end."""
        shared = list(range(1000, 1200))
        found = {
            self.picker.pick(str(number), array("I", [*shared, *[number] * 8])).worker_id
            for number in range(count)
        }
        for number in range(count):
            self.picker.free(str(number))
        return found


CACHE_FIRST: dict[str, Any] = {"prefill_load_scale": 64.0, "duplicate_cost": 32.0}


def test_a_burst_before_any_event_stays_together() -> None:
    box = Box(predicted_ttl_s=5.0, **CACHE_FIRST)
    assert len(box.burst(6)) == 1
    assert len(Box(**CACHE_FIRST).burst(12)) == 4


def test_predictions_end_after_the_ttl() -> None:
    box = Box(predicted_ttl_s=5.0)
    prompt = array("I", range(40))
    box.picker.pick("a", prompt)
    box.picker.free("a")
    box.now_s += 4.9
    assert box.picker.pick(None, prompt).overlap_blocks == 10
    box.now_s += 0.2
    assert box.picker.pick(None, prompt).overlap_blocks == 0


def test_the_greater_of_both_counts() -> None:
    box = Box(predicted_ttl_s=5.0)
    prompt = array("I", range(40))
    worker_id = box.picker.pick("a", prompt[:20]).worker_id
    box.picker.free("a")
    box.hold(worker_id, prompt[:8])
    assert box.picker.pick(None, prompt).overlap_blocks == 5
    box.hold(worker_id, prompt)
    assert box.picker.pick(None, prompt).overlap_blocks == 10


def test_a_removed_worker_is_forgotten() -> None:
    box = Box(predicted_ttl_s=5.0)
    prompt = array("I", range(40))
    box.picker.remove_worker(box.picker.pick("a", prompt).worker_id)
    assert box.picker.pick(None, prompt).overlap_blocks == 0
    box.picker.add_worker(9, RuntimeConfig(data_parallel_size=3))
    assert box.picker.pick(None, prompt).overlap_blocks == 0


def test_slots_are_those_of_the_pool_and_the_table_is_bounded() -> None:
    optimistic = OptimisticCache(5.0, 100, 0.8)
    optimistic.add_slot(2)
    depths = array("I", [9, 0, 1, 7])
    for number in range(40):
        local = array("Q", range(number * 10 + 1, number * 10 + 11))
        optimistic.routed(2, sequence_hashes(local), local, 0.0)
        optimistic.routed(1, sequence_hashes(local), local, 0.0)  # not known
        optimistic._check()
    optimistic.raise_into(local, depths, 1.0)
    assert depths.tolist() == [9, 0, 10, 7]
    assert 80 <= optimistic.blocks() <= 100
    assert optimistic.memory_bytes() > 0
    optimistic.drop_slot(2)
    optimistic._check()
    assert optimistic.blocks() == 0


def test_without_events_or_overlap_there_is_nothing_to_add() -> None:
    for settings in ({"kv_events": False}, {"overlap_score_weight": 0.0}):
        assert Box(predicted_ttl_s=5.0, **settings).picker.optimistic is None


def costs(**settings: Any) -> dict[int, float]:
    """By worker, of a 10-block prompt of which worker 1 holds 8 and worker 2 holds 4."""
    box = Box(**settings)
    prompt = array("I", range(40))
    box.hold(1, prompt[:32])
    box.hold(2, prompt[:16])
    by_slot = box.picker.weigh(prompt).inputs.cost_by_slot()
    return {
        member.worker_id: by_slot[member.slots[0]]
        for member in box.picker.worker_pool.members.values()
    }


def test_a_second_copy_has_its_price() -> None:
    assert costs() == {1: 12.0, 2: 16.0, 3: 20.0, 4: 20.0}
    # 2 and 10 blocks of prefill, 4 and 8 of them copies, at 5 * 8 / 10 each, all times 3
    assert costs(duplicate_cost=5.0, prefill_load_scale=3.0) == pytest.approx(
        {1: 6 + 10, 2: 18 + 10 + 3 * 4 * 4, 3: 30 + 10 + 3 * 8 * 4, 4: 30 + 10 + 3 * 8 * 4}
    )


def test_the_parts_of_a_cost_have_the_price_in_them() -> None:
    box = Box(duplicate_cost=5.0, prefill_load_scale=3.0)
    prompt = array("I", range(40))
    box.hold(1, prompt[:32])
    seen = box.picker.weigh(prompt).inputs
    for slot, cost in seen.cost_by_slot().items():
        found = seen.breakdown(slot, seen.load(slot, 0))
        assert cost == pytest.approx(3 * found.prefill_blocks + found.decode_blocks)


def test_uncached_prompts_have_no_price() -> None:
    box = Box(duplicate_cost=5.0)
    assert set(box.picker.weigh(array("I", range(40))).inputs.cost_by_slot().values()) == {20.0}


def test_copies_are_avoided_in_a_replay() -> None:
    arrivals = []
    for turn in range(6):
        for number in range(60):
            ids = [0, *(1 + number * 100 + block for block in range(3 * (turn + 1)))]
            arrivals.append(Arrival(turn * 2.0 + number * 0.03, ids, 20))
    plain = replay(arrivals, RouterSettings(mode="kv"), 4, 500)
    priced = replay(arrivals, RouterSettings(mode="kv", **CACHE_FIRST), 4, 500)
    assert priced.of_infinite > max(0.95, plain.of_infinite + 0.02)
    assert priced.request_imbalance < 1.3
