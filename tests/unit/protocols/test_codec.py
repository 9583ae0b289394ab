"""Wire types survive the wire; token ids travel as one block of bytes."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocols import codec
from dynamo.protocols.engine import (
    EngineOutput,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
    StopConditions,
)
from dynamo.protocols.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_tokens_round_trip_typed_and_plain(ids: list[int]) -> None:
    request = PreprocessedRequest("m", codec.tokens(ids), StopConditions(max_tokens=3))
    wire = codec.encode(request)
    again = codec.decoder(PreprocessedRequest).decode(wire)
    assert again == request and isinstance(again.token_ids, array)
    plain = codec.plain_decode(wire)
    assert plain["token_ids"] == ids and plain["stop_conditions"] == {"max_tokens": 3}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30))
def test_lists_of_token_ids_are_accepted(ids: list[int]) -> None:
    image = {"routing_token_ids": ids, "mm_objects": []}
    wire = codec.encode({"model": "m", "token_ids": ids, "routing": {"mm_routing_info": image}})
    request = codec.decoder(PreprocessedRequest).decode(wire)
    assert request.token_ids == codec.tokens(ids)
    assert request.routing is not None and request.routing.mm_routing_info is not None
    assert request.routing.mm_routing_info.routing_token_ids == codec.tokens(ids)
    inputs = codec.encode({"model": "m", "token_ids": [ids, codec.tokens(ids)]})
    embedding = codec.decoder(PreprocessedEmbeddingRequest).decode(inputs)
    assert embedding.token_ids == [codec.tokens(ids)] * 2


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], "ab", b"abcd", 5, None])
def test_other_token_ids_are_refused_with_the_field(ids: object) -> None:
    wire = codec.encode({"model": "m", "token_ids": ids})
    with pytest.raises(msgspec.ValidationError, match=r"integers from 0 to .* `\$.token_ids`"):
        codec.decoder(PreprocessedRequest).decode(wire)


def test_token_ids_are_little_endian_bytes_on_the_wire() -> None:
    wire = bytes((0xD7, codec.TOKENS_EXT, 1, 0, 0, 0, 255, 255, 255, 255))
    assert codec.encode(codec.tokens([1, 2**32 - 1])) == wire


def test_plain_lists_from_foreign_workers_decode_as_outputs() -> None:
    wire = msgspec.msgpack.encode({"token_ids": [5, 6], "finish_reason": "stop", "other": 1})
    output = codec.decoder(EngineOutput).decode(wire)
    assert output.token_ids == [5, 6] and output.finish_reason == "stop"


def test_tokens_does_not_copy_arrays() -> None:
    ids = array("I", [1])
    assert codec.tokens(ids) is ids
    assert codec.tokens([2, 3]) == array("I", [2, 3])


def test_events_keep_their_kind() -> None:
    column = (1).to_bytes(8, "little")
    events = [
        KvEvent(1, BlocksStored(column, column, parent_hash=2**64 - 1)),
        KvEvent(2, BlocksRemoved(column), dp_rank=3),
        KvEvent(3, BlocksCleared()),
    ]
    batch = KvEventBatch(7, events)
    assert codec.decoder(KvEventBatch).decode(codec.encode(batch)) == batch


def test_a_value_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(TypeError, match="cannot encode object"):
        codec.encode(object())
    with pytest.raises(msgspec.ValidationError):
        codec.decoder(EngineOutput).decode(codec.encode({"token_ids": "x"}))
