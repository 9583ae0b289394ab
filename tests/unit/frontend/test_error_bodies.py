"""The error objects that OpenAI's clients read, beside Dynamo's three fields."""

from __future__ import annotations

import json

import pytest

from dynamo.errors import (
    MESSAGE_LIMIT,
    DynamoError,
    EngineFailure,
    HttpFailure,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
)
from dynamo.frontend.requests.errors import error_object, error_response

_TOO_LONG = "This model's maximum context length is 9 tokens. However, your prompt has 10 tokens."
_DECODE = "Failed to deserialize the JSON body into the target type: "


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (ModelNotFound("no"), "invalid_request_error", "model", "model_not_found"),
        (Overloaded("full"), "server_error", None, "overloaded"),
        (EngineFailure("cuda"), "server_error", None, "engine_failure"),
        (HttpFailure("slow down", 429), "rate_limit_error", None, "http"),
        (HttpFailure("its own 529", 529), "server_error", None, "http"),
        (InvalidArgument(_TOO_LONG), "invalid_request_error", None, "context_length_exceeded"),
        (InvalidArgument("Chat template: no"), "invalid_request_error", None, None),
    ],
)
def test_every_error_has_openais_object(
    error: DynamoError, kind: str, param: str | None, code: str | None
) -> None:
    status, raw = error_response(error)
    body = json.loads(raw)
    assert status == error.status and body["code"] == status and body["type"]
    message = body["message"]
    assert message != "Service temporarily overloaded", "said of our own limits, if so chosen"
    assert body["error"] == {"message": message, "type": kind, "param": param, "code": code}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Validation: 'stop' strings cannot be empty", "stop"),
        ("Validation: messages[3].tool_calls: missing `function`", "messages[3].tool_calls"),
        (f"{_DECODE}messages[0]: missing field `role`", "messages[0]"),
        ("temperature: must be a number", "temperature"),
        ("Unsupported parameter(s): `zzz`", "zzz"),
        ("Unsupported parameter(s): zzz, yyy", "zzz"),
        ("Validation: the prompt has no tokens", None),
        ("ValueError: boom", None),
    ],
)
def test_the_field_at_fault_is_named(message: str, param: str | None) -> None:
    assert error_object(400, InvalidArgument(message))["param"] == param


def test_a_long_message_is_cut_in_both() -> None:
    body = json.loads(error_response(InvalidArgument("x" * 20_000))[1])
    assert body["message"] == body["error"]["message"]
    assert len(body["message"]) == MESSAGE_LIMIT
