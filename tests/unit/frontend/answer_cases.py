"""Answers as models write them, by format, and the messages that they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from family_cases import FAMILIES, texts

from dynamo.frontend.formats.message import AnswerMessage, AnswerParser, CallProbe
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.table import TOOL_FORMATS

CITY = {"type": "string", "description": "The city"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": CITY,
                    "days": {"type": "integer"},
                    "options": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "id": {"type": ["string", "integer"]},
                    "body": {"oneOf": [{"type": "string"}, {"type": "object"}]},
                    "level": {"enum": [1, 2, 3]},
                    "mode": {"enum": ["1", "fast", 2]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


class Case(NamedTuple):
    """``calls`` are (name, arguments) pairs; ``content`` and ``reasoning`` None if absent."""

    format: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str | None = None
    reasoning: str | None = None


PARIS = ("get_weather", '{"city": "Paris"}')
TIME = ("get_time", "{}")
NESTED = '{"city": "Köln \\u00e9 \\"}{\\"", "options": {"a": [1, {"b": null}], "c": "\\\\"}}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
DSML = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
DSML_CALL = '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n'
NS = "]<]minimax[>["
GEMMA = "<|tool_call>call:{}{{{}}}<tool_call|>"
TO_WEATHER = "commentary to=functions.get_weather <|constrain|>json<|message|>"

TYPED = (
    # the parameter, the text, the JSON
    ("city", "null", '"null"'),
    ("note", "null", "null"),
    ("note", "nullify", '"nullify"'),
    ("note", "Null", '"Null"'),
    ("note", "a 'note' of 5", "\"a 'note' of 5\""),
    ("note", "5", '"5"'),
    ("id", "5", "5"),
    ("id", "007", '"007"'),
    ("id", "5.5", '"5.5"'),
    ("id", "-", '"-"'),
    ("id", "5 apples", '"5 apples"'),
    ("body", '{"a": [1]}', '{"a": [1]}'),
    ("body", "{'a': True}", '{"a": true}'),
    ("body", "{ no object", '"{ no object"'),
    ("body", "[1]", '"[1]"'),
    ("level", "2", "2"),
    ("mode", "1", '"1"'),
    ("mode", "2", "2"),
    ("mode", "fast", '"fast"'),
)


def _typed(name: str, opens: str, closes: str) -> tuple[Case, ...]:
    """A call of each value; ``opens`` has the name of the parameter and the value."""
    return tuple(
        Case(
            name,
            opens.format(parameter, text) + closes,
            (("get_weather", f'{{"{parameter}": {value}}}'),),
        )
        for parameter, text, value in TYPED
    )


CASES = (
    # hermes: Hermes 2 and 3, Qwen 2.5, Qwen 3
    Case(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        (PARIS,),
    ),
    Case(
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": ' + NESTED + "}\n"
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
        (("get_weather", NESTED), TIME),
        "Let me look.",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_time"}</tool_call> and that is all <b>',
        (TIME,),
        " and that is all <b>",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        (PARIS,),
    ),
    Case("hermes", "1 < 2, <tool_cal", content="1 < 2, <tool_cal"),
    Case(
        "hermes", "<tool_call>\n[1, 2]\n</tool_call>", content="<tool_call>\n[1, 2]\n</tool_call>"
    ),
    Case("hermes", '<tool_call>{"a": 1}</tool_call> ', content='<tool_call>{"a": 1}</tool_call> '),
    Case("hermes", "<tool_call></tool_call>", content="<tool_call></tool_call>"),
    Case("hermes", '<tool_call>{"name": 3, "x', content='<tool_call>{"name": 3, "x'),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa',
        (("get_weather", '{"city": "Pa'),),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": 1</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        (("get_weather", '{"city": 1'), TIME),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": broken}\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        (TIME,),
        '<tool_call>{"name": broken}',
    ),
    # llama3_json: Llama 3.1 to 3.3
    Case("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', (PARIS,)),
    Case(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"type": "function", "name": "get_time", "parameters": {}}',
        (PARIS, TIME),
    ),
    Case(
        "llama3_json",
        '[{"name": "get_time", "parameters": {}}, {"name": "get_time", "parameters": {}}]',
        (TIME, TIME),
    ),
    Case("llama3_json", '{"name": "Bob", "age": 3}', content='{"name": "Bob", "age": 3}'),
    Case("llama3_json", ' {"a": {"b": 1}} ok', content=' {"a": {"b": 1}} ok'),
    Case("llama3_json", "Plain text {1}", content="Plain text {1}"),
    # mistral: the array of older tokenizers, and the names of newer ones
    Case(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_time", "arguments": {}}]',
        (PARIS, TIME),
    ),
    Case(
        "mistral",
        'Looking.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}',
        (PARIS, TIME),
        "Looking.",
    ),
    Case("mistral", "[TOOL_CALLS]get_time[CALL_ID]abc123xyz[ARGS]{}", (TIME,)),
    Case("mistral", 'Look: [TOOL_CALLS]get_weather{"city": "Paris"}', (PARIS,), "Look:"),
    Case("mistral", "[TOOL_CALLS] is a marker [x]", content="[TOOL_CALLS] is a marker [x]"),
    Case("mistral", "[TOOL", content="[TOOL"),
    # pythonic: Llama 3.2 and 4
    Case("pythonic", '[get_weather(city="Paris"), get_time()]', (PARIS, TIME)),
    Case(
        "pythonic",
        "[get_weather(city='it\\'s, (x)', days=-3, options={'a': [True, None], \"b\": false})]",
        (
            (
                "get_weather",
                '{"city": "it\'s, (x)", "days": -3, "options": {"a": [true, null], "b": false}}',
            ),
        ),
    ),
    Case("pythonic", "[get_weather(city=a + b,)]", (("get_weather", '{"city": "a + b"}'),)),
    Case(
        "pythonic",
        "[get_weather(city='it's (x)', days=1), get_time()]",
        (("get_weather", '{"city": "it\'s (x)", "days": 1}'), TIME),
    ),
    Case("pythonic", "[1, 2, 3]", content="[1, 2, 3]"),
    Case("pythonic", "[other(city=1)]", content="[other(city=1)]"),
    Case("pythonic", '[get_weather("Paris")]', content='[get_weather("Paris")]'),
    Case("pythonic", "[get_weather(a==1)]", content="[get_weather(a==1)]"),
    Case("pythonic", "[get_weather", content="[get_weather"),
    Case("pythonic", "No list: get_time()", content="No list: get_time()"),
    Case("pythonic", '[get_weather(city="Pa', (("get_weather", '{"city": "Pa'),)),
    # qwen3_coder
    Case(
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=options>\n{'a': [1, True]}\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        (
            ("get_weather", '{"city": "Paris", "days": 3, "options": {"a": [1, true]}}'),
            TIME,
        ),
        "I look.",
    ),
    Case(
        "qwen3_coder",
        '<tool_call><function=get_weather><parameter=city>a "b"\n\n\\n </x>\n\n</parameter>'
        "</function></tool_call>\nDone",
        (("get_weather", '{"city": "a \\"b\\"\\n\\n\\\\n </x>\\n"}'),),
        "\nDone",
    ),
    Case(
        "qwen3_coder",
        "<function=get_weather><parameter=days>many</parameter></function>",
        (("get_weather", '{"days": "many"}'),),
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Pa",
        (("get_weather", '{"city": "Pa'),),
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather>well<parameter=city>Paris</parameter> so\n"
        "<parameter=days>3</parameter></function></tool_call>",
        (("get_weather", '{"city": "Paris</parameter> so", "days": 3}'),),
        "well",
    ),
    *_typed(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter={}>\n{}",
        "\n</parameter></function></tool_call>",
    ),
    *_typed(
        "glm45",
        "<tool_call>get_weather<arg_key>{}</arg_key><arg_value>{}",
        "</arg_value></tool_call>",
    ),
    *_typed(
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="{}">{}',
        "</parameter></invoke></minimax:tool_call>",
    ),
    *_typed(
        "minimax_m3",
        NS + "<tool_call>" + NS + '<invoke name="get_weather">' + NS + "<{}>{}",
        NS + "</x>" + NS + "</invoke>" + NS + "</tool_call>",
    ),
    # a written file keeps its line breaks
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">\na\n</parameter>'
        "</invoke></minimax:tool_call>",
        (("get_weather", '{"city": "\\na\\n"}'),),
    ),
    # cut in a tag behind a value
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=days>\n48.85\n</para",
        (("get_weather", '{"days": 48.85'),),
    ),
    Case(
        "glm45",
        "<tool_call>get_weather<arg_key>id</arg_key><arg_value>48</arg_va",
        (("get_weather", '{"id": 48'),),
    ),
    Case("gemma4", "<|tool_call>call:f{a:48<tool_ca", (("f", '{"a": 48'),)),
    Case(
        "minimax_m3",
        f'{NS}<invoke name="get_weather">{NS}<days>48]<]mini',
        (("get_weather", '{"days": 48'),),
    ),
    Case("qwen3_coder", "<tool_call>\nno", content="<tool_call>\nno"),
    Case("qwen3_coder", "<function=>x", content="<function=>x"),
    # minimax_m2
    Case(
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n'
        "</invoke>\n</minimax:tool_call>",
        (("get_weather", '{"city": "Paris", "days": 3}'), TIME),
        "I look.",
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">\nPa',
        (("get_weather", '{"city": "\\nPa'),),
    ),
    Case("minimax_m2", "<minimax:tool_call>no", content="<minimax:tool_call>no"),
    # glm45: also GLM 4.7, without line breaks
    Case(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_time\n</tool_call>",
        (("get_weather", '{"city": "Paris", "days": 3}'), TIME),
        "I look.",
    ),
    Case(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a\n<b>\n</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>Done",
        (("get_weather", '{"city": "a\\n<b>\\n"}'), TIME),
        "Done",
    ),
    Case(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa",
        (("get_weather", '{"city": "Pa'),),
    ),
    Case(
        "glm45", '<tool_call>{"name": 1}</tool_call>', content='<tool_call>{"name": 1}</tool_call>'
    ),
    Case("glm45", "<tool_call>two words", content="<tool_call>two words"),
    Case("glm45", "<tool_call>unfinished", content="<tool_call>unfinished"),
    # deepseek_v3_2, deepseek_v4: string="…" says what a value is, not the schema
    Case(
        "deepseek_v3_2",
        "I look.\n\n<｜DSML｜function_calls>\n"
        + DSML_CALL.format("get_weather", DSML.format("city", "true", "杭州 <b>\n"))
        + DSML_CALL.format(
            "get_weather",
            DSML.format("city", "false", '["a"]') + DSML.format("days", "true", "5"),
        )
        + DSML_CALL.format("get_time", "")
        + "</｜DSML｜function_calls>",
        (
            ("get_weather", '{"city": "杭州 <b>\\n"}'),
            ("get_weather", '{"city": ["a"], "days": "5"}'),
            TIME,
        ),
        "I look.",
    ),
    Case(
        "deepseek_v3_2",
        '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" '
        'string="true">Pa',
        (("get_weather", '{"city": "Pa'),),
    ),
    Case("deepseek_v3_2", "<｜DSML｜tool_calls>", content="<｜DSML｜tool_calls>"),
    Case(
        "deepseek_v4",
        "<｜DSML｜tool_calls>\n"
        + DSML_CALL.format("get_weather", DSML.format("city", "true", "Paris"))
        + "</｜DSML｜tool_calls>",
        (PARIS,),
    ),
    # gemma4
    Case(
        "gemma4",
        "I look."
        + GEMMA.format("get_weather", 'city:<|"|>Paris<|"|>')
        + GEMMA.format("get_time", ""),
        (PARIS, TIME),
        "I look.",
    ),
    Case(
        "gemma4",
        GEMMA.format(
            "get_weather",
            'city:<|"|>a, "b"}\n<|<|"|>,days:-3.5,options:{a:[1,{b:null,<|"|>c d<|"|>:true},[]],'
            "e:word,f:{}}",
        ),
        (
            (
                "get_weather",
                '{"city": "a, \\"b\\"}\\n<|", "days": -3.5, "options": {"a": [1, {"b": null, '
                '"c d": true}, []], "e": "word", "f": {}}}',
            ),
        ),
    ),
    Case(
        "gemma4",
        "<|tool_call>call:get_weather{options:{a:[1<tool_call|>Done",
        (("get_weather", '{"options": {"a": [1]}}'),),
        "Done",
    ),
    Case("gemma4", '<|tool_call>call:get_weather{city:<|"|>Pa', (("get_weather", '{"city": "Pa'),)),
    Case("gemma4", "<|tool_call>call me", content="<|tool_call>call me"),
    Case("gemma4", "<|tool_call>call:f(", content="<|tool_call>call:f("),
    Case("gemma4", "<|tool_c", content="<|tool_c"),
    # minimax_m3
    Case(
        "minimax_m3",
        f'I look.\n{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Pa<b>ris{NS}</city>'
        f"{NS}<days>3{NS}</days>{NS}<options>{NS}<a>{NS}<item>1{NS}</item>{NS}<item>{NS}<b>x{NS}</b>"
        f"{NS}</item>{NS}</a>{NS}<c>true{NS}</c>{NS}</options>{NS}</invoke>\n"
        f'{NS}<invoke name="get_time">{NS}</invoke>\n{NS}</tool_call>',
        (
            (
                "get_weather",
                '{"city": "Pa<b>ris", "days": 3, "options": {"a": ["1", {"b": "x"}], "c": "true"}}',
            ),
            TIME,
        ),
        "I look.",
    ),
    Case(
        "minimax_m3",
        f'{NS}<tool_call>{NS}<invoke name="get_weather">{NS}<options>{NS}</options>{NS}<days>many'
        f"{NS}</days>{NS}<options>{NS}<a>x{NS}</invoke>{NS}</tool_call>Done",
        (("get_weather", '{"options": {}, "days": "many", "options": {"a": "x"}}'),),
        "Done",
    ),
    Case(
        "minimax_m3",
        f'{NS}<tool_call>{NS}<invoke name="get_weather">{NS}<city>Pa',
        (("get_weather", '{"city": "Pa'),),
    ),
    Case(
        "minimax_m3",
        f'{NS}<tool_call>{NS}<invoke name="get_time">{NS}</invoke>\n{NS}</tool',
        (TIME,),
    ),
    Case("minimax_m3", f"{NS}<tool_call>no", content=f"{NS}<tool_call>no"),
    Case(
        "minimax_m3", f"{NS}<tool_call>{NS}</tool_call>", content=f"{NS}<tool_call>{NS}</tool_call>"
    ),
    Case("minimax_m3", "a ]<] b", content="a ]<] b"),
    # kimi_k2
    Case(
        "kimi_k2",
        "I look."
        + KIMI_SECTION.format(
            KIMI.format("get_weather", 0, PARIS[1]) + KIMI.format("get_time", 1, "{}")
        ),
        (PARIS, TIME),
        "I look.",
    ),
    Case(
        "kimi_k2",
        KIMI_SECTION.format(KIMI.format("get_weather", 0, PARIS[1])).partition("ris")[0],
        (("get_weather", '{"city": "Pa'),),
    ),
    Case("kimi_k2", KIMI_SECTION.format(""), content=KIMI_SECTION.format("")),
    # deepseek_v3, deepseek_v3_1
    Case(
        "deepseek_v3",
        "Yes." + SECTION.format(V3.format(*PARIS) + "\n" + V3.format(*TIME)),
        (PARIS, TIME),
        "Yes.",
    ),
    Case(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>" + V3.format(*PARIS).partition("ris")[0],
        (("get_weather", '{"city": "Pa'),),
    ),
    Case("deepseek_v3", "<｜tool▁calls▁begin｜> none", content="<｜tool▁calls▁begin｜> none"),
    Case("deepseek_v3_1", SECTION.format(V31.format(*PARIS) + V31.format(*TIME)), (PARIS, TIME)),
    Case("deepseek_v3_1", SECTION.format(""), content=SECTION.format("")),
    # harmony: gpt-oss
    Case(
        "harmony",
        "<|channel|>analysis<|message|>We need the weather.<|end|><|start|>assistant<|channel|>"
        + TO_WEATHER
        + '{"city": "Paris"}<|call|>',
        (PARIS,),
        reasoning="We need the weather.",
    ),
    Case(
        "harmony",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.\n<|end|><|start|>assistant<|channel|>final<|message|>It is 5 < 6.<|return|>",
        content="It is 5 < 6.",
        reasoning="One.\nTwo.",
    ),
    Case(
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant "
        "to=functions.get_time<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
        "<|channel|>" + TO_WEATHER + '{"city": "Pa',
        (TIME, ("get_weather", '{"city": "Pa')),
        "I will look.",
    ),
    Case("harmony", " to=functions.get_time<|channel|>commentary<|message|>{}", (TIME,)),
    Case("harmony", "No channel", content="No channel"),
    Case("harmony", "<|channel|>final", content="<|channel|>final"),
    # variants of hermes
    Case("jamba", '<tool_calls>[{"name": "get_time", "arguments": {}}]</tool_calls>', (TIME,)),
    Case("nemotron_deci", '<TOOLCALL>[{"name": "get_time", "arguments": {}}]</TOOLCALL>', (TIME,)),
    Case("phi4", 'functools[{"name": "get_time", "arguments": {}}]', (TIME,)),
    Case(
        "k2_horizon",
        "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>days</ifm|arg_key>\n"
        "<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>3</ifm|arg_value></ifm|tool_call>"
        "</ifm|tool_calls>",
        (("get_weather", '{"days": 3}'),),
    ),
    Case("phi4", "use functools.partial", content="use functools.partial"),
    *(
        Case(
            name,
            text.text,
            tuple((f, json.dumps(a, ensure_ascii=False)) for f, a in text.calls),
            text.content,
        )
        for name, family in FAMILIES.items()
        for text in texts(family)
        # The model numbers the calls of kimi_k2, and all of this family have one number. Values
        # inside those of minimax_m3 have no schema here: they are texts.
        if not (name == "kimi_k2" and len(text.calls) > 1)
        and not (name == "minimax_m3" and text.kind in ("rich", "three"))
    ),
)


def tool_parser(name: str) -> tuple[AnswerMessage, AnswerParser]:
    numbers = itertools.count()
    message = AnswerMessage(lambda: f"call_{next(numbers)}")
    return message, TOOL_FORMATS[name].make(message, RequestTools.of(TOOLS))


def tool_probe(name: str) -> Callable[[], CallProbe]:
    tools = RequestTools.of(TOOLS)
    return lambda: CallProbe(lambda message: TOOL_FORMATS[name].make(message, tools), tools.names)


def merge_all(message: dict[str, Any], answer: AnswerMessage) -> None:
    """Add what is new in ``answer``, each delta of one kind."""
    for delta in answer.deltas():
        assert len(delta) == 1 and len(delta.get("tool_calls", [0])) == 1, delta
        merge(message, delta)


def expected(case: Case) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": case.content, "refusal": None}
    if case.reasoning is not None:
        message["reasoning_content"] = case.reasoning
    if case.calls:
        own = "functions.{1}:{0}" if case.format == "kimi_k2" else "call_{0}"
        message["tool_calls"] = [
            {"id": own.format(n, f), "type": "function", "function": {"name": f, "arguments": a}}
            for n, (f, a) in enumerate(case.calls)
        ]
    return message


def merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a streamed delta to ``message``, as a client does."""
    for name in ("content", "reasoning_content", "reasoning"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert set(call) == {"index", "id", "type", "function"}
            calls.append({key: call[key] for key in ("id", "type", "function")})
        else:
            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            assert call["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
