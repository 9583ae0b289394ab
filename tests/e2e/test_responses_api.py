"""The ``openai`` client's responses, unchanged: a mocker with scripted replies behind the real
frontend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from deployment import MODEL, Deployment, free_port
from lazy_module import openai

from dynamo.http.api_keys import key_line

THOUGHT = "<think>\nLet me see.\n</think>\n\n"
ARGUMENTS = '{"city": "Paris"}'
PATCH = "*** Begin Patch\n*** End Patch"
LONG = " ".join(f"word{number}" for number in range(400))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


SCRIPT = (
    ("Patch it", THOUGHT + call("apply_patch", json.dumps({"input": PATCH}))),
    ("Ask an agent", call("agents__spawn", '{"task": "look"}')),
    ("18 degrees", "It is 18 degrees in Paris."),
    ("What is the weather", THOUGHT + "I look.\n" + call("get_weather", ARGUMENTS)),
    ("as JSON", '{"city": "Paris", "degrees": 18}'),
    ("Count", LONG),
    ("", "Hello from the script."),
)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


class Site:
    """A frontend without keys, another one with the keys of ann and bob, and a mocker."""

    def __init__(self, at: Path) -> None:
        self.deployment = made = Deployment(at)
        self.keyed_port = free_port()
        script, keys = at / "script.jsonl", at / "keys"
        lines = [json.dumps({"match": match, "reply": reply}) for match, reply in SCRIPT]
        script.write_text("\n".join(lines))
        keys.write_text(key_line("ann", "user", "key-a") + key_line("bob", "user", "key-b"))
        keys.chmod(0o600)
        parsers = ("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")
        reply = ("--reply", "script", "--reply-script", str(script))
        made.mocker("--speedup-ratio", "0", *reply, *parsers)
        slow = ("--speedup-ratio", "1", "--endpoint", f"{made.namespace}.slow.generate")
        model = ("--model-path", str(MODEL), "--model-name", "slow")
        made.start("dynamo.mocker", *model, *slow, *reply, *parsers)
        made.frontend()
        made.start(
            *("dynamo.frontend", "--http-port", str(self.keyed_port)),
            *("--api-key-file", str(keys), "--responses-store-mb", "1"),
        )
        self.client = self.make(made.port, "none")
        self.ann, self.bob = (self.make(self.keyed_port, f"key-{name}") for name in "ab")

    def make(self, port: int, key: str) -> openai.OpenAI:
        url = f"http://127.0.0.1:{port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, timeout=30, max_retries=0)

    def ready(self) -> None:
        made = self.deployment
        made.wait_for_workers(2)

        def listed(client: openai.OpenAI) -> bool:
            try:
                return len(client.models.list().data) == 2
            except openai.APIConnectionError:
                return False

        made.until(lambda: listed(self.client) and listed(self.ann), "both models")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("responses"))
    try:
        made.ready()
        yield made
    finally:
        for client in (made.client, made.ann, made.bob):
            client.close()
        made.deployment.close()


@pytest.fixture
def client(site: Site) -> openai.OpenAI:
    return site.client


def test_create(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input="Hello", instructions="Be brief.", metadata={"a": "b"}, user="me"
    )
    assert answer.status == "completed" and answer.id.startswith("resp_")
    assert answer.output_text == "Hello from the script."
    assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"}
    assert answer.usage is not None and answer.usage.input_tokens > 5
    used = answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.total_tokens == used
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.created_at <= (answer.completed_at or 0)


def test_reasoning_and_the_loop_of_tools(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model="tiny", input=items, tools=[WEATHER])
    reasoning, message, asked = first.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text == "Let me see." and reasoning.summary == []
    assert message.type == "message" and first.output_text == "I look."
    assert asked.type == "function_call" and asked.name == "get_weather"
    assert asked.arguments == ARGUMENTS and asked.status == "completed"
    assert first.usage is not None
    assert 4 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    items += first.output
    output = {"type": "function_call_output", "call_id": asked.call_id, "output": "18 degrees"}
    items.append(output)
    last = client.responses.create(model="tiny", input=items, tools=[WEATHER])
    assert last.output_text == "It is 18 degrees in Paris."
    # The same by reference: the store has the first turn.
    ids: Any = [{"type": "item_reference", "id": asked.id}, output]
    again = client.responses.create(model="tiny", input=[items[0], *ids], tools=[WEATHER])
    assert again.output_text == last.output_text


def test_previous_response(client: openai.OpenAI) -> None:
    text = "What is the weather in Paris? " + "Answer in full sentences, please. " * 20
    first = client.responses.create(model="tiny", input=text, tools=[WEATHER])
    asked = first.output[-1]
    assert asked.type == "function_call"
    given: Any = [
        {"type": "function_call_output", "call_id": asked.call_id, "output": "18 degrees"}
    ]
    second = client.responses.create(
        model="tiny", input=given, tools=[WEATHER], previous_response_id=first.id
    )
    assert second.output_text == "It is 18 degrees in Paris."
    assert second.previous_response_id == first.id
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 100
    listed = client.responses.input_items.list(second.id, order="asc").data
    kinds = [item.type for item in listed]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    client.responses.delete(first.id)  # the second keeps what it needs of it
    third = client.responses.create(model="tiny", input="Thanks", previous_response_id=second.id)
    assert third.output_text == "It is 18 degrees in Paris."
    with pytest.raises(openai.BadRequestError, match=r"Previous response with id .* not found"):
        client.responses.create(model="tiny", input="More", previous_response_id=first.id)


def test_stream(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model="tiny", input="What is the weather?", tools=[WEATHER], stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", "output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "I look."
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    stored = client.responses.retrieve(last.response.id)
    assert stored == last.response
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == "I look."


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="What is the weather?", tools=[WEATHER], reasoning={"summary": "auto"}
    ) as stream:
        thought = ""
        for event in stream:
            if event.type == "response.reasoning_summary_text.delta":
                thought += event.delta
        final = stream.get_final_response()
    assert thought == "Let me see."
    reasoning, _, asked = final.output
    assert reasoning.type == "reasoning" and reasoning.summary[0].text == thought
    assert asked.type == "function_call" and asked.arguments == ARGUMENTS


def test_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="tiny", input="Paris as JSON", text_format=Weather)
    assert answer.output_parsed == Weather(city="Paris", degrees=18)
    with client.responses.stream(
        model="tiny", input="Paris as JSON", text_format=Weather
    ) as stream:
        parsed = stream.get_final_response().output_parsed
    assert parsed == Weather(city="Paris", degrees=18)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
    tools: Any = [{"type": "function", **tool}]
    called = client.responses.parse(
        model="tiny",
        input="What is the weather?",
        tools=tools,
    )
    assert called.output[-1].type == "function_call"


def test_stored_responses(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": f"Part {number}"} for number in range(5)]
    made = client.responses.create(model="tiny", input=items)
    assert client.responses.retrieve(made.id) == made
    page = client.responses.input_items.list(made.id, limit=2, order="asc")
    everything: Any = [item for one in page.iter_pages() for item in one.data]
    texts = [item.content[0].text for item in everything]
    assert texts == [f"Part {number}" for number in range(5)] and page.has_more
    latest = client.responses.input_items.list(made.id, limit=1).data[0]
    assert latest == everything[-1]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"'{made.id}' not found"):
            gone(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)
    unstored = client.responses.create(model="tiny", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_input_tokens(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "What is it?", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**asked)
    used = client.responses.create(**asked).usage
    assert used is not None and counted.input_tokens == used.input_tokens


def test_limits_and_log_probabilities(client: openai.OpenAI) -> None:
    cut = client.responses.create(model="tiny", input="Count", max_output_tokens=7)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].type == "message" and cut.output[0].status == "incomplete"
    assert cut.usage is not None and cut.usage.output_tokens == 7
    events = list(
        client.responses.create(model="tiny", input="Count", max_output_tokens=7, stream=True)
    )
    assert events[-1].type == "response.incomplete"


def test_custom_tools_and_namespaces(client: openai.OpenAI) -> None:
    patch: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
    agents: Any = {"type": "namespace", "name": "agents", "description": "More agents.",
                   "tools": [{"type": "function", "name": "spawn", "parameters": {}}]}  # fmt: skip
    search: Any = {"type": "web_search"}
    tools = [patch, agents, search]
    events = list(client.responses.create(model="tiny", input="Patch it", tools=tools, stream=True))
    last = events[-1]
    assert last.type == "response.completed"
    used = last.response.output[-1]
    assert used.type == "custom_tool_call" and used.input == PATCH
    assert [tool.type for tool in last.response.tools] == ["custom", "namespace"]
    (inputs,) = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert inputs.delta == PATCH
    output = {"type": "custom_tool_call_output", "call_id": used.call_id, "output": "18 degrees"}
    items: Any = [{"role": "user", "content": "Do it"}, used, output]
    done = client.responses.create(model="tiny", input=items, tools=tools)
    assert done.output_text == "It is 18 degrees in Paris."
    agent = client.responses.create(model="tiny", input="Ask an agent", tools=tools).output[-1]
    assert agent.type == "function_call"
    assert (agent.namespace, agent.name) == ("agents", "spawn")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"background": True}, "'background' is not supported"),
        ({"truncation": "auto"}, "'truncation' must be 'disabled'"),
        ({"extra_body": {"conversation": "c"}}, "'conversation' is not supported"),
        ({"extra_body": {"other": 1}}, "Unsupported parameter.*`other`"),
        ({"input": [{"role": "user", "content": "x", "foo": 1}]}, r"`input\[0\].foo`"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, r"input\[0\].type: an item"),
        ({"tools": [{"type": "local_shell"}]}, r"tools\[0\].type: `local_shell` is not supp"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type: `web_search`"),
        ({"temperature": 3}, "Temperature must be between 0 and 2, got 3"),
        ({"max_output_tokens": 0}, "Max tokens must be greater than 0, got 0"),
        ({"input": []}, "messages"),
    ],
)
def test_refused(client: openai.OpenAI, fields: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        client.responses.create(**({"model": "tiny", "input": "Hello"} | fields))
    assert caught.value.type == "invalid_request_error" and caught.value.code is None


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="Model not found") as caught:
        client.responses.create(model="nope", input="Hello")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_what_codex_sends(site: Site) -> None:
    """Its request is a fixture of the unit tests, which check what becomes of it."""
    path = Path(__file__).parents[1] / "unit" / "frontend" / "codex_request.json"
    made = site.deployment
    status, _, body = made.request("POST", "/v1/responses", json.loads(path.read_text()))
    assert status == 200 and b"event: response.completed\n" in body


def test_errors_of_the_http_layer(site: Site) -> None:
    with site.make(site.keyed_port, "no-key") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.responses.create(model="tiny", input="Hello")
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "authentication_error"
    status, _, body = site.deployment.request("POST", "/v1/responses", headers={"x": "y"})
    assert status == 415 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_other_keys_see_nothing(site: Site) -> None:
    made = site.ann.responses.create(model="tiny", input="Hello")
    assert site.ann.responses.retrieve(made.id) == made
    for use in (site.bob.responses.retrieve, site.bob.responses.delete, site.bob.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            use(made.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        site.bob.responses.create(model="tiny", input="More", previous_response_id=made.id)
    reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
    with pytest.raises(openai.BadRequestError, match="no stored item"):
        site.bob.responses.create(model="tiny", input=reference)
    assert site.ann.responses.create(model="tiny", input=reference).status == "completed"


def test_the_store_is_bounded(site: Site) -> None:
    first = site.ann.responses.create(model="tiny", input="x" * 20_000)
    for _ in range(60):
        site.ann.responses.create(model="tiny", input="y" * 20_000)
    with pytest.raises(openai.NotFoundError):
        site.ann.responses.retrieve(first.id)
    kept = site.ann.responses.create(model="tiny", input="z")
    page = site.deployment.request("GET", "/metrics", port=site.keyed_port)[2].decode()
    (stored,) = re.findall(r"^dynamo_frontend_stored_response_bytes ([\d.e+]+)$", page, re.M)
    assert 0 < float(stored) <= 1 << 20
    assert site.ann.responses.retrieve(kept.id) == kept


def test_metrics_and_disconnect(site: Site) -> None:
    made = site.deployment
    labels = {"model": "tiny", "endpoint": "responses"}
    name = "dynamo_frontend_requests_total"
    before = made.sample(name, **labels, status="success", request_type="stream")
    list(site.client.responses.create(model="tiny", input="Hello", stream=True))
    assert made.sample(name, **labels, status="success", request_type="stream") == before + 1
    stream = site.client.responses.create(model="slow", input="Count", stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    cancelled = {"model": "slow", "endpoint": "responses", "error_type": "cancelled"}
    made.until(lambda: made.sample(name, **cancelled) == 1, "the cancelled request")
