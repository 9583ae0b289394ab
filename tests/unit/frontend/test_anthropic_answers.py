"""Answers of Anthropic's Messages API: events and bodies, checked by the types of its client."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from image_kit import write_eyes
from lazy_module import LazyModule
from pydantic import TypeAdapter
from text_kit import EXAMPLE, card, outputs

from dynamo.errors import EngineFailure, InvalidArgument, NoInstances, Overloaded
from dynamo.frontend.apis.messages.answer import MessagesStream, error_message, error_object
from dynamo.frontend.apis.messages.prompt import parse_messages
from dynamo.frontend.apis.messages.route import prepare_message
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PromptTokensDetails

anthropic_types = LazyModule("anthropic.types")

CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
    for name, arguments in (("weather", '{"city": "Köln", "days": [1, 2]}'), ("time", "{}"))
)
TEXT = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALLS}"
BLOCKS = [
    {"type": "thinking", "thinking": "Let me see.", "signature": "dynamo"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Köln", "days": [1, 2]}},
    {"type": "tool_use", "name": "time", "input": {}},
]


@functools.cache
def event_type() -> TypeAdapter[Any]:
    return TypeAdapter(anthropic_types.RawMessageStreamEvent)


@functools.cache
def preprocessor(**config: Any) -> Preprocessor:
    return Preprocessor(card(source_path=str(EXAMPLE), runtime_config=RuntimeConfig(**config)))


def parsed() -> Preprocessor:
    return preprocessor(tool_call_parser="hermes", reasoning_parser="qwen3")


def begin(model: Preprocessor | None = None, **fields: Any) -> MessagesStream:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "max_tokens": 500, "messages": messages, "tools": tools}
    request = parse_messages(json.dumps({**body, **fields}).encode())
    model = model or parsed()
    return MessagesStream(request, prepare_message(model, request), model.tokenizer, "msg_1", 17)


def body(text: str, reason: str = "stop", **fields: Any) -> Any:
    stream = begin(**fields)
    for each in outputs(text, reason):
        stream.choices[0].push(each)
    raw = json.loads(stream.unary())
    anthropic_types.Message.model_validate(raw)
    return raw


def events(raw: bytes) -> list[Any]:
    found = []
    for part in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = part.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_of(shown: list[Any]) -> dict[str, Any]:
    """The message that the events are together; their order is checked."""
    message: dict[str, Any] = {}
    opened = -1
    is_open = False
    for event in shown:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert not is_open and event["index"] == opened + 1
            is_open, opened = True, event["index"]
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == opened
            add(message["content"][-1], event["delta"])
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == opened
            is_open = False
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
        if event["type"] != "ping":
            event_type().validate_python(event)
    assert not is_open and shown[-1]["type"] == "message_stop"
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return message


def add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kind = delta["type"]
    if kind == "input_json_delta":
        block["json"] += delta["partial_json"]
    else:
        field = kind.removesuffix("_delta")
        block[field] += delta[field]


def plain(message: dict[str, Any]) -> list[Any]:
    return [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 1000])
def test_stream(batch: int) -> None:
    stream = begin(stream=True)
    raw = stream.opening()
    for place, each in enumerate(outputs(TEXT)):
        stream.choices[0].push(each)
        if place % batch == 0:
            raw += stream.flush()
    message = message_of(events(raw + stream.end()))
    assert plain(message) == BLOCKS
    assert message["stop_reason"] == "tool_use" and message["stop_sequence"] is None
    ids = [block["id"] for block in message["content"][2:]]
    assert len(set(ids)) == 2
    usage = message["usage"]
    assert usage["output_tokens"] == len(outputs(TEXT))
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


def test_a_call_of_the_named_tool() -> None:
    choice = {"type": "tool", "name": "weather"}
    message = body(
        '{"city": "Köln"}', model=preprocessor(tool_call_parser="hermes"), tool_choice=choice
    )
    assert message["stop_reason"] == "tool_use"
    assert plain(message) == [{"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}]


def test_body() -> None:
    message = body(TEXT)
    assert plain(message) == BLOCKS and message["stop_reason"] == "tool_use"
    assert (message["id"], message["model"], message["role"]) == ("msg_1", "m", "assistant")


def test_a_model_without_parsers() -> None:
    stream = begin(preprocessor(), stream=True)
    raw = stream.opening()
    for each in outputs("Hello <tool_call> you"):
        stream.choices[0].push(each)
        raw += stream.flush()
    shown = events(raw + stream.end())
    assert plain(message_of(shown)) == [{"type": "text", "text": "Hello <tool_call> you"}]
    assert [event["type"] for event in shown[:3]] == [
        "message_start",
        "ping",
        "content_block_start",
    ]


def test_thinking_may_be_left_out() -> None:
    hidden: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
    expected = [{"type": "thinking", "thinking": "", "signature": "dynamo"}, *BLOCKS[1:]]
    assert plain(body(TEXT, **hidden)) == expected
    stream = begin(stream=True, **hidden)
    for each in outputs(TEXT):
        stream.choices[0].push(each)
    assert plain(message_of(events(stream.opening() + stream.end()))) == expected


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("length", {"max_tokens": 1_000_000}, ("model_context_window_exceeded", None)),
        ("content_filter", {}, ("refusal", None)),
        ("stop", {"stop_sequences": ["x", "way"]}, ("stop_sequence", "way")),
    ],
)
def test_stop_reasons(reason: str, fields: Any, expected: tuple[str, str | None]) -> None:
    message = body("Hello there, go away now", reason, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_a_call_cut_off_is_no_input() -> None:
    message = body(TEXT[: TEXT.index("Köln")], "length")
    assert message["content"][2]["input"] == {"INVALID_JSON": '{"city": "'}
    assert message["stop_reason"] == "max_tokens"


def test_cached_tokens_are_no_input_tokens() -> None:
    stream = begin()
    details = PromptTokensDetails(cached_tokens=32)
    usage = CompletionUsage(prompt_tokens=40, completion_tokens=1, prompt_tokens_details=details)
    last = EngineOutput(token_ids=[5], finish_reason="stop", completion_usage=usage)
    stream.choices[0].push(last)
    shown = json.loads(stream.unary())["usage"]
    assert (shown["input_tokens"], shown["cache_read_input_tokens"]) == (8, 32)
    assert shown["cache_creation_input_tokens"] == 0


def test_max_tokens_may_exceed_the_context() -> None:
    model = parsed()
    body = {"model": "m", "max_tokens": 1_000_000, "messages": [{"role": "user", "content": "a"}]}
    request = parse_messages(json.dumps(body).encode())
    prepared = prepare_message(model, request)
    assert model.context_length is not None
    left = model.context_length - prepared.prompt_tokens
    assert prepared.requests[0].stop_conditions.max_tokens == left
    small = parse_messages(json.dumps({**body, "max_tokens": 3}).encode())
    assert prepare_message(model, small).requests[0].stop_conditions.max_tokens == 3


def test_images(tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    body = {"model": "m", "max_tokens": 5, "messages": [message], "system": "be"}
    request = parse_messages(json.dumps(body).encode())
    with pytest.raises(InvalidArgument, match="messages: this model takes no images"):
        prepare_message(parsed(), request)
    eyes = Preprocessor(card(source_path=str(write_eyes(tmp_path / "eyes"))))
    (sent,) = prepare_message(eyes, request).requests
    assert sent.multi_modal_data == {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}
    assert sent.stop_conditions.max_tokens == 5


def test_images_of_tools(tmp_path: Path) -> None:
    """Claude Code sends them again with each later request: an error would end its session."""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    used = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    asked: list[Any] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": asked}
    request = parse_messages(json.dumps(body).encode())
    model = parsed()
    prompt = model.tokenizer.decode(prepare_message(model, request).prompts[0].token_ids)
    assert "(An image, which this model cannot see.)\nWell?" in prompt
    eyes = Preprocessor(card(source_path=str(write_eyes(tmp_path / "eyes"))))
    (sent,) = prepare_message(eyes, request).requests
    assert sent.multi_modal_data == {"image_url": [{"Url": "data:image/png;base64,AAAA"}]}
    asked[2]["content"] = [result, image]
    with pytest.raises(InvalidArgument, match="messages: this model takes no images"):
        prepare_message(model, parse_messages(json.dumps(body).encode()))


def test_errors() -> None:
    for status, kind in (
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (529, "overloaded_error"),
    ):
        found = json.loads(error_message(status, "why"))
        assert found["type"] == "error" and found["error"] == {"type": kind, "message": "why"}
    assert error_object(503, Overloaded("busy"))["error"]["type"] == "overloaded_error"
    assert error_object(503, NoInstances("none"))["error"]["type"] == "api_error"
    stream = begin(stream=True)
    stream.choices[0].push(outputs("Hi there")[0])
    (*_, last) = events(stream.opening() + stream.error(EngineFailure("secret")))
    assert last["error"] == {"type": "api_error", "message": "Internal server error"}
