"""The text of answers that are sent again: every API, and servers that send anything."""

from __future__ import annotations

import json
from itertools import product

import pytest

from dynamo.cli.replay import ReplayedAnswer, read_answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"choices": [{"message": {"content": "a"}}, {"text": "b"}]}, "ab"),
        ({"choices": [{"delta": {"content": None}}]}, ""),
        ({"type": "response.output_text.delta", "delta": "a"}, "a"),
        ({"type": "response.completed", "output": [{"content": [{"text": "a"}]}]}, ""),
        ({"output": [{"content": [{"text": "a"}]}]}, "a"),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, "a"),
        ({"type": "message", "content": [{"type": "text", "text": "a"}]}, "a"),
    ],
)
def test_each_form_of_answer(answer: object, text: str) -> None:
    assert read_answer(json.dumps(answer)).text == text
    assert read_answer(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n").text == text


def stream(*events: object) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n"


def delta(index: int, **fields: object) -> object:
    return {"choices": [{"index": index, "delta": fields}]}


def call(name: str | None, arguments: str, index: int = 0) -> object:
    return {"index": index, "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (stream(delta(0, content="a"), delta(1, content="x"), delta(0, content="b")), "ab | x"),
        (
            stream(
                delta(0, content="so"),
                delta(0, tool_calls=[call("f", "")]),
                delta(0, tool_calls=[call(None, '{"a":1}'), call("g", "{}", 1)]),
            ),
            'so | f {"a":1} | g {}',
        ),
        (
            json.dumps(
                {"choices": [{"message": {"tool_calls": [{"function": {"name": "f"}}] * 2}}]}
            ),
            "f  | f ",
        ),
        (
            stream(
                {
                    "type": "response.output_item.added",
                    "output_index": 1,
                    "item": {"type": "function_call", "name": "f", "arguments": ""},
                },
                {
                    "type": "response.function_call_arguments.delta",
                    "output_index": 1,
                    "delta": "{}",
                },
            ),
            "f {}",
        ),
        (
            json.dumps({"output": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
            "f {}",
        ),
        (
            stream(
                {"type": "content_block_start", "index": 1, "content_block": {"name": "f"}},
                {"type": "content_block_delta", "index": 1, "delta": {"partial_json": "{}"}},
            ),
            "f {}",
        ),
        (
            json.dumps({"content": [{"text": "so"}, {"name": "f", "input": {"a": 1}}]}),
            'so | f {"a":1}',
        ),
    ],
)
def test_choices_and_calls(answer: str, text: str) -> None:
    assert read_answer(answer) == ReplayedAnswer(text)


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "lost", "code": 503}},
        {"type": "error", "error": {"type": "api_error", "message": "lost"}},
        {"type": "error", "sequence_number": 0, "message": "lost"},
        {"type": "response.failed", "response": {"error": {"code": "c", "message": "lost"}}},
    ],
)
def test_a_stream_that_broke_off(event: object) -> None:
    begun = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    assert read_answer(stream(begun, event)) == ReplayedAnswer("a", "lost")


def test_answers_of_no_form() -> None:
    values = (None, 5, True, "t", {"a": 1}, [None, 5, {"message": 5, "delta": [1], "content": 5}])
    for key, value in product(("type", "choices", "delta", "output", "content"), values):
        assert read_answer(json.dumps({key: value})).text == ""
