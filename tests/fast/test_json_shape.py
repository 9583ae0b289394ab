"""Weight and depth of a JSON text, against the reference implementation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import json_shape as reference

from dynamo._fast import json_shape

NO_LIMIT = 2**62
PIECES = st.sampled_from(
    [*'{}[]:,"\\- \n', '\\"', "\\\\", '"a"', "true", "null", "1", "-1.5e-300", "9" * 20, "é", "\0"]
)


def measure(text: str | bytes, weight: int = NO_LIMIT, depth: int = NO_LIMIT) -> Any:
    raw = text.encode() if isinstance(text, str) else text
    found = json_shape.measure(raw, weight, depth)
    assert found == reference.measure(raw, weight, depth), text
    return found


@pytest.mark.parametrize(
    ("text", "weight", "depth"),
    [
        ("", 0, 0),
        ("[]", 4, 1),
        ("[1,-2,true]", 7, 1),
        ('{"a":[{"b":null}]}', 4 + 1 + 8 + 4 + 4 + 1 + 8 + 1, 3),
        (r'["[[[", "\"[", "\\", "\\\"["]', 8, 1),
        ("1" * 19, 1, 0),
        ("1" * 20, 10, 0),
        ("1e5", 8, 0),
        ("1.2345678901234567E-300", 1024, 0),
        ("1e" + "0" * 2000, 2002, 0),
        ("]]][", 4, 0),
        ('["never ends \\"', 5, 1),
    ],
)
def test_weights(text: str, weight: int, depth: int) -> None:
    assert measure(text)[:2] == (weight, depth)


def test_it_stops_in_the_member_that_is_too_much() -> None:
    text = json.dumps({"model": "m", "wide": [1] * 50, "deep": {"x": [[[[]]]]}, "last": 1})
    assert measure(text, weight=60)[2] == b"wide"
    assert measure(text, depth=5)[1:] == (6, b"deep")
    assert measure(text)[2] == b"last"
    assert measure("[" * 100_000, depth=128) == (4 * 129, 129, b"")


def test_any_buffer() -> None:
    text = b'{"a": 1}'
    for form in (bytearray(text), memoryview(text)):
        assert json_shape.measure(form, 99, 9) == (14, 1, b"a")
    with pytest.raises(TypeError):
        json_shape.measure("text", 1, 1)  # type: ignore[arg-type]


@given(st.lists(PIECES, max_size=40).map("".join), st.integers(0, 60), st.integers(0, 6))
def test_any_text_is_measured_as_the_reference_does(text: str, weight: int, depth: int) -> None:
    measure(text)
    measure(text, weight, depth)


@given(st.binary(max_size=60))
def test_any_bytes(text: bytes) -> None:
    measure(text)
