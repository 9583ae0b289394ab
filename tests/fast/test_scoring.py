"""Scoring against its reference implementation, measured numbers and distributions."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import scoring as oracle

from dynamo._fast import scoring

small = st.integers(0, 10_000)
loads = st.lists(st.builds(oracle.Load, *[small] * 6), min_size=1, max_size=40)
weight = st.floats(0, 4)


def compiled_costs(
    weights: scoring.Weights, isl_tokens: int, given_loads: list[oracle.Load]
) -> tuple[list[float], float]:
    """Run the compiled side with candidates in reverse slot order: costs, and the most held."""
    count = len(given_loads)
    out = array("d", bytes(8 * count))
    slots = array("I", reversed(range(count)))
    columns = list(reversed(given_loads))
    most = scoring.costs(
        weights,
        isl_tokens,
        slots,
        array("q", [load.prefill_tokens for load in columns]),
        array("q", [load.decode_blocks for load in columns]),
        out,
        array("I", [load.device for load in columns]),
        array("I", [load.host for load in columns]),
        array("I", [load.disk for load in columns]),
        array("I", [load.shared for load in columns]),
    )
    return out.tolist(), most


@given(
    loads,
    st.integers(0, 100_000),
    st.integers(1, 512),
    st.fixed_dictionaries(
        dict.fromkeys(("prefill_scale", "credit", "decay", "host", "disk", "shared"), weight)
    ),
)
def test_costs_equal_the_reference(
    given_loads: list[oracle.Load], isl: int, size: int, named: dict[str, float]
) -> None:
    expected = oracle.costs(oracle.Weights(size, **named), isl, given_loads)
    got, most = compiled_costs(scoring.Weights(size, **named), isl, given_loads)
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-9)
    assert most == pytest.approx(oracle.most(oracle.Weights(size, **named), given_loads))


@given(
    st.lists(st.integers(0, 6).map(float), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]),
    st.integers(0, 997),
)
def test_choice_equals_the_reference(values: list[float], temperature: float, step: int) -> None:
    uniform = (step + 0.5) / 998
    got = scoring.choose(array("d", values), len(values), temperature, uniform)
    expected = oracle.choose(values, temperature, uniform)
    if got != expected:  # one ulp at a cumulative border is no error
        shares = oracle.probabilities(values, temperature)
        assert min(abs(sum(shares[: i + 1]) - uniform) for i in range(len(values))) < 1e-9


@pytest.mark.parametrize(
    ("isl", "size", "device", "expected"),
    [
        (14, 4, 0, 6.5),
        (18, 4, 3, 5.5),
        (12, 16, 0, 0.75),
        (131, 16, 0, 16.1875),
        (80, 16, 0, 10.0),
    ],
)
def test_verified_numbers(isl: int, size: int, device: int, expected: float) -> None:
    load = oracle.Load(0, isl // size, device)
    assert compiled_costs(scoring.Weights(size), isl, [load])[0] == [expected]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ((2, 0, 0, 0), 4 + 6 - 2),
        ((2, 2, 0, 0), 4 + 6 - 2 - 0.75 * 2),
        ((2, 2, 1, 0), 4 + 6 - 2 - 0.75 * 2 - 0.25),
        ((2, 0, 0, 4), 4 + 6 - 2 - 0.5 * 4),
        ((0, 6, 0, 6), 4 + 0),
    ],
)
def test_every_tier_has_its_credit(held: tuple[int, ...], expected: float) -> None:
    """24 tokens in blocks of 4, four blocks active; credits never go below no prefill."""
    load = oracle.Load(0, 4, *held)
    assert compiled_costs(scoring.Weights(4, shared=0.5), 24, [load])[0] == [expected]


def test_worked_example_of_the_router_guide() -> None:
    """Dynamo's router guide: 18, 10 and 11 with weight 1; worker 2 wins."""
    given_loads = [oracle.Load(0, 10), oracle.Load(0, 5, 3), oracle.Load(0, 9, 6)]
    got, _ = compiled_costs(scoring.Weights(1), 8, given_loads)
    assert got == [18.0, 10.0, 11.0]
    assert scoring.choose(array("d", got), 3, 0.0, 0.99) == 1


@pytest.mark.parametrize(
    ("temperature", "measured"),
    [(0.5, (130, 459, 911)), (1.0, (253, 498, 749)), (2.0, (376, 497, 627))],
)
def test_measured_distributions(temperature: float, measured: tuple[int, ...]) -> None:
    """Costs 6.5/4.5/3.5: our draws and the measured ones come from the same distribution."""
    costs = array("d", [6.5, 4.5, 3.5])
    shares = oracle.probabilities(costs, temperature)
    source = random.Random(7)
    draws = Counter(scoring.choose(costs, 3, temperature, source.random()) for _ in range(30_000))
    ours = tuple(draws[index] for index in range(3))
    for counts in (ours, measured):
        expected = [share * sum(counts) for share in shares]
        chi2 = sum((o - e) ** 2 / e for o, e in zip(counts, expected, strict=True))
        assert chi2 < 13.8, counts  # 2 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_costs_are_drawn_uniformly(temperature: float) -> None:
    source = random.Random(11)
    costs = array("d", [2.0] * 3)
    draws = Counter(scoring.choose(costs, 3, temperature, source.random()) for _ in range(9000))
    assert all(abs(count - 3000) < 200 for count in draws.values())


def test_temperature_zero_always_takes_the_cheapest() -> None:
    costs = array("d", [6.5, 4.5, 3.5])
    assert {scoring.choose(costs, 3, 0.0, u / 100) for u in range(100)} == {2}


def test_tiny_temperature_does_not_divide_by_zero() -> None:
    assert scoring.choose(array("d", [1.0, 0.0]), 2, 5e-324, 0.3) == 1


def test_only_the_first_count_costs_matter() -> None:
    assert scoring.choose(array("d", [5.0, 4.0, 1.0]), 2, 0.0, 0.5) == 1


@pytest.mark.parametrize(
    ("costs", "count", "temperature", "uniform"),
    [
        ([], 0, 0.0, 0.5),
        ([1.0], 2, 0.0, 0.5),
        ([1.0], 1, -1.0, 0.5),
        ([1.0], 1, float("nan"), 0.5),
        ([1.0], 1, 0.0, 1.0),
        ([float("inf")], 1, 0.0, 0.5),
    ],
)
def test_bad_choices_are_refused(
    costs: list[float], count: int, temperature: float, uniform: float
) -> None:
    with pytest.raises(ValueError, match=r"count|temperature|uniform|finite"):
        scoring.choose(array("d", costs), count, temperature, uniform)


def test_a_slot_beyond_its_column_is_refused() -> None:
    columns = array("q", [0, 0]), array("q", [0, 0])
    with pytest.raises(IndexError, match="slot 2"):
        scoring.costs(scoring.Weights(4), 8, array("I", [2]), *columns, array("d", [0.0]))
    with pytest.raises(IndexError, match="slot 1"):
        scoring.costs(
            scoring.Weights(4), 8, array("I", [1]), *columns, array("d", [0.0]), array("I", [3])
        )
    with pytest.raises(ValueError, match="out holds"):
        scoring.costs(scoring.Weights(4), 8, array("I", [0]), *columns, array("d"))


@pytest.mark.parametrize("bad", [{"credit": float("nan")}, {"decay": -1}, {"host": float("inf")}])
def test_bad_weights_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"finite|negative"):
        scoring.Weights(4, **bad)
    with pytest.raises(ValueError, match="block_size"):
        scoring.Weights(0)
