"""Caches predicted from own decisions: age, pruning, a worker's capacity, bounds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo._fast.hashing import sequence_hashes
from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.caches import predicted as predicted_module
from dynamo.router.caches.predicted import PredictedCache
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker

TTL_S = 10.0


class Box:
    """A predicted cache over an index with slots 0 and 1."""

    def __init__(
        self, max_blocks: int = 1000, ratio: float = 0.8, capacity: int | None = None
    ) -> None:
        self.index = RadixTree()
        self.slots = [self.index.slot(worker, 0) for worker in (1, 2)]
        self.cache = PredictedCache(self.index, TTL_S, max_blocks, ratio, capacity is not None)
        for slot in self.slots:
            self.cache.add_slot(slot, capacity)

    def route(
        self, ids: Sequence[int], now_s: float, slot: int = 0, request_id: str | None = None
    ) -> None:
        """A prompt of the blocks ``ids`` goes to ``slot``."""
        local = array("Q", ids)
        self.cache.routed(request_id, slot, sequence_hashes(local), local, now_s)
        self.cache._check()

    def depth(self, ids: Sequence[int], slot: int = 0) -> int:
        """Leading blocks that the slot is believed to hold."""
        return self.index.match(array("Q", ids)).get((slot + 1, 0), 0)


def test_what_was_routed_is_expected_there_for_the_ttl() -> None:
    box = Box()
    box.route([1, 2, 3], 0.0)
    assert (box.depth([1, 2, 9]), box.depth([1, 2, 3], slot=1)) == (2, 0)
    assert box.cache.expire(9.9) == 0
    assert box.cache.expire(10.0) == 3
    assert (box.depth([1, 2, 3]), box.cache.blocks(), box.index.blocks()) == (0, 0, 0)
    assert box.cache.counts.expired.value == 3


def test_routing_again_refreshes_the_shared_part_only() -> None:
    box = Box()
    box.route([1, 2, 3], 0.0)
    box.route([1, 2, 4], 6.0)
    box.cache.expire(10.0)
    assert (box.depth([1, 2, 3]), box.depth([1, 2, 4])) == (2, 3)
    box.cache.expire(16.0)
    assert box.index.blocks() == 0


def test_pruning_takes_the_oldest_first_and_leaves_before_parents() -> None:
    box = Box(max_blocks=10, ratio=0.6)
    box.route([1, 2, 3, 4, 5], 0.0)
    box.route([11, 12, 13, 14, 15], 1.0, slot=1)
    assert box.cache.blocks() == 10
    box.route([1, 2, 6], 2.0)
    assert box.cache.blocks() == 6
    assert box.cache.counts.pruned.value == 5
    assert (box.depth([1, 2, 6]), box.depth([1, 2, 3])) == (3, 2)
    assert box.depth([11, 12, 13, 14, 15], slot=1) == 3


def test_a_slot_used_again_starts_empty() -> None:
    box = Box()
    box.route([1, 2, 3], 0.0)
    box.index.remove_worker(1)
    box.cache.drop_slot(0)
    box.cache._check()
    assert box.index.slot(7, 0) == 0
    box.cache.add_slot(0, None)
    box.route([1, 2], 5.0)
    box.cache.expire(12.0)
    box.cache._check()
    assert box.index.match(array("Q", [1, 2, 3])) == {(7, 0): 2}


def test_a_dropped_slot_takes_no_more_blocks() -> None:
    box = Box()
    box.cache.drop_slot(1)
    box.route([1, 2], 0.0, slot=1)
    assert box.index.blocks() == 0


def test_a_request_that_is_routed_again_holds_its_last_blocks_alone() -> None:
    box = Box(capacity=4)
    box.route([1, 2, 3], 0.0, request_id="r")
    box.route([5, 6], 1.0, slot=1, request_id="r")
    box.route([7, 8, 9, 10], 2.0)
    assert box.depth([1, 2, 3]) == 0 and box.depth([5, 6], slot=1) == 2
    box.cache.ended("r", 3.0)
    assert box.cache.leases() == 0
    box.cache._check()


def test_lru_forgets_by_capacity_not_by_age() -> None:
    box = Box(capacity=4)
    box.route([1, 2, 3], 0.0)
    box.cache.expire(1e6)
    assert box.depth([1, 2, 3]) == 3
    box.route([5, 6], 1e6)
    assert (box.depth([1, 2, 3]), box.depth([5, 6])) == (2, 2)
    assert (box.cache.counts.evicted.value, box.cache.counts.evictions.value) == (1, 1)


def test_lru_keeps_what_runs() -> None:
    box = Box(capacity=4)
    box.route([1, 2, 3], 0.0, request_id="a")
    box.route([5, 6, 7], 1.0, request_id="b")
    assert (box.cache.blocks(), box.cache.leases()) == (6, 2)
    box.cache.ended("a", 2.0)
    box.cache._check()
    assert (box.depth([1, 2, 3]), box.depth([5, 6, 7]), box.cache.leases()) == (1, 3, 1)
    box.cache.ended("a", 3.0)
    box.cache.ended("unknown", 3.0)
    box.cache.ended("b", 4.0)
    box.cache._check()
    assert box.cache.blocks() == 4


def test_lru_without_a_known_capacity_ages() -> None:
    box = Box(capacity=4)
    box.cache.drop_slot(1)
    box.cache.add_slot(1, None)
    assert box.cache.fallbacks() == 1
    box.route([1, 2], 0.0, slot=1, request_id="a")
    box.cache.expire(TTL_S)
    assert box.depth([1, 2], slot=1) == 0
    box.cache.add_slot(1, 4)  # the card came late
    assert box.cache.fallbacks() == 0
    box.route([1, 2], 20.0, slot=1, request_id="b")
    box.cache.drop_slot(1)
    box.cache.ended("b", 21.0)


@pytest.mark.parametrize("capacity", [None, 100])
def test_the_same_prompt_for_ever_stays_small(capacity: int | None) -> None:
    box = Box(capacity=capacity)
    for turn in range(500):
        box.route(range(1, 21), turn * 0.001, request_id=str(turn))
        box.cache.ended(str(turn), turn * 0.001)
        box.cache.expire(turn * 0.001)
        if turn == 0:
            memory_bytes = box.cache.memory_bytes()
    assert (box.cache.blocks(), box.cache.memory_bytes()) == (20, memory_bytes)
    box.cache.expire(11.0)
    assert box.cache.blocks() == (20 if capacity else 0)


def test_no_call_forgets_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_module, "STEP_BLOCKS", 10)
    box = Box(max_blocks=200, ratio=0.5)
    for number in range(40):
        box.route([number * 10 + 1000 + one for one in range(5)], 0.0)
    assert box.cache.blocks() == 200
    box.route([1, 2], 0.0)
    assert box.cache.blocks() == 190
    for number in range(12):
        box.route([number + 10], 0.0)
    assert box.cache.blocks() == 100 + 3  # nothing is pruned once the target is reached
    assert box.cache.expire(TTL_S) == 10
    while box.cache.expire(TTL_S):
        box.cache._check()
    assert box.index.blocks() == 0


Step = tuple[int, list[int], float]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(1, 3), max_size=4), st.sampled_from([0, 1, 4])
        ),
        min_size=15,
        max_size=40,
    ),
    st.integers(3, 12),
)
def test_histories_agree_with_a_table_of_expiries(steps: list[Step], max_blocks: int) -> None:
    """The reference: (slot, prefix) → expiry; oldest expiry first, deeper first."""
    box, table, now_s = Box(max_blocks, 0.5), dict[tuple[int, tuple[int, ...]], float](), 0.0
    for slot, ids, pause_s in steps:
        now_s += pause_s + 0.001
        box.cache.expire(now_s)
        table = {key: at for key, at in table.items() if at + TTL_S > now_s}
        box.route(ids, now_s, slot)
        table |= {(slot, tuple(ids[:depth])): now_s for depth in range(1, len(ids) + 1)}
        if len(table) > max_blocks:
            order = sorted(table, key=lambda key: (table[key], -len(key[1])))
            for key in order[: len(table) - max_blocks // 2]:
                del table[key]
        assert box.cache.blocks() == len(table)
        for one in (0, 1):
            held = [depth for depth in range(len(ids) + 1) if (one, tuple(ids[:depth])) in table]
            assert box.depth(ids, one) == max(held, default=0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(1, 3), max_size=4), st.sampled_from([0, 1, 4])
        ),
        min_size=15,
        max_size=40,
    ),
    st.integers(1, 9),
)
def test_lru_histories_stay_sound(steps: list[Step], capacity: int) -> None:
    box = Box(10_000, capacity=capacity)
    for number, (slot, ids, pause) in enumerate(steps):
        box.route(ids, float(number), slot, str(number))
        box.cache.ended(str(number - int(pause)), float(number))
        box.cache._check()
    for number in range(len(steps)):
        box.cache.ended(str(number), 100.0)
        box.cache._check()
    assert all(box.index.held(slot) <= capacity for slot in box.slots)
    assert box.cache.leases() == 0


PROMPT = array("I", range(100, 114))


def make_kv(**given: object) -> KvPicker:
    """A picker that predicts, over workers 1 and 2 of ten blocks each."""
    settings = RouterSettings(mode="kv", kv_events=False, **given)  # type: ignore[arg-type]
    picker = make_picker(settings, 4, index=make_index(settings))
    assert isinstance(picker, KvPicker)
    for worker_id in (1, 2):
        picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=10))
    return picker


@pytest.mark.parametrize("policy", ["ttl", "lru"])
@pytest.mark.parametrize("reuse", [True, False])
def test_a_second_request_follows_the_first(policy: str, reuse: bool) -> None:
    picker = make_kv(approximate_cache_policy=policy, assume_kv_reuse=reuse)
    first = picker.pick("a", PROMPT)
    picker.mark_prefill_complete("a")
    picker.free("a")
    again = picker.pick("b", PROMPT)
    assert (again.worker_id, again.overlap_blocks) == (first.worker_id, 3)
    picker.remove_worker(first.worker_id)
    assert picker.pick("c", PROMPT).overlap_blocks == 0


def test_asking_alone_predicts_nothing() -> None:
    picker = make_kv()
    picker.pick(None, PROMPT)
    assert picker.pick("a", PROMPT).overlap_blocks == 0


def test_predictions_age_in_the_picker() -> None:
    picker = make_kv(ttl_s=0.000001)
    picker.pick("a", PROMPT)
    assert picker.pick("b", PROMPT).overlap_blocks == 0


def test_predictions_are_counted() -> None:
    registry, picker = Registry(), make_kv(max_tree_size=2, prune_target_ratio=0.5)
    assert picker.predicted is not None and picker.index is not None
    place = RouterLabels("ns", "backend", "m", "7")
    picker.predicted.export(registry, place, "ttl")
    picker.pick("a", PROMPT)
    page = registry.render().decode()
    here = 'dynamo_component="backend",dynamo_namespace="ns",worker_id="7"'
    assert f"dynamo_component_router_predicted_blocks_pruned_total{{{here}}} 2" in page
    assert 'approximate_cache_configured_policy{dynamo_component="backend",dynamo_name' in page
    assert "dynamo_component_router_index_blocks{" in page
