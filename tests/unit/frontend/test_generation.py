"""Answers, checked with the models of the `openai` package."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from typing import Any

import pytest
from lazy_module import LazyModule
from memory_kit import memory_of
from text_kit import (
    chat_body,
    completion_body,
    events,
    example_preprocessor,
    ids_of,
    outputs,
)

from dynamo.errors import Disconnected, EngineFailure, InvalidArgument
from dynamo.frontend.answer.completions import ChatStream, CompletionStream
from dynamo.frontend.answer.generation import GenerationStream
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PromptTokensDetails

openai_types = LazyModule("openai.types")
chat_types = LazyModule("openai.types.chat")

UUID = "123e4567-e89b-12d3-a456-426614174000"
PROMPT_TOKENS = len(ids_of("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"))


def chat(**fields: Any) -> ChatStream:
    request = parse_chat(chat_body(**fields))
    preprocessor = example_preprocessor()
    prepared = preprocessor.chat(request)
    return ChatStream(request, prepared, preprocessor.tokenizer, f"chatcmpl-{UUID}", 1700000000)


def completion(**fields: Any) -> CompletionStream:
    request = parse_completion(completion_body(**fields))
    preprocessor = example_preprocessor()
    prepared = preprocessor.completion(request)
    return CompletionStream(request, prepared, preprocessor.tokenizer, f"cmpl-{UUID}", 1700000000)


def chat_chunks(stream: bytes) -> list[Any]:
    return [
        chat_types.ChatCompletionChunk.model_validate(each, strict=True) for each in events(stream)
    ]


def write(stream: GenerationStream, index: int, output: EngineOutput) -> bytes:
    stream.choices[index].push(output)
    return stream.flush()


def feed(stream: GenerationStream, text: str, *args: Any, **last: Any) -> bytes:
    return b"".join(write(stream, 0, each) for each in outputs(text, *args, **last))


def test_chat_stream() -> None:
    stream = chat(stream=True)
    text = 'Grüße, "world" \\ \n 😀☃'
    chunks = chat_chunks(feed(stream, text, "eos") + stream.end())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].delta.role for chunk in chunks][:2] == ["assistant", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {
        (f"chatcmpl-{UUID}", 1700000000, "m")
    }
    assert all(chunk.usage is None for chunk in chunks)
    assert stream.usage().completion_tokens == len(ids_of(text))


def test_usage_chunk() -> None:
    stream = chat(stream=True, stream_options={"include_usage": True})
    usage = CompletionUsage(prompt_tokens=99, prompt_tokens_details=PromptTokensDetails(64))
    raw = feed(stream, "one two", "length", completion_usage=usage) + stream.end()
    *chunks, last = chat_chunks(raw)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(event["usage"] is None for event in events(raw)[:-1])
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (99, len(ids_of("one two")))
    assert last.usage.total_tokens == 99 + len(ids_of("one two"))
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 64


@pytest.mark.parametrize("make", ["chat", "completion"])
def test_usage_in_each_chunk(make: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    begin = chat if make == "chat" else completion
    stream = begin(stream=True, n=2, stream_options=options)
    usage = CompletionUsage(prompt_tokens=99)
    raw = b""
    for place, tokens in ((0, 1), (1, 3), (0, 2)):
        output = EngineOutput(token_ids=ids_of("a") * tokens, completion_usage=usage)
        raw += write(stream, place, output)
    *chunks, last = events(raw + stream.end())
    found = [(c["choices"][0]["index"], c["usage"]["completion_tokens"]) for c in chunks]
    assert found[:3] == [(0, 1), (1, 3), (0, 3)]
    assert all(chunk["usage"]["prompt_tokens"] == 99 for chunk in chunks[:3])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


def test_offsets_of_characters_of_several_tokens() -> None:
    """A special token is not in the text, and a character of several tokens counts once."""
    text = "a ☃ b 😀 c"
    stream = completion(logprobs=0, prompt="x")
    tokenizer = example_preprocessor().tokenizer
    special = min(tokenizer.special_ids - frozenset(tokenizer.eos_ids))
    ids = [*ids_of(text), special, *ids_of(" d")]
    for each in ids:
        stream.choices[0].push(EngineOutput(token_ids=[each], log_probs=[-1.0]))
    (choice,) = json.loads(stream.unary())["choices"]
    assert choice["text"] == f"{text} d"
    logprobs = choice["logprobs"]
    starts = dict(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    for token in ("a", " b", " c", " d"):
        assert choice["text"].startswith(token, starts[token]), token


def test_unary_chat() -> None:
    stream = chat()
    done = [stream.choices[0].push(each) for each in outputs("Hello 😀", "length")]
    assert done == [False] * (len(done) - 1) + [True]
    answer = chat_types.ChatCompletion.model_validate_json(stream.unary(), strict=True)
    assert answer.choices[0].message.content == "Hello 😀"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.prompt_tokens_details is None


def test_tokens_that_arrive_together_become_one_delta() -> None:
    stream = chat(stream=True)
    first, *middle, last = outputs("one two three four", "stop")
    assert stream.flush() == b""
    head = write(stream, 0, first)
    for each in middle:
        stream.choices[0].push(each)
    merged = stream.flush()
    assert merged.count(b"data:") == 1
    assert stream.flush() == b""
    stream.choices[0].push(last)
    chunks = chat_chunks(head + merged + stream.end())
    texts = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(text or "" for text in texts) == "one two three four"
    assert len(chunks) == 3


def test_incomplete_characters_wait_and_are_dropped_at_the_end() -> None:
    stream = chat(stream=True)
    ids = ids_of("☃")
    assert write(stream, 0, EngineOutput(token_ids=ids[:2])) == b""
    (chunk,) = chat_chunks(write(stream, 0, EngineOutput(finish_reason="length")) + stream.end())
    assert chunk.choices[0].delta.content == ""
    assert chunk.choices[0].delta.role == "assistant"


def test_stop_string_ends_the_choice_before_the_engine_does() -> None:
    stream = chat(stream=True, stop=["STOP"])
    raw = b""
    for each in outputs("one ST two STOP three", None):
        done = stream.choices[0].push(each)
        raw += stream.flush()
        if done:
            break
    raw += write(stream, 0, EngineOutput(token_ids=[1500], finish_reason="cancelled"))
    chunks = chat_chunks(raw + stream.end())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one ST two "
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"include_stop_str_in_output": True}, "aXY"),
        ({}, "a"),
        ({"min_tokens": 30}, "aXYb"),
        ({"stop": ["XYZ"]}, "aXYb"),
    ],
)
def test_stop_strings_unary(fields: dict[str, Any], text: str) -> None:
    stream = chat(**({"stop": ["XY"]} | fields))
    for each in outputs("aXYb", "stop"):
        stream.choices[0].push(each)
    assert json.loads(stream.unary())["choices"][0]["message"]["content"] == text


def test_a_stop_token_behind_the_minimum_ends_the_text_however_it_arrives() -> None:
    """Tokens of earlier outputs count for ``min_tokens``, too."""
    a, b, stop = ids_of("a") + ids_of("b") + ids_of("X")
    for items, text, count in (
        ([[a], [b], [stop], [a]], "ab", 3),
        ([[a, b], [stop, a]], "ab", 3),
        ([[a, b, stop, a]], "ab", 3),
        ([[stop], [b], [stop], [a]], "Xb", 3),
        ([[a, stop], [b], [stop]], "aXb", 4),
    ):
        stream = completion(min_tokens=2, stop_token_ids=[stop])
        for item in items:
            stream.choices[0].push(EngineOutput(token_ids=item))
        body = json.loads(stream.unary())
        assert body["choices"][0]["text"] == text, items
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == count


def test_min_tokens_are_those_of_each_prompt() -> None:
    """The context leaves the first prompt fewer tokens than ``min_tokens``."""
    request = parse_completion(
        completion_body(prompt=[[64] * 60, [64]], min_tokens=9, max_tokens=20, stop=["X"])
    )
    preprocessor = copy.copy(example_preprocessor())
    preprocessor.context_length = 64
    prepared = preprocessor.completion(request)
    assert [one.stop_conditions.min_tokens for one in prepared.requests] == [4, 9]
    stream = CompletionStream(request, prepared, preprocessor.tokenizer, f"cmpl-{UUID}", 1)
    for each in outputs("a b c d e f X h", "stop"):
        stream.choices[1].push(each)
    assert stream.choices[1].tokens == len(ids_of("a b c d e f X h")) == 8


def test_choices_share_their_rules() -> None:
    few, many = (
        memory_of(partial(chat, n=choices, stop=["STOP"], stop_token_ids=list(range(1000))))
        for choices in (2, 32)
    )
    assert many.left < 2 * few.left, "a set of 1,000 ids for each choice"


def test_choices_find_their_own_stop_strings() -> None:
    stream = chat(n=2, stop=["STOP"])
    for index, text, stopped in ((0, "ST", None), (1, "OP", None), (0, "OP", "stop")):
        for each in outputs(text, None):
            write(stream, index, each)
        assert stream.choices[index].finish_reason == stopped


def test_held_back_text_is_shown_when_the_engine_ends() -> None:
    stream = chat(stop=["XYZ"])
    feed_ids = outputs("a XY", "length")
    for each in feed_ids:
        stream.choices[0].push(each)
    choice = json.loads(stream.unary())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a XY", "length")


@pytest.mark.parametrize(
    ("fields", "content", "tokens", "reason"),
    [
        ({}, "a", 2, "stop"),
        ({"skip_special_tokens": False}, "a", 2, "stop"),
        ({"ignore_eos": True}, "ab", 3, "length"),
        ({"min_tokens": 2}, "ab", 3, "length"),
        ({"ignore_eos": True, "stop_token_ids": [64]}, "", 1, "stop"),
        ({"stop_token_ids": [64], "include_stop_str_in_output": True}, "a", 1, "stop"),
    ],
)
def test_stop_ids(fields: dict[str, Any], content: str, tokens: int, reason: str) -> None:
    a, b = ids_of("a")[0], ids_of("b")[0]
    fields = {name: [a] if name == "stop_token_ids" else value for name, value in fields.items()}
    stream = chat(**fields)
    stream.choices[0].push(EngineOutput(token_ids=[a, 4098, b], finish_reason="length"))
    choice = json.loads(stream.unary())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
    assert stream.usage().completion_tokens == tokens


def test_choices_have_indexes() -> None:
    stream = chat(n=2, stream=True, stream_options={"include_usage": True})
    raw = write(stream, 1, EngineOutput(token_ids=ids_of("b"), finish_reason="stop"))
    raw += write(stream, 0, EngineOutput(token_ids=ids_of("a"), finish_reason="length"))
    chunks = chat_chunks(raw + stream.end())
    found = [
        (each.index, each.delta.role, each.delta.content) for c in chunks for each in c.choices
    ]
    assert found == [(1, "assistant", "b"), (0, "assistant", "a")]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, 2)


def test_engine_errors() -> None:
    stream = chat(stream=True)
    raw = write(stream, 0, EngineOutput(token_ids=ids_of("a")))
    with pytest.raises(EngineFailure, match=r"^boom$"):
        write(stream, 0, EngineOutput(finish_reason="error: boom"))
    found = events(raw + stream.error(EngineFailure("boom")))
    assert found[-1]["error"] == {
        "message": "Internal server error",
        "type": "internal_server_error",
        "param": None,
        "code": 500,
    }
    gone = events(chat(stream=True).error(Disconnected("peer")))[0]["error"]
    assert gone == {
        "message": "Service temporarily unavailable",
        "type": "service_unavailable",
        "param": None,
        "code": 503,
    }


def test_a_stream_may_end_without_a_finish_reason() -> None:
    stream = chat(stream=True, stop=["xyz"])
    raw = feed(stream, "a x", None)
    stream.choices[0].close()
    chunks = chat_chunks(raw + stream.end())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a x"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    unary = chat()
    unary.choices[0].push(outputs("a", None)[0])
    assert json.loads(unary.unary())["choices"][0]["finish_reason"] is None


def top(token_id: int, logprob: float) -> dict[str, Any]:
    return {"rank": 1, "token_id": token_id, "token": None, "logprob": logprob}


def test_chat_logprobs() -> None:
    a, snow = ids_of("a")[0], ids_of("☃")
    given = EngineOutput(
        token_ids=[a, snow[0]],
        log_probs=[-0.5, float("-inf")],
        top_logprobs=[[top(a, -0.5), top(snow[0], -2.0), top(5, -3.0)], [top(snow[0], -1.0)]],
        finish_reason="length",
    )
    stream = chat(logprobs=True, top_logprobs=2)
    stream.choices[0].push(given)
    answer = chat_types.ChatCompletion.model_validate_json(stream.unary(), strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first, second = logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [each.logprob for each in first.top_logprobs] == [-0.5, -2.0]
    assert (second.token, second.logprob, second.bytes) == ("\ufffd", -9999.0, [0xE2])
    streamed = chat(logprobs=True, stream=True)
    (chunk,) = chat_chunks(write(streamed, 0, given) + streamed.end())
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.content is not None
    assert chunk.choices[0].logprobs.content[0].top_logprobs == []
    without = chat(logprobs=True)
    without.choices[0].push(EngineOutput(token_ids=[a], finish_reason="stop"))
    assert json.loads(without.unary())["choices"][0]["logprobs"] is None


def test_completion_logprobs_and_echo() -> None:
    a, b = ids_of("a")[0], ids_of(" b")[0]
    stream = completion(prompt="Say:", echo=True, logprobs=1)
    stream.choices[0].push(
        EngineOutput(
            token_ids=[a, b],
            log_probs=[-1.0, -2.0],
            finish_reason="length",
            top_logprobs=[[top(a, -1.0), top(5, -3.0)], [top(b, -2.0)]],
        ),
    )
    choice = json.loads(stream.unary())["choices"][0]
    assert choice["text"] == "Say:a b"
    said = len(ids_of("Say:"))
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "Say:a b"
    assert logprobs["token_logprobs"] == [None] * said + [-1.0, -2.0]
    assert logprobs["top_logprobs"] == [None] * said + [{"a": -1.0}, {" b": -2.0}]
    assert logprobs["text_offset"][said:] == [4, 5]


PROMPT_ROWS = [
    None,
    [{"token_id": 7, "logprob": -1.5, "rank": 4}, {"token_id": 8, "logprob": -0.5, "rank": 1}],
]


def test_prompt_logprobs_as_vllm_shows_them() -> None:
    text = example_preprocessor().tokenizer.token_text
    shown = [
        None,
        {
            "7": {"logprob": -1.5, "rank": 4, "decoded_token": text(7)},
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": text(8)},
        },
    ]
    output = EngineOutput(
        token_ids=[5], finish_reason="length", extra_args={"prompt_logprobs": PROMPT_ROWS}
    )
    asked = chat(prompt_logprobs=1)
    asked.choices[0].push(output)
    body = json.loads(asked.unary())
    assert body["prompt_logprobs"] == shown and "prompt_logprobs" not in body["choices"][0]
    several = completion(prompt_logprobs=1, n=2)
    several.choices[0].push(output)
    several.choices[1].push(EngineOutput(token_ids=[5], finish_reason="length"))
    first, second = json.loads(several.unary())["choices"]
    assert first["prompt_logprobs"] == shown and second["prompt_logprobs"] is None
    without = chat()
    without.choices[0].push(output)
    assert "prompt_logprobs" not in json.loads(without.unary())


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_log_probabilities_of_the_prompt(stream: bool) -> None:
    answer = completion(prompt=[7, 8], echo=True, logprobs=1, stream=stream)
    rows = [None, [{"token_id": 8, "logprob": -2.0}, {"token_id": 7, "logprob": -math.inf}]]
    output = EngineOutput(
        token_ids=[5],
        log_probs=[-1.0],
        finish_reason="length",
        extra_args={"prompt_logprobs": rows},
    )
    if stream:
        (chunk,) = events(write(answer, 0, output) + answer.end())
        (choice,) = chunk["choices"]
    else:
        answer.choices[0].push(output)
        (choice,) = json.loads(answer.unary())["choices"]
    text = example_preprocessor().tokenizer.token_text
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {text(8): -2.0, text(7): -9999.0}]


def test_bounds_of_prompt_logprobs() -> None:
    assert completion(prompt=[5] * 32768, prompt_logprobs=1)
    with pytest.raises(InvalidArgument, match="at most 65536 tokens and alternatives"):
        completion(prompt=[5] * 32769, prompt_logprobs=1)
    with pytest.raises(EngineFailure, match="prompt_logprobs are invalid"):
        bad = EngineOutput(token_ids=[5], extra_args={"prompt_logprobs": [[{"token_id": "x"}]]})
        chat(prompt_logprobs=0).choices[0].push(bad)
    with pytest.raises(InvalidArgument, match="not available when 'stream' is true"):
        chat(prompt_logprobs=0, stream=True)


@pytest.mark.parametrize(
    ("prompt", "text"), [("a ☃ <s>b", "a ☃ <s>b"), ("<|im_end|>x", "<|im_end|>x"), (None, "☃x")]
)
def test_offsets_of_echoed_tokens_match_the_text(prompt: str | None, text: str) -> None:
    stream = completion(prompt=prompt or [4098, *ids_of("☃x")], echo=True, logprobs=0, n=2)
    for index in (0, 1):
        stream.choices[index].push(outputs("y", "length")[0])
    for choice in json.loads(stream.unary())["choices"]:
        assert choice["text"] == f"{text}y"
        logprobs = choice["logprobs"]
        ends = [*logprobs["text_offset"][1:], len(text)]
        for token, start, end in zip(
            logprobs["tokens"], logprobs["text_offset"], ends, strict=True
        ):
            assert token == text[start:end] or "\ufffd" in token or token == "<|im_end|>"


def test_an_answer_repeats_prompts_up_to_a_bound() -> None:
    long = [ids_of("a")[0]] * 3000
    with pytest.raises(InvalidArgument, match=r"at most 32768 prompt .*got 36000"):
        completion(prompt=[long] * 3, n=4, echo=True, logprobs=1)
    long = ids_of("internationalization")[:1] * 4000
    text = len(example_preprocessor().tokenizer.decode(long))
    with pytest.raises(InvalidArgument, match="'echo' repeats at most 16777216 characters"):
        completion(prompt=[long] * (1 + (16 << 20) // (128 * text)), n=128, echo=True)


def test_completion_stream_of_several_prompts() -> None:
    stream = completion(
        prompt=[ids_of("x y"), ids_of("z")],
        n=2,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    for index in range(4):
        usage = CompletionUsage(10 + index, prompt_tokens_details=PromptTokensDetails(index))
        output = EngineOutput(
            token_ids=[ids_of("a")[0]], finish_reason="stop", completion_usage=usage
        )
        stream.choices[index].push(output)
    raw = stream.flush()
    chunks = [
        openai_types.Completion.model_validate(each, strict=True)
        for each in events(raw + stream.end())
    ]
    texts = [(chunk.choices[0].index, chunk.choices[0].text) for chunk in chunks[:-1]]
    assert texts == [(0, "x ya"), (1, "x ya"), (2, "za"), (3, "za")]
    usage_chunk = chunks[-1].usage
    assert usage_chunk is not None
    assert (usage_chunk.prompt_tokens, usage_chunk.completion_tokens) == (10 + 12, 4)
    assert usage_chunk.prompt_tokens_details is not None
    assert usage_chunk.prompt_tokens_details.cached_tokens == 0 + 2


def test_nvext_and_annotations() -> None:
    nvext = {
        "extra_fields": ["worker_id", "timing", "stop_reason"],
        "annotations": ["request_id", "token_ids", "formatted_prompt", "llm_metrics"],
    }
    stream = chat(stream=True, nvext=nvext, stop=["END"])
    stream.worker_id = {"decode_worker_id": 2**63}
    stream.timing = lambda: {"ttft_ms": 1.5}
    opening = stream.opening().decode()
    assert opening.startswith(f'event: request_id\n: "{UUID}"\n\nevent: token_ids\n: "[4097,')
    assert "llm_metrics" not in opening
    assert '\n: "<|im_start|>user\\nHello' in opening
    found = events(feed(stream, "a b END", "stop") + stream.end())
    assert found[0]["nvext"] == {"worker_id": {"decode_worker_id": 2**63}}
    assert "nvext" not in found[1]
    assert found[-1]["nvext"] == {"timing": {"ttft_ms": 1.5}, "stop_reason": "END"}
    unary = chat(nvext=nvext)
    unary.worker_id, unary.timing = stream.worker_id, stream.timing
    feed(unary, "a")
    body = json.loads(unary.unary())
    assert body["nvext"] == {"worker_id": {"decode_worker_id": 2**63}, "timing": {"ttft_ms": 1.5}}
    assert chat().opening() == b""


def test_located_answer() -> None:
    stream = chat(nvext={"annotations": ["query_instance_id:"]})
    stream.worker_id = {"decode_worker_id": 7}
    (found,) = events(stream.location())
    assert found["nvext"]["worker_id"] == {"decode_worker_id": 7}
    assert len(found["nvext"]["token_ids"]) == PROMPT_TOKENS


def test_text_of_an_engine_that_detokenizes_itself() -> None:
    stream = chat()
    stream.choices[0].push(
        EngineOutput(token_ids=[1, 2], text="own", finish_reason="content_filter")
    )
    choice = json.loads(stream.unary())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("own", "content_filter")
