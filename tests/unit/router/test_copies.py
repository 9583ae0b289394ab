"""A hot prefix is copied once its prompts have lost the price of a copy by queueing."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from make_trace import hot_prefix
from memory_kit import memory_of

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.config.router import RouterSettings
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.decision import cost as duplicates
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo_lab.routing.replay import Arrival, replay

BLOCK = 4
CACHE_FIRST: dict[str, Any] = {"prefill_load_scale": 64.0, "duplicate_cost": 32.0}
KNOWN_BY: dict[str, dict[str, Any]] = {
    "events": {},
    "lru": {"kv_events": False, "approximate_cache_policy": "lru"},
    "ttl": {"kv_events": False, "ttl_s": 120.0},
    "events and predictions": {"predicted_ttl_s": 5.0},
}


def hot(**given: Any) -> list[Arrival]:
    """600 questions about a document of 40 blocks, 5 workers' worth at half load."""
    rows = hot_prefix(600, workers=10, load=0.5, document_blocks=40, question_blocks=4, **given)
    return [Arrival(row["timestamp"] / 1e3, row["hash_ids"], row["output_length"]) for row in rows]


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("known_by", KNOWN_BY)
@pytest.mark.parametrize("change", [{}, {"prefill_load_scale": 4.0}, {"duplicate_cost": 8.0}])
def test_a_hot_prefix_does_not_queue_at_its_holder(
    change: dict[str, Any], known_by: str, cold: bool
) -> None:
    settings = RouterSettings(mode="kv", **(CACHE_FIRST | KNOWN_BY[known_by] | change))
    report = replay(hot(cold=cold), settings, workers=10, blocks_per_worker=400)
    assert report.ttft_mean_s < 0.6
    assert report.of_infinite > 0.98


def test_the_same_load_gives_the_same_copies() -> None:
    settings = RouterSettings(mode="kv", **CACHE_FIRST)
    assert replay(hot(), settings, 10, 400) == replay(hot(), settings, 10, 400)


class Box:
    """A picker over three workers; the first has a document of 40 blocks cached."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        chosen = RouterSettings(mode="kv", **(CACHE_FIRST | settings))
        self.index = make_index(chosen)
        self.picker = KvPicker(chosen, BLOCK, self.index, clock=lambda: self.now_s)
        for worker_id in (1, 2, 3):
            self.picker.add_worker(worker_id, RuntimeConfig())
        self.document = list(range(BLOCK * 40))
        self.hold(1)

    def hold(self, worker_id: int) -> None:
        """Apply the event of a worker that has computed the document."""
        assert self.index is not None
        local = block_hashes(array("I", self.document), BLOCK)
        slot = self.picker.worker_pool.members[worker_id].slots[0]
        self.index.store(slot, None, sequence_hashes(local), local)

    def question(self, number: int) -> array[int]:
        """The document followed by two blocks."""
        return array("I", [*self.document, *[10_000 + number] * (2 * BLOCK)])

    def ask(self, *numbers: int) -> list[int]:
        """The workers of these questions, which keep running."""
        return [self.picker.pick(str(one), self.question(one)).worker_id for one in numbers]


def test_the_first_questions_queue_and_then_one_makes_a_copy() -> None:
    workers = Box().ask(*range(60))
    first = next(place for place, worker in enumerate(workers) if worker != 1)
    # The n-th question waits for 2 * n blocks; a copy has its price, and costs 40 blocks itself.
    lost = sum(2 * number for number in range(first))
    assert 40 < lost < 32 * 40 * 40 / 42
    assert workers.count(1) > 20
    dearer = Box(duplicate_cost=128.0).ask(*range(60))
    assert all(worker == 1 for worker in dearer[: first + 1])


def test_a_copy_in_progress_counts_as_held_until_its_first_token() -> None:
    box = Box()
    workers = box.ask(*range(40))
    maker = next(place for place, worker in enumerate(workers) if worker != 1)
    copied_to = box.picker.worker_pool.members[workers[maker]].slots[0]
    assert box.picker.weigh(box.question(99)).inputs.tiers(copied_to).device == 40
    assert box.picker.weigh(array("I", range(5000, 5100))).inputs.tiers(copied_to).device == 0
    box.picker.mark_prefill_complete(str(maker))
    assert box.picker.weigh(box.question(99)).inputs.tiers(copied_to).device == 0


def test_a_copy_whose_request_ends_or_whose_worker_exits_is_forgotten() -> None:
    for end in ("free", "exit"):
        box = Box()
        workers = box.ask(*range(40))
        maker = next(place for place, worker in enumerate(workers) if worker != 1)
        slot = box.picker.worker_pool.members[workers[maker]].slots[0]
        if end == "free":
            box.picker.free(str(maker))
        else:
            box.picker.remove_worker(workers[maker])
            box.picker.add_worker(9, RuntimeConfig())
            assert box.picker.worker_pool.members[9].slots[0] == slot
        assert box.picker.weigh(box.question(99)).inputs.tiers(slot).device == 0


def test_losses_decay() -> None:
    box = Box()
    for number in range(400):
        box.now_s += 20.0
        assert box.ask(number) == [1]
        box.picker.free(str(number - 5))


def test_a_snapshot_records_nothing_and_its_terms_add_up() -> None:
    box = Box()
    running = 0
    while (seen := box.picker.weigh(box.question(99)).inputs).free_copy is None:
        box.ask(running)
        running += 1
    for _ in range(5):
        assert box.picker.pick(None, box.question(99)).worker_id != 1
    assert seen.chosen == seen.free_copy
    for slot, cost in seen.cost_by_slot().items():
        found = seen.breakdown(slot, seen.load(slot, 0))
        assert cost == pytest.approx(64 * found.prefill_blocks + found.decode_blocks)
    assert box.ask(running, running + 1)[0] != 1


def test_no_price_no_copies() -> None:
    box = Box(duplicate_cost=0.0)
    for number in range(20):
        seen = box.picker.weigh(box.question(99)).inputs
        assert seen.free_copy is None
        assert not any("copies" in row.terms for row in seen.candidates())
        box.ask(number)


def test_the_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_MAX_PREFIXES", 10)
    monkeypatch.setattr(duplicates, "_MAX_COPIES_IN_PROGRESS", 3)
    policy = duplicates.CopyPolicy()

    def route() -> None:
        for prefix in range(100, 10_000):
            offer = duplicates.CopyOffer(prefix, 1, 2, 5.0, False)
            policy.routed(f"queued {prefix}", 1, offer._replace(prefix=-prefix), 0.0)
            policy.routed(f"copied {prefix}", 2, offer, 0.0)

    assert memory_of(route).left < 400_000
    assert [one for one in range(10_000) if policy.in_progress(array("Q", [one]))] == [
        100,
        101,
        102,
    ]


def test_sessions_about_one_document_do_not_queue_at_its_holder() -> None:
    """Each session's prompts share more than the document, so that every prefix is a new one."""
    arrivals = [Arrival(0.0, list(range(100)), 1)]
    for number in range(120):
        blocks, parent = list(range(100)), None
        for turn in range(8):
            first_new = 1000 + (number * 8 + turn) * 4
            blocks = [*blocks, *range(first_new, first_new + 4)]
            arrivals.append(Arrival(10.0 + number / 20, blocks, 50, parent, 0.5))
            parent = len(arrivals) - 1
    report = replay(arrivals, RouterSettings(mode="kv", **CACHE_FIRST), 6, 1500)
    assert report.ttft_mean_s < 6.0  # 44 s with a price that demand does not lower
    assert report.request_imbalance < 4.0
