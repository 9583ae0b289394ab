"""Estimated prefill progress: the oldest prefill of a slot is the anchor."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.router.load.active_load import ActiveLoad, Reservation
from dynamo.router.load.prefill_load import PrefillLoad
from dynamo.router.load.prefill_model import BusyInterval, StaticModel


class Model(StaticModel):
    """Predicts ``expected_s``, and records the observed intervals."""

    def __init__(self, expected_s: float | None = 10.0) -> None:
        self.expected_s = expected_s
        self.observed: list[BusyInterval] = []

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        return self.expected_s

    def observe(self, interval: BusyInterval, now_s: float) -> None:
        self.observed.append(interval)


class Clocked:
    """Active load on slots 0 and 1 under a clock that the test moves."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.now_s = 0.0
        self.load = ActiveLoad(4, prefill_model=model, clock=lambda: self.now_s)

    def book(self, name: str, tokens: int, expected_s: float | None = 10.0, slot: int = 0) -> None:
        self.model.expected_s = expected_s
        reservation = Reservation(slot, 10 + slot, 0, tokens + 8, 2, self.now_s)
        self.load.book(name, reservation, None, 0, tokens)

    def first_token(self, name: str) -> None:
        self.load.mark_prefill_complete(name, self.now_s)

    def tokens(self, slot: int = 0) -> int:
        """The reported load, the same in a projection and by slot."""
        prefill, decode = array("q", [0, 0]), array("q", [0, 0])
        self.load.project_into(None, 0, prefill, decode)
        assert prefill[slot] == self.load.load(slot)[0]
        return prefill[slot]


@pytest.fixture
def here() -> Clocked:
    return Clocked(Model())


def test_the_oldest_decays_by_elapsed_over_expected(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 50)
    assert here.tokens() == 150
    here.now_s = 2.5
    assert here.tokens() == 125
    here.now_s = 2.59
    assert here.tokens() == 150 - 25  # whole tokens, rounded up
    here.now_s = 1000.0
    assert here.tokens() == 50


def test_the_next_oldest_starts_when_the_anchor_is_done(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 50)
    here.now_s = 4.0
    here.first_token("a")
    assert here.tokens() == 50
    here.now_s = 9.0
    assert here.tokens() == 25
    here.first_token("b")
    assert here.tokens() == 0


def test_overtaking_the_anchor_makes_no_jump(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 20)
    here.now_s = 5.0
    assert here.tokens() == 70
    here.first_token("b")
    assert here.tokens() == 70  # the anchor's time went into b: its own start moves
    here.now_s = 7.0
    assert here.tokens() == 50


def test_progress_of_the_anchor_is_never_negative(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 20)
    here.now_s = 1.0
    here.first_token("b")
    assert here.tokens() == 100
    here.now_s = 2.0
    assert here.tokens() == 90


def test_a_prefill_without_a_prediction_counts_in_full(here: Clocked) -> None:
    here.book("a", 100, None)
    here.book("b", 50)
    here.now_s = 100.0
    assert here.tokens() == 150
    here.first_token("b")
    assert here.tokens() == 100
    here.book("c", 40)
    here.first_token("a")
    assert here.tokens() == 40
    here.now_s = 105.0
    assert here.tokens() == 20


def test_only_the_anchor_is_modelled(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 50, None)
    here.now_s = 3.0
    assert here.tokens() == 70 + 50
    here.first_token("b")
    assert here.tokens() == 70  # b was charged in full until now


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_a_prediction_that_is_none(here: Clocked, nonsense: float) -> None:
    here.book("a", 100, nonsense)
    here.now_s = 5.0
    assert here.tokens() == 100


def test_a_cached_prompt_is_no_anchor(here: Clocked) -> None:
    here.book("a", 0)
    here.book("b", 100)
    here.now_s = 5.0
    assert here.tokens() == 50
    here.first_token("a")
    assert here.tokens() == 50


def test_a_cancelled_anchor_and_a_lost_worker(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 50)
    here.book("c", 30, slot=1)
    here.now_s = 5.0
    here.load.free("a")
    assert here.tokens() == 50
    for request_id in here.load.booked_on({0}):
        here.load.free(request_id)
    assert (here.tokens(), here.tokens(1)) == (0, 15)
    here.book("d", 40)
    assert here.tokens() == 40


def test_slots_do_not_mix_and_time_does_not_run_backwards(here: Clocked) -> None:
    here.now_s = 5.0
    here.book("a", 100)
    here.book("b", 100, slot=1)
    here.now_s = 4.0
    assert (here.tokens(), here.tokens(1)) == (100, 100)
    here.now_s = 10.0
    here.first_token("a")
    assert (here.tokens(), here.tokens(1)) == (0, 50)


def test_without_a_model_prompts_count_in_full() -> None:
    load = ActiveLoad(4, clock=lambda: 1e9)
    load.book("a", Reservation(0, 10, 0, 100, 0, 0.0), None, 0, 100)
    assert load.load(0)[0] == 100


def test_observed_intervals(here: Clocked) -> None:
    here.book("a", 100)
    here.now_s = 1.0
    here.book("b", 50)
    here.now_s = 4.0
    here.first_token("a")
    assert here.model.observed == []
    here.now_s = 6.0
    here.first_token("b")
    attention = 100 * (8 + 50) + 50 * (8 + 25)
    assert here.model.observed == [BusyInterval(2, 150, attention, 6.0)]


def test_an_interval_ends_after_eight_prefills(here: Clocked) -> None:
    for number in range(20):
        here.book(str(number), 10)
    for number in range(19):
        here.now_s += 1.0
        here.first_token(str(number))
    assert [(one.prefills, one.seconds) for one in here.model.observed] == [(8, 8.0), (8, 8.0)]


def test_an_interval_with_a_cancelled_prefill_is_dropped(here: Clocked) -> None:
    here.book("a", 100)
    here.book("b", 50)
    here.book("c", 50)
    here.now_s = 3.0
    here.load.free("a")
    here.now_s = 4.0
    here.first_token("b")
    here.now_s = 6.0
    here.first_token("c")
    assert [(one.tokens, one.seconds) for one in here.model.observed] == [(50, 2.0)]


def test_a_predictor_alone_is_a_model() -> None:
    load = PrefillLoad(StaticModel(lambda tokens, cached: (tokens + cached) / 100))
    load.begin(0, "a", 100, 100, 0.0)
    assert load.done_tokens(0, 1.0) == 50
    load.first_token(0, "a", 2.0)
    load.first_token(0, "a", 2.0)
    load.abandon(7, "zz", 2.0)
    assert load.done_tokens(0, 3.0) == 0


STEP = st.one_of(
    st.tuples(
        st.just("book"),
        st.integers(0, 5000),
        st.one_of(st.none(), st.floats(0.001, 50)),
        st.integers(0, 1),
    ),
    st.tuples(st.just("wait"), st.floats(0, 20)),
    st.tuples(st.just("first"), st.integers(0, 30)),
    st.tuples(st.just("free"), st.integers(0, 30)),
    st.tuples(st.just("drop"), st.integers(0, 1)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, min_size=15, max_size=40))
def test_load_rises_by_bookings_only(steps: list[tuple[Any, ...]]) -> None:
    here = Clocked(Model())
    names: list[str] = []
    before = [0, 0]
    for number, (kind, *values) in enumerate(steps):
        booked = [0, 0]
        if kind == "book":
            tokens, expected_s, slot = values
            here.book(str(number), tokens, expected_s, slot)
            names.append(str(number))
            booked[slot] = tokens
        elif kind == "wait":
            here.now_s += values[0]
        elif kind == "drop":
            for request_id in here.load.booked_on(set(values)):
                here.load.free(request_id)
        elif names:
            name = names[values[0] % len(names)]
            here.first_token(name) if kind == "first" else here.load.free(name)
        now = [here.tokens(0), here.tokens(1)]
        full = [here.load._sequences.load(slot)[0] for slot in (0, 1)]
        for slot in (0, 1):
            assert 0 <= now[slot] <= full[slot]
            assert now[slot] <= before[slot] + booked[slot]
        before = now
    for name in names:
        here.first_token(name)
    assert (here.tokens(0), here.tokens(1)) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(200, 5000),
    st.lists(st.integers(1, 100), min_size=1, max_size=2),
    st.floats(0.1, 40),
    st.floats(0, 1),
)
def test_overtaking_is_exact(
    tokens: int, others: list[int], expected_s: float, share: float
) -> None:
    here = Clocked(Model())
    here.book("a", tokens, expected_s)
    for number, other in enumerate(others):
        here.book(str(number), other)
    here.now_s = expected_s * share
    before, done = here.tokens(), sum((tokens, *others)) - here.tokens()
    for number, other in enumerate(others):
        if done < other:
            return
        here.first_token(str(number))
        assert here.tokens() == before
        done -= other
