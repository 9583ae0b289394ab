"""Progress by slot."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.prefill_progress import OraclePrefillProgress

from dynamo._fast.prefill_progress import PrefillProgress


def test_growth_up_to_the_limit() -> None:
    progress = PrefillProgress()
    progress.set(2, 5.0, 10.0, 100.0, 20.0)
    assert [progress.value(2, now) for now in (99.0, 100.0, 100.5, 101.5, 1e9)] == [
        5,
        5,
        10,
        20,
        20,
    ]
    assert (progress.value(0, 1e9), progress.value(99, 1e9), progress.value(-1, 1e9)) == (0, 0, 0)


def test_whole_parts_are_subtracted_from_a_column() -> None:
    progress = PrefillProgress()
    progress.set(0, 0.0, 1.0, 0.0, 100.0)
    progress.set(3, 0.0, 2.0, 0.0, 5.0)
    for width in (1, 4, 6):
        column = array("q", [50] * width)
        progress.subtract_done(column, 2.9)
        assert column.tolist() == ([48, 50, 50, 45] + [50] * width)[:width]
    progress.set(3, 0.0, 0.0, 0.0, 0.0)
    column = array("q", [50] * 4)
    progress.subtract_done(column, 2.9)
    assert column.tolist() == [48, 50, 50, 50]


def test_invalid_arguments() -> None:
    progress = PrefillProgress()
    for slot in (-1, 65_536):
        with pytest.raises(IndexError):
            progress.set(slot, 0.0, 0.0, 0.0, 0.0)
    for wrong in ((-1.0, 0.0, 0.0), (0.0, float("nan"), 0.0), (0.0, 0.0, -1.0)):
        with pytest.raises(ValueError, match="must be >= 0"):
            progress.set(0, wrong[0], wrong[1], 0.0, wrong[2])
    with pytest.raises((TypeError, ValueError)):
        progress.subtract_done(array("d", [0.0]), 0.0)


@given(st.floats(0, 1e6), st.floats(0, 1e9), st.floats(0, 1e6), st.lists(st.floats(0, 1e6)))
def test_progress_never_falls(base: float, rate: float, limit: float, times: list[float]) -> None:
    progress = PrefillProgress()
    progress.set(0, base, rate, 1.0, limit)
    values = [progress.value(0, now) for now in sorted(times)]
    assert values == sorted(values)
    assert all(value <= limit for value in values)


SET = st.tuples(
    st.integers(0, 5),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(-1e6, 1e6),
    st.floats(0, 1e6),
)


@given(st.lists(SET, max_size=10), st.lists(st.floats(-1e6, 1e7), min_size=1, max_size=5))
def test_the_reference_implementation_agrees(
    settings: list[tuple[int, float, float, float, float]], times: list[float]
) -> None:
    fast, plain = PrefillProgress(), OraclePrefillProgress()
    for setting in settings:
        fast.set(*setting)
        plain.set(*setting)
    for now in times:
        assert [fast.value(slot, now) for slot in range(8)] == [
            plain.value(slot, now) for slot in range(8)
        ]
        columns = [array("q", [0] * 8) for _ in "ab"]
        fast.subtract_done(columns[0], now)
        plain.subtract_done(columns[1], now)
        assert columns[0] == columns[1]
