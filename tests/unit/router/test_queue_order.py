"""Who is next among those that wait: against a list that is sorted anew each time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.errors import Overloaded, RouterQueueLimitExceeded
from dynamo.protocols.engine import Routing
from dynamo.router.queue.waiting import POLICIES, Priority, WaitingQueue, priority_of


class Twin:
    """The rule, written down: strict priority, then score, then arrival."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.waiting: list[dict[str, Any]] = []

    def score(self, one: dict[str, Any]) -> float:
        jump, arrived = one["jump"], one["at"]
        if self.policy == "fcfs":
            return max(jump, 0.0) - arrived
        if self.policy == "lcfs":
            return jump + arrived
        return (1 + jump) / max(1, one["isl"] - one["cached"])

    def order(self) -> list[int]:
        ranked = sorted(
            self.waiting, key=lambda one: (-one["strict"], -self.score(one), one["number"])
        )
        return [one["number"] for one in ranked]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("join"),
            st.integers(-1, 2),
            st.sampled_from([-3.0, 0.0, 0.5, 2.0, 100.0]),
            st.integers(1, 50),
        ),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("recount"), st.integers(0, 30), st.integers(0, 50)),
        st.tuples(st.just("serve")),
    ),
    min_size=40,
    max_size=120,
)
"""Left to itself hypothesis makes histories of a handful of steps, in which nothing happens."""


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_as_the_rule_says(policy: str, steps: list[Any]) -> None:
    queue: WaitingQueue[int] = WaitingQueue(policy, 40)
    twin, held, now = Twin(policy), {}, 0.0
    for number, (step, *values) in enumerate(steps):
        now += 0.25
        known = [one["number"] for one in twin.waiting]
        if step == "join" and len(known) < 40:
            strict, jump, isl = values
            held[number] = queue.add(number, Priority(strict, jump), isl, 0, now)
            one = {"number": number, "strict": strict, "jump": jump, "isl": isl}
            twin.waiting.append({**one, "cached": 0, "at": now})
        elif step == "recount" and known:
            target = known[values[0] % len(known)]
            (one,) = (one for one in twin.waiting if one["number"] == target)
            one["cached"] = min(values[1], one["isl"])
            queue.set_cached_tokens(held[target], one["cached"])
        elif step in ("leave", "serve") and known:
            head = queue.head()
            assert head is not None and head.item == twin.order()[0]
            target = head.item if step == "serve" else known[values[0] % len(known)]
            assert queue.remove(held[target]) and not queue.remove(held[target])
            twin.waiting = [one for one in twin.waiting if one["number"] != target]
        assert len(queue) == len(twin.waiting)
        assert queue.isl_tokens == sum(one["isl"] for one in twin.waiting)
        assert queue.cached_tokens == sum(one["cached"] for one in twin.waiting)
        assert len(queue._heap) <= 2 * len(queue) + 65
    served = []
    while (head := queue.head()) is not None:
        served.append(head.item)
        queue.remove(head)
    assert served == twin.order() and len(queue) == queue.isl_tokens == queue.cached_tokens == 0


def test_a_jump_counts_as_having_come_earlier() -> None:
    queue: WaitingQueue[str] = WaitingQueue("fcfs", 10)
    queue.add("early", Priority(), 8, 0, 10.0)
    queue.add("hasty", Priority(priority_boost_s=2.5), 8, 0, 12.0)
    queue.add("patient", Priority(priority_boost_s=-50.0), 8, 0, 12.5)
    queue.add("first of all", Priority(strict=1), 8, 0, 90.0)
    order = []
    while (head := queue.head()) is not None:
        order.append(head.item)
        queue.remove(head)
    assert order == ["first of all", "hasty", "early", "patient"]


def test_a_negative_jump_is_none_where_who_came_first_goes_first() -> None:
    queue: WaitingQueue[str] = WaitingQueue("fcfs", 10)
    queue.add("patient", Priority(priority_boost_s=-50.0), 8, 0, 10.0)
    queue.add("later", Priority(), 8, 0, 11.0)
    head = queue.head()
    assert head is not None and head.item == "patient"


def test_the_bound() -> None:
    queue: WaitingQueue[int] = WaitingQueue("fcfs", 2)
    first = queue.add(1, Priority(), 8, 0, 0.0)
    queue.add(2, Priority(), 8, 0, 0.0)
    text = r'router policy class "default" queue requests limit reached \(current=2, limit=2\)'
    with pytest.raises(RouterQueueLimitExceeded, match=text) as caught:
        queue.add(3, Priority(strict=9), 8, 0, 0.0)
    assert isinstance(caught.value, Overloaded) and len(queue) == 2
    queue.remove(first)
    queue.add(3, Priority(), 8, 0, 0.0)


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
def test_what_a_request_claims(routing: Routing | None, priority: tuple[int, float]) -> None:
    assert priority_of(routing) == priority
