"""Prompts for vLLM's EngineCore, and the plain tokens of its outputs."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import engine_core as oracle
from oracle.engine_core import OracleTokenRouter

from dynamo._fast.engine_core import TokenRouter, pack_ids
from dynamo.protocols.engine import TOKEN_PREFIX, EngineOutput, token_item
from dynamo.runtime.requests.frames import DATA, LAST_KIND, Splitter

_FIELDS = 20
_IDS = st.integers(0, 2**32 - 1)
_NAMES = st.sampled_from(["a", "1f-2", "x" * 31, "y" * 32, "ü" * 200])
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=18) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_FURTHER = st.lists(st.sampled_from([None, 0]), min_size=3, max_size=_FIELDS) | st.lists(
    _VALUES, max_size=_FIELDS
)
_TOKENS = (
    st.lists(_IDS, min_size=1, max_size=1)
    | st.lists(st.sampled_from([-1, 0, 2**32 - 1, 2**32]), min_size=1, max_size=1)
    | st.lists(_IDS, max_size=20)
    | _VALUES
)
_OUTPUTS = st.lists(st.tuples(_NAMES, _TOKENS, _FURTHER), max_size=20)


def _routers(kind: int = DATA) -> tuple[TokenRouter, OracleTokenRouter]:
    return TokenRouter(kind, TOKEN_PREFIX), OracleTokenRouter(kind, TOKEN_PREFIX)


def _message(outputs: list[tuple[str, Any, list[Any]]], tail: tuple[Any, ...] = ()) -> bytes:
    rows = [[request_id, ids, *further] for request_id, ids, further in outputs]
    return msgspec.msgpack.encode([0, rows, *tail])


@given(st.lists(_IDS, max_size=70))
def test_prompts_are_packed_as_message_pack(ids: list[int]) -> None:
    assert pack_ids(array("I", ids)) == oracle.pack_ids(ids)


@pytest.mark.parametrize("count", [0, 15, 16, 65535, 65536])
def test_prompts_of_any_length(count: int) -> None:
    ids = array("I", range(count))
    packed, largest = pack_ids(ids)
    assert msgspec.msgpack.decode(packed) == ids.tolist()
    assert largest == max(count - 1, 0)
    with pytest.raises(ValueError, match=r"array\('I'\), not array\('q'\)"):
        pack_ids(array("q", ids))


@given(
    st.lists(st.tuples(_OUTPUTS, st.lists(_VALUES, max_size=4), st.integers(0, 4)), max_size=4),
    st.dictionaries(_NAMES, st.integers(0, 3)),
)
def test_any_steps_are_split_as_by_the_reference(
    steps: list[tuple[list[tuple[str, Any, list[Any]]], list[Any], int]], added: dict[str, int]
) -> None:
    fast, reference = _routers()
    for number, (request_id, left_in) in enumerate(added.items()):
        fast.add(request_id, number % 2, number, left_in, number / 4)
        reference.add(request_id, number % 2, number, left_in, number / 4)
    for number, (outputs, tail, read) in enumerate(steps, 1):
        if len(tail) == 4:
            fast.leave(number)
            reference.leave(number)
        message = _message(outputs, tuple(tail))
        for name in list(added)[number:]:
            assert fast.stamp(name, number / 8) == reference.stamp(name, number / 8)
        assert fast.split(message, number, read) == reference.split(message, number, read)
    assert [fast.remove(name) for name in sorted(added)] == [
        reference.remove(name) for name in sorted(added)
    ]
    assert len(fast) == len(reference) == 0


@given(_OUTPUTS, st.data())
def test_a_truncated_or_damaged_message_is_returned_whole_or_split(
    outputs: list[tuple[str, Any, list[Any]]], data: st.DataObject
) -> None:
    router, _ = _routers()
    for number, (request_id, _, _) in enumerate(outputs):
        router.add(request_id, 1, number, 0, 0.0)
    message = _message(outputs, (None,))
    size = data.draw(st.integers(0, len(message)))
    noise = data.draw(st.binary(max_size=8))
    for damaged in (message[:size], message[:size] + noise + message[size + len(noise) :]):
        frames, rest, _ = router.split(damaged, 1, 1)
        if not frames:
            assert rest == damaged


def test_a_frame_is_that_of_the_item() -> None:
    router, _ = _routers()
    router.add("a", 7, 42, 0, 0.0)
    tokens = (0, 127, 128, 65535, 65536, 2**32 - 1)
    for token in tokens:
        frames, rest, _ = router.split(
            _message([("a", [token], [None] * 18), ("b", [1], [])]), 1, 0
        )
        assert [(connection, count) for connection, count, _ in frames] == [(7, 1)]
        splitter = Splitter(1000, b"", LAST_KIND)
        assert splitter.feed(frames[0][2]) == [(DATA, 42, token_item(token))]
        assert msgspec.msgpack.decode(token_item(token), type=EngineOutput).token_ids == [token]
        assert msgspec.msgpack.decode(rest) == [0, [["b", [1]]]]
    assert router.remove("a") == (len(tokens), 0.0)
    assert router.remove("a") == (0, 0.0)


def test_gaps_are_the_times_between_the_tokens_of_a_request() -> None:
    router, _ = _routers()
    for number, name in enumerate("abc"):
        router.add(name, 1, number, 0, 1.0)
    all_three = [(name, [5], [None] * 18) for name in "abc"]
    assert router.split(_message(all_three, (None, 1.5)), 1, 0)[2] == [(0.5, 3)]
    # One of them got its token another way, which the caller notes.
    assert router.stamp("b", 1.75) == 1.5 and router.stamp("none", 2.0) == 0.0
    assert router.split(_message(all_three, ({"x": [1]}, 2.0)), 1, 0)[2] == [
        (0.5, 1),
        (0.25, 1),
        (0.5, 1),
    ]
    # Without a time there is no gap, and the last one stays.
    for tail in ((), (None,), (None, None), (None, 7)):
        assert router.split(_message(all_three, tail), 1, 0)[2] == []
    assert router.remove("a") == (6, 2.0)
