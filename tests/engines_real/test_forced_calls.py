"""Forced and strict tool calls: the grammars that the frontend makes, in vLLM, over random weights.

Calls are in the model's own format. ``ours`` has no reasoning; the model of ``thinking`` closes it
with a token, which a bias makes likely.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers_kit import EngineDeployment, closing

from dynamo.frontend.formats.call_tags import after_reasoning, forced_tag
from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.table import TOOL_FORMATS

UNITS = {"heat": ["celsius", "kelvin"], "length": ["metre", "foot"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": units},
                    "on": {"type": "boolean"},
                },
                "required": ["unit", "on"],
                "additionalProperties": False,
            },
        },
    }
    for name, units in UNITS.items()
]
NAMED = {"type": "function", "function": {"name": "length"}}
CLOSE = 4102  # </think>


@pytest.fixture(scope="module")
def thinking(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[EngineDeployment]:
    """The model ``tiny``, whose answers begin inside the reasoning, also for vLLM's own parser of
    it, and as ``drafting`` with drafts of speculation, which exclude biases."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with closing(EngineDeployment(tmp_path_factory.mktemp("thinking"))) as deployment:
        deployment.frontend()
        deployment.worker(tiny_model, "tiny", "--reasoning-parser", "deepseek_r1")
        deployment.worker(tiny_model, "drafting", "--speculative-config", json.dumps(drafts))
        deployment.wait_for_models("tiny", "drafting")
        yield deployment


def ask(choice: Any, text: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 400,
    }


def calls(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("text", ["How warm is it?", "How far?", "x"])
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_the_engine_follows_the_schemas(ours: EngineDeployment, choice: Any, text: str) -> None:
    # An array without a limit would go on for ever.
    answer = ours.post("/v1/chat/completions", ask(choice, text) | {"parallel_tool_calls": False})
    (one,) = answer["choices"]
    # As OpenAI and vLLM: "stop" where the request names the function.
    assert one["finish_reason"] == ("stop" if choice == NAMED else "tool_calls"), answer
    assert one["message"]["content"] is None
    ((name, arguments),) = calls(answer)
    assert name == "length" or choice == "required"
    assert arguments["unit"] in UNITS[name] and arguments["on"] in (True, False)
    assert len(arguments) == 2


def test_the_template_of_the_model_chooses_the_format(ours: EngineDeployment) -> None:
    status = json.loads(ours.request("GET", "/v1/status")[2])
    formats = {model["model"]: model.get("tool_call_parser") for model in status["models"]}
    assert formats["tiny"] == "hermes", "no flag names it, and forced calls need one"


def test_a_stream_has_the_same_arguments(ours: EngineDeployment) -> None:
    body = ask(NAMED, "How far?")
    parts = [
        call["function"].get("arguments") or ""
        for event in ours.stream("/v1/chat/completions", body)
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    message = ours.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert len(parts) > 2 and "".join(parts) == message["tool_calls"][0]["function"]["arguments"]


def streamed(deployment: EngineDeployment, body: dict[str, Any]) -> dict[str, str]:
    """The reasoning, the content, and the names and arguments of a stream, put together."""
    parts = {"reasoning_content": "", "content": "", "name": "", "arguments": ""}
    for event in deployment.stream("/v1/chat/completions", body):
        for choice in event["choices"]:
            functions = [call["function"] for call in choice["delta"].get("tool_calls") or ()]
            for fields in (choice["delta"], *functions):
                for name in parts:
                    parts[name] += fields.get(name) or ""
    return parts


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_the_model_thinks_before_a_forced_call(thinking: EngineDeployment, choice: Any) -> None:
    lengths = set()
    for seed in range(6):
        body = ask(choice, "How far?") | {
            "parallel_tool_calls": False, "logit_bias": {str(CLOSE): 8}, "temperature": 1,
            "seed": seed,
        }  # fmt: skip
        answer = thinking.post("/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        ((name, arguments),) = calls(answer)
        assert arguments["unit"] in UNITS[name] and arguments["on"] in (True, False)
        assert message["content"] is None
        lengths.add(len(message.get("reasoning_content") or ""))
    assert max(lengths) > 20, "the grammar left no room for reasoning"
    parts = streamed(thinking, body)
    assert parts["reasoning_content"] == (message.get("reasoning_content") or "")
    assert not parts["content"] and parts["name"] == name
    assert json.loads(parts["arguments"]) == arguments


def test_drafts_follow_the_grammar(thinking: EngineDeployment) -> None:
    call = '<tool_call>\n{"name": "length", "arguments": {"unit": "mile", "on": "no", "x": 1}}'
    for seed in range(8):
        body = ask("required", f"Write {call}, then {call}") | {
            "model": "drafting", "parallel_tool_calls": False, "temperature": 1, "seed": seed
        }  # fmt: skip
        ((name, arguments),) = calls(thinking.post("/v1/chat/completions", body))
        assert arguments["unit"] in UNITS[name] and len(arguments) == 2


def test_the_call_token_of_the_model_is_written(ours: EngineDeployment) -> None:
    body = ask(NAMED, "How far?") | {"logprobs": True}
    answer = ours.post("/v1/chat/completions", body)["choices"][0]
    text = "".join(row["token"] for row in answer["logprobs"]["content"])
    assert text.lstrip().startswith("<tool_call>"), text


@pytest.mark.parametrize("name", [name for name, row in TOOL_FORMATS.items() if row.tags])
def test_every_format_is_followed_by_the_engine(ours: EngineDeployment, name: str) -> None:
    row, functions = TOOL_FORMATS[name], [tool["function"] for tool in TOOLS]
    tag = after_reasoning(forced_tag(row.tags, functions, True), None, False, None, ())
    body = {
        "model": "tiny", "prompt": f"Call {name}:", "max_tokens": 400, "temperature": 1, "seed": 7,
        "structural_tag": json.dumps({"type": "structural_tag", "format": tag}),
    }  # fmt: skip
    unary = ours.post("/v1/completions", body)["choices"][0]["text"]
    events = [event["choices"] for event in ours.stream("/v1/completions", body)]
    pieces = [choice["text"] for choices in events for choice in choices]
    for texts in ([unary], pieces):
        message = AnswerMessage(lambda: "id")
        parser = row.make(message, RequestTools.of(TOOLS))
        for piece in texts:
            parser.push(piece)
        message.stopped = True
        parser.finish()
        (call,) = message.whole()["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["unit"] in UNITS[call["function"]["name"]]
        assert arguments["on"] in (True, False) and len(arguments) == 2


def test_messages_and_responses_force_calls_alike(thinking: EngineDeployment) -> None:
    functions = [tool["function"] for tool in TOOLS]
    plain = {"model": "drafting", "temperature": 0}
    message = thinking.post(
        "/v1/messages",
        plain
        | {
            "messages": [{"role": "user", "content": "How far?"}],
            "max_tokens": 400,
            "tools": [
                {"name": function["name"], "input_schema": function["parameters"]}
                for function in functions
            ],
            "tool_choice": {"type": "tool", "name": "length"},
        },
    )
    response = thinking.post(
        "/v1/responses",
        plain
        | {
            "input": "How far?",
            "max_output_tokens": 400,
            "tools": [{"type": "function", **function} for function in functions],
            "tool_choice": {"type": "function", "name": "length"},
        },
    )
    (use,) = message["content"]
    (call,) = response["output"]
    assert (use["type"], call["type"]) == ("tool_use", "function_call")
    for name, arguments in (
        (use["name"], use["input"]),
        (call["name"], json.loads(call["arguments"])),
    ):
        assert name == "length" and len(arguments) == 2
        assert arguments["unit"] in UNITS["length"] and arguments["on"] in (True, False)


def test_a_schema_that_is_no_grammar_is_refused(ours: EngineDeployment) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "no"}}}}
    body = ask("required", "x") | {"tools": [{"type": "function", "function": function}]}
    status, _, answer = ours.request("POST", "/v1/chat/completions", body)
    message = json.loads(answer)["error"]["message"]
    assert status == 400 and "'parameters' of a function in 'tools'" in message, answer
