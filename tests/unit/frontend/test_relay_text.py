"""Models of ``ModelInput.Text``: the worker takes the OpenAI body as a dict and yields chunks."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from relayed_kit import PATHS, RelaySite, RelayStream
from test_request import turn

from dynamo.errors import EngineFailure, HttpFailure, InvalidArgument
from dynamo.frontend.apis.relay.text_answer import ChunkFold

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "far"}


def chunk(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {**HEAD, "choices": [choice]}


@pytest.fixture
async def site() -> RelaySite:
    return RelaySite("Text")


def ask(site: RelaySite, path: str = PATHS[0], **body: Any) -> RelayStream:
    stream = site.ask(path, **body)
    assert isinstance(stream, RelayStream)
    return stream


async def test_the_worker_gets_the_body_as_a_dict(site: RelaySite) -> None:
    stream = ask(site, temperature=0.5, max_tokens=3, tools=[{"type": "function"}])
    assert stream.value == {
        "model": "far",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "max_tokens": 3,
        "tools": [{"type": "function"}],
    }


async def test_chunks_stream_as_events(site: RelaySite) -> None:
    stream = ask(site, stream=True)
    chunks = [chunk(role="assistant", content="a"), chunk(content="b"), chunk(finish="stop")]
    stream.items(chunks[0])
    await turn()
    assert "content-type: text/event-stream" in site.head and site.events == [chunks[0]]
    assert site.prefilled == [stream.engine_id]
    stream.items(*chunks[1:])
    stream.sink.on_end()
    await turn()
    assert site.events == [*chunks, "[DONE]"]
    assert site.sample("dynamo_frontend_output_tokens_total", model="far") == 3
    site.settled()


async def test_chunks_become_one_body(site: RelaySite) -> None:
    stream = ask(site)
    stream.items(chunk(role="assistant", content=""), chunk(content="to"), chunk(content="gether"))
    usage = {"prompt_tokens": 4, "completion_tokens": 9, "total_tokens": 13}
    stream.items(chunk(finish="stop"), {**HEAD, "choices": [], "usage": usage})
    stream.sink.on_end()
    assert site.status == 200
    message = {"role": "assistant", "content": "together"}
    assert site.answer == {
        "id": "c1",
        "object": "chat.completion",
        "created": 5,
        "model": "far",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }
    assert site.sample("dynamo_frontend_output_tokens_total", model="far") == 9
    site.settled()


async def test_an_embedding_is_one_item(site: RelaySite) -> None:
    stream = ask(site, "/v1/embeddings", input="hi")
    stream.items(vectors([0.5, 1e-7]))
    stream.sink.on_end()
    assert site.status == 200 and site.answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1e-7]}],
        "model": "far",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    site.settled()


def vectors(*given: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(given)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return {"object": "list", "data": data, "model": "far", "usage": usage}


@pytest.mark.parametrize("as_base64", [False, True])
@pytest.mark.parametrize("encoding", ["base64", "float"])
async def test_embeddings_have_the_encoding_that_is_asked_for(
    site: RelaySite, encoding: str, as_base64: bool
) -> None:
    stream = ask(site, "/v1/embeddings", input=["a", "b"], encoding_format=encoding)
    packed = base64.b64encode(struct.pack("<2f", 0.5, 2.0)).decode()
    stream.items(vectors(*[packed if as_base64 else [0.5, 2.0]] * 2))
    stream.sink.on_end()
    wanted = packed if encoding == "base64" else [0.5, 2.0]
    assert [one["embedding"] for one in site.answer["data"]] == [wanted] * 2
    site.settled()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "give either 'input' or 'messages'"),
        ({"input": []}, "cannot be empty"),
        ({"input": ["a", 1]}, "not a mixture"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
    ],
)
async def test_bodies_of_embeddings_are_checked(
    site: RelaySite, body: dict[str, Any], words: str
) -> None:
    site.post({"model": "far", **body}, "/v1/embeddings")
    assert site.status == 400 and words in site.answer["message"] and not site.relayed
    site.settled()


@pytest.mark.parametrize("item", [vectors([1.0], [2.0]), vectors("?"), vectors("YWI="), {"a": 1}])
async def test_a_body_that_has_not_one_vector_for_each_input(site: RelaySite, item: Any) -> None:
    stream = ask(site, "/v1/embeddings", input="hi")
    stream.items(item)
    assert site.status == 500 and stream.calls == ["kill"]
    site.settled()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"foo_bar": 1}, "Unsupported parameter(s): `foo_bar`"),
        ({"temperature": 3}, "Temperature must be between 0 and 2, got 3"),
        ({"messages": []}, "cannot be empty"),
        ({"metadata": {"a": 2**70}}, "integers must be between"),
    ],
)
async def test_bad_requests_are_refused_as_for_other_models(
    site: RelaySite, body: dict[str, Any], words: str
) -> None:
    site.ask(**body)
    assert site.status == 400 and words in site.answer["message"]
    assert not site.relayed
    site.settled()


async def test_only_the_routes_of_its_type() -> None:
    site = RelaySite("Text", "Chat")
    site.ask("/v1/completions", prompt="hi")
    assert site.status == 404
    assert "model `far` has no /v1/completions, it has /v1/chat/completions" in str(site.answer)


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidArgument("no"), 400), (HttpFailure("teapot", 418), 418), (EngineFailure("x"), 500)],
)
async def test_errors_of_the_handler(site: RelaySite, error: Any, status: int) -> None:
    ask(site, stream=True).sink.on_error(error)
    assert site.status == status
    site.settled()


async def test_an_error_after_a_chunk_is_an_event(site: RelaySite) -> None:
    stream = ask(site, stream=True)
    stream.items(chunk(content="a"))
    await turn()
    stream.sink.on_error(EngineFailure("x"))
    await turn()
    assert [one == "[DONE]" or sorted(one)[0] for one in site.events] == ["choices", "error", True]
    site.settled()


@pytest.mark.parametrize("item", [7, ["a"], {"a": b"bytes"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_items_that_are_no_chunks(site: RelaySite, item: Any, stream: bool) -> None:
    worker = ask(site, stream=stream)
    worker.items(item)
    worker.sink.on_end()
    assert site.status == 500
    site.settled()


# -- the fold


def fold(*chunks: dict[str, Any]) -> dict[str, Any]:
    made = ChunkFold()
    for one in chunks:
        made.add(json.loads(json.dumps(one)))
    return made.body()


def test_tool_calls_are_joined_by_their_index() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        more = {"id": f"t{index}", "type": "function"} if "name" in function else {}
        return chunk(tool_calls=[{"index": index, **more, "function": function}])

    parts = [call(0, name="f", arguments=""), call(0, arguments='{"a":'), call(0, arguments="1}")]
    parts += [call(1, name="g", arguments="{}"), chunk(finish="tool_calls")]
    (choice,) = fold(*parts)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "t0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "t1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_choices_reasoning_and_logprobs() -> None:
    def with_logprobs(token: str) -> dict[str, Any]:
        made = chunk(content=token)
        made["choices"][0]["logprobs"] = {"content": [{"token": token}]}
        return made

    body = fold(
        chunk(1, content="x"),
        chunk(0, reasoning_content="think "),
        chunk(0, reasoning_content="hard"),
        with_logprobs("a"),
        with_logprobs("b"),
        chunk(1, finish="length"),
    )
    first, second = body["choices"]
    assert first["message"]["reasoning_content"] == "think hard"
    assert [one["token"] for one in first["logprobs"]["content"]] == ["a", "b"]
    assert (second["index"], second["finish_reason"]) == (1, "length")


def test_text_completions() -> None:
    parts = [
        {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": end}]}
        for text, end in (("a", None), ("b", None), (None, "stop"))  # the last has no text
    ]
    assert fold(*parts) == {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}],
    }
