"""Every format of tool calls and reasoning, on answers as models write them, cut anywhere."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from answer_cases import CASES, TOOLS, Case, expected, merge_all, tool_parser, tool_probe
from hypothesis import given
from hypothesis import strategies as st

from dynamo.config.worker import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_PARSERS,
)
from dynamo.frontend.formats.frames import FrameParser
from dynamo.frontend.formats.message import AnswerMessage, AnswerParser
from dynamo.frontend.formats.reasoning import ContentParser, ReasoningParser, ReasoningShape
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.table import REASONING_FORMATS, TOOL_FORMATS

THINK = ReasoningShape("<think>", "</think>")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_markers_of_a_format_are_compiled_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        message, parser = tool_parser(name)
        ReasoningParser(message, THINK._replace(calls=TOOL_FORMATS[name].begins), False, parser)

    start()
    compiled: list[str] = []
    monkeypatch.setattr(re, "compile", compiled.append)
    start()
    assert compiled == [], "every choice of every request would pay for it"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]}")
def test_whole_answer(case: Case) -> None:
    message, parser = tool_parser(case.format)
    parser.push(case.text)
    parser.finish()
    assert message.whole() == expected(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.text[:40]}")
def test_answer_in_single_characters_is_the_same_in_a_stream(case: Case) -> None:
    message, parser = tool_parser(case.format)
    found = {"role": "assistant", "content": None, "refusal": None}
    for char in case.text:
        parser.push(char)
        merge_all(found, message)
    parser.finish()
    merge_all(found, message)
    assert found == expected(case)


MARKUP = [
    "<tool_call>", "</tool_call>", "<function=get_weather>", "<parameter=city>", "</parameter>",
    "</function>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "get_weather", '{"name": "get_time"',
    ', "arguments": {', "}}", "}", "[", "]", "get_time(", "city=", ")", '"', "\\", "'", "<",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n", "\n```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|start|>", "<|channel|>", "<|message|>",
    "<invoke name=", '"get_weather">', "<parameter name=", "</invoke>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<minimax:tool_call>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "analysis", "to=functions.get_time", "<|end|>", "functools", " ",
    "<|tool_call>", "call:f", "{", "}", '<|"|>', "<tool_call|>", "[", "]", "a:", "]<]minimax[>[",
    "<tool_call>", '<invoke name="f">', "<city>", "</city>", "<item>", "</item>", "</tool_call>",
    "<｜DSML｜function_calls>", "<｜DSML｜invoke name=",
    '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "\n", ",", "null", "é",
    *sorted({marker for each in TOOL_FORMATS.values() for marker in each.markers}),
]  # fmt: skip


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    text=st.one_of(
        st.sampled_from([case.text for case in CASES]),
        st.lists(st.sampled_from(MARKUP), max_size=30).map("".join),
    ),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_cuts_do_not_change_the_message(name: str, text: str, cuts: list[int]) -> None:
    whole, parser = tool_parser(name)
    parser.push(text)
    parser.finish()
    cut, parser = tool_parser(name)
    places = sorted({0, len(text), *(min(each, len(text)) for each in cuts)})
    for start, end in pairwise(places):
        parser.push(text[start:end])
    parser.finish()
    assert cut.whole() == whole.whole()


@given(name=st.sampled_from(sorted(TOOL_FORMATS)), text=st.text(alphabet="a<[{\n |", max_size=40))
def test_text_without_calls_is_content(name: str, text: str) -> None:
    message, parser = tool_parser(name)
    parser.push(text)
    parser.finish()
    assert message.whole()["content"] == text


HOSTILE = [
    (
        "deepseek_v3_2",
        '<｜DSML｜function_calls><｜DSML｜invoke name=f><｜DSML｜parameter name=a string="false">',
        "<",
    ),
    ("gemma4", "<|tool_call>call:f{a:", "<"),
    ("gemma4", "<|tool_call>call:f{a:1}", " "),
    ("glm45", "<tool_call>", " "),
    ("glm45", "<tool_call>get_weather<arg_key>days</arg_key>", "\n"),
    ("glm45", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>", "<"),
    ("harmony", "", " "),
    ("hermes", "<tool_call>", "["),
    ("hermes", '<tool_call>{"name": "f", "arguments": ', "1"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} ', " "),
    ("llama3_json", "", " "),
    ("llama3_json", '{"name": "get_weather", "parameters": {"a": ', "1"),
    ("minimax_m3", ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>', " "),
    ("minimax_m3", ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<days>', "]"),
    ("mistral", "[TOOL_CALLS]", " "),
    ("phi4", 'functools[{"name": "f", "a": ', "\\"),
    ("pythonic", "", " "),
    ("pythonic", "[get_weather(city=", "<"),
    ("qwen3_coder", "<tool_call>", " "),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>", "<"),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>", "<\n"),
    ("reasoning", "", "\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prefix", "filler"), HOSTILE)
def test_the_time_grows_with_the_text(name: str, prefix: str, filler: str) -> None:
    """Sixteen times the text takes some sixteen times as long, not 256 times."""

    def make() -> AnswerParser:
        if name != "reasoning":
            return tool_parser(name)[1]
        message = AnswerMessage(lambda: "id")
        return ReasoningParser(message, THINK, False, ContentParser(message))

    assert _seconds(make, prefix, filler, 16_000) < 80 * _seconds(make, prefix, filler, 1000)


def _seconds(make: Callable[[], AnswerParser], prefix: str, filler: str, count: int) -> float:
    """The CPU time of ``count`` pieces, the shortest of three."""
    times = []
    for _ in range(3):
        parser = make()
        parser.push(prefix)
        start_s = time.process_time()
        for _ in range(count):
            parser.push(filler)
        times.append(time.process_time() - start_s)
        parser.finish()
    return min(times)


def think(shape: ReasoningShape, inside: bool, *pieces: str, json_only: bool = False) -> list[str]:
    message = AnswerMessage(lambda: "id")
    parser = ReasoningParser(message, shape, inside, ContentParser(message), json_only)
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    found = message.whole()
    return [found.get("reasoning_content"), found["content"]]


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nSo. <b>\n</think>\n\nHi <think>", "So. <b>", "Hi <think>"),
        (True, "So.</think>Hi", "So.", "Hi"),
        (True, "<think>So.</think>Hi", "So.", "Hi"),
        (True, "cut off at\n", "cut off at\n", ""),
        (True, "</think>Hi", None, "Hi"),
        (False, "<think>\n\n</think>\n\nHi", None, "Hi"),
        (False, "Hi </think> there", None, "Hi </think> there"),
        (False, "<thi", None, "<thi"),
        (False, " \n", None, " \n"),
        (True, "a</thin", "a</thin", ""),
    ],
)
def test_reasoning(inside: bool, text: str, reasoning: str | None, content: str) -> None:
    assert think(THINK, inside, text) == [reasoning, content]
    assert think(THINK, inside, *text) == [reasoning, content]


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("gemma4", "<|channel>thought\nSo.\n<channel|>Hi", "So.", "Hi"),
        ("gemma4", "<|channel>thought\n<channel|>Hi", None, "Hi"),
        ("kimi", "◁think▷So.◁/think▷Hi", "So.", "Hi"),
        ("kimi_k25", "So.</think>Hi", "So.", "Hi"),
        ("minimax_append_think", "So.\n</think>\n\nHi", "So.", "Hi"),
        ("minimax_m3", "<mm:think>So.</mm:think>Hi", "So.", "Hi"),
        ("step3", "So.</think>Hi", "So.", "Hi"),
        ("seed_oss", "<seed:cot_budget_reflect>So.</seed:think>Hi", "So.", "Hi"),
    ],
)
def test_reasoning_by_name(name: str, text: str, reasoning: str | None, content: str) -> None:
    shape = REASONING_FORMATS[name]
    assert shape is not None
    assert think(shape, shape.begins_inside(""), text) == [reasoning, content]
    assert think(shape, shape.begins_inside(""), *text) == [reasoning, content]


def read_thought(name: str, text: str, inside: bool, cuts: list[int]) -> dict[str, Any]:
    """The message of an answer without tools, as :class:`ModelFormats` reads it."""
    shape = REASONING_FORMATS[name]
    assert shape is not None
    message = AnswerMessage(lambda: "id")
    rest: AnswerParser = ContentParser(message)
    if shape.frames:
        rest = FrameParser(message, shape.frames, rest)
    parser = ReasoningParser(message, shape, inside, rest)
    for start, end in pairwise(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})):
        parser.push(text[start:end])
    parser.finish()
    return message.whole()


TAGGED = sorted(name for name, shape in REASONING_FORMATS.items() if shape is not None)
SHAPES = [shape for shape in REASONING_FORMATS.values() if shape is not None]
THOUGHT_PIECES = [
    "So.", "Hi", " ", "\n", "<", "a", *sorted({text for shape in SHAPES for text in shape.markers}),
]  # fmt: skip


@pytest.mark.parametrize("name", TAGGED)
def test_every_row_of_reasoning_ends_at_its_tag(name: str) -> None:
    shape = REASONING_FORMATS[name]
    assert shape is not None
    for opens, closes in shape.pairs:
        text = f"{opens}\nSo <b>.\n{closes}\n\nHi."
        for cuts in ([], list(range(len(text)))):
            found = read_thought(name, text, False, cuts)
            assert (found["reasoning_content"], found["content"]) == ("So <b>.", "Hi.")


@pytest.mark.parametrize("name", TAGGED)
def test_no_row_of_reasoning_shows_its_frames(name: str) -> None:
    shape = REASONING_FORMATS[name]
    assert shape is not None
    for frame in shape.frames:
        text = "".join(frame) if len(frame) == 1 else f"{frame[0]}x{frame[1]}"
        rest = "".join(frame[1:])  # what follows a name is a frame of its own, if it is one
        found = read_thought(name, f"{shape.opens}So.{shape.closes}Hi\n{text}there", False, [])
        assert found["content"] in ("Hithere", f"Hi{rest}there")


@given(
    name=st.sampled_from(TAGGED),
    pieces=st.lists(st.sampled_from(THOUGHT_PIECES), max_size=16),
    inside=st.booleans(),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_cuts_do_not_change_the_reasoning(
    name: str, pieces: list[str], inside: bool, cuts: list[int]
) -> None:
    text = "".join(pieces)
    whole = read_thought(name, text, inside, [])
    assert read_thought(name, text, inside, cuts) == whole
    assert read_thought(name, text, inside, list(range(len(text)))) == whole


HERMES_CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<think>So.\n{HERMES_CALL}", "So.", None),
        (f"<think>So.{HERMES_CALL}\n</think>\n\nDone", "So.", "\nDone"),
        (f"{HERMES_CALL}", None, None),
        (f"<think>So.{HERMES_CALL}</thi", "So.", "</thi"),
    ],
)
def test_a_call_ends_unclosed_reasoning(
    text: str, reasoning: str | None, content: str | None
) -> None:
    for pieces in ([text], list(text)):
        message, rest = tool_parser("hermes")
        shape = THINK._replace(calls=TOOL_FORMATS["hermes"].begins)
        parser = ReasoningParser(message, shape, False, rest, probe=tool_probe("hermes"))
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        found = message.whole()
        assert (found.get("reasoning_content"), found["content"]) == (reasoning, content)
        assert [call["function"]["name"] for call in found["tool_calls"]] == ["get_time"]


def test_every_format_with_a_marker_ends_reasoning() -> None:
    """The others have no marker that must be there, or reasoning of their own."""
    without = {name for name, each in TOOL_FORMATS.items() if not each.begins}
    assert without == {"harmony", "llama3_json", "phi4", "pythonic", "xlam"}


def test_a_grammar_from_the_first_token_leaves_no_reasoning() -> None:
    assert think(THINK, True, '{"a": 1}', json_only=True) == [None, '{"a": 1}']
    assert think(THINK, True, "So.</think>{}", json_only=True) == ["So.", "{}"]


@pytest.mark.parametrize(
    ("prompt", "plain", "forced"),
    [
        ("<|im_start|>assistant\n", False, True),
        ("<|im_start|>assistant\n<think>\n", True, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        (None, False, True),
    ],
)
def test_the_prompt_decides_where_an_answer_begins(
    prompt: str | None, plain: bool, forced: bool
) -> None:
    assert THINK.begins_inside(prompt) is plain
    assert ReasoningShape("<think>", "</think>", forced=True).begins_inside(prompt) is forced


def test_a_prompt_may_open_the_reasoning_with_another_tag() -> None:
    shape = REASONING_FORMATS["seed_oss"]
    assert shape is not None
    assert shape.begins_inside("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>")
    assert not shape.begins_inside("<seed:bos>assistant\n")


def test_only_the_first_calls_are_kept() -> None:
    message = AnswerMessage(lambda: "id", max_calls=1)
    message.begin_call("f")
    message.add_arguments("{}")
    message.begin_call("g")
    message.add_arguments('{"lost": 1}')
    (call,) = message.whole()["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_the_flags_list_the_formats() -> None:
    assert tuple(sorted(TOOL_FORMATS)) == TOOL_CALL_PARSERS
    assert tuple(sorted(REASONING_FORMATS)) == REASONING_PARSERS
    assert set(TOOL_CALL_ALIASES.values()) <= set(TOOL_FORMATS)
    assert set(REASONING_ALIASES.values()) <= set(REASONING_FORMATS)


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs/tools.md").read_text()
    aliases = {name for name in {**TOOL_CALL_ALIASES, **REASONING_ALIASES} if "-" not in name}
    named = {*TOOL_CALL_PARSERS, *REASONING_PARSERS, *aliases}
    assert not [name for name in sorted(named) if f"`{name}`" not in page]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_frame_is_the_beginning_of_another(name: str) -> None:
    """The shorter one would be found first, or the longer one, as the text is cut."""
    texts = [frame[0] for frame in TOOL_FORMATS[name].frames]
    assert not [pair for pair in permutations(texts, 2) if pair[0].startswith(pair[1])]


def test_complete_arguments_are_json() -> None:
    assert {case.format for case in CASES} == set(TOOL_FORMATS)
    complete = [a for case in CASES for _, a in case.calls if a.endswith("}")]
    assert len(complete) > 30 and TOOLS
    for arguments in complete:
        json.loads(arguments)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": {"a": 1}},
        {"type": [{"a": 1}, 5, None]},
        {"anyOf": 5},
        {"anyOf": {"type": "string"}},
        {"oneOf": [5, "x", None, [1]]},
        {"type": 5, "items": 5, "properties": 5, "enum": 5},
        {"type": "object", "properties": [1]},
        {"type": "array", "items": [1]},
        5,
        None,
        [1],
    ],
)
def test_a_schema_may_be_anything(schema: Any) -> None:
    """It is the client's: the answer must not fail because of it."""
    for case in CASES:
        tools: Any = [
            {
                "type": "function",
                "function": {
                    "name": tool["function"]["name"],
                    "parameters": {
                        "properties": {"city": schema, "days": schema, "options": schema}
                    },
                },
            }
            for tool in TOOLS
        ]
        message = AnswerMessage(lambda: "id")
        parser = TOOL_FORMATS[case.format].make(message, RequestTools.of(tools))
        parser.push(case.text)
        parser.finish()
        assert [call["function"]["name"] for call in message.whole().get("tool_calls", ())] == [
            name for name, _ in case.calls
        ]
