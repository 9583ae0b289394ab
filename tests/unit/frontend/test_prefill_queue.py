"""The prefill queue against a plain list: no request is lost, order and slots hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from occurred import StateMachine, occurring

from dynamo.errors import Overloaded
from dynamo.router.queue.prefill import Capacity, PrefillQueue

LIMIT = 6
WORKERS = (1, 2, 3)


def served(queue: PrefillQueue[str], tokens: int = 10) -> list[tuple[str, int]]:
    """Start every request that has a free slot, at the first worker allowed."""
    sent = []
    while (turn := queue.next()) is not None:
        worker = (turn.workers or queue.workers)[0]
        queue.start(turn.request, worker, tokens)
        sent.append((turn.request, worker))
    return sent


def test_a_worker_gets_no_more_than_its_slots_and_the_rest_wait_in_order() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.set_worker(1, Capacity(10**6, 2))
    for number, name in enumerate("abcd"):
        queue.add(name, float(number))
    assert served(queue) == [("a", 1), ("b", 1)]
    assert len(queue) == 2 and queue.running == 2
    queue.finish("b")
    assert served(queue) == [("c", 1)]


def test_tokens_are_slots_too_and_an_idle_worker_takes_any_prompt() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.set_worker(1, Capacity(100, 10))
    for number, name in enumerate("abc"):
        queue.add(name, float(number))
    assert served(queue, 400) == [("a", 1)], "larger than the batch, but the worker is idle"
    queue.finish("a")
    assert served(queue, 60) == [("b", 1), ("c", 1)], "60 of 100: there is room for one more"


def test_strict_priority_then_boost_then_arrival() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.add("old", 0.0)
    queue.add("hinted", 5.0, priority_boost_s=6.0)
    queue.add("strict", 9.0, strict=1)
    queue.set_worker(1, Capacity(1, 1))
    order = []
    while (turn := queue.next()) is not None:
        queue.remove(turn.request)
        order.append(turn.request)
    assert order == ["strict", "hinted", "old"]


def test_requeued_requests_go_first_in_order_whatever_the_priority() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.set_worker(1, Capacity(10**6, 2))
    for number, name in enumerate("ab"):
        queue.add(name, float(number))
    served(queue)
    queue.add("c", 2.0, strict=9)
    assert queue.remove_worker(1) == []
    for request in queue.running_at(1):
        queue.requeue(request)
    queue.set_worker(2, Capacity(10**6, 5))
    assert [request for request, _ in served(queue)] == ["a", "b", "c"]


def test_others_overtake_pinned_requests() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    for worker in (1, 2):
        queue.set_worker(worker, Capacity(10**6, 1))
    queue.add("x", 0.0, pin=1)
    queue.add("y", 1.0, pin=1)
    queue.add("z", 2.0)
    assert served(queue) == [("x", 1), ("z", 2)]
    assert queue.remove_worker(1) == ["y"], "it waits for no other"
    queue.remove("y")
    assert len(queue) == 0


def test_unbound_requests_keep_their_rank() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    for worker in (1, 2):
        queue.set_worker(worker, Capacity(10**6, 1))
    for number, name in enumerate("abc"):
        queue.add(name, float(number))
    queue.bind("a", 2)
    queue.bind("nothing fits", 2)
    queue.start("b", 2, 1)
    assert queue.next() == ("c", [1]), "the head is bound to a worker without a slot"
    assert queue.waiting_for(2) == ["a"]
    queue.bind("a", None)
    assert queue.next() == ("a", [1])


def test_a_full_queue_rejects_unless_a_request_can_start_at_once() -> None:
    queue: PrefillQueue[str] = PrefillQueue(0)
    with pytest.raises(Overloaded, match="0 requests wait"):
        queue.add("a", 0.0)
    queue.set_worker(1, Capacity(10, 1))
    queue.add("a", 0.0)
    assert served(queue) == [("a", 1)]
    with pytest.raises(Overloaded):
        queue.add("b", 1.0)


def test_suspended_workers_get_nothing() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.set_worker(1, Capacity(10, 1))
    queue.suspend(1)
    queue.add("a", 0.0)
    assert queue.next() is None and queue.workers == [] and queue.all_workers == [1]
    queue.suspend(1, False)
    assert served(queue) == [("a", 1)]


def test_a_worker_that_returns_still_has_its_running_requests() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.set_worker(1, Capacity(10**6, 2))
    for number, name in enumerate("abc"):
        queue.add(name, float(number))
    assert served(queue) == [("a", 1), ("b", 1)]
    queue.remove_worker(1)
    queue.set_worker(1, Capacity(10**6, 2))
    queue._check()
    assert served(queue) == []
    queue.finish("a")
    assert served(queue) == [("c", 1)]


def test_a_worker_that_registers_again_is_not_suspended() -> None:
    queue: PrefillQueue[str] = PrefillQueue(LIMIT)
    queue.set_worker(1, Capacity(10**6, 2))
    queue.suspend(1)
    queue.add("a", 0.0)
    assert served(queue) == []
    queue.set_worker(1, Capacity(10**6, 2))
    assert served(queue) == [("a", 1)]


def test_removed_requests_leave_no_memory_behind() -> None:
    queue: PrefillQueue[int] = PrefillQueue(10)
    for number in range(5000):
        queue.add(number, float(number))
        queue.remove(number)
    queue._check()


class QueueMachine(StateMachine):
    """Any history of arrivals, departures, deaths, busy workers and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: set[int] = set()
        self.queue: PrefillQueue[int] = PrefillQueue(
            LIMIT, lambda request: request + 7, lambda: self.busy
        )
        self.slots: dict[int, Capacity] = {}
        self.waiting: list[int] = []  # in the order in which they must go, as all priorities agree
        self.running: dict[int, tuple[int, int]] = {}
        self.returned: list[int] = []
        self.pins: dict[int, int | None] = {}
        self.number = 0

    @initialize(requests=st.integers(1, 3), tokens=st.integers(1, 100))
    def begin(self, requests: int, tokens: int) -> None:
        for worker in WORKERS[:2]:
            self.come(worker, requests, tokens)

    @rule(worker=st.sampled_from(WORKERS), requests=st.integers(1, 3), tokens=st.integers(1, 100))
    def come(self, worker: int, requests: int, tokens: int) -> None:
        self.slots[worker] = Capacity(tokens, requests)
        self.queue.set_worker(worker, self.slots[worker])

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: int) -> None:
        stranded = [one for one in self.waiting if self.pins[one] == worker]
        assert self.queue.remove_worker(worker) == stranded
        self.seen["stranded"] += bool(stranded)
        for one in stranded:
            if one % 2:
                self.queue.bind(one, None)
                self.pins[one] = None
            else:
                self.queue.remove(one)
                self.waiting.remove(one)
        self.slots.pop(worker, None)
        left = [request for request, (at, _) in self.running.items() if at == worker]
        assert self.queue.running_at(worker) == left
        for request in left:
            del self.running[request]
            if self.pins[request] is None:
                self.queue.requeue(request)
            else:
                self.queue.remove(request)
        back = [request for request in left if self.pins[request] is None]
        self.returned = [one for one in self.returned if one in self.waiting]
        front = len(self.returned)
        self.waiting[front:front] = back
        self.seen["back to the front"] += bool(back and self.waiting[len(back) :])
        self.returned += back

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def turn_busy_or_not(self, data: st.DataObject) -> None:
        self.busy ^= {data.draw(st.sampled_from([*self.slots]))}

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.number += 1
        pin = data.draw(st.sampled_from([None, None, *self.slots]))
        free = self.free()
        slot = bool(free) if pin is None else pin in free
        behind = any(self.pins[one] == pin for one in self.waiting)
        if len(self.waiting) >= LIMIT and (behind or not slot):
            with pytest.raises(Overloaded):
                self.queue.add(self.number, float(self.number), pin=pin)
            self.seen["full"] += 1
            return
        self.queue.add(self.number, float(self.number), pin=pin)
        self.pins[self.number] = pin
        self.waiting.append(self.number)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.pins[request] = data.draw(st.sampled_from([None, *self.slots]))
        self.queue.bind(request, self.pins[request])

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([*self.waiting, *self.running]))
        self.queue.remove(request)
        self.running.pop(request, None)
        if request in self.waiting:
            self.waiting.remove(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([*self.running]))
        self.queue.finish(request)
        self.queue.finish(request)
        del self.running[request]
        self.seen["answered"] += 1

    @rule(tokens=st.integers(1, 60), last=st.booleans())
    def send(self, tokens: int, last: bool) -> None:
        turn = self.queue.next()
        free = self.free()
        first = next((one for one in self.waiting if self.pins[one] in (None, *free)), None)
        if not free or first is None:
            assert turn is None
            self.seen["all slots taken"] += bool(self.waiting and self.slots)
            return
        pin = self.pins[first]
        anywhere = None if len(free) == len(self.slots) else free
        assert turn == (first, anywhere if pin is None else [pin])
        worker = pin or free[-1 if last else 0]
        self.queue.start(first, worker, tokens)
        self.waiting.remove(first)
        self.running[first] = (worker, tokens)

    def free(self) -> list[int]:
        return [one for one in self.slots if self.has_slot(one) and one not in self.busy]

    def has_slot(self, worker: int) -> bool:
        held = [tokens for at, tokens in self.running.values() if at == worker]
        capacity = self.slots[worker]
        return not held or (sum(held) < capacity.tokens and len(held) < capacity.requests)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.queue._check()
        assert len(self.queue) == len(self.waiting) and self.queue.running == len(self.running)
        assert self.queue.free_workers == self.free()
        idle = any(self.has_slot(one) for one in self.slots if one in self.busy)
        assert self.queue.is_blocked == (bool(self.waiting) and idle)

    def teardown(self) -> None:
        assert self.queue.pop_all() == self.waiting


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueue = occurring(
    QueueMachine, "stranded", "back to the front", "full", "answered", "all slots taken"
)
