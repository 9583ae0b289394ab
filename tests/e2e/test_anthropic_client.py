"""The ``anthropic`` Python client, unchanged, against mockers behind the real frontend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from deployment import MODEL, Deployment

ASK: Any = [{"role": "user", "content": "Tell me about key-value caches, please."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCRIPT = [
    {"match": "17 degrees", "reply": f"{THOUGHT}It is warm."},
    {"match": "Weather", "reply": f"{THOUGHT}I look.\n{CALL}"},
    {"reply": f"{THOUGHT}Hello there. Bye."},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("anthropic"))
    script = deployment.logs / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, SCRIPT)))
    deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
    flags = ["--model-path", str(MODEL), "--model-name", "agent", "--speedup-ratio", "0"]
    flags += ["--endpoint", f"{deployment.namespace}.agent.generate"]
    flags += ["--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3"]
    deployment.start("dynamo.mocker", *flags, "--reply", "script", "--reply-script", str(script))
    deployment.frontend("--router-mode", "kv")
    try:
        deployment.wait_for_workers(2)
        yield deployment
    finally:
        deployment.close()


@pytest.fixture(scope="module")
def client(made: Deployment) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=made.url, api_key="none", timeout=30, max_retries=0) as one:
        yield one


def test_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="tiny", messages=ASK, max_tokens=12, system="Be brief.")
    assert answer.type == "message" and answer.role == "assistant" and answer.id.startswith("msg_")
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert answer.stop_reason == "max_tokens" and answer.stop_sequence is None
    assert answer.usage.output_tokens == 12 and answer.usage.input_tokens > 10
    assert answer._request_id


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="agent", messages=ASK, max_tokens=99) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello there. Bye."
    thinking, block = final.content
    assert thinking.type == "thinking" and thinking.thinking == "Let me see." and thinking.signature
    assert block.type == "text" and block.text == text
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 4
