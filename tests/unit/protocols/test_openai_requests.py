"""The typed requests accept what clients send, and only that."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.frontend.prompt.validation import strict_kind
from dynamo.protocols import openai

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STRICT_CHAT = strict_kind(openai.ChatCompletionRequest)
STRICT_COMPLETION = strict_kind(openai.CompletionRequest)


def strict(**fields: object) -> openai.ChatCompletionRequest:
    return msgspec.convert(CHAT | fields, STRICT_CHAT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("metadata", {"a": "b"}),
        ("service_tier", "auto"),
        ("parallel_tool_calls", False),
        ("reasoning_effort", "low"),
        ("logit_bias", {"12": -100}),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "u"),
        ("verbosity", "low"),
        ("modalities", ["text"]),
        ("user", "u"),
        ("stop", "x"),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stream_options", {"include_usage": True}),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("temperature", 1),
        ("seed", -(2**63)),
        ("top_k", -1),
        ("nvext", {"annotations": ["token_ids"], "agent_hints": {"osl": 5}, "new_thing": 1}),
        ("guided_json", {"type": "object"}),
    ],
)
def test_fields_that_clients_send_are_accepted(name: str, value: object) -> None:
    assert getattr(strict(**{name: value}), name) is not None


def test_every_optional_field_may_be_null() -> None:
    request = STRICT_CHAT
    nulls = {field.name: None for field in msgspec.structs.fields(request) if not field.required}
    del nulls["model"]  # null where bodies are decoded; the frontend's BodyDecoder drops it
    assert strict(**nulls).temperature is None


def test_strict_and_lenient_have_the_same_fields() -> None:
    pairs = (
        (STRICT_CHAT, openai.ChatCompletionRequest),
        (STRICT_COMPLETION, openai.CompletionRequest),
    )
    for one, other in pairs:
        assert one.__struct_fields__ == other.__struct_fields__
    with pytest.raises(msgspec.ValidationError):
        strict(foo_bar=1)
    assert msgspec.convert(CHAT | {"foo_bar": 1}, openai.ChatCompletionRequest).model == "m"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompt_forms(prompt: object) -> None:
    raw = {"model": "m", "prompt": prompt}
    assert msgspec.convert(raw, STRICT_COMPLETION).prompt == prompt


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_token_ids_are_uint32(ids: list[int]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"model": "m", "prompt": ids}, openai.CompletionRequest)
