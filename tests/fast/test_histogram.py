"""The histogram against its reference implementation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.histogram import Histogram as Reference

from dynamo._fast import histogram

numbers = st.floats(allow_nan=False, width=32)
bounds = st.lists(numbers, max_size=30).map(sorted)


def test_is_compiled() -> None:
    assert histogram.__file__ is not None and histogram.__file__.endswith(".so")


@given(bounds, st.data())
def test_equals_the_reference(limits: list[float], data: st.DataObject) -> None:
    values = st.one_of(numbers, st.sampled_from(limits)) if limits else numbers
    compiled, reference = histogram.Histogram(limits), Reference(limits)
    for value, times in data.draw(st.lists(st.tuples(values, st.integers(1, 1000)), max_size=50)):
        compiled.observe(value, times)
        reference.observe(value, times)
    assert compiled.counts == reference.counts and compiled.bounds == reference.bounds
    assert compiled.total == reference.total or math.isnan(compiled.total) == math.isnan(
        reference.total
    )


def test_once_is_the_default_and_a_bound_belongs_to_its_bucket() -> None:
    found = histogram.Histogram((0.1, 1))
    for value in (0.1, 0.10001, 1, 2):
        found.observe(value)
    assert found.counts == [1, 2, 1] and found.total == pytest.approx(3.20001)


def test_counts_are_a_copy() -> None:
    found = histogram.Histogram((1,))
    found.counts[0] = 7
    assert found.counts == [0, 0]


@pytest.mark.parametrize("value", ["1", None, [1]])
def test_what_is_no_number_is_refused(value: object) -> None:
    found = histogram.Histogram((1,))
    with pytest.raises(TypeError):
        found.observe(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        histogram.Histogram((1, value))  # type: ignore[arg-type]
    assert found.counts == [0, 0]
