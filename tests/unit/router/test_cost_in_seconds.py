"""The cost in seconds: what it learns of workers, and what it makes of it."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import pytest
from memory_kit import memory_of

from dynamo.config.router import RouterSettings
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.caches.prompt import CachedBlocks, HashedPrompt
from dynamo.router.decision.receipt import KvInputs
from dynamo.router.decision.seconds import Seconds
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.factory import make_index, summarize
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics

BLOCK = 16
TOKEN_S = 1e-4
FIXED_S = 0.01


class Pool:
    """Workers that compute one prompt after the other; ``slowness`` of each may change.

    Prompts arrive at random, and share nothing unless they are given.
    """

    def __init__(self, workers: int, noise: float = 0.0, **settings: Any) -> None:
        self.now_s = 0.0
        self.random = Random(5)
        self.noise = noise
        chosen = RouterSettings(mode="kv", cost="seconds", **settings)
        self.registry = Registry()
        labels = RouterLabels("a", "b", "m", "r", "decode")
        self.picker = KvPicker(
            chosen,
            BLOCK,
            make_index(chosen),
            DecisionMetrics(self.registry, labels),
            Random(1),
            lambda: self.now_s,
        )
        self.slowness = dict.fromkeys(range(1, workers + 1), 1.0)
        self.free_at_s = dict.fromkeys(self.slowness, 0.0)
        for worker_id in self.slowness:
            self.picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=100_000))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.ttft_s: list[float] = []

    def send(self, tokens: array[int]) -> int:
        """Route a prompt and compute it after those before it; return the worker."""
        name = str(next(self._numbers))
        chosen = self.picker.pick(name, tokens)
        worker_id, sent_s = chosen.worker_id, self.now_s
        fresh = max(len(tokens) - chosen.overlap_blocks * BLOCK, 1)
        work_s = (FIXED_S + fresh * TOKEN_S) * self.slowness[worker_id]
        work_s *= self.random.lognormvariate(0, self.noise)
        end_s = max(self.free_at_s[worker_id], self.now_s) + work_s
        self.free_at_s[worker_id] = end_s

        def computed() -> None:
            self.ttft_s.append(self.now_s - sent_s)
            self.picker.mark_prefill_complete(name)
            self._at(self.now_s + 0.5, lambda: self.picker.free(name))

        self._at(end_s, computed)
        return worker_id

    def run_until(self, now_s: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= now_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = now_s

    def load(self, requests: int, use: float) -> Counter[int]:
        """Send prompts of 1,000 to 3,000 tokens that use so much of all workers at slowness 1."""
        rate = use * len(self.slowness) / (FIXED_S + 2000 * TOKEN_S)
        sent: Counter[int] = Counter()
        for _ in range(requests):
            self.run_until(self.now_s + self.random.expovariate(rate))
            length = self.random.randrange(1000, 3000)
            sent[self.send(array("I", self.random.choices(range(1 << 30), k=length)))] += 1
        return sent

    def found(self, worker_id: int) -> float:
        """What the picker believes of a worker's slowness."""
        rows = self.picker.explain(array("I", [1])).candidates
        return next(row.slowness for row in rows if row.worker_id == worker_id)

    def wait_s(self, worker_id: int) -> float:
        """What the picker believes a new prompt waits there."""
        rows = self.picker.explain(array("I", [1])).candidates
        return next(row.seconds["wait"] for row in rows if row.worker_id == worker_id)

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), action))


def relative(pool: Pool) -> float:
    """How many times as slow as worker 2 is worker 1, in the picker's eyes."""
    return pool.found(1) / pool.found(2)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_worker_that_becomes_twice_as_slow_gets_half_the_share(noise: float) -> None:
    pool = Pool(4, noise)
    pool.load(200, 0.6)
    assert relative(pool) == pytest.approx(1.0, rel=0.3 if noise else 0.05)
    pool.slowness[1] = 2.0
    before = pool.load(1, 0.6)
    while before[1] < 50:
        before += pool.load(1, 0.6)
    assert relative(pool) > 1.5
    sent = pool.load(600, 0.6)
    assert sent[1] < 0.75 * sent[2]


@pytest.mark.parametrize("indexed", [True, False])
def test_running_requests_and_full_caches_count_with_and_without_an_index(indexed: bool) -> None:
    """Decode workers after a prefill are chosen without an index."""
    chosen = RouterSettings(mode="kv", cost="seconds")
    picker = KvPicker(chosen, BLOCK, make_index(chosen) if indexed else None, random=Random(1))
    for worker_id in range(4):
        picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=100))
    source, found = Random(2), Counter[int]()
    for number in range(40):
        tokens = array("I", [source.randrange(9999) for _ in range(10 * BLOCK)])
        found[picker.pick(str(number), tokens).worker_id] += 1
        picker.mark_prefill_complete(str(number))
    assert sorted(found.values()) == [10] * 4
    inputs = picker.weigh(array("I", range(10 * BLOCK))).inputs
    assert array("q", inputs.decode)[:4].tolist() == [110] * 4
    assert array("q", inputs.prefill)[:4].tolist() == [0] * 4


def test_workers_of_two_speeds_share_the_work_by_their_speed() -> None:
    pool = Pool(4)
    pool.slowness |= {1: 2.0, 2: 2.0}
    pool.load(200, 0.5)
    sent = pool.load(1500, 0.7)
    assert 1.5 < (sent[3] + sent[4]) / (sent[1] + sent[2]) < 3.0
    even = Pool(4)
    even.slowness |= {1: 2.0, 2: 2.0}
    even.picker = KvPicker(
        RouterSettings(mode="kv"), BLOCK, None, None, Random(1), lambda: even.now_s
    )
    for worker_id in even.slowness:
        even.picker.add_worker(worker_id, RuntimeConfig())
    even.load(1700, 0.7)
    assert sum(pool.ttft_s[-1000:]) < sum(even.ttft_s[-1000:])


def test_a_few_prompts_find_a_worker_that_is_slow_from_the_start() -> None:
    pool = Pool(4)
    pool.slowness[1] = 3.0
    sent = pool.load(20, 0.5)
    while sent[1] < 10:
        sent += pool.load(1, 0.5)
    pool.run_until(pool.now_s + 60)
    assert relative(pool) > 2.2


def test_noise_does_not_shift_how_slow_all_workers_seem() -> None:
    pool = Pool(4, 0.5)
    pool.load(3000, 0.6)
    assert all(0.7 < pool.found(worker_id) < 1.8 for worker_id in pool.slowness)


def test_one_prompt_is_enough_to_correct_a_prior_that_is_wrong_by_ten() -> None:
    pool = Pool(1)
    pool.slowness[1] = 10.0
    prompt = array("I", range(3200))
    pool.send(prompt)
    pool.run_until(20.0)
    pool.send(array("I", range(5000, 8200)))
    waiting = pool.picker.weigh(array("I", range(9000, 12_200))).inputs
    assert waiting.seconds(0, 0.0)["wait"] == pytest.approx(3.3, rel=0.3)


def test_a_waiting_prompt_is_cached_on_its_way_and_events_count_after_it() -> None:
    pool = Pool(2)
    pool.load(30, 0.3)
    pool.run_until(pool.now_s + 60)
    prompt = array("I", range(4800))
    worker_id = pool.send(prompt)
    assert pool.picker.pick(None, prompt).overlap_blocks == 300  # no event says so yet
    pool.run_until(pool.now_s + 60)  # computed; the worker has sent no event: it has evicted it
    weighed = pool.picker.weigh(prompt).inputs
    assert max(weighed.effective(slot) for slot in weighed.slots) == 0
    assert worker_id in (1, 2)


def test_a_hot_prefix_is_copied_once_its_prompts_have_waited() -> None:
    pool = Pool(4)
    pool.load(40, 0.3)
    pool.run_until(pool.now_s + 60)
    document = array("I", range(20_000))
    workers: Counter[int] = Counter()
    for number in range(300):  # 18 ms each, of which one worker can do 55 a second
        pool.run_until(pool.now_s + 0.010)
        question = array("I", [1_000_000 + 100 * number + i for i in range(80)])
        workers[pool.send(document + question)] += 1
    assert workers.most_common()[0][1] > 60  # not at once on all
    assert len(workers) >= 2


def test_prefixes_that_have_waited_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.router.decision.seconds._MAX_PREFIXES", 10)
    cost, slots = Seconds(BLOCK, (0.0, 0.0, 0.0)), array("I", [0, 1])
    cost.slots.set_fit(FIXED_S, TOKEN_S, 0.0)
    for slot in slots:
        cost.slots.add_slot(slot, 1e9)
    cost.slots.set_queue(0, 1.0, 1e6, 0.0, 0.0, 0.0, 0.0)
    cached = CachedBlocks(None)
    cached.device[0] = 1
    costs, decode_blocks = array("d", [0.0, 0.0]), array("q", bytes(128))

    def route() -> None:
        for number in range(5000):
            chained = array("Q", [number])
            prompt = HashedPrompt(BLOCK, 1, chained, chained, chained)
            cost.weigh(slots, cached, prompt, decode_blocks, costs)
            assert costs[0] > costs[1]
            cost.routed(0, slots, cached, prompt)

    assert memory_of(route).left < 100_000, "250 bytes each"


def test_the_terms_of_a_receipt_add_up_to_the_cost() -> None:
    pool = Pool(3)
    pool.load(100, 0.8)
    weighed = pool.picker.weigh(array("I", range(2000))).inputs
    assert isinstance(weighed, KvInputs)
    receipt = weighed.receipt()
    assert receipt.unit == "seconds" and len(receipt.candidates) == 3
    for row in receipt.candidates:
        assert set(row.terms) == {"wait", "compute", "others", "running"}
        assert row.cost == pytest.approx(sum(row.terms.values()))
    narrowed = weighed.narrowed(True).receipt()
    assert narrowed.candidates == receipt.candidates
    explained = pool.picker.explain(array("I", range(2000)))
    assert explained.speed is not None and explained.speed.samples > 0
    assert explained.speed.token_s == pytest.approx(TOKEN_S, rel=0.2)
    assert all(row.slowness == pytest.approx(1.0, rel=0.1) for row in explained.candidates)
    assert explained.router_cost == "seconds"
    assert explained.candidates[0].seconds == receipt.candidates[0].terms


def test_a_weight_for_one_request_makes_its_cost_one_in_blocks() -> None:
    pool = Pool(2)
    prompt = array("I", range(2000))
    assert pool.picker.weigh(prompt).inputs.unit == "seconds"
    for override in ({"overlap_score_weight": 2.0}, {"prefill_load_scale": 2.0}):
        assert pool.picker.weigh(prompt, None, override).inputs.unit == "blocks"
    kept = pool.picker.weigh(prompt, None, {"router_temperature": 0.5}).inputs
    assert kept.unit == "seconds"


def test_nothing_waits_when_all_have_ended() -> None:
    pool = Pool(2)
    for number in range(20):
        pool.picker.pick(f"dropped {number}", array("I", range(number, number + 500)))
    pool.load(50, 0.9)
    for number in range(20):
        pool.picker.free(f"dropped {number}")
    pool.run_until(pool.now_s + 60)
    assert (pool.wait_s(1), pool.wait_s(2)) == (0.0, 0.0)
    pool.picker.remove_worker(1)
    pool.picker.add_worker(3, RuntimeConfig())
    pool.slowness[3], pool.free_at_s[3] = 1.0, 0.0
    del pool.slowness[1]
    assert pool.load(20, 0.5)[3] > 0


def test_a_worker_that_is_announced_again_keeps_its_queue() -> None:
    pool = Pool(2)
    pool.load(40, 0.5)
    pool.run_until(pool.now_s + 60)
    worker_id = pool.send(array("I", range(20_000)))
    waiting_s = pool.wait_s(worker_id)
    assert waiting_s > 1
    pool.picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=50))
    assert pool.wait_s(worker_id) == waiting_s
    pool.run_until(pool.now_s + 60)
    assert pool.wait_s(worker_id) == 0
    assert pool.picker.weigh(array("I", range(2000))).inputs.seconds(0, 0.0)["running"] == 0


def test_the_error_of_the_estimate_is_measured() -> None:
    pool = Pool(2)
    pool.load(200, 0.5)
    pool.run_until(pool.now_s + 10)
    text = pool.registry.render().decode()
    counts = [line for line in text.splitlines() if "ttft_error_seconds_count" in line]
    assert counts and float(counts[0].split()[-1]) == 200
    sums = {
        name: float(line.split()[-1])
        for line in text.splitlines()
        for name in ("ttft_error_seconds_sum", "time_to_first_token_seconds_sum")
        if name in line
    }
    assert sums["ttft_error_seconds_sum"] < 0.3 * sums["time_to_first_token_seconds_sum"]


def test_it_is_named_in_the_summary_and_needs_an_index() -> None:
    assert "cost in seconds" in summarize(RouterSettings(mode="kv", cost="seconds"))
    ignored = RouterSettings(mode="kv", cost="seconds", overlap_score_weight=0.0)
    assert not ignored.in_seconds
