"""Forced tool calls: the same calls as from vLLM's own server, which applies the same grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from servers_kit import EngineDeployment

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
    for name, units in (("heat", ["celsius", "kelvin"]), ("length", ["metre", "foot"]))
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
def test_the_calls_of_vllm(
    ours: EngineDeployment, vllm_tiny: EngineDeployment, choice: Any, text: str
) -> None:
    body = ask(choice, text)
    answer = ours.post("/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["content"] is None
    assert calls(answer) == calls(vllm_tiny.post("/v1/chat/completions", body))
    found = calls(answer)
    assert all(set(arguments) == {"unit", "on"} for _, arguments in found)
    if choice == NAMED:
        assert [name for name, _ in found] == ["length"]


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
