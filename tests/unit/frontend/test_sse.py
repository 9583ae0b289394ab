"""Spliced chunks are valid JSON with any text in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import (
    Cancelled,
    DynamoError,
    EngineFailure,
    InvalidArgument,
    NoInstances,
    Overloaded,
    WorkerUnavailable,
)
from dynamo.frontend.answer.sse import (
    ChatChunks,
    ChoiceChunks,
    CompletionChunks,
    annotation,
    error_event,
    json_bytes,
    public_message,
    stream_head,
)

scalars = st.characters(exclude_categories=["Cs"])


def payload(event: bytes) -> Any:
    text = event.decode()
    assert text.startswith("data: ") and text.endswith("\n\n")
    assert text.count("\n") == 2
    return json.loads(text[len("data: ") :])


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
@given(text=st.text(scalars), model=st.text(scalars), response_id=st.text(scalars))
def test_any_text_survives(
    kind: type[ChoiceChunks], text: str, model: str, response_id: str
) -> None:
    head = stream_head(kind.kind, response_id, 12, model)
    chunks = kind(head, 3, b',"usage":null')
    first = payload(chunks.chunk(text))
    middle = payload(chunks.head + json_bytes(text) + chunks.tail)
    last = payload(chunks.chunk("", {"content": []}, "stop", body=b',"nvext":{"a":1}'))
    for each in (first, middle, last):
        assert (each["id"], each["model"], each["created"]) == (response_id, model, 12)
        assert each["object"] == kind.kind
        assert each["usage"] is None
        assert each["choices"][0]["index"] == 3
    if kind is ChatChunks:
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": text}
        assert middle["choices"][0]["delta"] == {"content": text}
        assert last["choices"][0]["delta"] == {}
    else:
        assert [each["choices"][0]["text"] for each in (first, middle, last)] == [text, text, ""]
    assert last["choices"][0]["logprobs"] == {"content": []}
    assert (last["choices"][0]["finish_reason"], last["nvext"]) == ("stop", {"a": 1})


class Teapot(DynamoError):
    """A status that no error of ours has."""

    status = 429


@pytest.mark.parametrize(
    ("error", "kind", "code", "message"),
    [
        (InvalidArgument("bad n"), "invalid_request_error", 400, "bad n"),
        (Teapot("slow down"), "rate_limit_error", 429, "slow down"),
        (Cancelled("Request cancelled"), "invalid_request_error", 499, "Request cancelled"),
        (Overloaded("all busy"), "service_unavailable", 503, "all busy"),
        (
            NoInstances("Model `m` is not ready"),
            "service_unavailable",
            503,
            "Model `m` is not ready",
        ),
        (WorkerUnavailable("x"), "service_unavailable", 503, "Service temporarily unavailable"),
        (EngineFailure("secret"), "internal_server_error", 500, "Internal server error"),
    ],
)
def test_errors(error: DynamoError, kind: str, code: int, message: str) -> None:
    expected = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    assert payload(error_event(error)) == expected
    assert public_message(error) == message


def test_annotation_is_a_named_event_with_a_comment() -> None:
    assert annotation("request_id", 'a"b\n') == b'event: request_id\n: "a\\"b\\n"\n\n'
