"""The frame splitter against its reference: any split of any bytes gives the same frames."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import frames as oracle

from dynamo._fast import frames

PREAMBLE = b"DYNR\x01"
LAST_KIND = 10
LIMIT_BYTES = 64

whole = st.builds(
    oracle.pack, st.integers(1, LAST_KIND), st.integers(0, 2**32 - 1), st.binary(max_size=100)
)
foreign = st.binary(max_size=30)
streams = st.builds(
    lambda start, parts: start + b"".join(parts),
    st.sampled_from([PREAMBLE, PREAMBLE, PREAMBLE, b"GET / HTTP/1.1\r\n", b""]),
    st.lists(st.one_of(whole, whole, whole, foreign), max_size=12),
)


def test_is_compiled() -> None:
    assert frames.__file__ is not None and frames.__file__.endswith(".so")


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_pack_equals_the_reference(kind: int, stream: int, payload: bytes) -> None:
    assert frames.pack(kind, stream, payload) == oracle.pack(kind, stream, payload)


@given(
    st.integers(0, 2**32 - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.binary(max_size=50),
    st.binary(max_size=300),
)
def test_pack_open_equals_the_reference(
    stream: int, endpoint: str, headers: bytes, payload: bytes
) -> None:
    packed = frames.pack_open(stream, endpoint, headers, payload)
    assert packed == oracle.pack_open(stream, endpoint, headers, payload)


@pytest.mark.parametrize("endpoint", ["x" * 65_536, "\udc80"])
def test_an_endpoint_that_does_not_fit_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"too long|surrogates"):
        frames.pack_open(1, endpoint, b"", b"")


@given(streams, st.lists(st.integers(0, 2000), max_size=30))
def test_any_cut_gives_the_same_frames(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    splitter = frames.Splitter(LIMIT_BYTES, PREAMBLE, LAST_KIND)
    got = [
        frame
        for start, end in itertools.pairwise(edges)
        for frame in splitter.feed(data[start:end])
    ]
    expected, faulty = oracle.split(data, LIMIT_BYTES, PREAMBLE, LAST_KIND)
    assert got == expected
    assert (splitter.fault is not None) == faulty


@given(st.lists(whole, max_size=8))
def test_byte_by_byte(parts: list[bytes]) -> None:
    data = PREAMBLE + b"".join(parts)
    splitter = frames.Splitter(LIMIT_BYTES, PREAMBLE, LAST_KIND)
    got = [f for i in range(len(data)) for f in splitter.feed(data[i : i + 1])]
    assert got == oracle.split(data, LIMIT_BYTES, PREAMBLE, LAST_KIND)[0]
    assert splitter.fault is None


def test_a_large_payload_is_skipped_and_the_next_frame_survives() -> None:
    splitter = frames.Splitter(LIMIT_BYTES, PREAMBLE, LAST_KIND)
    data = PREAMBLE + frames.pack(2, 5, bytes(100_000)) + frames.pack(2, 6, b"next")
    got = [f for i in range(0, len(data), 999) for f in splitter.feed(data[i : i + 999])]
    assert got == [(frames.OVERSIZE, 5, b"100000"), (2, 6, b"next")]


@pytest.mark.parametrize("kind", [0, LAST_KIND + 1, 0x7F, 255])
def test_an_unknown_kind_is_a_fault_and_ends_everything(kind: int) -> None:
    splitter = frames.Splitter(LIMIT_BYTES, PREAMBLE, LAST_KIND)
    good = frames.pack(2, 1, b"x")
    assert splitter.feed(PREAMBLE + good + frames.pack(kind, 1, b"") + good) == [(2, 1, b"x")]
    assert splitter.fault == f"unknown frame kind {kind}"
    assert splitter.feed(good) == []


def test_another_version_is_refused_by_name() -> None:
    splitter = frames.Splitter(LIMIT_BYTES, PREAMBLE, LAST_KIND)
    assert splitter.feed(b"DYNR\x02....") == []
    assert splitter.fault is not None and "another protocol or version" in splitter.fault


def test_wrong_types_are_refused() -> None:
    splitter = frames.Splitter(LIMIT_BYTES, PREAMBLE, LAST_KIND)
    with pytest.raises(TypeError):
        splitter.feed(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        frames.pack(1, 1, "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        frames.pack_open(1, b"name", b"", b"")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        frames.pack(1, 2**32, b"")
    with pytest.raises(OverflowError):
        frames.pack_open(2**32, "name", b"", b"")


PREFIX = b"\x81\xa9token_ids\x91"
DATA = 2
PIECES = ["", "a", None, "ä", *("x" * (n % 7) for n in range(4, 300))]
STOP_IDS = frozenset((5, 150))
numbers = st.one_of(
    st.integers(0, 310).map(lambda n: bytes((n,)) if n < 0x80 else b"\xcd" + n.to_bytes(2, "big")),
    st.integers(0, 255).map(lambda n: bytes((0xCC, n))),
    st.integers(0, 400).map(lambda n: b"\xce" + n.to_bytes(4, "big")),
    st.binary(max_size=6),
)
items = st.one_of(numbers, numbers, numbers).map(PREFIX.__add__) | st.binary(max_size=20)
token_frames = st.builds(
    oracle.pack, st.sampled_from([DATA, DATA, DATA, DATA, 3]), st.integers(1, 3), items
)


@given(st.lists(st.tuples(st.lists(token_frames, max_size=12), st.booleans()), max_size=6))
def test_sinks_take_what_the_reference_takes(reads: list[tuple[list[bytes], bool]]) -> None:
    splitter = frames.Splitter(LIMIT_BYTES, b"", LAST_KIND, DATA, PREFIX)
    texts: dict[int, list[str]] = {1: [], 2: []}
    expected_texts: dict[int, list[str]] = {1: [], 2: []}
    expected = {}
    for stream in texts:  # stream 3 has no sink
        splitter.sinks[stream] = frames.TokenSink(stream, PIECES, STOP_IDS, texts[stream])
        expected[stream] = oracle.TokenSink(PREFIX, PIECES, STOP_IDS, expected_texts[stream])
    for parts, reactivate in reads:
        rest = [
            frame
            for frame in oracle.split(b"".join(parts), LIMIT_BYTES, b"", LAST_KIND)[0]
            if not (frame[0] == DATA and frame[1] in expected and expected[frame[1]].push(frame[2]))
        ]
        assert splitter.feed(b"".join(parts)) == rest
        assert {sink.owner for sink in splitter.touched} == {
            stream for stream, one in expected.items() if one.taken
        }
        assert texts == expected_texts
        for stream, one in expected.items():
            sink = splitter.sinks[stream]
            assert sink.active == one.active
            assert sink.take() == (one.taken, one.size_bytes)
            one.taken, one.size_bytes = [], 0
            if reactivate:
                sink.active = one.active = True


def test_tokens_before_a_refused_item_are_taken_and_those_after_it_are_not() -> None:
    splitter = frames.Splitter(LIMIT_BYTES, b"", LAST_KIND, DATA, PREFIX)
    texts: list[str] = []
    splitter.sinks[1] = frames.TokenSink(None, PIECES, STOP_IDS, texts)
    parts = [oracle.pack(DATA, 1, PREFIX + bytes((token,))) for token in (1, 3, 2, 1)]
    assert [frame[2][-1] for frame in splitter.feed(b"".join(parts))] == [2, 1]
    assert texts == ["a", "ä"] and splitter.sinks[1].take()[0] == [1, 3]
    del splitter.sinks[1]
    assert len(splitter.feed(parts[0])) == 1 and not splitter.touched
