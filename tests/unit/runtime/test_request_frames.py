"""What the larger frames carry survives the trip; malformed ones are refused, never a surprise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import DynamoError, EngineShutdown, Overloaded
from dynamo.runtime.requests import frames

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def body(frame: bytes) -> bytes:
    return frame[frames.HEADER_SIZE_BYTES :]


@given(TEXT, st.dictionaries(TEXT, TEXT, max_size=4), st.binary(max_size=200))
def test_open_round_trip(endpoint: str, headers: dict[str, str], payload: bytes) -> None:
    frame = frames.pack_open(9, endpoint, frames.encode_headers(headers), payload)
    splitter = frames.Splitter(10_000, b"", frames.LAST_KIND)
    [(kind, number, inside)] = splitter.feed(frame)
    assert (kind, number) == (frames.OPEN, 9)
    assert frames.parse_open(inside) == (endpoint, headers, payload)


@given(st.binary(max_size=60))
def test_a_malformed_open_is_a_frame_error(data: bytes) -> None:
    try:
        endpoint, headers, payload = frames.parse_open(data)
    except frames.FrameError:
        return
    assert isinstance(endpoint, str) and isinstance(headers, dict) and isinstance(payload, bytes)


def test_an_open_cut_anywhere_before_its_payload_is_a_frame_error() -> None:
    whole = body(
        frames.pack_open(1, "ns/worker/generate", frames.encode_headers({"a": "b"}), b"payload")
    )
    for cut in range(len(whole) - len(b"payload")):
        with pytest.raises(frames.FrameError):
            frames.parse_open(whole[:cut])


def test_an_endless_endpoint_name_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        frames.pack_open(1, "x" * 70_000, b"", b"")


@pytest.mark.parametrize("error", [Overloaded("full"), EngineShutdown(""), DynamoError("ä \n")])
def test_errors_keep_class_and_message(error: DynamoError) -> None:
    back = frames.parse_error(body(frames.pack_error(1, error, 1000)))
    assert type(back) is type(error) and back.message == error.message


def test_a_long_error_is_cut_and_a_foreign_one_is_plain() -> None:
    packed = body(frames.pack_error(1, Overloaded("x" * 5000), 100))
    assert len(packed) <= 100 and isinstance(frames.parse_error(packed), Overloaded)
    assert type(frames.parse_error(b"\x04new!text")) is DynamoError
    assert frames.parse_error(b"").message == ""


@given(st.binary(max_size=40))
def test_any_error_payload_is_some_error(data: bytes) -> None:
    assert isinstance(frames.parse_error(data), DynamoError)
