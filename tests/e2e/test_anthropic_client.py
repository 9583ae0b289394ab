"""The ``anthropic`` Python client, unchanged, against mockers behind the real frontend.

claude_code.json has the shape of the requests of Claude Code 2.1.197, in other words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from deployment import MODEL, Deployment
from lazy_module import anthropic

CLAUDE_CODE = json.loads(Path(__file__).with_name("claude_code.json").read_text())
ASK: Any = [{"role": "user", "content": "Tell me about key-value caches, please."}]
WEATHER: Any = [{"role": "user", "content": "Weather?"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCRIPT = [
    {"match": "17 degrees", "reply": f"{THOUGHT}It is warm."},
    {"match": "Weather", "reply": f"{THOUGHT}I look.\n{CALL}"},
    {"match": "As JSON", "reply": f'{THOUGHT}{{"city": "Köln", "days": 3}}'},
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


def test_a_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="tiny", messages=ASK, max_tokens=12, system="Be brief.")
    assert answer.type == "message" and answer.role == "assistant" and answer.id.startswith("msg_")
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert answer.stop_reason == "max_tokens" and answer.stop_sequence is None
    assert answer.usage.output_tokens == 12 and answer.usage.input_tokens > 10
    assert answer._request_id is not None and answer.id == f"msg_{answer._request_id}"


def test_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="agent", messages=ASK, max_tokens=99) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == stream.get_final_text() == "Hello there. Bye."
    thinking, block = final.content
    assert thinking.type == "thinking" and thinking.thinking == "Let me see." and thinking.signature
    assert block.type == "text" and block.text == text
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 4
    raw = client.messages.create(model="agent", messages=ASK, max_tokens=99, stream=True)
    kinds = [event.type for event in raw]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


def test_tools_round_trip(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="agent", messages=WEATHER, max_tokens=99, tools=[TOOL]
    ) as stream:
        inputs = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert inputs[-1] == {"city": "Köln"} and final.stop_reason == "tool_use"
    call = final.content[-1]
    assert call.type == "tool_use" and call.name == "get_weather" and call.input == inputs[-1]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "17 degrees"}
    again: Any = [
        *WEATHER,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model="agent", messages=again, max_tokens=99, tools=[TOOL])
    assert answer.content[-1].type == "text" and answer.content[-1].text == "It is warm."


def test_the_tool_runner(client: anthropic.Anthropic) -> None:
    asked = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "17 degrees"

    final = client.beta.messages.tool_runner(
        model="agent", messages=WEATHER, max_tokens=99, tools=[get_weather]
    ).until_done()
    assert asked == ["Köln"]
    assert final.content[-1].type == "text" and final.content[-1].text == "It is warm."


def test_a_parsed_answer(client: anthropic.Anthropic) -> None:
    class Trip(pydantic.BaseModel):
        city: str
        days: int

    ask: Any = [{"role": "user", "content": "As JSON, please"}]
    answer = client.messages.parse(model="agent", messages=ask, max_tokens=99, output_format=Trip)
    assert answer.parsed_output == Trip(city="Köln", days=3)


def test_options(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model="agent",
        messages=ASK,
        max_tokens=99,
        stop_sequences=["there"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        service_tier="auto",
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    )
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "there"
    forced = client.messages.create(
        model="agent",
        messages=ASK,
        max_tokens=99,
        tools=[TOOL],
        tool_choice={"type": "none"},
    )
    assert forced.stop_reason == "end_turn"


def test_a_long_message(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * 60_000}]  # prepared in a thread
    answer = client.messages.create(model="tiny", messages=long, max_tokens=2)
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 60_000
    assert usage.output_tokens == 2


def test_cached_tokens(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "The same long prompt, many times. " * 40}]
    first, again = (
        client.messages.create(model="tiny", messages=long, max_tokens=2).usage for _ in range(2)
    )
    assert first.cache_read_input_tokens == 0 and again.cache_read_input_tokens
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens
    assert again.input_tokens <= 2 * 16


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="agent", messages=ASK, system="Be brief.")
    answer = client.messages.create(model="agent", messages=ASK, max_tokens=9, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens
    more = client.messages.count_tokens(model="agent", messages=ASK, tools=[TOOL])
    assert more.input_tokens > counted.input_tokens
    beyond: Any = [{"role": "user", "content": "word " * 200_000}]
    assert client.beta.messages.count_tokens(model="agent", messages=beyond).input_tokens > 200_000


def test_models(client: anthropic.Anthropic) -> None:
    assert sorted(one.id for one in client.models.list()) == ["agent", "tiny"]
    assert [len(page.data) for page in client.models.list(limit=1).iter_pages()] == [1, 1]
    model = client.models.retrieve("tiny")
    assert model.type == "model" and model.display_name == "tiny" and model.max_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="Model not found: nope"):
        client.models.retrieve("nope")


async def test_the_async_client(made: Deployment) -> None:
    async with anthropic.AsyncAnthropic(base_url=made.url, auth_token="none", timeout=30) as one:
        answer = await one.messages.create(model="tiny", messages=ASK, max_tokens=3)
        assert answer.usage.output_tokens == 3
        async with one.messages.stream(model="agent", messages=ASK, max_tokens=99) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello there. Bye."


def test_errors(client: anthropic.Anthropic) -> None:
    def create(**fields: Any) -> Any:
        given: Any = {"model": "tiny", "messages": ASK, "max_tokens": 3, **fields}
        return client.messages.create(**given)

    with pytest.raises(anthropic.NotFoundError, match="Model not found: nope") as missing:
        create(model="nope")
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: expected `int` >= 1"):
        create(max_tokens=0)
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].type: `web_search_20250305`"):
        create(tools=[search])
    with pytest.raises(anthropic.BadRequestError, match="`gamble`: not supported"):
        create(extra_body={"gamble": 1})
    long: Any = [{"role": "user", "content": "word " * 200_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        create(messages=long)
    with pytest.raises(anthropic.RequestTooLargeError, match="Request body exceeds"):
        create(system="x" * (10 << 20))
    with pytest.raises(anthropic.NotFoundError, match="Route not found"):
        client.messages.batches.list()


def test_claude_code(made: Deployment) -> None:
    status, headers, raw = made.request(
        "POST", CLAUDE_CODE["path"], CLAUDE_CODE["body"], CLAUDE_CODE["headers"]
    )
    assert status == 200 and headers["content-type"] == "text/event-stream", raw
    events = [json.loads(part.partition("data: ")[2]) for part in raw.decode().split("\n\n")[:-1]]
    started = [one["content_block"]["type"] for one in events if "content_block" in one]
    assert started == ["thinking", "text", "tool_use"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    path = "/v1/messages/count_tokens?beta=true"
    body = {key: CLAUDE_CODE["body"][key] for key in ("model", "messages", "system", "tools")}
    status, _, raw = made.request("POST", path, body, CLAUDE_CODE["headers"])
    usage = events[0]["message"]["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert status == 200 and json.loads(raw) == {"input_tokens": total}


def test_metrics(made: Deployment, client: anthropic.Anthropic) -> None:
    labels = {"endpoint": "anthropic_messages", "model": "tiny", "status": "success"}
    before = made.sample("dynamo_frontend_requests_total", **labels)
    client.messages.create(model="tiny", messages=ASK, max_tokens=3)
    assert made.sample("dynamo_frontend_requests_total", **labels) == before + 1
