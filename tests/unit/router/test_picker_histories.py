"""Random histories of a picker: workers arrive, drain and leave while requests run.

``pytest --hypothesis-profile long`` runs longer and more histories.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from occurred import StateMachine, occurring

from dynamo.config.router import ROUTER_MODES, RouterSettings
from dynamo.errors import DynamoError
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.decision.receipt import InflightInputs
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import InflightPicker

BLOCK = 2
WORKERS = st.integers(1, 4)
REQUESTS = st.integers(0, 11).map(str)
PROMPTS = st.builds(
    lambda prefix, length: array("I", [prefix, *range(length)]),
    st.integers(0, 2),
    st.integers(0, 30),
)
KV_SETTINGS: list[dict[str, Any]] = [
    {"kv_events": False, "approximate_cache_policy": "lru", "max_index_blocks": 60},
    {"kv_events": False, "approximate_cache_policy": "lru", "duplicate_cost": 4.0},
    {"kv_events": False, "approximate_cache_policy": "lru", "track_output_blocks": True},
    {"kv_events": False, "ttl_s": 5.0, "max_tree_size": 40},
    {"predicted_ttl_s": 2.0, "duplicate_cost": 4.0, "prefill_load_model": "fitted"},
    {"overlap_score_weight": 0.0},
]


class Clock:
    """A clock that the history advances."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Histories(StateMachine):
    """A picker, and a plain record of which request runs where."""

    picker: KvPicker | InflightPicker

    def start(self, picker: KvPicker | InflightPicker, clock: Clock) -> None:
        self.picker, self.clock = picker, clock
        self.running: dict[str, int] = {}
        self.workers: set[int] = set()
        for worker in (1, 2):
            self.add(worker, 1, 12, None)

    @rule(
        worker=WORKERS,
        ranks=st.sampled_from([1, 1, 3]),
        blocks=st.sampled_from([None, 3, 12]),
        publishes=st.sampled_from([None, True, False]),
    )
    def add(self, worker: int, ranks: int, blocks: int | None, publishes: bool | None) -> None:
        config = RuntimeConfig(
            data_parallel_size=ranks,
            total_kv_blocks=blocks,
            kv_event_publishing_enabled=publishes,
        )
        self.picker.add_worker(worker, config)
        self.workers.add(worker)

    @rule(worker=WORKERS)
    def remove(self, worker: int) -> None:
        """Remove a worker, known or not, with or without requests."""
        self.seen["removed with requests"] += worker in self.running.values()
        self.picker.remove_worker(worker)
        self.workers.discard(worker)
        self.running = {name: at for name, at in self.running.items() if at != worker}

    @rule(worker=WORKERS, avoided=st.booleans())
    def drain(self, worker: int, avoided: bool) -> None:
        """A draining worker gets nothing new, and its requests continue."""
        self.picker.worker_pool.avoid(worker, avoided)

    @rule(worker=WORKERS, rejected=st.booleans())
    def full(self, worker: int, rejected: bool) -> None:
        eligibility = self.picker.eligibility
        (eligibility.rejected if rejected else eligibility.recovered)(worker)

    @rule(name=REQUESTS, prompt=PROMPTS, pin=st.none() | WORKERS)
    def route(self, name: str, prompt: array[int], pin: int | None) -> None:
        routing = None if pin is None else Routing(backend_instance_id=pin)
        try:
            decision = self.picker.pick(name, prompt, routing=routing)
        except DynamoError:
            assert name in self.running or pin is not None or not self._available()
            self.seen["refused"] += name not in self.running
            return
        self.seen["pinned" if pin is not None else "routed"] += 1
        self.seen["a worker is busy"] += bool(self.picker.worker_pool.busy)
        assert decision.worker_id in self.workers and name not in self.running
        if isinstance(decision.inputs, InflightInputs):
            assert sum(decision.inputs.inflight) == len(self.running)
        self.running[name] = decision.worker_id

    @rule(name=REQUESTS, count=st.integers(1, 40))
    def tokens(self, name: str, count: int) -> None:
        self.picker.mark_prefill_complete(name)
        self.picker.add_output_tokens(name, count)

    @rule(name=REQUESTS, count=st.integers(0, 9))
    def end(self, name: str, count: int) -> None:
        self.picker.free(name, count)
        self.seen["ended"] += self.running.pop(name, None) is not None

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def _available(self) -> set[int]:
        return self.workers - self.picker.worker_pool.busy

    @invariant()
    def pool_is_consistent(self) -> None:
        pool = self.picker.worker_pool
        assert pool.members.keys() == self.workers
        assert {owner for owner, _ in pool.owners} - {-1} == self.workers
        assert pool.busy <= self.workers


class KvHistories(Histories):
    """The kv mode: also the columns of load and the predictions are consistent."""

    picker: KvPicker

    @initialize(chosen=st.sampled_from(KV_SETTINGS))
    def make(self, chosen: dict[str, Any]) -> None:
        router = RouterSettings(mode="kv", **chosen)
        index, clock = make_index(router), Clock()
        self.start(KvPicker(router, BLOCK, index, None, Random(1), clock), clock)

    @rule(prompt=PROMPTS, worker=WORKERS)
    def predict(self, prompt: array[int], worker: int) -> None:
        self.picker.predict(prompt, worker)

    @precondition(lambda self: bool(self.running))
    @rule(age_s=st.sampled_from([0.05, 2.0]))
    def expire(self, age_s: float) -> None:
        for name in self.picker.expire(age_s):
            del self.running[name]
            self.seen["expired"] += 1

    @invariant()
    def load_is_that_of_the_running_requests(self) -> None:
        picker = self.picker
        picker.active._check()
        for checked in (picker.predicted, picker.optimistic):
            if checked is not None:
                checked._check()
        booked = {name: picker.active._reservations[name].worker_id for name in self.running}
        assert booked == self.running and len(picker.active) == len(self.running)
        if picker.predicted is not None:
            assert picker.predicted.leases() <= len(self.running)


class ModeHistories(Histories):
    """The other modes: requests in flight are counted."""

    picker: InflightPicker

    @initialize(
        mode=st.sampled_from([mode for mode in ROUTER_MODES if mode not in ("kv", "direct")])
    )
    def make(self, mode: str) -> None:
        clock = Clock()
        router = RouterSettings(
            mode=mode, admission_control="token-capacity", active_prefill_tokens_threshold=40
        )
        self.start(InflightPicker(mode, Random(1), router, clock), clock)

    @invariant()
    def requests_in_flight_are_counted(self) -> None:
        self.picker._check()


STATES = ("removed with requests", "refused", "pinned", "routed", "a worker is busy", "ended")
TestKvHistories = occurring(KvHistories, *STATES, "expired")
TestModeHistories = occurring(ModeHistories, *STATES)
