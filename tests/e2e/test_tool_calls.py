"""Tool calls and reasoning with the ``openai`` client: a mocker with scripted replies behind the
real frontend, one model for each pair of formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import MODEL, Deployment
from lazy_module import openai

ARGUMENTS = '{"city": "Köln \\u00e9", "days": {"from": 1, "names": ["a", "\\"}"]}}'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
TO = (
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
)
CITY = json.dumps(json.loads(ARGUMENTS)["city"], ensure_ascii=False)[1:-1]
DAYS = json.dumps(json.loads(ARGUMENTS)["days"])
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>\n'
CALLS = (("get_weather", ARGUMENTS), ("get_time", "{}"))
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
THOUGHT = "<think>\nLet me see.\n</think>\n\n"

REPLIES = {
    "hermes": ("qwen3", THOUGHT + "I look.\n" + "".join(HERMES.format(*each) for each in CALLS)),
    "qwen3_coder": (
        "qwen3",
        THOUGHT + "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        f"{CITY}\n</parameter>\n<parameter=days>\n{DAYS}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "glm45",
        f"{THOUGHT}I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}"
        f"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>{DAYS}</arg_value>\n</tool_call>\n"
        "<tool_call>get_time\n</tool_call>",
    ),
    "kimi_k2": (
        "kimi_k2",
        f"{THOUGHT}I look.<|tool_calls_section_begin|>"
        + "".join(KIMI.format(name, n, given) for n, (name, given) in enumerate(CALLS))
        + "<|tool_calls_section_end|>",
    ),
    "minimax_m2": (
        "minimax_m2",
        f'{THOUGHT}I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        f'<parameter name="city">{CITY}</parameter>\n<parameter name="days">{DAYS}</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
    ),
    "llama3_json": (
        "",
        '<|python_tag|>{"name": "get_weather", "parameters": ' + ARGUMENTS + "}; "
        '{"name": "get_time", "parameters": {}}',
    ),
    "mistral": (
        "mistral",
        "[THINK]Let me see.[/THINK]I look.[TOOL_CALLS]"
        + "[TOOL_CALLS]".join(f"{name}[ARGS]{arguments}" for name, arguments in CALLS),
    ),
    "pythonic": ("", f'[get_weather(city="{CITY}", days={DAYS}), get_time()]'),
    "deepseek_v3": (
        "deepseek_r1",
        "Let me see.</think>I look."
        + SECTION.format("\n".join(V3.format(*each) for each in CALLS)),
    ),
    "deepseek_v3_1": (
        "deepseek_v3_1",
        THOUGHT + "I look." + SECTION.format("".join(V31.format(*each) for each in CALLS)),
    ),
    "harmony": (
        "gpt_oss",
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|>" + "".join(TO.format(*each) for each in CALLS),
    ),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    made = Deployment(tmp_path_factory.mktemp("tools"))
    flags = ["--model-path", str(MODEL), "--speedup-ratio", "0", "--reply", "script"]
    for name, (reasoning, reply) in REPLIES.items():
        script = made.logs / f"{name}.jsonl"
        lines = [{"match": "Say no", "reply": "No < yes. "}, {"reply": reply}]
        script.write_text("\n".join(map(json.dumps, lines)))
        parsers = ["--dyn-tool-call-parser", name]
        if reasoning:
            parsers += ["--dyn-reasoning-parser", reasoning]
        names = ["--model-name", name, "--endpoint", f"{made.namespace}.{name}.generate"]
        made.start("dynamo.mocker", *flags, *names, "--reply-script", str(script), *parsers)
    made.frontend()
    try:
        made.wait_for_workers(len(REPLIES))
        base = f"{made.url}/v1"
        with openai.OpenAI(base_url=base, api_key="none", timeout=30) as one:
            made.until(lambda: len(one.models.list().data) == len(REPLIES), "every model")
            yield one
    finally:
        made.close()


def ask(model: str, text: str = "Weather?", **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        **fields,
    }


def check(model: str, message: Any) -> None:
    weather, time = message.tool_calls
    assert weather.type == "function" and weather.id != time.id
    assert weather.function.name == "get_weather" and time.function.name == "get_time"
    assert json.loads(weather.function.arguments) == json.loads(ARGUMENTS)
    assert time.function.arguments == "{}"
    reasoning = REPLIES[model][0]
    assert message.content == ("I look." if reasoning else None)
    assert getattr(message, "reasoning_content", None) == ("Let me see." if reasoning else None)


@pytest.mark.parametrize("model", REPLIES)
def test_unary(client: openai.OpenAI, model: str) -> None:
    (choice,) = client.chat.completions.create(**ask(model)).choices
    assert choice.finish_reason == "tool_calls"
    check(model, choice.message)


@pytest.mark.parametrize("model", REPLIES)
def test_stream_helper(client: openai.OpenAI, model: str) -> None:
    arguments, reasoning = "", ""
    with client.chat.completions.stream(**ask(model)) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta" and event.index == 0:
                arguments += event.arguments_delta
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                reasoning += getattr(delta, "reasoning_content", None) or ""
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    message: Any = choice.message
    assert arguments == message.tool_calls[0].function.arguments
    message.reasoning_content = reasoning or None
    check(model, message)


@pytest.mark.parametrize("model", REPLIES)
def test_text_and_cut_calls(client: openai.OpenAI, model: str) -> None:
    (choice,) = client.chat.completions.create(**ask(model, "Say no")).choices
    answer = choice.message.content or getattr(choice.message, "reasoning_content", None)
    assert answer == "No < yes. " and choice.finish_reason == "stop"
    whole = client.chat.completions.create(**ask(model)).choices[0].message.tool_calls
    seen = 0
    for limit in range(10, 140, 8):
        (cut,) = client.chat.completions.create(**ask(model, max_tokens=limit)).choices
        if cut.finish_reason == "length" and cut.message.tool_calls and whole:
            seen += 1
            first: Any = cut.message.tool_calls[0]
            complete: Any = whole[0]
            assert first.function.name == "get_weather"
            assert complete.function.arguments.startswith(first.function.arguments[:12])
    assert seen


def test_n_choices_and_one_call_each(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ask("hermes", n=3, parallel_tool_calls=False))
    assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [1, 1, 1]


def test_tool_choice_none_leaves_the_text(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**ask("hermes", tool_choice="none")).choices
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert "<tool_call>" in (choice.message.content or "")


def test_bad_tool_choice(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "nope"}}
    with pytest.raises(openai.BadRequestError, match="'tool_choice' names 'nope', but 'tools' has"):
        client.chat.completions.create(**ask("hermes", tool_choice=choice))
    with pytest.raises(openai.BadRequestError, match="harmony, which takes no grammar"):
        client.chat.completions.create(**ask("harmony", tool_choice="required"))


def test_unknown_format_is_a_config_error(deployment: Deployment, tmp_path: Path) -> None:
    process = deployment.mocker("--dyn-tool-call-parser", "nope")
    assert process.wait(20) == 2
    assert "--dyn-tool-call-parser must be one of apertus" in deployment.tail()
