"""Forced tool calls: the grammars that the frontend makes, in vLLM, over random weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
from servers_kit import EngineDeployment

UNITS = {"heat": ["celsius", "kelvin"], "length": ["metre", "foot"]}
TOOLS = [
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


def ask(choice: Any, text: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 120,
    }


def calls(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


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
