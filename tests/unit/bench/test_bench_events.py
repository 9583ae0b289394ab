"""Server-sent events: line ends, fields and edge cases of the WHATWG's parser."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.bench.client import EventParser


def reference(stream: bytes) -> list[bytes]:
    """The specification word by word, on the complete stream."""
    events: list[bytes] = []
    data: bytes | None = None
    lines = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in lines[:-1]:
        if line == b"":
            if data is not None:
                events.append(data[:-1])
            data = None
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data = (data or b"") + value.removeprefix(b" ") + b"\n"
    return events


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata:b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\ndata: b\n\r", [b"a", b"b"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data:  two\ndata: lines\n\n", [b" two\nlines"]),
        (b": comment\n\nevent: x\nid: 1\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"data\n\ndatum: x\n\n", [b""]),
        (b"data: a\n\ndata: never ended\n", [b"a"]),
    ],
)
def test_examples(stream: bytes, events: list[bytes]) -> None:
    assert EventParser().feed(stream) == events == reference(stream)


PIECE = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"data:", b"data", b" ", b":", b"x", b"\xef\xbb\xbf"]
)


@given(st.lists(PIECE, max_size=30).map(b"".join), st.lists(st.integers(0, 60), max_size=8))
def test_any_split_of_the_stream_follows_the_specification(stream: bytes, cuts: list[int]) -> None:
    parser, found, last = EventParser(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        found += parser.feed(stream[last:cut])
        last = max(last, cut)
    assert found == reference(stream)
