"""Forced and strict calls in the model's own format: their grammars, and how answers are read."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from answer_cases import TOOLS
from test_parsed_answers import CALL, NAMED, body, prepare, stream
from text_kit import card

from dynamo.errors import InvalidArgument
from dynamo.frontend.formats.table import TOOL_FORMATS
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.protocols.control import STRUCTURAL_TAGS_KEY, RuntimeConfig

STRICT = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, *TOOLS[1:]]


@functools.cache
def model(tool: str = "hermes", reasoning: str | None = None) -> Preprocessor:
    """A model whose workers take structural tags."""
    config = RuntimeConfig(
        tool_call_parser=tool,
        reasoning_parser=reasoning,
        runtime_data={STRUCTURAL_TAGS_KEY: True},
    )
    return Preprocessor(card(runtime_config=config))


def grammars(preprocessor: Preprocessor | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The grammars of all choices."""
    requests = prepare(preprocessor or model(), **fields).requests
    return [request.sampling_options.guided_decoding or {} for request in requests]


def tag(preprocessor: Preprocessor | None = None, **fields: Any) -> Any:
    """The format in the structural tag, which must be the grammar."""
    (guided,) = grammars(preprocessor, **fields)
    assert guided.keys() == {"structural_tag", "with_reasoning"} and guided["with_reasoning"]
    return json.loads(guided["structural_tag"])["format"]


def parts(format: Any, kind: str) -> list[Any]:
    """Every part of a format with this type, from the outside in."""
    values = format.values() if isinstance(format, dict) else format
    inner = [
        part for value in values if isinstance(value, dict | list) for part in parts(value, kind)
    ]
    return [format, *inner] if isinstance(format, dict) and format.get("type") == kind else inner


@pytest.mark.parametrize("name", [name for name, row in TOOL_FORMATS.items() if row.tags])
def test_a_forced_call_is_a_tag_of_the_format(name: str) -> None:
    for choice, names in ((NAMED, 1), ("required", len(TOOLS))):
        form = tag(model(name), tools=TOOLS, tool_choice=choice)
        for row in parts(form, "tags_with_separator"):
            assert row["at_least_one"] and len(row["tags"]) == names
            schemas = [part["json_schema"] for part in parts(row["tags"], "json_schema")]
            assert schemas[0] == TOOLS[0]["function"]["parameters"]
            assert choice == "required" or row["stop_after_first"]
    assert '"get_time"' not in json.dumps(tag(model(name), tools=TOOLS, tool_choice=NAMED))
    (row, *_) = parts(
        tag(model(name), tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
        "tags_with_separator",
    )
    assert row["stop_after_first"]


def test_the_call_is_read_in_its_own_format() -> None:
    for choice, reason in ((NAMED, "stop"), ("required", "tool_calls")):
        fields: Any = {"model": model("hermes", "qwen3"), "tools": TOOLS, "tool_choice": choice}
        text = f"<think>So.</think>\n{CALL}"
        answer = body(text, **fields)
        assert answer["finish_reason"] == reason
        message, chunks = stream(text, **fields)
        assert (message["content"], message["reasoning_content"]) == (None, "So.")
        assert chunks[-1]["finish_reason"] == reason
        for calls in (answer["message"]["tool_calls"], message["tool_calls"]):
            assert [call["function"] for call in calls] == [
                {"name": "get_weather", "arguments": '{"city": "Paris"}'}
            ]
        assert answer["message"]["reasoning_content"] == "So."
        assert answer["message"]["content"] is None


def test_reasoning_comes_before_the_call() -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": NAMED}
    (text,) = parts(tag(model("hermes", "qwen3"), **fields), "any_text")
    assert text["excludes"] == ["<tool_call>"]
    assert parts(tag(model("hermes", "qwen3"), **fields), "optional")
    inside = tag(model("hermes", "deepseek_r1"), **fields)
    assert not parts(inside, "optional") and parts(inside, "tag")[0]["begin"] == ""
    assert not parts(tag(model("mistral"), **fields), "any_text")


def test_every_choice_has_the_grammar() -> None:
    rows = grammars(tools=TOOLS, tool_choice=NAMED, n=3, seed=1)
    assert len(rows) == 3 and rows[0] == rows[1] == rows[2] and rows[0]["with_reasoning"]


@pytest.mark.parametrize(
    "function",
    [
        {"name": "größe"},
        {"name": "f", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}},
        {"name": "f", "parameters": {"$defs": {"a": {"allOf": [{}, {}]}}}},
        {"name": "f", "parameters": {"anyOf": [{"pattern": "a", "maxLength": 2}]}},
    ],
)
def test_a_tag_that_promises_too_much_is_json(function: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": function}]
    (guided,) = grammars(tools=tools, tool_choice="required")
    assert guided.keys() == {"json"}


def test_properties_may_have_the_names_of_conditions() -> None:
    properties = {"not": {"type": "string", "enum": [{"if": 1}]}, "contains": {"type": "string"}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    assert tag(tools=[{"type": "function", "function": function}], tool_choice="required")


@pytest.mark.parametrize("name", ["pythonic", "gemma4", "qwen3_coder"])
def test_formats_without_tags_are_forced_by_json(name: str) -> None:
    (guided,) = grammars(model(name), tools=TOOLS, tool_choice="required")
    assert guided.keys() == {"json"}


def test_a_strict_function_is_constrained_where_it_is_called() -> None:
    form = tag(tools=STRICT)
    (row,) = parts(form, "triggered_tags")
    assert row["triggers"] == ["<tool_call>"] and not row["stop_after_first"]
    schemas = [part["json_schema"] for part in parts(row["tags"][:2], "json_schema")]
    assert schemas == [
        TOOLS[0]["function"]["parameters"],
        {"type": "object", "additionalProperties": True},
    ]
    (row,) = parts(tag(tools=STRICT, parallel_tool_calls=False), "triggered_tags")
    assert row["stop_after_first"]
    message = body(f"I look.\n{CALL}", model=model(), tools=STRICT)["message"]
    assert message["content"] == "I look." and len(message["tool_calls"]) == 1


def test_requests_without_forced_or_strict_calls_have_no_grammar() -> None:
    for fields in ({"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}, {}):
        assert grammars(**fields) == [{}]
    for name in ("llama3_json", "xlam", "phi4", "pythonic"):
        assert grammars(model(name), tools=STRICT) == [{}]
    (guided,) = grammars(tools=STRICT, response_format={"type": "json_object"})
    assert guided == {"json": {"type": "object"}}


def test_a_forced_call_beside_a_grammar_is_refused() -> None:
    for choice in (NAMED, "required"):
        with pytest.raises(InvalidArgument, match="another grammar"):
            prepare(model(), tools=TOOLS, tool_choice=choice, guided_regex="a")
