"""Error texts for invalid requests."""

from __future__ import annotations

import pytest
from text_kit import chat_body, completion_body

from dynamo.errors import InvalidArgument
from dynamo.frontend.prompt.validation import parse_chat, parse_completion

TARGET = "Failed to deserialize the JSON body into the target type: "


def chat_error(body: bytes) -> str:
    with pytest.raises(InvalidArgument) as caught:
        parse_chat(body)
    return caught.value.message


def completion_error(body: bytes) -> str:
    with pytest.raises(InvalidArgument) as caught:
        parse_completion(body)
    return caught.value.message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": 3}, "Temperature must be between 0 and 2, got 3"),
        ({"temperature": -0.1}, "Temperature must be between 0 and 2, got -0.1"),
        ({"top_p": 1.5}, "Top_p must be between 0 and 1, got 1.5"),
        ({"min_p": 2}, "Min_p must be between 0 and 1, got 2"),
        ({"n": 0}, "N must be between 1 and 128, got 0"),
        ({"n": 129}, "N must be between 1 and 128, got 129"),
        ({"frequency_penalty": -3}, "Frequency penalty must be between -2 and 2, got -3"),
        ({"presence_penalty": 2.5}, "Presence penalty must be between -2 and 2, got 2.5"),
        ({"repetition_penalty": 0}, "Repetition penalty must be between 0 and 1000000, got 0"),
        (
            {"logit_bias": {"5": 2e6}},
            "Logit bias must be between -1000000 and 1000000, got 2000000.0",
        ),
        ({"best_of": 129}, "Best_of must be between 0 and 128, got 129"),
        (
            {"logprobs": True, "top_logprobs": 129},
            "Top_logprobs must be between 0 and 128, got 129",
        ),
        ({"max_tokens": 0}, "Max tokens must be greater than 0, got 0"),
        ({"max_completion_tokens": -5}, "Max tokens must be greater than 0, got -5"),
        ({"max_tokens": 1048577}, "Max tokens must not exceed 1048576, got 1048577"),
        ({"max_tokens": 2, "min_tokens": 3}, "Min tokens must not exceed max tokens, got 3 > 2"),
        ({"top_logprobs": 3}, "Top_logprobs requires 'logprobs' to be true"),
        ({"stop": ["a", ""]}, "'stop' strings cannot be empty"),
        ({"stop": ""}, "'stop' strings cannot be empty"),
        (
            {"prompt_logprobs": 1, "stream": True},
            "'prompt_logprobs' is not available when 'stream' is true; leave one out",
        ),
        ({"best_of": 1, "n": 2}, "'best_of' must not be less than 'n', got 1 < 2"),
        (
            {"best_of": 3, "stream": True},
            "'best_of' above 'n' cannot be streamed, got 3 > 1: the best are known at the end; "
            "leave out 'best_of' or 'stream'",
        ),
        (
            {"tool_choice": "required", "tools": []},
            "'tool_choice' forces a tool call, but no entry of 'tools' is a function with a name",
        ),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "tools": [{"type": "function", "function": {"name": "g"}}],
            },
            "'tool_choice' names 'f', but 'tools' has g",
        ),
        (
            {"tool_choice": "x" * 1000},
            "'tool_choice' must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": …}}, got \'' + "x" * 60 + "...",
        ),
        (
            {"function_call": ["f"]},
            "'function_call' must be 'auto' or 'none', got ['f']; use 'tools' and 'tool_choice'",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "'stream_options' is only allowed when 'stream' is true; leave it out",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "b"},
            "'structured_outputs.regex' and 'guided_regex' are the same constraint; leave one out",
        ),
        ({"stop": ["a"] * 33}, "'stop' takes at most 32 strings, got 33"),
        (
            {"stop": "x" * 100_000},
            "a 'stop' string takes at most 512 characters, got 100000: '" + "x" * 60 + "...",
        ),
        (
            {"stop_token_ids": [1] * 1025},
            "'stop_token_ids' must have at most 1024 entries, got 1025",
        ),
        (
            {"bad_words": ["x" * 59_000] * 50},
            "'bad_words' must have at most 32768 characters, got 2950000: " + "x" * 61 + "...",
        ),
        (
            {"guided_regex": "a" * 16_385},
            "'guided_regex' must have at most 16384 characters, got 16385: " + "a" * 61 + "...",
        ),
        (
            {"structured_outputs": {"regex": "b" * 20_000}},
            "'guided_regex' must have at most 16384 characters, got 20000: " + "b" * 61 + "...",
        ),
        (
            {"guided_choice": ["a" * 131_073] * 2},
            "'guided_choice' must have at most 262144 characters, got 262146: " + "a" * 61 + "...",
        ),
        (
            {"guided_grammar": "g" * 300_000},
            "'guided_grammar' must have at most 262144 characters, got 300000: " + "g" * 61 + "...",
        ),
        (
            {"cache_salt": "s" * 5000},
            "'cache_salt' must have at most 4096 characters, got 5000: " + "s" * 61 + "...",
        ),
        ({"logit_bias": {"x": 1}}, "'logit_bias' keys must be token ids"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
        ),
        (
            {"messages": []},
            "The 'messages' field cannot be empty. At least one message is required.",
        ),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, object], text: str) -> None:
    assert chat_error(chat_body(**fields)) == f"Validation: {text}"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "truncated"),
        (b"", "truncated"),
        (b"\xff\xfe", "JSON is malformed"),
        (b"[]", "expected `object`, got `list`"),
        (b'{"model": "m"}', "missing field `messages`"),
        (b'{"messages": [{}]}', "messages[0]: missing field `role`"),
        (chat_body(seed="x"), "seed: expected `int | null`, got `str`"),
        (chat_body(stop=5), "stop: expected"),
        (chat_body(messages=["x"]), "messages[0]: expected `object`, got `str`"),
        (chat_body(messages=[{"content": "x"}]), "messages[0]: missing field `role`"),
        (chat_body(messages=[{"role": 1}]), "messages[0].role: expected `str`, got `int`"),
        (chat_body(messages=[{"role": "user", "content": 3}]), "messages[0].content: expected"),
        (
            chat_body(messages=[{"role": "user", "content": ["x"]}]),
            "messages[0].content[0]: expected an object with a `type`",
        ),
        (chat_body(nvext={"token_data": [1, -1]}), "nvext.token_data[1]: expected `int` >= 0"),
    ],
)
def test_types_are_named_with_their_place(body: bytes, text: str) -> None:
    message = chat_error(body)
    assert message.startswith(TARGET)
    assert text in message


def test_unknown_fields_are_listed_or_ignored() -> None:
    body = chat_body(foo_bar=1, abc=None)
    assert chat_error(body) == "Unsupported parameter(s): `abc`, `foo_bar`"
    assert parse_chat(body, unknown="ignore").model == "m"
    assert completion_error(completion_body(messages=[])) == "Unsupported parameter(s): `messages`"
    assert parse_completion(completion_body(x=1), unknown="ignore").prompt == "Hello there"


def test_a_second_fault_is_found_when_unknown_fields_pass() -> None:
    with pytest.raises(InvalidArgument, match="Temperature must be between 0 and 2, got 9"):
        parse_chat(chat_body(foo=1, temperature=9), unknown="ignore")


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_empty_prompts(prompt: object) -> None:
    message = completion_error(completion_body(prompt=prompt))
    assert message == "Validation: Prompt string cannot be empty"


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]]])
def test_mixed_prompts(prompt: object) -> None:
    assert "not a mixture" in completion_error(completion_body(prompt=prompt))


def test_completion_logprobs_and_suffix() -> None:
    text = "Validation: Logprobs must be between 0 and 128, got 129"
    assert completion_error(completion_body(logprobs=129)) == text
    assert "'suffix'" in completion_error(completion_body(suffix="x"))
    assert parse_completion(completion_body(suffix=None, logprobs=5, echo=True)).echo


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("modalities", ["text", "audio"], "may be text, got audio"),
        ("audio", {"voice": "a"}, "answers are text"),
        ("functions", [{"name": "f"}], "describe them in 'tools'"),
        ("web_search_options", {}, "offer a search in 'tools'"),
    ],
)
def test_what_no_worker_can_do_is_refused(field: str, value: object, remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{field}' .*{remedy}"):
        parse_chat(chat_body(**{field: value}))
    parse_chat(chat_body(modalities=["text"], functions=[], audio=None, web_search_options=None))


def test_content_may_be_null_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    assert parse_chat(chat_body(messages=messages)).messages == messages


def test_options_without_effect_pass() -> None:
    assert parse_chat(chat_body(best_of=2, n=2, tool_choice="auto", function_call="none"))
    assert parse_chat(chat_body(best_of=None, tool_choice="none", stream_options=None))
    assert parse_chat(chat_body(stream=True, stream_options={}))
    assert parse_completion(completion_body(stop=["x" * 512] * 32, best_of=1))
