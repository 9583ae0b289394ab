"""Calls as the models of each family write them: a row each, and the texts that the tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

NS = "]<]minimax[>["
TYPES = {str: "string", int: "number", dict: "object"}
Call = tuple[str, dict[str, Any]]
Calls = list[Call]


def xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def brace_value(quote: str) -> Callable[[Any], str]:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return json.dumps(value)

    return written


def element_value(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(
            f"{NS}<{key}>{element_value(item)}{NS}</{key}>" for key, item in value.items()
        )
    if isinstance(value, list):
        return "".join(f"{NS}<item>{element_value(item)}{NS}</item>" for item in value)
    return xml_value(value)


class Family(NamedTuple):
    """How a family writes calls.

    In ``call``, NAME is the function and JSON its arguments, or PARAMETERS one ``parameter`` after
    another, with KEY, TYPE and VALUE. ``single``: one call at most. ``bare``: the calls are the
    whole answer.
    """

    call: str
    section: str = "CALLS"
    parameter: str = ""
    between: str = ""
    after_parameter: str = ""
    value: Callable[[Any], str] = xml_value
    single: bool = False
    bare: bool = False

    def write(self, calls: Calls) -> str:
        """Return ``calls`` as a model writes them."""
        return self.section.replace("CALLS", self.between.join(map(self._call, calls)))

    def _call(self, call: tuple[str, dict[str, Any]]) -> str:
        name, arguments = call
        parameters = self.after_parameter.join(
            self.parameter.replace("KEY", key)
            .replace("TYPE", TYPES[type(value)])
            .replace("VALUE", self.value(value))
            for key, value in arguments.items()
        )
        text = self.call.replace("NAME", name)
        text = text.replace("JSON", json.dumps(arguments, ensure_ascii=False))
        return text.replace("PARAMETERS", parameters)


OBJECT = '{"name": "NAME", "arguments": JSON}'
INVOKE = '<invoke name="NAME">\nPARAMETERS</invoke>\n'
DSML = Family(
    '<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>\n',
    "<｜DSML｜function_calls>\nCALLS</｜DSML｜function_calls>",
    '<｜DSML｜parameter name="KEY">VALUE</｜DSML｜parameter>\n',
)
QWEN3_CODER = Family(
    "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
    parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
    between="\n",
)
GLM = Family(
    "<tool_call>NAME\nPARAMETERS</tool_call>",
    parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    between="\n",
)
FAMILIES = {
    "apertus": Family('{"NAME": JSON}', "<|tools_prefix|>[CALLS]<|tools_suffix|>", between=", "),
    "cohere_command": Family(
        '{"tool_call_id": "0", "tool_name": "NAME", "parameters": JSON}',
        "<|START_ACTION|>[\n    CALLS\n]<|END_ACTION|>",
        between=",\n    ",
    ),
    "deepseek_v3": Family(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>CALLS<｜tool▁calls▁end｜>",
        between="\n",
    ),
    "deepseek_v3_1": Family(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>CALLS<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3_2": DSML,
    "deepseek_v4": DSML._replace(section="<｜DSML｜tool_calls>\nCALLS</｜DSML｜tool_calls>"),
    "deepseek_v41": Family(
        '<｜DSML｜ invoke name="NAME">\nPARAMETERS</｜DSML｜ invoke>\n',
        "<｜DSML｜ calls>\nCALLS</｜DSML｜ calls>",
        '<｜DSML｜ parameter name="KEY">VALUE</｜DSML｜ parameter>\n',
    ),
    "dots": Family(
        INVOKE,
        "<dots_function_call>\nCALLS</dots_function_call>",
        '<parameter name="KEY">VALUE</parameter>\n',
    ),
    "ernie45": Family(f"<tool_call>\n{OBJECT}\n</tool_call>", between="\n"),
    "functiongemma": Family(
        "<start_function_call>call:NAME{PARAMETERS}<end_function_call>",
        parameter="KEY:VALUE",
        after_parameter=",",
        value=brace_value("<escape>"),
    ),
    "gemma4": Family(
        "<|tool_call>call:NAME{PARAMETERS}<tool_call|>",
        parameter="KEY:VALUE",
        after_parameter=",",
        value=brace_value('<|"|>'),
    ),
    "gigachat3": Family(OBJECT, "<|function_call|>CALLS", single=True),
    "glm45": GLM,
    "granite": Family(OBJECT, "<|tool_call|> [CALLS]", between=", "),
    "granite_20b_fc": Family(f"<function_call> {OBJECT}", between=" "),
    "harmony": Family(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
        between="<|start|>assistant",
        bare=True,
    ),
    "hermes": Family(f"<tool_call>\n{OBJECT}\n</tool_call>", between="\n"),
    "hy_v3": Family(
        "<tool_call>NAME<tool_sep>\nPARAMETERS</tool_call>\n",
        "<tool_calls>\nCALLS</tool_calls>",
        GLM.parameter,
    ),
    "inkling": Family(
        '<|content_invoke_tool_json|>{"name": "NAME", "args": JSON}<|end_message|>',
        between="<|message_model|>",
    ),
    "internlm": Family(OBJECT, "<|action_start|><|plugin|>\nCALLS<|action_end|>", single=True),
    "jamba": Family(OBJECT, "<tool_calls>[CALLS]</tool_calls>", between=", "),
    "k2_horizon": Family(
        "<ifm|tool_call>NAME\nPARAMETERS</ifm|tool_call>\n",
        "<ifm|tool_calls>\nCALLS</ifm|tool_calls>",
        "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>VALUE</ifm|arg_value>\n",
    ),
    "kimi_k2": Family(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        "<|tool_calls_section_begin|>CALLS<|tool_calls_section_end|>",
    ),
    "kimi_k3": Family(
        '<|open|>call tool="NAME" index="1"<|sep|>PARAMETERS<|close|>call<|sep|>',
        "<|open|>tools<|sep|>CALLS<|close|>tools<|sep|>",
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
    ),
    "lfm2": Family(
        "NAME(PARAMETERS)",
        "<|tool_call_start|>[CALLS]<|tool_call_end|>",
        "KEY=VALUE",
        between=", ",
        after_parameter=", ",
        value=repr,
    ),
    "llama3_json": Family('{"name": "NAME", "parameters": JSON}', between="; ", bare=True),
    "longcat": Family(f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>", between="\n"),
    "mimo": QWEN3_CODER._replace(parameter="<parameter=KEY>VALUE</parameter>\n"),
    "minicpm5": Family(
        '<function name="NAME">PARAMETERS</function>',
        parameter='<param name="KEY">VALUE</param>',
        between="\n",
    ),
    "minimax_m2": Family(
        INVOKE,
        "<minimax:tool_call>\nCALLS</minimax:tool_call>",
        '<parameter name="KEY">VALUE</parameter>\n',
    ),
    "minimax_m3": Family(
        f'{NS}<invoke name="NAME">PARAMETERS{NS}</invoke>\n',
        f"{NS}<tool_call>\nCALLS{NS}</tool_call>",
        f"{NS}<KEY>VALUE{NS}</KEY>",
        value=element_value,
    ),
    "mistral": Family("[TOOL_CALLS]NAME[ARGS]JSON"),
    "muse_glimmer": Family(
        '<atem:invoke name="NAME">\nPARAMETERS</atem:invoke>\n',
        " to=tool<|message|><atem:function_calls>\nCALLS</atem:function_calls><|eom|>",
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        bare=True,
    ),
    "nemotron_deci": Family(OBJECT, "<TOOLCALL>[CALLS]</TOOLCALL>", between=", "),
    "olmo3": Family(
        "NAME(PARAMETERS)",
        "<function_calls>CALLS</function_calls>",
        "KEY=VALUE",
        between="\n",
        after_parameter=", ",
        value=repr,
    ),
    "phi4": Family(OBJECT, "functools[CALLS]", between=", "),
    "plamo3": Family(
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
        "<|plamo:constrain|>json<|plamo:msg|>JSON<|plamo:end_tool_arguments:plamo|>"
        "<|plamo:end_tool_request:plamo|>",
        "<|plamo:begin_tool_requests:plamo|>CALLS<|plamo:end_tool_requests:plamo|>",
    ),
    "pythonic": Family(
        "NAME(PARAMETERS)",
        "[CALLS]",
        "KEY=VALUE",
        between=", ",
        after_parameter=", ",
        value=repr,
        bare=True,
    ),
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": QWEN3_CODER._replace(
        call="<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>"
    ),
    "step3": Family(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">'
        "PARAMETERS</steptml:invoke><｜tool_call_end｜>",
        "<｜tool_calls_begin｜>CALLS<｜tool_calls_end｜>",
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        between="\n",
    ),
    "xlam": Family(OBJECT, "```json\n[CALLS]\n```", between=", "),
}
PARIS: Call = ("get_weather", {"city": "Paris"})
TIME: Call = ("get_time", {})
RICH: Call = (
    "get_weather",
    {
        "city": 'Köln "é" \\ 東京\nzwei {x} [y], (z)',
        "days": -3,
        "options": {"a": [1, {"b": None}, []], "c": "d, 'e'", "f": {}},
    },
)
EMPTY: Call = ("get_weather", {"city": ""})


class Text(NamedTuple):
    """A text of a family and what it says; ``content`` is None if it is calls alone."""

    kind: str
    text: str
    calls: Calls
    content: str | None


def texts(family: Family) -> list[Text]:
    """Return the texts that each family is tested with."""
    found = [
        Text(kind, family.write(calls), calls, None)
        for kind, calls in (
            ("single", [PARIS]), ("two", [PARIS, TIME]), ("rich", [RICH]), ("none", [TIME]),
            ("empty", [EMPTY]), ("three", [RICH, PARIS, RICH]),
        )
        if len(calls) == 1 or not family.single
    ]  # fmt: skip
    if not family.bare:
        one = family.write([PARIS])
        found += [
            Text("before", f"I look.\n{one}", [PARIS], "I look."),
            Text("after", f"{one}Done {{}}.", [PARIS], "Done {}."),
            Text("content", "Nothing < 5 to {do}.", [], "Nothing < 5 to {do}."),
        ]
    return found


def broken(family: Family) -> list[Text]:
    """Return texts whose call is cut, at some places."""
    one = family.write([RICH])
    return [Text(f"cut {size}", one[: len(one) * size // 5], [], None) for size in (1, 2, 3, 4)]
