"""The prefills of each slot against their reference implementation."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.prefill_queue import PrefillQueues as Reference

from dynamo._fast.prefill_queue import PrefillQueues
from dynamo._fast.seconds import SecondsCost

SLOTS = 3
FIT = (0.1, 1e-3, 1e-7)


def test_the_oldest_grows_up_to_its_tokens() -> None:
    queues = PrefillQueues()
    queues.begin(2, "a", 20, 0, 2.0, 100.0)
    times = (99.0, 100.0, 100.55, 101.5, 1e9)
    assert [queues.done_tokens(2, now_s) for now_s in times] == [0, 0, 5, 15, 20]
    assert [queues.done_tokens(slot, 1e9) for slot in (0, 99, -1)] == [0, 0, 0]
    for width in (1, 3, 6):
        column = array("q", [50] * width)
        queues.subtract_done(column, 100.55)
        assert column.tolist() == ([50, 50, 45] + [50] * width)[:width]


def test_invalid_arguments() -> None:
    queues = PrefillQueues()
    for slot in (-1, 65_536):
        with pytest.raises(IndexError):
            queues.begin(slot, "a", 1, 0, None, 0.0)
    for tokens, cached_tokens in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ValueError, match="a token or more"):
            queues.begin(0, "a", tokens, cached_tokens, None, 0.0)
    with pytest.raises(IndexError, match="was not added"):
        PrefillQueues(SecondsCost()).begin(0, "a", 1, 0, None, 0.0)
    with pytest.raises(ValueError, match=r"array\('q'\), not array\('Q'\)"):
        queues.subtract_done(array("Q", [0]), 0.0)


def test_a_slot_that_the_cost_does_not_have_gets_no_prefill() -> None:
    cost = SecondsCost()
    queues = PrefillQueues(cost)
    with pytest.raises(IndexError):
        queues.begin(1, "a", 10, 0, 1.0, 0.0)
    cost.add_slot(1, 0)
    cost.set_fit(1.0, 0.0, 0.0)
    queues.begin(1, "b", 10, 0, 1.0, 0.0)
    assert cost.wait_s(1, 0.0) == 1.0
    assert queues.done_tokens(1, 9.0) == 10


slot = st.integers(0, SLOTS - 1)
name = st.integers(0, 12)
STEP = st.one_of(
    st.tuples(
        st.just("begin"),
        slot,
        st.integers(1, 5000),
        st.integers(0, 5000),
        st.one_of(st.none(), st.floats(0.01, 50)),
    ),
    st.tuples(st.just("first_token"), slot, name, st.booleans(), st.sampled_from([1, 2, 8])),
    st.tuples(st.just("abandon"), slot, name),
    st.tuples(st.just("mark_waiting"), slot),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 1.0, 7.0])),
)


class Pair:
    """The compiled queues and the reference, with what a cost in seconds learns from each."""

    def __init__(self) -> None:
        self.cost, self.expected = SecondsCost(), SecondsCost()
        for each in (self.cost, self.expected):
            each.set_fit(*FIT)
            for number in range(SLOTS):
                each.add_slot(number, 0)
        self.fast, self.plain = PrefillQueues(self.cost), Reference(FIT, self.expected.slowness)
        self.now_s = 0.0
        self._names = [0] * SLOTS

    def step(self, kind: str, *values: Any) -> None:
        """Do the same with both."""
        if kind == "wait":
            self.now_s += values[0]
            return
        slot, *rest = values
        if kind == "begin":
            rest = [f"{slot} {self._names[slot]}", *rest, self.now_s]
            self._names[slot] += 1
        elif kind != "mark_waiting":
            rest = [f"{slot} {rest[0]}", self.now_s, *rest[1:]]
        found, expected = [getattr(each, kind)(slot, *rest) for each in (self.fast, self.plain)]
        assert found == (None if expected is None else pytest.approx(expected))
        for each in self.plain.measured:
            self.expected.measured(*each)
        self.plain.measured.clear()

    def check(self, now_s: float) -> None:
        """Both must say the same of ``now_s``."""
        columns = [array("q", [10_000] * 5) for _ in "ab"]
        self.fast.subtract_done(columns[0], now_s)
        self.plain.subtract_done(columns[1], now_s)
        # Rounding may differ by one token.
        assert columns[0].tolist() == pytest.approx(columns[1].tolist(), abs=1)
        for slot in range(SLOTS):
            assert self.fast.done_tokens(slot, now_s) == 10_000 - columns[0][slot]
            assert self.cost.slowness(slot) == pytest.approx(self.expected.slowness(slot))
            wait_s = self.plain.wait_s(slot, now_s)
            assert self.cost.wait_s(slot, now_s) == pytest.approx(wait_s, 1e-6, 1e-6)


@settings(deadline=None)
@given(st.lists(STEP, max_size=40))
def test_the_reference_implementation_agrees(steps: list[tuple[Any, ...]]) -> None:
    pair = Pair()
    for step in steps:
        pair.step(*step)
        pair.check(pair.now_s)
        pair.check(pair.now_s + 0.7)
