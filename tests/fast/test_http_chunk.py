"""The chunk framing against its reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import http_chunk as oracle

from dynamo._fast import http_chunk


def test_is_compiled() -> None:
    assert http_chunk.__file__ is not None and http_chunk.__file__.endswith(".so")


@given(st.binary(max_size=300))
def test_equals_the_reference(data: bytes) -> None:
    assert http_chunk.http_chunk(data) == oracle.http_chunk(data)


@pytest.mark.parametrize("size", [0, 9, 10, 15, 16, 255, 256, 65_535, 65_536, 1 << 20])
def test_sizes(size: int) -> None:
    data = b"x" * size
    assert http_chunk.http_chunk(data) == oracle.http_chunk(data)
