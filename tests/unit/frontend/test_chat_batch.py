"""/v1/chat/completions/batch: several conversations in a request, one choice for each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from relayed_kit import RelaySite
from test_parsed_answers import preprocessor as parsing_preprocessor
from test_request import Site, turn
from text_kit import outputs

from dynamo.config.frontend import IGNORE, PASS, REFUSE
from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.chat.batch import (
    ParsedChatBatchStream,
    conversations,
    parse_batch,
    prepare_batch,
)
from dynamo.frontend.prompt.field_rules import FieldRules

PATH = "/v1/chat/completions/batch"


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def batch(*conversations: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": list(conversations), **fields}


def end_all(site: Site, ids: list[int]) -> None:
    for stream in site.streams:
        stream.say(ids, finish_reason="stop")
        stream.sink.on_end()


@pytest.fixture
async def site() -> Site:
    return Site()


async def test_each_conversation_is_a_choice(site: Site) -> None:
    site.post(batch(conversation("hi"), conversation("one", "two"), max_tokens=3), PATH)
    assert [stream.engine_id.rpartition("-")[2] for stream in site.streams][1:] == ["1"]
    alone = []
    for texts in (["hi"], ["one", "two"]):
        single = Site()
        single.post({"model": "tiny", "messages": conversation(*texts), "max_tokens": 3})
        alone.append(single.streams[0].request.token_ids)
        single.bench.connection.connection_lost(None)
    assert [stream.request.token_ids for stream in site.streams] == alone
    assert {stream.request.stop_conditions.max_tokens for stream in site.streams} == {3}
    site.streams[1].say([5, 6], finish_reason="length")
    site.streams[1].sink.on_end()
    site.streams[0].say([5], finish_reason="stop")
    site.streams[0].sink.on_end()
    await turn()
    answer = site.answer
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    choices = [(choice["index"], choice["finish_reason"]) for choice in answer["choices"]]
    assert choices == [(0, "stop"), (1, "length")]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, alone))
    assert answer["usage"]["completion_tokens"] == 3
    labels = {"endpoint": "chat_completions_batch", "model": "tiny", "status": "success"}
    assert site.sample("dynamo_frontend_requests_total", **labels) == 1
    site.settled()


@pytest.mark.parametrize("unknown", [REFUSE, IGNORE, PASS])
async def test_unknown_fields_are_those_of_a_chat(unknown: str) -> None:
    """As the setting says: the engine gets what it gets of one conversation."""
    options = []
    for path, messages in (
        (PATH, [conversation("a"), conversation("b")]),
        ("/v1/chat/completions", conversation("a")),
    ):
        site = Site(unknown_fields=unknown)
        site.post({"model": "tiny", "messages": messages, "odd": 3, "vllm_xargs": {"a": 1}}, path)
        options.append([stream.request.sampling_options.engine_options for stream in site.streams])
        site.bench.connection.connection_lost(None)
    assert options[0] == options[1] * 2
    assert bool(options[1]) == (unknown != REFUSE)
    assert (unknown == PASS) == ("odd" in str(options[1]))


async def test_log_probabilities_are_those_of_each_choice(site: Site) -> None:
    site.post(batch(conversation("a"), conversation("b"), logprobs=True), PATH)
    for number, stream in enumerate(site.streams):
        stream.say([5], finish_reason="stop", log_probs=[-1.0 - number])
        stream.sink.on_end()
    await turn()
    entries = [choice["logprobs"]["content"] for choice in site.answer["choices"]]
    assert [[entry["logprob"] for entry in content] for content in entries] == [[-1.0], [-2.0]]


async def test_a_client_that_leaves_frees_all_conversations(site: Site) -> None:
    site.post(batch(*[conversation("hi")] * 5), PATH)
    assert len(site.streams) == 5
    site.bench.connection.connection_lost(None)
    assert [stream.killed for stream in site.streams] == [1] * 5
    site.settled()


async def test_many_conversations_are_prepared_in_a_thread(site: Site) -> None:
    site.post(batch(*[conversation("hi")] * 200), PATH)
    assert not site.streams
    async with asyncio.timeout(20):
        while len(site.streams) < 200:  # noqa: ASYNC110 - the threads call nothing
            await asyncio.sleep(0.01)
    end_all(site, [5])
    await turn()
    assert len(site.answer["choices"]) == 200
    site.settled()


def test_each_answer_is_parsed() -> None:
    model = parsing_preprocessor()
    request = parse_batch(json.dumps(batch(conversation("a"), conversation("b"))).encode())
    prepared = prepare_batch(model, request)
    stream = ParsedChatBatchStream(request, prepared, model.tokenizer, "chatcmpl-1", 17)
    for choice, text in zip(stream.choices, ("<think>x</think>y", "plain"), strict=True):
        for output in outputs(text, "stop"):
            choice.push(output)
    messages = [choice["message"] for choice in json.loads(stream.unary())["choices"]]
    assert [message["content"] for message in messages] == ["y", "plain"]
    assert messages[0]["reasoning_content"] == "x" and not messages[1].get("reasoning_content")


async def test_the_rules_of_the_graph_hold(site: Site) -> None:
    site.entry.name = "tiny"
    site.rules = {"tiny": FieldRules({"temperature": 0.5}, ("seed",))}
    site.post(batch(conversation("a"), conversation("b"), seed=3), PATH)
    for stream in site.streams:
        options = stream.request.sampling_options
        assert (options.temperature, options.seed) == (0.5, None)
    site.bench.connection.connection_lost(None)


async def test_the_rules_of_the_graph_hold_for_other_servers() -> None:
    site = RelaySite()
    site.far.paths |= {PATH}
    site.rules = {"far": FieldRules({"temperature": 0.5}, ("seed",))}
    site.post({**batch(conversation("a"), seed=3), "model": "far"}, PATH)
    (stream,) = site.relayed
    sent = json.loads(stream.request.body)
    assert stream.request.path == PATH and sent["temperature"] == 0.5 and "seed" not in sent


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "1 to 1024 conversations, got 0"),
        ({"messages": [[]] * 1025}, "1 to 1024 conversations, got 1025"),
        ({"messages": {}}, "is a list of conversations"),
        ({"messages": [[]]}, "Conversation 0 of 'messages': Validation: The 'messages' field"),
        ({"messages": [conversation("a"), [{"role": 3}]]}, "Conversation 1 of 'messages': Failed"),
        ({"messages": conversation("a")}, "Conversation 0 of 'messages': Failed"),
        ({"temperature": 3}, "Validation: Temperature must be between"),
        ({"stream": True}, "'stream' is not supported by /v1/chat/completions/batch, got true"),
        ({"n": 2}, "'n' is not supported by"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools' is not supported"),
        ({"nvext": {"token_data": [1]}}, "'nvext.token_data' is not supported by"),
        ({"nvext": {"annotations": ["query_instance_id:"]}}, "'nvext.annotations' is not"),
    ],
)
def test_wrong_batches_are_refused(fields: dict[str, Any], text: str) -> None:
    body = {**batch(conversation("a")), **fields}
    with pytest.raises(InvalidArgument) as refused:
        parse_batch(json.dumps(body).encode())
    assert text in refused.value.message


async def test_a_prompt_that_is_too_long_names_its_conversation(site: Site) -> None:
    site.post(batch(conversation("a"), conversation("word " * 5000)), PATH)
    async with asyncio.timeout(20):
        while not site.bench.transport.out:  # noqa: ASYNC110 - the threads call nothing
            await asyncio.sleep(0.01)
    assert site.status == 400 and not site.streams
    assert "Conversation 1 of 'messages': This model's maximum" in json.dumps(site.answer)


def test_usual_values_of_what_is_not_supported_pass() -> None:
    fields = {"stream": False, "n": 1, "tools": [], "tool_choice": "none"}
    request = parse_batch(json.dumps(batch(conversation("a"), **fields)).encode())
    assert [list(messages) for messages in conversations(request)] == [conversation("a")]
