"""The cost in seconds against its reference implementation."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import seconds as oracle

from dynamo._fast.seconds import SecondsCost

share = st.floats(0, 1)
few = st.integers(0, 200)
slots = st.builds(
    oracle.Slot,
    queue=st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 50_000)), max_size=4),
    since_s=st.floats(0, 20),
    measured=st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 20)), max_size=6),
    capacity=st.sampled_from([0, 10, 1000]),
    decoding=few,
    decode_blocks=st.integers(0, 2000),
    device=few,
    host=few,
    disk=few,
    shared=few,
    spent=st.lists(st.tuples(st.floats(0, 40), st.floats(0, 20)), max_size=3).map(sorted),
)
fits = st.builds(oracle.Fit, st.floats(0, 1), st.floats(0, 1e-2), st.floats(0, 1e-6))
prompts = st.builds(
    oracle.Prompt,
    st.integers(0, 100_000),
    st.integers(1, 512),
    st.tuples(share, share, share),
    share,
    st.floats(0, 10),
    st.floats(0, 100),
    share,
)


def column(kind: str, given_slots: list[oracle.Slot], name: str) -> array[int]:
    return array(kind, [getattr(slot, name) for slot in given_slots])


@given(fits, prompts, st.lists(slots, min_size=1, max_size=20), st.floats(0, 40))
def test_costs_equal_the_reference(
    fit: oracle.Fit, prompt: oracle.Prompt, given_slots: list[oracle.Slot], now_s: float
) -> None:
    made = SecondsCost()
    made.set_fit(fit.fixed_s, fit.token_s, fit.attention_s)
    for number, slot in enumerate(given_slots):
        made.add_slot(number, slot.capacity)
        for tokens, ratio in slot.measured:
            attention = tokens * tokens / 2
            made.measured(number, tokens, attention, ratio * fit.work_s(1, tokens, attention))
        made.add_decoding(number, slot.decoding)
        for at_s, work_s in slot.spent:
            made.send(number, array("Q"), 0, 0, work_s, at_s)
        each = [t * (c + t / 2) for t, c in slot.queue]
        if slot.queue:
            sums = len(slot.queue), sum(t for t, _ in slot.queue), sum(each)
            made.set_queue(number, *sums, slot.queue[0][0], each[0], slot.since_s)
    count = len(given_slots)
    out, terms = array("d", bytes(8 * count)), array("d", bytes(32 * count))
    best, least_wait, least_work, price = made.costs(
        array("I", range(count)),
        now_s,
        prompt.isl_tokens,
        prompt.block_size,
        prompt.weights,
        prompt.assumed,
        prompt.rent,
        prompt.held_s,
        prompt.stall,
        column("q", given_slots, "decode_blocks"),
        out,
        terms,
        *(column("I", given_slots, name) for name in ("device", "host", "disk", "shared")),
    )
    expected = oracle.costs(fit, prompt, given_slots, now_s)
    for number, one in enumerate(expected):
        assert terms[4 * number : 4 * number + 4].tolist() == pytest.approx(one, 1e-6, 1e-6)
        assert out[number] == pytest.approx(sum(one), 1e-6, 1e-6)
    least = min(prompt.work_s(fit, slot) for slot in given_slots)
    host, disk, _ = prompt.weights
    held = max(slot.device + host * slot.host + disk * slot.disk for slot in given_slots)
    assert best == pytest.approx(held)
    assert least_wait == pytest.approx(min(wait for wait, *_ in expected), 1e-6, 1e-6)
    assert least_work == pytest.approx(least, 1e-6, 1e-6)
    assert price == pytest.approx(oracle.others(prompt, given_slots, now_s), 1e-6, 1e-6)


def test_blocks_wanted_again_that_no_slot_holds_are_pressure_on_their_last_slot() -> None:
    made = SecondsCost()
    for slot in range(2):
        made.add_slot(slot, 400)
    blocks = array("Q", range(16, 416))  # of 16 one is looked at
    made.send(0, blocks, 0, 0, 0.0, 0.0)
    assert made.pressure(0) == 0.0  # they are new
    made.send(1, blocks, 300, 0, 0.0, 0.0)
    assert made.pressure(0) == pytest.approx(oracle.pressure(400, 96, 400))
    assert made.pressure(1) == 0.0
    for turn in range(1, 100):
        made.send(0, array("Q", range(1000 * turn, 1000 * turn + 400)), 0, 0, 0.0, 0.0)
    assert made.pressure(0) < 1e-6  # and forgotten


def test_the_middle_of_those_that_were_measured() -> None:
    made = SecondsCost()
    made.set_fit(1.0, 0.0, 0.0)
    for slot in range(5):
        made.add_slot(slot, 0)
    assert made.middle_slowness() == 1.0
    for slot, took_s in ((0, 3.0), (1, 1.0), (3, 2.0), (4, 5.0)):
        made.measured(slot, 1.0, 0.0, took_s)
    assert made.middle_slowness() == made.slowness(3) == pytest.approx(3.9 / 2.9)
    made.drop_slot(3)
    assert made.middle_slowness() == made.slowness(0)


def test_what_is_remembered_is_bounded() -> None:
    made = SecondsCost()
    made.add_slot(0, 0)
    first = array("Q", range(16, 416))
    made.send(0, first, 0, 0, 0.0, 0.0)
    for turn in range(1, 14):
        made.send(0, array("Q", range(10**6 * turn, 10**6 * turn + 100_000)), 0, 0, 0.0, 0.0)
    made.send(0, first, 0, 0, 0.0, 0.0)
    assert made.pressure(0) == 0.0


def test_bad_arguments_are_refused() -> None:
    made = SecondsCost()
    with pytest.raises(IndexError):
        made.measured(0, 1.0, 0.0, 1.0)
    with pytest.raises(IndexError):
        made.add_slot(65_536, 1.0)
    made.add_slot(3, 0)
    for took_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            made.measured(3, 1.0, 0.0, took_s)
    with pytest.raises(ValueError):
        made.set_fit(0.0, float("nan"), 0.0)
    columns = array("q", bytes(32)), array("d", bytes(32))
    rest = (0.0, 10, 4, (0.0, 0.0, 0.0), 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(IndexError):
        made.costs(array("I", [4]), *rest, *columns, array("d", bytes(32)))
    with pytest.raises(ValueError):
        made.costs(array("I", [3, 3]), *rest, *columns, array("d", bytes(32)))
    with pytest.raises(TypeError):
        made.costs(array("q", [3]), *rest, *columns, array("d", bytes(32)))
