"""The line before the workers, with a clock and a loop that the test moves."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from occurred import StateMachine, occurring
from prometheus_client.parser import text_string_to_metric_families

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.errors import (
    Cancelled,
    DynamoError,
    InvalidArgument,
    NoInstances,
    Overloaded,
    RouterQueueLimitExceeded,
    Unavailable,
)
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.connect.routed import wait_for_decision
from dynamo.router.decision.decision import Decision
from dynamo.router.labels import RouterLabels
from dynamo.router.load.prefill_model import PrefillSpeed
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.queue.classes import QueueMetrics
from dynamo.router.queue.request_queue import (
    TICK_S,
    QueuedRequest,
    RequestQueue,
    make_queue,
)
from dynamo.runtime import Context

BLOCK, BATCH = 4, 100


class Timer:
    """A call to come."""

    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at, self.callback = at, callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class World:
    """A picker of workers with a batch of 100 tokens, its line, and everybody's outcome."""

    def __init__(self, workers: int = 2, **more: Any) -> None:
        chosen: dict[str, Any] = {"queue_threshold": 0.5, **more}
        self.settings = RouterSettings(mode="kv", **chosen)
        self.now = 100.0
        self.timers: list[Timer] = []
        self.registry = Registry()
        index = make_index(self.settings)
        self.picker = KvPicker(self.settings, BLOCK, index, None, Random(1), self.clock)
        metrics = partial(QueueMetrics, self.registry, "m")
        self.queue = RequestQueue(self.picker, self.settings, metrics, self.clock, self.later)
        self.outcomes: dict[str, Decision | DynamoError] = {}
        self.order: list[str] = []
        self.queued: dict[str, QueuedRequest] = {}
        for worker_id in range(1, workers + 1):
            self.add_worker(worker_id)

    def clock(self) -> float:
        return self.now

    def later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.timers.append(Timer(self.now + delay_s, callback))
        return self.timers[-1]

    def add_worker(self, worker_id: int, batch: int | None = BATCH) -> None:
        self.picker.add_worker(worker_id, RuntimeConfig(max_num_batched_tokens=batch))

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and the loop run what is due."""
        end = self.now + seconds
        while due := [one for one in self.timers if not one.cancelled and one.at <= end]:
            first = min(due, key=lambda one: one.at)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.callback()
        self.now = end
        self.timers = [one for one in self.timers if not one.cancelled]

    def ask(self, name: str, tokens: int = 60, first: int = 0, **hints: Any) -> bool:
        """Whether it went at once."""
        prompt = array("I", range(first, first + tokens))

        def settled(outcome: Decision | DynamoError) -> None:
            assert name not in self.outcomes
            self.outcomes[name] = outcome
            self.order.append(name)

        override = hints.pop("override", None)
        routing = Routing(**hints) if hints else None
        found = self.queue.submit(
            name, prompt, routing=routing, override=override, on_decision=settled, on_error=settled
        )
        if isinstance(found, QueuedRequest):
            self.queued[name] = found
            return False
        settled(found)
        return True

    def sample(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.registry.render().decode()):
            for one in family.samples:
                if one.name == f"dynamo_frontend_router_{name}" and (
                    {"model": "m", "policy_class": "default", "worker_type": "decode", **labels}
                    == {key: value for key, value in one.labels.items() if key != "le"}
                ):
                    return float(one.value)
        return 0.0


def fill(world: World, tokens: int = 60) -> None:
    """Give every worker more than half a batch."""
    for worker_id in world.picker.worker_pool.members:
        assert world.ask(
            f"fill {worker_id}", tokens, 5000 * worker_id, backend_instance_id=worker_id
        )


def test_at_once_while_one_worker_has_room() -> None:
    world = World()
    assert world.ask("a", 50) and world.ask("b", 51, 1000)
    assert world.ask("c", 60, 2000), "50 of 100 tokens are not more than half"
    assert not world.ask("d", 1, 3000)
    assert len(world.queue) == 1
    assert world.sample("queue_pending_requests") == 1
    assert world.sample("queue_pending_isl_tokens") == 1
    assert world.sample("admission_received_total") == 4
    assert world.sample("queue_backpressure_total", reason="prefill_load") == 1


@pytest.mark.parametrize("event", ["first token", "end", "new worker", "new config"])
def test_what_lets_the_head_go(event: str) -> None:
    world = World()
    fill(world)
    assert not world.ask("waits") and not world.ask("behind", 60, 2000)
    assert world.sample("queue_backpressure_total", reason="backlog") == 1
    world.turn()
    assert world.order == ["fill 1", "fill 2"]
    if event == "first token":
        world.picker.mark_prefill_complete("fill 2")
    elif event == "end":
        world.picker.free("fill 2")
    elif event == "new worker":
        world.add_worker(2**63)
    else:
        world.add_worker(2, 10_000)
    world.turn()
    decision = world.outcomes["waits"]
    assert isinstance(decision, Decision)
    if event != "new config":  # which makes no worker cheaper
        assert decision.worker_id == (2**63 if event == "new worker" else 2)
    assert ("behind" in world.outcomes) is (event == "new config"), "60 tokens fill the others"
    world.turn(1)
    assert world.sample("queue_wait_seconds_count") == len(world.order) - 2


def test_a_worker_that_answers_again_lets_the_head_go() -> None:
    world = World()
    fill(world)
    world.picker.eligibility.avoid(3, True)
    world.add_worker(3)
    assert not world.ask("waits")
    world.turn()
    world.picker.eligibility.avoid(3, False)
    world.turn()  # at once, not at the next tick
    decision = world.outcomes["waits"]
    assert isinstance(decision, Decision) and decision.worker_id == 3


def test_an_unknown_batch_is_ten_million_tokens() -> None:
    world = World(0)
    world.add_worker(1, None)
    for number in range(5):
        assert world.ask(str(number), 60, number * 100)


def test_order_of_the_line_and_who_comes_meanwhile() -> None:
    world = World(1)
    fill(world)
    world.ask("first", 60, 0)
    world.ask("second", 60, 100)
    world.turn(0.5)
    world.ask("jumps", 60, 200, priority_jump=0.7)
    world.ask("strict", 60, 300, strict_priority=1)
    for running in ("fill 1", "strict", "jumps", "first"):
        world.picker.free(running)
        assert not world.ask(f"after {running}", 60, 1000 + 10 * len(world.order))
        world.turn()
    assert world.order[1:] == ["strict", "jumps", "first", "second"]


def test_the_shortest_work_goes_first_and_is_looked_at_again() -> None:
    world = World(1, queue_policy="wspt")
    fill(world)
    world.ask("long", 80, 0)
    world.ask("short", 40, 500)
    assert world.sample("queue_pending_cached_tokens") == 0
    hashes = block_hashes(array("I", range(80)), BLOCK)[:15]
    index = world.picker.index
    assert isinstance(index, RadixTree)
    index.store(world.picker.worker_pool.members[1].slots[0], None, sequence_hashes(hashes), hashes)
    world.turn(9)
    assert world.sample("queue_pending_cached_tokens") == 0
    world.turn(2)
    assert world.sample("queue_pending_cached_tokens") == 60, "20 of 80 tokens are left to compute"
    world.picker.free("fill 1")
    world.turn()
    assert world.order[1] == "long"
    decision = world.outcomes["long"]
    assert isinstance(decision, Decision) and decision.overlap_blocks == 15


@pytest.mark.parametrize(("cost", "first"), [("blocks", "long"), ("seconds", "short")])
def test_the_shortest_work_is_in_the_unit_of_the_cost(cost: str, first: str) -> None:
    world = World(1, queue_policy="wspt", cost=cost)
    # Attention alone: 20 tokens behind 60 cached ones take longer than 24 of a short prompt.
    speed = PrefillSpeed(fixed_s=1e-6, token_s=0, attention_s=1e-3, samples=50)
    world.picker.active.restore_prefill_speed(speed)
    fill(world)
    hashes = block_hashes(array("I", range(80)), BLOCK)[:15]
    index = world.picker.index
    assert isinstance(index, RadixTree)
    index.store(index.slot(1, 0, 0), None, sequence_hashes(hashes), hashes)
    world.ask("long", 80, 0)
    world.ask("short", 24, 500)
    assert world.sample("queue_pending_cached_tokens") == 60
    world.picker.free("fill 1")
    world.turn()
    assert world.order[1] == first


def test_what_lies_below_the_device_is_less_work_too() -> None:
    world = World(1, queue_policy="wspt")
    fill(world)
    hashes = block_hashes(array("I", range(80)), BLOCK)
    index = world.picker.index
    assert isinstance(index, RadixTree)
    index.store(index.slot(1, 0, 1), None, sequence_hashes(hashes), hashes)
    world.ask("long", 80, 0)
    world.ask("short", 40, 500)
    assert world.sample("queue_pending_cached_tokens") == 60, "three quarters of what host holds"
    world.picker.free("fill 1")
    world.turn()
    assert world.order[1] == "long"


def test_the_overlap_of_the_decision_is_that_of_its_time() -> None:
    world = World(1, overlap_refresh_after_s=0)
    fill(world)
    world.ask("a", 40, 0)
    hashes = block_hashes(array("I", range(40)), BLOCK)
    index = world.picker.index
    assert isinstance(index, RadixTree)
    index.store(world.picker.worker_pool.members[1].slots[0], None, sequence_hashes(hashes), hashes)
    world.turn(60)
    assert world.sample("queue_pending_cached_tokens") == 0
    world.picker.free("fill 1")
    world.turn()
    decision = world.outcomes["a"]
    assert isinstance(decision, Decision) and decision.overlap_blocks == 10


def test_who_leaves_is_not_booked() -> None:
    world = World(1)
    fill(world)
    world.ask("a")
    world.ask("b", 60, 1000)
    world.queued["a"].cancel()
    world.queued["a"].cancel()
    assert len(world.queue) == 1 and world.sample("queue_left_total") == 1
    world.picker.free("fill 1")
    world.turn()
    assert world.order == ["fill 1", "b"] and "a" not in world.picker.active
    world.queued["b"].cancel()
    assert "b" in world.picker.active, "it is the caller's by now"
    assert not world.timers, "no timer while the queue is empty"


def test_a_pinned_head_holds_up_the_line() -> None:
    world = World()
    fill(world)
    world.ask("pinned", 60, 0, backend_instance_id=1)
    world.ask("any", 60, 100)
    world.picker.free("fill 2")
    world.turn()
    assert world.order == ["fill 1", "fill 2"]
    world.picker.free("fill 1")
    world.turn()
    assert world.order[2:] == ["pinned", "any"]
    assert world.outcomes["pinned"].worker_id == 1  # type: ignore[union-attr]


def test_a_head_that_leaves_makes_room_at_once() -> None:
    world = World()
    fill(world)
    world.ask("pinned", 60, 0, backend_instance_id=1)
    world.ask("any", 60, 100)
    world.picker.free("fill 2")
    world.turn()
    world.queued["pinned"].cancel()
    world.turn()
    assert world.order[2:] == ["any"], "without waiting for a tick"


def test_all_that_wait_long_are_looked_at_again_however_many() -> None:
    world = World(1, queue_policy="wspt")
    fill(world)
    for number in range(100):
        world.ask(str(number), 40, 1000 * number)
    world.turn(9)
    for number in range(100):
        prompt = array("I", range(1000 * number, 1000 * number + 40))
        hashes = block_hashes(prompt, BLOCK)
        slot = world.picker.worker_pool.members[1].slots[0]
        world.picker.index.store(slot, None, sequence_hashes(hashes), hashes)  # type: ignore[union-attr]
    world.turn(2)
    assert world.sample("queue_pending_cached_tokens") == 100 * 40


def test_a_newcomer_that_is_first_goes_where_the_head_may_not() -> None:
    world = World()
    fill(world)
    world.ask("pinned", 60, 0, backend_instance_id=1)
    world.picker.free("fill 2")
    world.turn()
    assert not world.ask("strict", 60, 100, strict_priority=1)
    world.turn()
    assert world.order[2:] == ["strict"]


def test_what_cannot_be_served_is_told_at_its_turn() -> None:
    world = World()
    fill(world)
    world.ask("pinned", 60, 0, backend_instance_id=1)
    world.ask("any", 60, 100)
    world.picker.remove_worker(1)
    world.turn()
    assert isinstance(world.outcomes["pinned"], InvalidArgument)
    assert "any" not in world.outcomes
    world.picker.worker_pool.set_busy(2, True)  # without a callback to the queue
    world.turn(TICK_S)
    assert isinstance(world.outcomes["any"], Overloaded)
    assert world.sample("admission_rejected_total", reason="overloaded") == 1
    world.picker.worker_pool.set_busy(2, False)
    world.ask("last", 60, 200)
    world.picker.remove_worker(2)
    world.turn()
    assert isinstance(world.outcomes["last"], NoInstances)
    with pytest.raises(NoInstances):
        world.ask("too late")
    assert not world.timers


def test_what_cannot_be_served_at_all_is_told_at_once() -> None:
    world = World()
    fill(world)
    with pytest.raises(InvalidArgument, match="does not identify"):
        world.ask("a", backend_instance_id=9)
    with pytest.raises(InvalidArgument, match="router_temperature"):
        world.ask("b", override={"router_temperature": -1})
    world.ask("c")
    for taken in ("c", "fill 1"):
        with pytest.raises(InvalidArgument, match="already exists"):
            world.ask(taken, 60, 300)
    assert len(world.queue) == 1


def test_the_bound_and_the_end() -> None:
    world = World(1, queue_limit=2)
    fill(world)
    world.ask("a")
    world.ask("b", 60, 100)
    with pytest.raises(RouterQueueLimitExceeded, match=r"current=2, limit=2"):
        world.ask("c", 60, 200, strict_priority=5)
    assert world.sample("admission_rejected_total", reason="queue_limit") == 1
    world.queue.close()
    world.queue.close()
    assert isinstance(world.outcomes["a"], Unavailable)
    assert isinstance(world.outcomes["b"], Unavailable)
    with pytest.raises(Unavailable, match="shutting down"):
        world.ask("d")
    assert not [one for one in world.timers if not one.cancelled]


def test_one_that_fails_to_take_its_decision_is_freed(caplog: pytest.LogCaptureFixture) -> None:
    world = World(1)
    fill(world)

    def broken(outcome: object) -> None:
        raise ZeroDivisionError

    prompt = array("I", range(60))
    world.queue.submit("a", prompt, on_decision=broken, on_error=broken)
    world.ask("b", 60, 100)
    world.picker.free("fill 1")
    world.turn()
    assert "a" not in world.picker.active and "b" in world.outcomes
    assert "the decision callback failed" in caplog.text


def test_a_long_line_goes_in_turns_of_the_loop() -> None:
    world = World(1)
    fill(world)
    for number in range(100):
        world.ask(str(number), 4, 4 * number)
    world.add_worker(1, 10_000)
    world.timers[0].callback()
    assert 0 < len(world.queue) < 100
    world.turn()
    assert len(world.queue) == 0 and world.order[1:] == [str(number) for number in range(100)]


def test_only_the_kv_mode_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    kv = RouterSettings(mode="kv")
    registry, place = Registry(), RouterLabels("n", "c")
    assert make_queue(kv, KvPicker(kv, BLOCK, None), registry, place) is None
    blind = RouterSettings(mode="kv", queue_threshold=1.0, track_prefill_tokens=False)
    assert make_queue(blind, KvPicker(blind, BLOCK, None), registry, place) is None
    assert "--no-router-track-prefill-tokens" in caplog.text
    queued = RouterSettings(mode="kv", queue_threshold=1.0)
    before_prefill = RouterLabels("n", "c", phase="prefill", worker_type="prefill")
    assert make_queue(queued, KvPicker(queued, BLOCK, None), registry, before_prefill) is None
    assert isinstance(
        make_queue(queued, KvPicker(queued, BLOCK, None), registry, place), RequestQueue
    )


async def placed(world: World, name: str, context: Context | None = None) -> Decision:
    prompt = array("I", range(7000, 7060))
    return await wait_for_decision(world.queue, name, prompt, context=context)


async def test_a_task_waits_for_its_turn() -> None:
    world = World(1)
    fill(world)
    task = asyncio.create_task(placed(world, "a"))
    await asyncio.sleep(0)
    assert len(world.queue) == 1
    world.picker.free("fill 1")
    world.turn()
    assert (await task).worker_id == 1 and "a" in world.picker.active


@pytest.mark.parametrize("decided", [False, True])
async def test_a_cancelled_task_leaves_nothing(decided: bool) -> None:
    world = World(1)
    fill(world)
    task = asyncio.create_task(placed(world, "a"))
    await asyncio.sleep(0)
    if decided:
        world.picker.free("fill 1")
        world.turn()
        assert "a" in world.picker.active
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(world.queue) == 0 and "a" not in world.picker.active


@pytest.mark.parametrize("first", ["cancel", "turn"])
async def test_a_task_that_is_cancelled_in_the_turn_of_its_decision(first: str) -> None:
    world = World(1)
    fill(world)
    task = asyncio.create_task(placed(world, "a"))
    await asyncio.sleep(0)
    world.picker.free("fill 1")
    for step in (task.cancel, world.turn) if first == "cancel" else (world.turn, task.cancel):
        step()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(world.queue) == 0 and "a" not in world.picker.active


async def test_a_cancelled_context_leaves_the_line() -> None:
    world = World(1)
    fill(world)
    context = Context("a")
    task = asyncio.create_task(placed(world, "a", context))
    await asyncio.sleep(0)
    context.kill()
    with pytest.raises(Cancelled):
        await task
    assert len(world.queue) == 0
    with pytest.raises(Cancelled):
        await placed(world, "b", context)
    assert len(world.queue) == 0


class Machine(StateMachine):
    """Any history: no request is lost or booked twice, the queue is bounded and ordered."""

    names: list[str]

    @initialize(policy=st.sampled_from(["fcfs", "lcfs", "wspt"]))
    def begin(self, policy: str) -> None:
        self.world = World(2, queue_policy=policy, queue_limit=6)
        self.asked: set[str] = set()
        self.left: set[str] = set()
        self.ended: set[str] = set()
        self.strict: dict[str, int] = {}
        self.workers = 2

    @rule(tokens=st.integers(1, 90), strict=st.integers(0, 1), pin=st.booleans())
    def ask(self, tokens: int, strict: int, pin: bool) -> None:
        name = str(len(self.asked))
        hints: dict[str, Any] = {"strict_priority": strict}
        if pin and self.workers:
            hints["backend_instance_id"] = self.workers
        full = len(self.world.queue) == 6
        try:
            self.world.ask(name, tokens, 200 * len(self.asked), **hints)
        except RouterQueueLimitExceeded:
            assert full
            self.seen["full"] += 1
            return
        except NoInstances:
            assert not self.workers
            self.seen["no workers"] += 1
            return
        self.asked.add(name)
        self.strict[name] = strict
        self.seen["waits" if name in self.waiting() else "goes at once"] += 1

    def running(self) -> list[str]:
        return sorted(
            name
            for name, outcome in self.world.outcomes.items()
            if isinstance(outcome, Decision) and name not in self.ended
        )

    @precondition(lambda self: self.running())
    @rule(data=st.data(), early=st.booleans())
    def progress(self, data: st.DataObject, early: bool) -> None:
        name = data.draw(st.sampled_from(self.running()))
        if early:
            self.world.picker.mark_prefill_complete(name)
        else:
            self.world.picker.free(name)
            self.ended.add(name)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting())))
        self.world.queued[name].cancel()
        self.left.add(name)
        self.seen["leaves"] += 1

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        strict = max((self.strict[one] for one in self.waiting()), default=0)
        before = len(self.world.order)
        self.world.turn(seconds)
        gone = self.world.order[before:]
        if gone:
            self.seen["goes later"] += 1
            assert self.strict[gone[0]] == strict
        order = [self.strict[one] for one in gone]
        assert order == sorted(order, reverse=True)

    @rule(grow=st.booleans())
    def worker_pool(self, grow: bool) -> None:
        if grow and self.workers < 4:
            self.workers += 1
            self.world.add_worker(self.workers)
        elif not grow and self.workers:
            gone = self.workers
            self.workers -= 1
            self.seen["worker gone while one waits"] += bool(self.waiting())
            self.world.picker.remove_worker(gone)

    def waiting(self) -> set[str]:
        return self.asked - set(self.world.outcomes) - self.left

    @invariant()
    def nobody_is_lost(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        assert len(world.queue) == len(self.waiting()) <= 6
        assert not self.left & set(world.outcomes)
        for name in self.waiting() | self.left:
            assert name not in world.picker.active
        ticking = [one for one in world.timers if not one.cancelled]
        assert bool(ticking) >= bool(self.waiting()), "a timer is set"
        world.picker.active._check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if not self.workers:
            self.world.add_worker(1)
        for _ in range(200):
            for name in self.running():
                self.world.picker.free(name)
                self.ended.add(name)
            self.world.turn(TICK_S)
        assert not self.waiting(), "in the end everybody is told"
        assert len(self.world.picker.active) == 0


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = occurring(
    Machine,
    *("full", "no workers", "waits", "goes at once", "goes later", "leaves"),
    "worker gone while one waits",
)
