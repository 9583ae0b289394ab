"""The order of waiting requests, against a list that is sorted at each step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.errors import Overloaded, RouterQueueLimitExceeded
from dynamo.protocols.engine import Routing
from dynamo.router.queue.waiting import (
    POLICIES,
    Priority,
    QueueEntry,
    WaitingQueue,
    priority_of,
)


class Entry(QueueEntry):
    """A waiting request with a name."""

    def __init__(self, name: Any, priority: Priority, isl: int, arrived_s: float) -> None:
        super().__init__(priority, isl)
        self.arrived_s = arrived_s
        self.name = name


def in_order(queue: WaitingQueue[Entry]) -> list[Any]:
    """Empty the queue; return the names."""
    served = []
    while (head := queue.head()) is not None:
        served.append(head.name)
        queue.remove(head)
    return served


class SortedList:
    """The rule: strict priority, then score, then arrival."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.waiting: list[dict[str, Any]] = []

    def score(self, one: dict[str, Any]) -> float:
        boost, arrived = float(one["boost"]), float(one["at"])
        if self.policy == "fcfs":
            return max(boost, 0.0) - arrived
        if self.policy == "lcfs":
            return boost + arrived
        return (1 + boost) / float(max(1, one["isl"] - one["cached"]))

    def order(self) -> list[int]:
        ranked = sorted(
            self.waiting, key=lambda one: (-one["strict"], -self.score(one), one["number"])
        )
        return [one["number"] for one in ranked]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(-1, 2),
            st.sampled_from([-3.0, 0.0, 0.5, 2.0, 100.0]),
            st.integers(1, 50),
        ),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("set_cached"), st.integers(0, 30), st.integers(0, 50)),
        st.tuples(st.just("serve")),
    ),
    min_size=40,
    max_size=120,
)
"""Without a minimum hypothesis makes histories of a few steps, in which nothing happens."""


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_the_queue_agrees_with_a_sorted_list(policy: str, steps: list[Any]) -> None:
    queue: WaitingQueue[Entry] = WaitingQueue(policy, 40)
    expected, held, now = SortedList(policy), {}, 0.0
    for number, (step, *values) in enumerate(steps):
        now += 0.25
        known = [one["number"] for one in expected.waiting]
        if step == "add" and len(known) < 40:
            strict, boost, isl = values
            held[number] = Entry(number, Priority(strict, boost), isl, now)
            queue.add(held[number])
            one = {"number": number, "strict": strict, "boost": boost, "isl": isl}
            expected.waiting.append({**one, "cached": 0, "at": now})
        elif step == "set_cached" and known:
            target = known[values[0] % len(known)]
            (one,) = (one for one in expected.waiting if one["number"] == target)
            one["cached"] = min(values[1], one["isl"])
            queue.set_cached_tokens(held[target], one["cached"])
        elif step in ("remove", "serve") and known:
            head = queue.head()
            assert head is not None and head.name == expected.order()[0]
            target = head.name if step == "serve" else known[values[0] % len(known)]
            assert queue.remove(held[target]) and not queue.remove(held[target])
            expected.waiting = [one for one in expected.waiting if one["number"] != target]
        assert len(queue) == len(expected.waiting)
        assert queue.isl_tokens == sum(one["isl"] for one in expected.waiting)
        assert queue.cached_tokens == sum(one["cached"] for one in expected.waiting)
    assert in_order(queue) == expected.order()
    assert len(queue) == queue.isl_tokens == queue.cached_tokens == 0


def test_a_boost_counts_as_an_earlier_arrival() -> None:
    queue: WaitingQueue[Entry] = WaitingQueue("fcfs", 10)
    queue.add(Entry("early", Priority(), 8, 10.0))
    queue.add(Entry("boosted", Priority(priority_boost_s=2.5), 8, 12.0))
    queue.add(Entry("negative", Priority(priority_boost_s=-50.0), 8, 12.5))
    queue.add(Entry("strict", Priority(strict=1), 8, 90.0))
    assert in_order(queue) == ["strict", "boosted", "early", "negative"]


def test_a_negative_boost_does_not_count_under_fcfs() -> None:
    queue: WaitingQueue[Entry] = WaitingQueue("fcfs", 10)
    queue.add(Entry("negative", Priority(priority_boost_s=-50.0), 8, 10.0))
    queue.add(Entry("later", Priority(), 8, 11.0))
    assert in_order(queue) == ["negative", "later"]


def test_the_limit() -> None:
    queue: WaitingQueue[Entry] = WaitingQueue("fcfs", 2)
    first, *others = (Entry(number, Priority(), 8, 0.0) for number in (1, 2, 3))
    queue.add(first)
    queue.add(others[0])
    text = r'router policy class "default" queue requests limit reached \(current=2, limit=2\)'
    with pytest.raises(RouterQueueLimitExceeded, match=text) as caught:
        queue.add(Entry(4, Priority(strict=9), 8, 0.0))
    assert isinstance(caught.value, Overloaded) and len(queue) == 2
    queue.remove(first)
    queue.add(others[1])


@pytest.mark.parametrize(
    ("routing", "priority"),
    [
        (None, (0, 0.0)),
        (Routing(), (0, 0.0)),
        (Routing(priority_jump=1.5), (0, 1.5)),
        (Routing(priority_jump=1.5, priority=3), (0, 3.0)),
        (Routing(priority=-3, strict_priority=2), (2, -3.0)),
        (Routing(priority_jump=math.nan), (0, 0.0)),
        (Routing(priority_jump=math.inf), (0, 1e9)),
        (Routing(priority=-(10**30)), (0, -1e9)),
    ],
)
def test_the_priority_of_a_request(routing: Routing | None, priority: tuple[int, float]) -> None:
    assert priority_of(routing) == priority
