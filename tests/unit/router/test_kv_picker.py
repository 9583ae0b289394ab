"""The kv mode end to end in one process: index, active load, cost, choice, booking."""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import astuple

from dynamo._fast.hashing import block_hashes, seed_for, sequence_hashes
from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument, NoInstances
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.connect.replicas import PickerLoadSink
from dynamo.router.labels import RouterLabels
from dynamo.router.load.replica_loads import AddRequest, LocalRequests, SequenceEvent
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics

BLOCK = 4


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(workers: int = 3, clock: Clock | None = None, **settings: Any) -> KvPicker:
    """A picker with an index over workers 1..workers."""
    chosen = RouterSettings(mode="kv", **settings)
    index = make_index(chosen)
    made = KvPicker(chosen, BLOCK, index, None, Random(1), clock or Clock())
    for worker_id in range(1, workers + 1):
        made.add_worker(worker_id, RuntimeConfig())
    return made


def cache(picker: KvPicker, worker_id: int, tokens: array[int], blocks: int, **seed: str) -> None:
    """Store the first ``blocks`` blocks of the prompt on the worker."""
    index = picker.index
    assert isinstance(index, RadixTree)
    hashes = block_hashes(tokens, BLOCK, seed=seed_for(**seed))[:blocks]
    index.store(
        picker.worker_pool.members[worker_id].slots[0], None, sequence_hashes(hashes), hashes
    )


PROMPT = array("I", range(100, 114))  # 14 tokens, three full blocks


def test_the_longest_cached_prefix_wins_among_idle_workers() -> None:
    picker = make()
    cache(picker, 2, PROMPT, 2)
    cache(picker, 3, PROMPT, 3)
    assert astuple(picker.pick(None, PROMPT))[:4] == (3, 0, 3, 3)
    assert list(picker.weigh(PROMPT).inputs.cost_by_slot().values()) == [6.5, 4.5, 3.5]


@pytest.mark.parametrize(
    ("tokens", "block_size", "cached", "cost"),
    [(14, 4, 0, 6.5), (18, 4, 3, 5.5), (12, 16, 0, 0.75), (131, 16, 0, 16.1875), (80, 16, 0, 10.0)],
)
def test_measured_costs(tokens: int, block_size: int, cached: int, cost: float) -> None:
    """Fractional prefill, whole blocks of decode."""
    settings = RouterSettings(mode="kv")
    index = make_index(settings)
    assert index is not None
    picker = KvPicker(settings, block_size, index)
    picker.add_worker(1, RuntimeConfig())
    prompt = array("I", range(tokens))
    local = block_hashes(prompt, block_size)[:cached]
    index.store(index.slot(1, 0), None, sequence_hashes(local), local)
    assert list(picker.weigh(prompt).inputs.cost_by_slot().values()) == [cost]


def test_running_requests_cost_with_a_weight() -> None:
    picker = make(2, decode_active_request_weight=2.0)
    for number in range(3):
        routing = Routing(backend_instance_id=1)
        picker.pick(str(number), array("I"), routing=routing)
    assert list(picker.weigh(PROMPT).inputs.cost_by_slot().values()) == [6.5 + 6.0, 6.5]
    plain = {"decode_active_request_weight": 0}
    assert list(picker.weigh(PROMPT, override=plain).inputs.cost_by_slot().values()) == [6.5, 6.5]
    near = Routing(preferred_taints={"near": 0.5})
    picker.add_worker(1, RuntimeConfig(taints=["near"]))
    factor = math.exp(-math.tanh(0.5))
    assert picker.weigh(PROMPT, near).inputs.cost_by_slot()[0] == pytest.approx(12.5 * factor)


def test_load_outweighs_overlap() -> None:
    picker = make()
    cache(picker, 3, PROMPT, 3)
    pinned = Routing(backend_instance_id=3)
    picker.pick("long", array("I", range(1000, 1040)), routing=pinned)
    assert picker.pick(None, PROMPT).worker_id in (1, 2)


def test_observed_example_of_booked_load() -> None:
    """As Dynamo: 14 tokens with two blocks cached, then a cold query of 8 tokens."""
    picker = make(1)
    cache(picker, 1, PROMPT, 2)
    picker.pick("a", PROMPT)
    query = array("I", range(500, 508))

    def booked() -> tuple[int, int]:
        load = picker.weigh(query).inputs.load(0, 0)
        return load.prefill_tokens + len(query), load.decode_blocks

    assert booked() == (14, 5)
    picker.mark_prefill_complete("a")
    assert booked() == (8, 5)
    picker.free("a")
    assert booked() == (8, 2)


def test_a_pick_without_an_id_books_nothing() -> None:
    picker = make()
    picker.pick(None, PROMPT)
    assert len(picker.active) == 0


def test_exact_ties_are_spread() -> None:
    picker = make()
    counts = Counter(picker.pick(None, PROMPT).worker_id for _ in range(900))
    assert all(abs(count - 300) < 70 for count in counts.values())


def test_temperature_spreads_and_can_be_overridden() -> None:
    picker = make(temperature=1.0)
    cache(picker, 2, PROMPT, 2)
    cache(picker, 3, PROMPT, 3)
    counts = Counter(picker.pick(None, PROMPT).worker_id for _ in range(1500))
    for worker_id, expected in ((1, 265), (2, 516), (3, 720)):
        assert abs(counts[worker_id] - expected) < 80
    cold = {"router_temperature": 0.0}
    assert {picker.pick(None, PROMPT, override=cold).worker_id for _ in range(50)} == {3}


def test_bad_overrides_book_nothing() -> None:
    picker = make()
    with pytest.raises(InvalidArgument, match="router_temperature must be finite"):
        picker.pick("a", PROMPT, override={"router_temperature": -1})
    assert len(picker.active) == 0


def test_weight_zero_routes_by_load_alone() -> None:
    picker = make(overlap_score_weight=0.0)
    assert picker.index is None
    first = picker.pick("a", PROMPT).worker_id
    other = array("I", range(900, 914))
    assert picker.pick("b", other).worker_id != first


def test_untracked_blocks_leave_only_prefill() -> None:
    picker = make(track_active_blocks=False)
    costs = picker.weigh(array("I", range(12))).inputs.cost_by_slot()
    assert costs[0] == 12 / BLOCK


def test_untracked_prefill_leaves_only_blocks() -> None:
    picker = make(1, track_prefill_tokens=False)
    picker.pick("a", PROMPT)
    costs = picker.weigh(PROMPT).inputs.cost_by_slot()
    assert (picker.active.load(0), costs[0]) == ((0, 3, 1), 3.0)


def test_without_kv_reuse_every_request_counts_in_full() -> None:
    picker = make(1, assume_kv_reuse=False)
    picker.pick("a", PROMPT)
    picker.pick("b", PROMPT)
    assert picker.active.load(0) == (28, 6, 2)


def test_adapters_do_not_share_blocks() -> None:
    picker = make()
    cache(picker, 2, PROMPT, 3, lora_name="my-lora")
    assert picker.pick(None, PROMPT).overlap_blocks == 0
    routing = Routing(lora_name="my-lora")
    assert astuple(picker.pick(None, PROMPT, routing=routing))[:4] == (2, 0, 3, 3)


def test_short_and_empty_prompts() -> None:
    picker = make(1)
    assert astuple(picker.pick("a", array("I")))[:4] == (1, 0, 0, 0)
    assert astuple(picker.pick("b", array("I", [1, 2])))[:4] == (1, 0, 0, 0)


def test_each_rank_is_a_candidate() -> None:
    picker = make(0)
    picker.add_worker(5, RuntimeConfig(data_parallel_size=40, data_parallel_start_rank=2))
    ranks = [picker.pick(str(i), array("I", range(i * 50, i * 50 + 14))) for i in range(40)]
    assert sorted(decision.dp_rank for decision in ranks) == list(range(2, 42))


def test_a_removed_worker_is_forgotten() -> None:
    picker = make(2)
    cache(picker, 2, PROMPT, 3)
    picker.pick("a", PROMPT)
    picker.remove_worker(2)
    picker.remove_worker(2)
    picker.mark_prefill_complete("a")
    picker.add_output_tokens("a", 2)
    picker.free("a")
    assert astuple(picker.pick("b", PROMPT))[:4] == (1, 0, 0, 3)
    picker.remove_worker(1)
    with pytest.raises(NoInstances):
        picker.pick("c", PROMPT)
    picker.active._check()


def test_a_new_worker_in_an_old_slot_starts_empty() -> None:
    picker = make(1)
    cache(picker, 1, PROMPT, 3)
    picker.pick("a", PROMPT)
    picker.remove_worker(1)
    picker.add_worker(9, RuntimeConfig())
    assert astuple(picker.pick(None, PROMPT))[:4] == (9, 0, 0, 3)
    assert picker.active.load(0) == (0, 0, 0)


def test_requests_that_were_never_freed_expire() -> None:
    clock = Clock()
    picker = make(1, clock)
    picker.pick("a", PROMPT)
    clock.now += 10
    picker.pick("b", PROMPT)
    assert picker.expire(5.0) == ["a"]
    assert picker.expire(5.0) == []


def test_the_decision_is_explained_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    picker = make(2)
    cache(picker, 2, PROMPT, 3)
    with caplog.at_level(logging.DEBUG, "dynamo.router.explanations.decision_log"):
        picker.pick("a", PROMPT)
    assert [record.getMessage() for record in caplog.records] == [
        "Formula for worker_1: 6.500 = 1.0 * 3.500 + 3.0 (cached_blocks: 0)",
        "Formula for worker_2: 3.500 = 1.0 * 0.500 + 3.0 (cached_blocks: 3)",
        "[ROUTING] Best: worker_2 dp_rank=0 with 3/3 blocks overlap",
        "Selected worker router_mode=kv request_id=a worker_id=2 worker_type=decode dp_rank=0 "
        "logit=3.5 overlap_blocks=3 host_pinned_blocks=0 disk_blocks=0",
    ]


def test_metrics_follow_a_request() -> None:
    registry, clock = Registry(), Clock()
    settings = RouterSettings(mode="kv")
    metrics = DecisionMetrics(registry, RouterLabels("ns", "backend", "tiny", "7"))
    picker = KvPicker(settings, BLOCK, make_index(settings), metrics, Random(1), clock)
    picker.add_worker(1, RuntimeConfig())
    cache(picker, 1, PROMPT, 3)
    picker.pick("a", PROMPT)
    clock.now += 0.3
    picker.mark_prefill_complete("a")
    picker.add_output_tokens("a", 11)
    clock.now += 1.0
    picker.reused_tokens.value += 11
    picker.free("a")
    page = registry.render().decode()
    router = 'dynamo_component="backend",dynamo_namespace="ns",router_id="7",worker_id="7"'
    prefix = "dynamo_component_router"
    assert f"{prefix}_requests_started_total{{{router}}} 1" in page
    assert f"{prefix}_requests_total{{{router}}} 1" in page
    assert f'{prefix}_kv_hit_rate_bucket{{{router},le="0.9500000000000001"}} 0' in page
    assert f'{prefix}_kv_hit_rate_bucket{{{router},le="1"}} 1' in page
    assert f"{prefix}_output_sequence_tokens_sum{{{router}}} 11" in page
    assert f"{prefix}_inter_token_latency_seconds_count{{{router}}} 10" in page
    assert 'dynamo_router_overhead_total_ms_count{router_id="7"} 1' in page
    assert 'dynamo_router_overhead_seq_hashing_ms_count{router_id="7"} 1' in page
    modelled = 'dynamo_component="backend",dynamo_namespace="ns",model="tiny",phase="aggregated"'
    rest = f'{{{modelled},router_id="7",worker_id="7"}}'
    assert f"{prefix}_kv_selected_cached_prefix_tokens_total{rest} 12" in page
    assert f"{prefix}_kv_best_eligible_cached_prefix_tokens_total{rest} 12" in page
    assert f"{prefix}_kv_worker_reused_tokens_total{rest} 11" in page


def test_requests_of_a_removed_worker_have_ended() -> None:
    registry = Registry()
    settings = RouterSettings(mode="kv")
    metrics = DecisionMetrics(registry, RouterLabels("ns", "backend", "tiny", "7"))
    picker = KvPicker(settings, BLOCK, make_index(settings), metrics, Random(1), Clock())
    picker.local_requests = own = LocalRequests(1, BLOCK, False, lambda: None)
    picker.add_worker(1, RuntimeConfig())
    for number in range(5):
        picker.pick(str(number), PROMPT)
    for name in ("remote", "remote and forgotten"):
        PickerLoadSink(picker).book(name, SequenceEvent(name, 1, AddRequest(b"", 14, 14, 3), 0))
    picker.free("0")
    picker.free("remote and forgotten")
    picker.remove_worker(1)
    picker.free("1")
    assert len(own) == 0 and len(picker.active) == 0
    labels = 'dynamo_component="backend",dynamo_namespace="ns",router_id="7",worker_id="7"'
    ended = f"dynamo_component_router_requests_total{{{labels}}} 5"
    assert ended in registry.render().decode()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_removed_rank_leaves_no_load_in_its_slot(indexed: bool) -> None:
    """A worker has fewer ranks after a change of its configuration; later it exits."""
    settings = RouterSettings(mode="kv", overlap_score_weight=None if indexed else 0.0)
    picker = KvPicker(settings, BLOCK, make_index(settings), None, Random(1), Clock())
    picker.add_worker(1, RuntimeConfig(data_parallel_size=4))
    for number in range(4):
        picker.pick(str(number), array("I", range(number * 50, number * 50 + 14)))
    picker.add_worker(1, RuntimeConfig(data_parallel_size=1))
    assert {picker.pick(None, PROMPT).dp_rank for _ in range(20)} == {0}
    picker.add_worker(1, RuntimeConfig(data_parallel_size=2))  # what runs there was not forgotten
    rank = picker.worker_pool.members[1].slots[1]
    assert picker.active.load(rank)[2] == 1
    picker.add_worker(1, RuntimeConfig(data_parallel_size=1))
    picker.remove_worker(1)
    assert len(picker.active) == 0
    picker.add_worker(2, RuntimeConfig(data_parallel_size=4))
    assert {picker.active.load(slot) for slot in picker.worker_pool.candidates} == {(0, 0, 0)}


def test_lost_overlap_is_counted() -> None:
    registry = Registry()
    settings = RouterSettings(mode="kv")
    place = RouterLabels("ns", "backend", "tiny", "7", "prefill", "prefill")
    metrics = DecisionMetrics(registry, place)
    picker = KvPicker(settings, BLOCK, make_index(settings), metrics, Random(1), Clock())
    for worker_id in (1, 2, 3):
        picker.add_worker(worker_id, RuntimeConfig())
    cache(picker, 1, PROMPT, 1)
    cache(picker, 2, PROMPT, 3)
    picker.pick("best", PROMPT, routing=Routing(backend_instance_id=2))
    picker.pick("other", PROMPT, routing=Routing(backend_instance_id=1))
    picker.pick("worse", PROMPT, routing=Routing(allowed_worker_ids=[1, 3]))
    page = registry.render().decode()
    prefix = "dynamo_component_router"
    labels = 'dynamo_component="backend",dynamo_namespace="ns",router_id="7",worker_id="7"'
    typed = f'{{{labels},worker_type="prefill"}}'
    assert f"{prefix}_non_max_overlap_selections_total{typed} 1" in page
    assert f"{prefix}_overlap_blocks_lost_sum{typed} 1" in page
    modelled = 'dynamo_component="backend",dynamo_namespace="ns",model="tiny",phase="prefill"'
    rest = f'{{{modelled},router_id="7",worker_id="7"}}'
    assert f"{prefix}_kv_selected_cached_prefix_tokens_total{rest} 16" in page
    assert f"{prefix}_kv_best_eligible_cached_prefix_tokens_total{rest} 20" in page


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "power-of-two", "kv"])
def test_every_mode_has_a_picker(mode: str) -> None:
    settings = RouterSettings(mode=mode)
    picker = make_picker(settings, BLOCK, index=make_index(settings))
    picker.add_worker(1, RuntimeConfig())
    assert picker.pick("a", PROMPT).worker_id == 1
    picker.free("a")


def test_preferred_taints_make_a_worker_cheaper() -> None:
    picker = make()
    picker.add_worker(2, RuntimeConfig(taints=["fast", "near"]))
    routing = Routing(preferred_taints={"fast": 0.2, "near": 0.3, "other": 9.0})
    assert {picker.pick(None, PROMPT, routing=routing).worker_id for _ in range(20)} == {2}
    costs = picker.weigh(PROMPT, routing).inputs.cost_by_slot()
    assert costs[1] == pytest.approx(6.5 * math.exp(-math.tanh(0.5)))
    avoided = Routing(preferred_taints={"fast": -1.0})
    assert picker.pick(None, PROMPT, routing=avoided).worker_id != 2
    with pytest.raises(InvalidArgument, match="finite"):
        picker.pick("a", PROMPT, routing=Routing(preferred_taints={"fast": math.inf}))
    assert len(picker.active) == 0
