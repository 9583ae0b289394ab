"""The formats of tool calls and of reasoning, by name: a row each.

A row is data. To add a family, add a row to a grammar, and texts to ``tests/unit/frontend/
answer_cases.py``: the tests cut these anywhere and compare them with vLLM's parser of that name.
``dynamo.config.worker`` lists the same names, for the flags, and other spellings of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo.frontend.formats.brace_calls import BraceCallShape
from dynamo.frontend.formats.call_tags import CallTag
from dynamo.frontend.formats.element_calls import ElementCallShape
from dynamo.frontend.formats.frames import Frame, FrameParser, frames
from dynamo.frontend.formats.harmony import HarmonyShape
from dynamo.frontend.formats.json_calls import JsonCallShape
from dynamo.frontend.formats.message import AnswerMessage, AnswerParser
from dynamo.frontend.formats.pythonic_calls import PythonicCallShape
from dynamo.frontend.formats.reasoning import ReasoningShape
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.section_calls import SectionCallShape
from dynamo.frontend.formats.xml_calls import XmlCallShape

Grammar = (
    BraceCallShape
    | ElementCallShape
    | HarmonyShape
    | JsonCallShape
    | PythonicCallShape
    | SectionCallShape
    | XmlCallShape
)


class ToolFormat(NamedTuple):
    """A format of tool calls: one row of the table.

    ``frames`` are markers around the parts of an answer, which are no part of its message, and
    ``opens`` those of them that begin a section of calls.
    ``short_ids``: the chat template takes ids of nine letters and digits only. ``suffixed``: the
    markers of a checkpoint may end with a suffix of its own, as ``<tool_call:6124c78e>``.
    ``tags`` are the ways in which a grammar lets the model write calls, if there is one.
    """

    grammar: Grammar
    frames: tuple[Frame, ...] = ()
    opens: tuple[str, ...] = ()
    short_ids: bool = False
    suffixed: bool = False
    tags: tuple[CallTag, ...] = ()

    def make(self, message: AnswerMessage, tools: RequestTools) -> AnswerParser:
        """Return a parser of one answer, which begins behind the reasoning."""
        parser = self.grammar.parser(message, tools)
        return FrameParser(message, self.frames, parser) if self.frames else parser

    @property
    def markers(self) -> tuple[str, ...]:
        """All that is shown to the parser even if they are special tokens."""
        return (*self.grammar.every_marker, *(text for frame in self.frames for text in frame))

    @property
    def begins(self) -> tuple[str, ...]:
        """The markers that begin calls, and so end reasoning that the model has not closed."""
        return (*self.grammar.begins, *self.opens)

    @property
    def triggers(self) -> tuple[str, ...]:
        """The markers with which ``tags`` begin; empty if calls need no marker."""
        opens = [tag.opens or tag.begin for tag in self.tags]
        return tuple(
            marker for marker in self.begins if any(text.startswith(marker) for text in opens)
        )


def with_suffix(row: Any, suffix: str) -> Any:
    """Return a row of the table, or a part of one, with ``suffix`` at the end of each marker."""
    if isinstance(row, str):
        return f"{row[:-1]}{suffix}>" if row.startswith("<") and row.endswith(">") else row
    if not isinstance(row, tuple):
        return row
    parts = [with_suffix(part, suffix) for part in row]
    return type(row)(*parts) if hasattr(row, "_fields") else tuple(parts)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
_DSML = XmlCallShape(
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
    ("<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
    trims=False,
    typed=True,
    tokens=("｜DSML｜",),
)
_QWEN3_CODER = XmlCallShape(
    ("<tool_call>", "</tool_call>"), ("<function=", "</function>"), ("<parameter=", "</parameter>")
)
_INVOKE = XmlCallShape(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<invoke name=", "</invoke>"),
    ("<parameter name=", "</parameter>"),
    trims=False,
)
_GLM = XmlCallShape(
    ("<tool_call>", "</tool_call>"),
    ("", "</tool_call>"),
    ("<arg_key>", "</arg_value>"),
    "</arg_key>",
    "<arg_value>",
    trims=False,
)
_OBJECT = '{"name": "NAME", "arguments": '


def _objects(opens: str, closes: str, space: str = "\n", between: str = "\n") -> CallTag:
    """Return the tag of an object for each call, between its own markers."""
    return CallTag(f"{opens}{space}{_OBJECT}", f"}}{space}{closes}", between=between)


def _list(opens: str, closes: str) -> CallTag:
    """Return the tag of a list of objects."""
    return CallTag(_OBJECT, "}", opens, closes, ", ")


_HERMES_TAGS = tuple(_objects("<tool_call>", "</tool_call>", space) for space in ("\n", ""))
# Markers around the parts of an answer, which stand in both tables.
_COHERE = frames(
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>",
    "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
_ERNIE = frames("<response>", "</response>")
_INKLING = (
    ("<|message_model|>", "<|content_"),
    *frames(
        "<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>",
        "<|end_message|>", "<|content_model_end_sampling|>",
    ),
)  # fmt: skip
_KIMI_K3 = frames(
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
)
_MUSE = (
    ("<|start|>", "<|message|>"),
    ("to=", "<|message|>"),
    *frames("<|message|>", "<|eom|>", "<|eot|>"),
)
_PLAMO_TOKENS = (
    "<|plamo:begin_",
    "<|plamo:end_",
    ":plamo|>",
    "<|plamo:constrain|>",
    "<|plamo:msg|>",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "apertus": ToolFormat(
        JsonCallShape(("<|tools_prefix|>",), ("<|tools_suffix|>",), name=(), keyed=True),
        tags=(CallTag('{"NAME": ', "}", "<|tools_prefix|>[", "]<|tools_suffix|>", ", "),),
    ),
    "cohere_command": ToolFormat(
        JsonCallShape(("<|START_ACTION|>",), ("<|END_ACTION|>",), name=("tool_name",)),
        _COHERE,
        tags=(
            CallTag(
                '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ',
                "}",
                "<|START_ACTION|>[\n    ",
                "\n]<|END_ACTION|>",
                ",\n    ",
            ),
        ),
    ),
    "deepseek_v3": ToolFormat(
        SectionCallShape(
            _DEEPSEEK,
            "<｜tool▁sep｜>",
            "```json\n",
            ("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
        ),
        tags=(
            CallTag(
                f"{_DEEPSEEK[2]}function<｜tool▁sep｜>NAME\n```json\n",
                "\n```<｜tool▁call▁end｜>",
                *_DEEPSEEK[:2],
                "\n",
            ),
        ),
    ),
    "deepseek_v3_1": ToolFormat(
        SectionCallShape(_DEEPSEEK, "", "<｜tool▁sep｜>", ("<｜tool▁call▁end｜>",)),
        tags=(CallTag(f"{_DEEPSEEK[2]}NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", *_DEEPSEEK[:2]),),
    ),
    "deepseek_v3_2": ToolFormat(
        _DSML,
    ),
    "deepseek_v4": ToolFormat(
        _DSML._replace(call=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),
    ),
    "deepseek_v41": ToolFormat(
        _DSML._replace(
            call=("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
            function=("<｜DSML｜ invoke name=", "</｜DSML｜ invoke>"),
            parameter=("<｜DSML｜ parameter name=", "</｜DSML｜ parameter>"),
        ),
    ),
    "dots": ToolFormat(
        _INVOKE._replace(call=("<dots_function_call>", "</dots_function_call>"), trims=True),
    ),
    "ernie45": ToolFormat(
        JsonCallShape(("<tool_call>",), ("</tool_call>",)), _ERNIE, tags=_HERMES_TAGS
    ),
    "functiongemma": ToolFormat(
        BraceCallShape("<start_function_call>", "<end_function_call>", "<escape>")
    ),
    "gemma4": ToolFormat(BraceCallShape("<|tool_call>", "<tool_call|>", '<|"|>')),
    "gigachat3": ToolFormat(
        JsonCallShape(("<|function_call|>", "function call<|role_sep|>")),
        frames("<|message_sep|>", "</s>"),
        tags=(CallTag(f"<|function_call|>{_OBJECT}", "}", single=True),),
    ),
    "glm45": ToolFormat(
        _GLM,
    ),
    "granite": ToolFormat(
        JsonCallShape(("<|tool_call|>", "<tool_call>")),
        tags=tuple(
            _list(f"{marker}{space}[", "]")
            for marker in ("<|tool_call|>", "<tool_call>")
            for space in ("", " ")
        ),
    ),
    "granite_20b_fc": ToolFormat(
        JsonCallShape(("<function_call>",)),
        tags=(CallTag(f"<function_call> {_OBJECT}", "}", between=" "),),
    ),
    "harmony": ToolFormat(HarmonyShape()),
    "hermes": ToolFormat(JsonCallShape(("<tool_call>",), ("</tool_call>",)), tags=_HERMES_TAGS),
    "hy_v3": ToolFormat(
        _GLM._replace(follows=("<tool_calls>", "</tool_calls>")),
        frames("<tool_calls>", "<tool_sep>", "</tool_calls>"),
        ("<tool_calls>",),
        suffixed=True,
    ),
    "inkling": ToolFormat(
        JsonCallShape(("<|content_invoke_tool_json|>",), ("<|end_message|>",), arguments=("args",)),
        _INKLING,
    ),
    "internlm": ToolFormat(
        JsonCallShape(
            ("<|action_start|><|plugin|>",),
            ("<|action_end|>",),
            tokens=("<|action_start|>", "<|plugin|>"),
        ),
        tags=(CallTag(f"<|action_start|><|plugin|>\n{_OBJECT}", "}<|action_end|>", single=True),),
    ),
    "jamba": ToolFormat(
        JsonCallShape(("<tool_calls>",), ("</tool_calls>",)),
        tags=(_list("<tool_calls>[", "]</tool_calls>"),),
    ),
    "k2_horizon": ToolFormat(
        XmlCallShape(
            ("<ifm|tool_call>", "</ifm|tool_call>"),
            ("", "</ifm|tool_call>"),
            ("<ifm|arg_key>", "</ifm|arg_value>"),
            "</ifm|arg_key>",
            "<ifm|arg_value>",
            trims=False,
            kind=("<ifm|arg_type>", "</ifm|arg_type>"),
            follows=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        ),
        frames("<ifm|tool_calls>", "</ifm|tool_calls>"),
        ("<ifm|tool_calls>",),
    ),
    "kimi_k2": ToolFormat(
        SectionCallShape(
            (
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
            ),
            "",
            "<|tool_call_argument_begin|>",
            ("<|tool_call_end|>",),
            numbered=True,
        ),
        tags=(
            CallTag(
                "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
            ),
        ),
    ),
    "kimi_k3": ToolFormat(
        XmlCallShape(
            ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            ("<|open|>call tool=", "<|close|>call<|sep|>"),
            ("<|open|>argument key=", "<|close|>argument<|sep|>"),
            "<|sep|>",
            trims=False,
            tag_ends="<|sep|>",
            typed=True,
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
        ),
        _KIMI_K3,
    ),
    "lfm2": ToolFormat(PythonicCallShape("<|tool_call_start|>", "<|tool_call_end|>")),
    "llama3_json": ToolFormat(
        JsonCallShape(("<|python_tag|>",), bare=True),
        tags=(CallTag('{"name": "NAME", "parameters": ', "}", between="; "),),
    ),
    "longcat": ToolFormat(
        JsonCallShape(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
        tags=tuple(
            _objects("<longcat_tool_call>", "</longcat_tool_call>", space) for space in ("\n", "")
        ),
    ),
    "mimo": ToolFormat(
        _QWEN3_CODER._replace(trims=False),
    ),
    "minicpm5": ToolFormat(
        XmlCallShape(
            ("", ""),
            ("<function name=", "</function>"),
            ("<param name=", "</param>"),
            value_opens="<![CDATA[",
            value_closes="]]></param>",
        )
    ),
    "minimax_m2": ToolFormat(
        _INVOKE,
    ),
    "minimax_m3": ToolFormat(ElementCallShape()),
    "mistral": ToolFormat(
        JsonCallShape(("[TOOL_CALLS]",), header=True, tokens=("[ARGS]", "[CALL_ID]")),
        short_ids=True,
        tags=(CallTag("[TOOL_CALLS]NAME[ARGS]", ""), _list("[TOOL_CALLS][", "]")),
    ),
    "muse_glimmer": ToolFormat(
        XmlCallShape(
            ("<atem:function_calls>", "</atem:function_calls>"),
            ("<atem:invoke name=", "</atem:invoke>"),
            ("<atem:parameter name=", "</atem:parameter>"),
            trims=False,
            doubled=True,
            follows=("<|eom|>",),
        ),
        _MUSE,
        ("<|start|>", "to="),
    ),
    "nemotron_deci": ToolFormat(
        JsonCallShape(("<TOOLCALL>",), ("</TOOLCALL>",)),
        tags=(_list("<TOOLCALL>[", "]</TOOLCALL>"),),
    ),
    "olmo3": ToolFormat(PythonicCallShape("<function_calls>", "</function_calls>")),
    "phi4": ToolFormat(JsonCallShape(("functools",)), tags=(_list("functools[", "]"),)),
    "plamo3": ToolFormat(
        SectionCallShape(
            (
                "<|plamo:begin_tool_requests:plamo|>",
                "<|plamo:end_tool_requests:plamo|>",
                "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
            ),
            "",
            "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
            "<|plamo:constrain|>json<|plamo:msg|>",
            ("<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",),
            tokens=_PLAMO_TOKENS,
        ),
        frames("<|plamo:tag|>"),
        tags=(
            CallTag(
                "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
                "<|plamo:begin_tool_requests:plamo|>",
                "<|plamo:end_tool_requests:plamo|>",
            ),
        ),
    ),
    "pythonic": ToolFormat(PythonicCallShape()),
    "qwen3_coder": ToolFormat(
        _QWEN3_CODER,
    ),
    "seed_oss": ToolFormat(
        _QWEN3_CODER._replace(call=("<seed:tool_call>", "</seed:tool_call>")),
    ),
    "step3": ToolFormat(
        XmlCallShape(
            ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            ("<steptml:invoke name=", "</steptml:invoke>"),
            ("<steptml:parameter name=", "</steptml:parameter>"),
            follows=("<｜tool_call_end｜>",),
            tokens=("<｜tool_call_begin｜>", "<｜tool_sep｜>"),
        ),
        frames("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ),
    "xlam": ToolFormat(
        JsonCallShape(
            ("```json", "[TOOL_CALLS]", "<tool_call>"),
            ("```", "</tool_call>"),
            bare=True,
            listed=True,
        ),
        tags=(_list("[", "]"), _list("```json\n[", "]\n```")),
    ),
}

_THINK = ReasoningShape("<think>", "</think>")
_FORCED = _THINK._replace(forced=True)
REASONING_FORMATS: Mapping[str, ReasoningShape | None] = {
    "basic": _THINK,
    "cohere_command": ReasoningShape(
        "<|START_THINKING|>", "<|END_THINKING|>", frames=_COHERE, again=True
    ),
    "deepseek_r1": _FORCED,
    "deepseek_v3": _THINK,
    "deepseek_v3_1": _THINK,
    "deepseek_v4": _THINK,
    "ernie45": _FORCED._replace(frames=_ERNIE),
    "gemma4": ReasoningShape("<|channel>thought\n", "<channel|>", tokens=("<|channel>",)),
    "glm45": _THINK,
    "gpt_oss": None,  # harmony
    "granite": ReasoningShape(
        "Here is my thought process:",
        "Here is my response:",
        others=(("Here's my thought process:", "Here's my response:"),),
    ),
    "hunyuan_a13b": _THINK._replace(frames=frames("<answer>", "</answer>")),
    "hy_v3": _THINK._replace(suffixed=True),
    "inkling": ReasoningShape(
        "<|content_thinking|>", "<|end_message|>", frames=_INKLING, again=True
    ),
    "k2_horizon": ReasoningShape(
        "<ifm|think>",
        "</ifm|think>",
        others=(
            ("<ifm|think_fast>", "</ifm|think_fast>"),
            ("<ifm|think_faster>", "</ifm|think_faster>"),
        ),
    ),
    "kimi": ReasoningShape("◁think▷", "◁/think▷"),
    "kimi_k2": _THINK,
    "kimi_k25": _FORCED,
    "kimi_k3": ReasoningShape(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        frames=_KIMI_K3,
    ),
    "minimax_append_think": _FORCED,
    "minimax_m2": _THINK,
    "minimax_m2_append_think": _THINK._replace(as_content=True),
    "minimax_m3": ReasoningShape("<mm:think>", "</mm:think>"),
    "mistral": ReasoningShape("[THINK]", "[/THINK]"),
    "muse_glimmer": ReasoningShape(
        "to=self<|message|>",
        "<|eom|>",
        others=(("<|start|>assistant to=self<|message|>", "<|eot|>"),),
        frames=_MUSE,
        again=True,
    ),
    "nemotron_deci": _THINK,
    "nemotron_nano": _FORCED,
    "plamo3": ReasoningShape(
        "<|plamo:begin_think:plamo|>",
        "<|plamo:end_think:plamo|>",
        tokens=_PLAMO_TOKENS,
        frames=frames("<|plamo:tag|>"),
    ),
    "qwen3": _THINK,
    "seed_oss": ReasoningShape(
        "<seed:think>",
        "</seed:think>",
        # With a budget of zero the template opens the reasoning with both.
        others=(("<seed:cot_budget_reflect>", "</seed:think>"),),
    ),
    "step3": _FORCED,
}
