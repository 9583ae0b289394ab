"""Answers that are not quite in their format: missing tags, tags inside values, raw line breaks."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from answer_cases import merge_all, tool_parser, tool_probe
from family_cases import FAMILIES, Family, xml_value
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.formats.message import AnswerMessage, AnswerParser
from dynamo.frontend.formats.reasoning import ReasoningParser, ReasoningShape
from dynamo.frontend.formats.scan import StringEscapes
from dynamo.frontend.formats.table import TOOL_FORMATS

NS = "]<]minimax[>["


class Tags(NamedTuple):
    """The tags of a format with a tag a parameter; ``opens`` takes the name of a parameter."""

    begins: str
    opens: str
    closes: str
    ends: str
    no_name: str


def tags_of(family: Family) -> Tags:
    section, _, end_section = family.section.partition("CALLS")
    call, _, end_call = family.call.replace("NAME", "get_weather").partition("PARAMETERS")
    opens, _, closes = family.parameter.replace(' type="TYPE"', "").partition("VALUE")
    ends = end_call + end_section
    return Tags(section + call, opens.replace("KEY", "{}"), closes, ends, opens.partition("KEY")[0])


TAGS = {
    name: tags_of(family)
    for name, family in FAMILIES.items()
    if family.parameter and family.value is xml_value
} | {
    "qwen3_coder": Tags(
        "<tool_call>\n<function=get_weather>\n", "<parameter={}>\n", "\n</parameter>\n",
        "</function>\n</tool_call>", "<parameter=",
    ),
    "glm45": Tags(
        "<tool_call>get_weather\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n",
        "</tool_call>", "<arg_key>",
    ),
    "minimax_m2": Tags(
        '<minimax:tool_call>\n<invoke name="get_weather">\n', '<parameter name="{}">',
        "</parameter>\n", "</invoke>\n</minimax:tool_call>", "<parameter name=",
    ),
    "deepseek_v3_2": Tags(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n',
        '<｜DSML｜parameter name="{}">', "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>", "<｜DSML｜parameter name=",
    ),
    "deepseek_v4": Tags(
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n',
        '<｜DSML｜parameter name="{}">', "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "<｜DSML｜parameter name=",
    ),
    "minimax_m3": Tags(
        f'{NS}<tool_call>{NS}<invoke name="get_weather">', f"{NS}<{{}}>", f"{NS}</city>\n",
        f"{NS}</invoke>{NS}</tool_call>", f"{NS}<",
    ),
}  # fmt: skip
JSON_CALLS = {
    name: family.write([("get_weather", {})])
    .replace("{", "{{")
    .replace("}", "}}")
    .replace("{{}}", "{}")
    for name, family in FAMILIES.items()
    if not family.parameter
}


def read(parser: AnswerParser, message: AnswerMessage, text: str, cuts: list[int]) -> Any:
    """The message of ``text``, with deltas taken at each of ``cuts``."""
    places = sorted({0, len(text), *(min(each, len(text)) for each in cuts)})
    found: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for start, end in pairwise(places):
        parser.push(text[start:end])
        merge_all(found, message)
    message.stopped = True
    parser.finish()
    merge_all(found, message)
    return found


def parsed(name: str, text: str) -> Any:
    """The message, whole and character by character."""
    found = []
    for cuts in ([], list(range(len(text)))):
        message, parser = tool_parser(name)
        found.append(read(parser, message, text, cuts))
    assert found[0] == found[1]
    return found[0]


def arguments(name: str, text: str) -> Any:
    """The arguments of the only call."""
    (call,) = parsed(name, text)["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    return json.loads(call["function"]["arguments"])


def test_every_format_is_here() -> None:
    others = {"functiongemma", "gemma4", "lfm2", "olmo3", "pythonic"}
    assert {*TAGS, *JSON_CALLS, *others} == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("missing", ["first", "last", "all"])
def test_a_value_without_its_end_ends_at_the_next_tag(name: str, missing: str) -> None:
    tags = TAGS[name]
    first = "\n" if missing in ("first", "all") else tags.closes
    last = "\n" if missing in ("last", "all") else tags.closes.replace("city", "days")
    text = tags.begins + tags.opens.format("city") + "/a" + first
    text += tags.opens.format("days") + "5" + last + tags.ends
    assert arguments(name, text) == {"city": "/a", "days": 5}


@pytest.mark.parametrize("name", TAGS)
def test_a_model_that_stops_early_has_called(name: str) -> None:
    tags = TAGS[name]
    if name not in ("glm45", "hy_v3", "k2_horizon"):  # there the next tag ends the name
        assert arguments(name, tags.begins) == {}
    assert arguments(name, tags.begins + tags.opens.format("city") + "a") == {"city": "a"}
    assert arguments(name, tags.begins + tags.opens.format("days") + "5") == {"days": 5}


@pytest.mark.parametrize("name", TAGS)
def test_a_value_may_contain_its_end(name: str) -> None:
    tags = TAGS[name]
    for kind in ("city", "note"):
        value = f'x = "{tags.closes.strip()}"; y'
        text = tags.begins + tags.opens.format(kind) + value + tags.closes + tags.ends
        found = parsed(name, text)
        (call,) = found["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {kind: value}
        assert not found["content"]


@pytest.mark.parametrize("name", sorted(set(TAGS) - {"minimax_m3", "muse_glimmer"}))
def test_a_parameter_without_a_name_leaves_the_next_alone(name: str) -> None:
    tags = TAGS[name]
    for broken in ("", "\nfoo\n", "foo\nbar", "\n<b>foo\n"):
        text = tags.begins + tags.no_name + broken + tags.closes
        text += tags.opens.format("days") + "5" + tags.closes + tags.ends
        assert arguments(name, text) == {"days": 5}


@pytest.mark.parametrize("name", sorted(set(TAGS) - {"minimax_m3", "muse_glimmer"}))
def test_a_call_without_its_end_ends_at_the_next_call(name: str) -> None:
    tags = TAGS[name]
    text = tags.begins + tags.opens.format("city") + "a" + tags.closes
    found = parsed(name, text + text + tags.ends)
    assert [json.loads(call["function"]["arguments"]) for call in found["tool_calls"]] == [
        {"city": "a"}, {"city": "a"}
    ]  # fmt: skip


@pytest.mark.parametrize("attribute", [
    'city" string="tru"', 'city" string=true', 'city"string="true"', "city' string='true'",
    'city string="true"', 'city" string="', 'city" kind="a b"',
])  # fmt: skip
def test_a_broken_attribute_is_no_part_of_a_name(attribute: str) -> None:
    tags = TAGS["deepseek_v3_2"]
    text = f'{tags.begins}{tags.no_name}"{attribute}>Paris{tags.closes}{tags.ends}'
    assert arguments("deepseek_v3_2", text) == {"city": "Paris"}


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize(
    ("written", "meant"), [("a\nb", "a\nb"), ("\ta\\", "\ta\n"), ("\x01\r", "\x01\r"), ("", "")]
)
def test_control_characters_in_strings_are_escaped(name: str, written: str, meant: str) -> None:
    if written.endswith("\\"):
        written += "\n"
    text = JSON_CALLS[name].format('{\n"city":\t"' + written + '"\n}')
    assert arguments(name, text) == {"city": meant}


def test_control_characters_in_values_are_escaped() -> None:
    for value in ('"a\nb"', "'a\nb'"):
        assert arguments("pythonic", f"[get_weather(city={value})]") == {"city": "a\nb"}
    for name, tags in TAGS.items():
        text = tags.begins + tags.opens.format("options") + '{"a": "\n\t"}' + tags.closes
        assert arguments(name, text + tags.ends) == {"options": {"a": "\n\t"}}


@given(st.lists(st.sampled_from(['"', "\\", "\n", "\t", "a", "\\u00e4"]), max_size=12))
def test_escapes_do_not_depend_on_cuts(pieces: list[str]) -> None:
    text = "".join(pieces)
    escapes = StringEscapes()
    assert "".join(map(escapes.push, text)) == StringEscapes().push(text)


@pytest.mark.parametrize("name", JSON_CALLS)
def test_no_arguments_are_an_empty_object(name: str) -> None:
    if name == "mistral":
        return  # a brace begins them
    alone = name in ("deepseek_v3", "deepseek_v3_1", "harmony", "kimi_k2", "plamo3")
    empty = "" if alone else '""'
    assert arguments(name, JSON_CALLS[name].format(empty)) == {}


@pytest.mark.parametrize("stopped", [True, False])
def test_a_call_that_is_cut_keeps_its_arguments(stopped: bool) -> None:
    """Only a model that ended the answer itself has left out what is missing."""
    for name, tags in TAGS.items():
        message, parser = tool_parser(name)
        parser.push(tags.begins + tags.opens.format("city") + "Pa")
        message.stopped = stopped
        parser.finish()
        (call,) = message.whole()["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "Pa' + '"}' * stopped
        assert message.in_call is not stopped


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"{\"city\": \"Pa", '{"city": "Pa'),
        ('{\\"city\\": \\"Pa\\', '{"city": "Pa'),
        (r"{\"city\": \"Pa\u00e", '{"city": "Pa'),
        (r"{\"city\": \"Pa\ud83d", '{"city": "Pa'),
    ],
)
def test_arguments_in_a_string_that_is_cut_are_kept(
    written: str, meant: str, stopped: bool
) -> None:
    """max_tokens may end a call anywhere: also in the string that has its arguments as JSON."""
    for name in ("hermes", "jamba", "llama3_json", "nemotron_deci"):
        message, parser = tool_parser(name)
        parser.push(JSON_CALLS[name].format('"CUT"').partition("CUT")[0] + written)
        message.stopped = stopped
        parser.finish()
        (found,) = message.whole()["tool_calls"]
        assert found["function"]["arguments"].startswith(meant), name
        assert message.in_call, name


def test_json_that_is_cut_is_no_whole_call() -> None:
    for name in JSON_CALLS:
        message, parser = tool_parser(name)
        parser.push(JSON_CALLS[name].format('{"city": "Pa').partition("Pa")[0])
        message.stopped = True
        parser.finish()
        assert message.called and message.in_call, name


@pytest.mark.parametrize(("recipient", "called"), [("get_weather", True), ("other", False)])
def test_a_bare_recipient_is_a_tool_of_the_request(recipient: str, called: bool) -> None:
    for header in (
        f"<|channel|>commentary to={recipient} <|constrain|>json", f" to={recipient}<|channel|>x"
    ):  # fmt: skip
        found = parsed("harmony", header + '<|message|>{"city": "a"}<|call|>')
        assert bool(found.get("tool_calls")) is called
        assert found["content"] == (None if called else '{"city": "a"}')


def test_text_after_a_call_has_its_own_line_breaks_alone() -> None:
    call = "<|channel|>commentary to=functions.get_time<|message|>{}<|call|><|start|>assistant"
    text = "<|channel|>commentary<|message|>A<|end|><|start|>assistant" + call
    assert parsed("harmony", text + "<|channel|>final<|message|>B")["content"] == "AB"
    inside = '<tool_call>\n{"name": "get_time"}\n</tool_call>'
    assert parsed("hermes", inside + "B")["content"] == "B"
    inside = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
    assert parsed("qwen3_coder", inside + "B")["content"] == "B"


THINK = ReasoningShape("<think>", "</think>")


def thinking(name: str) -> tuple[AnswerMessage, AnswerParser]:
    message, rest = tool_parser(name)
    shape = THINK._replace(calls=TOOL_FORMATS[name].begins)
    return message, ReasoningParser(message, shape, False, rest, probe=tool_probe(name))


MENTIONING = sorted(name for name, each in TOOL_FORMATS.items() if each.begins)


@pytest.mark.parametrize("name", MENTIONING)
@pytest.mark.parametrize("behind", [" tag.", "", "x", "{", "[", '{"name": "other"}', "\n\n", '{"a'])
def test_reasoning_may_mention_a_call(name: str, behind: str) -> None:
    for marker in (*TOOL_FORMATS[name].begins, TOOL_FORMATS[name].markers[0]):
        thought = f"I write {marker}{behind}, {marker}"
        text = f"<think>{thought}</think>\nanswer"
        for cuts in ([], list(range(len(text)))):
            message, parser = thinking(name)
            found = read(parser, message, text, cuts)
            assert (found["reasoning_content"], found["content"]) == (thought, "answer")


@pytest.mark.parametrize("name", sorted(set(MENTIONING) & {*JSON_CALLS, *TAGS}))
def test_a_mention_does_not_hide_a_call(name: str) -> None:
    marker = TOOL_FORMATS[name].begins[0]
    if name in TAGS:
        tags = TAGS[name]
        call = tags.begins + tags.opens.format("city") + "</think>" + tags.closes + tags.ends
    else:
        call = JSON_CALLS[name].format('{"city": "</think>"}')
    message, parser = thinking(name)
    found = read(parser, message, f"<think>I write {marker} and {call}", [])
    (made,) = found["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"city": "</think>"}
    assert found["reasoning_content"] == f"I write {marker} and"


COMMON = {
    "<think>", "</think>", "\n", " ", "a", '"', "\\", "{", "}", "[", "]", "<", ">", ",", ":",
    '{"name": "get_weather", "arguments": {"city": "a\nb"}}', "get_weather", "(city=", ")",
    "call:f{", "to=get_time", "'", "5", "name=", '"city" string="true">',
}  # fmt: skip


def pieces_of(name: str) -> set[str]:
    """The markers and tags of a format."""
    tags = TAGS.get(name)
    own = () if tags is None else (*tags, tags.opens.format("city"))
    return {*TOOL_FORMATS[name].markers, *own}


PIECES = sorted({*COMMON, *(piece for name in TOOL_FORMATS for piece in pieces_of(name))})


@given(
    name=st.sampled_from(sorted(TOOL_FORMATS)),
    pieces=st.lists(st.sampled_from(PIECES), max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_a_stream_is_the_whole_answer_at_any_cut(
    name: str, pieces: list[str], cuts: list[int]
) -> None:
    for text in ("".join(pieces), "<think>" + "".join(pieces)):
        found = []
        for places in ([], cuts, list(range(len(text)))):
            message, parser = thinking(name)
            found.append(read(parser, message, text, places))
        assert found[0] == found[1] == found[2]


REPEATED = {*COMMON, " \n", "\\\\", "'\"", "[{", "((", "<tool_call>{", "a ", "::", "x=1,"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_text_costs_more_than_its_length(name: str) -> None:
    """Four times a hostile text takes some four times as long, behind each beginning of a call."""
    beginnings = [""]
    if name in TAGS:
        tags = TAGS[name]
        call = tags.begins
        beginnings += [call, call + tags.no_name, call + tags.opens.format("city")]
        beginnings += [call + tags.opens.format("days")]
    elif name in JSON_CALLS:
        beginnings += [JSON_CALLS[name].partition("{}")[0].replace("{{", "{") + '{"a": ', "["]
    else:
        beginnings += ["[get_weather(city=", "<|tool_call>call:f{a:"]
    slow = []
    for beginning in beginnings:
        for piece in sorted(REPEATED | pieces_of(name)):
            four = _cpu_s(name, beginning, piece, 8_000)
            if four > 0.02 and four > 10 * _cpu_s(name, beginning, piece, 2_000):
                once, four = (_cpu_s(name, beginning, piece, size) for size in (8_000, 32_000))
                if four > 10 * once:
                    slow.append((beginning, piece, once, four))
    assert not slow


def _cpu_s(name: str, beginning: str, piece: str, size: int) -> float:
    text = beginning + piece * (size // len(piece))
    _, parser = thinking(name)
    parser.push("<think></think>")
    start_s = time.process_time()
    for place in range(0, len(text), 16):
        parser.push(text[place : place + 16])
    parser.finish()
    return time.process_time() - start_s
