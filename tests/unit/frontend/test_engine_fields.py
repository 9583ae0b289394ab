"""The fields that vLLM's server has beyond OpenAI's: what engines, routers and answers get."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from text_kit import card, chat_body, completion_body, events, example_preprocessor, ids_of

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import Forbidden, InvalidArgument
from dynamo.frontend.answer.completions import ChatStream, CompletionStream
from dynamo.frontend.answer.events import ParsedChatStream
from dynamo.frontend.answer.generation import GenerationStream
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.frontend.requests.headers import check_fields, request_id, routed
from dynamo.http.api_keys import ApiKey, Grants
from dynamo.protocols.codec import encode
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import (
    KV_TRANSFER,
    EngineOutput,
    InvalidOutput,
    Routing,
    decode_output,
)

KEY = ApiKey("alice", "user", b"", Grants(priority=5))


def prepared_chat(**fields: Any) -> Prepared:
    return example_preprocessor().chat(parse_chat(chat_body(**fields)))


def prepared(**fields: Any) -> Prepared:
    return example_preprocessor().completion(parse_completion(completion_body(**fields)))


def chat(**fields: Any) -> ChatStream:
    request, model = parse_chat(chat_body(**fields)), example_preprocessor()
    return ChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 1)


def completion(**fields: Any) -> CompletionStream:
    request, model = parse_completion(completion_body(**fields)), example_preprocessor()
    return CompletionStream(request, model.completion(request), model.tokenizer, "cmpl-1", 1)


def unary(stream: GenerationStream) -> Any:
    return events(b"data: %b\n\ndata: [DONE]\n\n" % stream.unary())[0]


def token(text: str, **fields: Any) -> EngineOutput:
    return EngineOutput(token_ids=ids_of(text), **fields)


# --- what the body says


@pytest.mark.parametrize(
    ("field", "sent", "read"),
    [
        ("max_tokens", "5", 5),
        ("max_tokens", 5.0, 5),
        ("temperature", "0.5", 0.5),
        ("stream", "true", True),
        ("stop_token_ids", ["7", 8.0], [7, 8]),
        ("logit_bias", {"5": "101"}, {"5": 101.0}),
    ],
)
def test_numbers_may_be_texts(field: str, sent: Any, read: Any) -> None:
    assert getattr(parse_chat(chat_body(**{field: sent})), field) == read


@pytest.mark.parametrize("sent", ["five", "5.5", "nan", "", [5], {}])
def test_no_other_text_is_a_number(sent: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_tokens"):
        parse_chat(chat_body(max_tokens=sent))
    with pytest.raises(InvalidArgument, match=r"length_penalty|temperature"):
        parse_chat(chat_body(temperature="nan", length_penalty="inf"))


def test_true_is_one_log_probability_of_a_completion() -> None:
    assert parse_completion(completion_body(logprobs=True)).logprobs == 1
    assert parse_completion(completion_body(logprobs=False)).logprobs is None


def test_the_model_may_be_left_out() -> None:
    assert parse_chat(b'{"messages":[{"role":"user","content":"a"}]}').model == ""
    assert parse_completion(b'{"model":null,"prompt":"a"}').model == ""


@pytest.mark.parametrize("unknown", ["ignore", "pass"])
def test_unknown_fields(unknown: str) -> None:
    body = chat_body(new_option={"a": [1]}, other=2)
    with pytest.raises(InvalidArgument, match=r"Unsupported parameter\(s\): `new_option`, `other`"):
        parse_chat(body)
    request = parse_chat(body, unknown=unknown)
    options = example_preprocessor().chat(request).requests[0].sampling_options.engine_options
    passed = {"passed_fields": {"new_option": {"a": [1]}, "other": 2}}
    assert options == (passed if unknown == "pass" else None)


def test_an_unknown_field_is_bounded_as_others() -> None:
    body = chat_body()[:-1] + b',"new_option":[%d]}' % 2**64
    with pytest.raises(InvalidArgument, match="new_option: integers must be between"):
        parse_chat(body, unknown="pass")


def test_a_client_cannot_name_the_fields_that_are_passed() -> None:
    request = parse_chat(chat_body(passed_fields={"a": 1}), unknown="pass")
    options = example_preprocessor().chat(request).requests[0].sampling_options.engine_options
    assert options == {"passed_fields": {"passed_fields": {"a": 1}}}


# --- what the engine gets


def test_engine_options_keep_their_names() -> None:
    fields: dict[str, Any] = {
        "allowed_token_ids": [1, 2],
        "bad_words_token_ids": [[3], [4, 5]],
        "watermarking": False,
        "vllm_xargs": {"a": 1, "b": ["c", 2.5]},
        "kv_transfer_params": {"do_remote_prefill": True},
        "ec_transfer_params": {"x": None},
    }
    detection = {"max_pattern_size": 4, "min_count": 3}
    sampling = prepared(**fields, repetition_detection=detection).requests[0].sampling_options
    assert sampling.engine_options == {**fields, "repetition_detection": detection}
    assert prepared().requests[0].sampling_options.engine_options is None


def test_structural_tags() -> None:
    tag = '{"type":"structural_tag","format":{"type":"any_text"}}'
    form = {"type": "structural_tag", "format": {"type": "any_text"}}
    for fields in (
        {"structural_tag": tag},
        {"structured_outputs": {"structural_tag": tag}},
        {"response_format": form},
    ):
        guided = prepared(**fields).requests[0].sampling_options.guided_decoding
        assert guided == {"structural_tag": tag}, fields
    with pytest.raises(InvalidArgument, match="only one guided decoding constraint"):
        prepared(response_format=form, structural_tag=tag)
    outputs = {"json": {"type": "object"}, "disable_any_whitespace": True}
    guided = prepared(structured_outputs=outputs).requests[0].sampling_options.guided_decoding
    assert guided == outputs


def test_thinking_budget() -> None:
    stop = prepared_chat(thinking_token_budget=7).requests[0].stop_conditions
    assert stop.max_thinking_tokens == 7
    stop = prepared_chat(thinking_token_budget=-1).requests[0].stop_conditions
    assert stop.max_thinking_tokens is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_token_ids": [1]}, "requires 'logprobs'"),
        ({"bad_words_token_ids": [[1] * 5000] * 2}, "at most 8192 tokens together, got 10000"),
        ({"kv_transfer_params": {"a": -(2**63)}, "max_tokens": 0}, "may be 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "must be at most"),
        ({"truncate_prompt_tokens": 0}, "leaves no prompt"),
        ({"truncation_side": "top"}, "truncation_side"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        prepared(**fields)


# --- the prompt


def test_truncation_keeps_a_side() -> None:
    ids = ids_of("one two three four five six")
    cut = prepared(prompt=ids, truncate_prompt_tokens=3)
    assert cut.requests[0].token_ids.tolist() == ids[-3:]
    cut = prepared(prompt=ids, truncate_prompt_tokens=3, truncation_side="right")
    assert cut.requests[0].token_ids.tolist() == ids[:3]
    text = prepared(prompt="one two three four five six", truncate_prompt_tokens=3, echo=True)
    assert text.requests[0].token_ids.tolist() == ids[-3:]
    assert prepared(truncate_prompt_tokens=500).prompts[0].token_ids.tolist() == ids_of(
        "Hello there"
    )


def test_a_text_beyond_the_context_is_cut_before_it_is_tokenized() -> None:
    model = example_preprocessor()
    context = model.context_length
    assert context is not None
    long = "word " * (3 * context)
    for side in ("left", "right"):
        fields = {"prompt": long, "truncate_prompt_tokens": -1, "truncation_side": side}
        request = prepared(**fields).requests[0]
        whole = model.tokenizer.encode(long)
        kept = whole[-(context - 1) :] if side == "left" else whole[: context - 1]
        assert request.token_ids == kept and request.stop_conditions.max_tokens == 1
    chat_request = prepared_chat(
        messages=[{"role": "user", "content": long}], truncate_prompt_tokens=16
    )
    assert len(chat_request.requests[0].token_ids) == 16


@cache
def trusting() -> Preprocessor:
    return Preprocessor(card(), settings=FrontendSettings(trust_request_chat_template=True))


def test_the_template_of_a_request() -> None:
    request = parse_chat(chat_body(chat_template="{{ messages[0].content }}!{{ bos }}"))
    assert trusting().chat(request).prompts[0].text == "Hello there!"
    with pytest.raises(InvalidArgument, match="--trust-request-chat-template"):
        example_preprocessor().chat(request)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "'chat_template', line 1: the chat template does not compile"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more"),
    ],
)
def test_a_template_that_fails(template: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        trusting().chat(parse_chat(chat_body(chat_template=template)))


# --- the router, and grants


def test_a_low_priority_goes_first_as_in_vllm() -> None:
    assert prepared(priority=-3).requests[0].routing == Routing(priority=3)
    assert prepared(priority=2**40).requests[0].routing == Routing(priority=-(2**31))
    hints = {"agent_hints": {"priority": 1}}
    routing = prepared(priority=-3, nvext=hints).requests[0].routing
    assert routing is not None and routing.priority == 1


def test_a_session_of_the_body() -> None:
    routing = prepared(session_id="s").requests[0].routing
    assert routing == Routing(session_id="s")
    assert routed(routing, {}, KEY) == Routing(session_id="alice\ns")
    assert routed(routing, {"x-dynamo-session-id": "h"}) == Routing(session_id="h")
    assert routed(routing, {}, None, True) == Routing()


def test_users_need_grants() -> None:
    check_fields(parse_chat(chat_body(priority=-5)), KEY)
    with pytest.raises(Forbidden, match=r"'priority' = -6 is not granted.*send at least -5"):
        check_fields(parse_chat(chat_body(priority=-6)), KEY)
    with pytest.raises(Forbidden, match="'kv_transfer_params' is not granted"):
        check_fields(parse_chat(chat_body(kv_transfer_params={})), KEY, True)


def test_the_id_of_the_body() -> None:
    assert request_id({}, "mine-1") == ("mine-1", "mine-1")
    assert request_id({"x-request-id": "h"}, "mine-1") == ("h", "h")
    for bad in ("a\r\nset-cookie: x", "", "é", "a" * 200):
        internal, client = request_id({}, bad)
        assert client is None and internal != bad


# --- the answer


def test_reasons_and_fingerprint() -> None:
    stream = chat(stop=["!"])
    stream.choices[0].push(token("Hi!"))
    body = unary(stream)
    assert body["choices"][0]["stop_reason"] == "!"
    assert body["system_fingerprint"].startswith("dynamo-") and "abc" in body["system_fingerprint"]
    text = completion(stream=True)
    text.choices[0].push(token("Hi"))
    raw = text.flush()
    text.choices[0].push(token(" you", finish_reason="length"))
    *_, last = events(raw + text.end())
    assert last["choices"][0]["stop_reason"] is None and "system_fingerprint" in last


@pytest.mark.parametrize("make", [chat, completion])
def test_token_ids(make: Any) -> None:
    parts = ["Hello", " you", " all"]
    stream = make(return_token_ids=True)
    for part in parts:
        stream.choices[0].push(token(part))
    body = unary(stream)
    holder = body if make is chat else body["choices"][0]
    assert holder["prompt_token_ids"] == stream._prepared.prompts[0].token_ids.tolist()
    assert body["choices"][0]["token_ids"] == ids_of("Hello you all")

    stream = make(return_token_ids=True, stream=True)
    raw = b""
    for part in parts:
        stream.choices[0].push(token(part, finish_reason="stop" if part == " all" else None))
        raw += stream.flush()
    chunks = events(raw + stream.end())
    first = chunks[0] if make is chat else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == holder["prompt_token_ids"]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [ids_of(p) for p in parts]
    assert "prompt_token_ids" not in {**chunks[1], **chunks[1]["choices"][0]}


def test_tokens_are_named_by_their_ids() -> None:
    stream = completion(logprobs=1, return_tokens_as_token_ids=True, echo=True)
    first, second = ids_of("Hello")[0], ids_of(" you")[0]
    top = [[{"token_id": second, "logprob": -0.5}]]
    stream.choices[0].push(EngineOutput(token_ids=[first], log_probs=[-0.1], top_logprobs=top))
    rows = unary(stream)["choices"][0]["logprobs"]
    prompt = [f"token_id:{number}" for number in ids_of("Hello there")]
    assert rows["tokens"] == [*prompt, f"token_id:{first}"]
    assert rows["top_logprobs"][-1] == {f"token_id:{second}": -0.5}
    assert rows["text_offset"][-1] == len("Hello there")


def test_only_the_prompt() -> None:
    stream = completion(echo=True, max_tokens=0, logprobs=1, kv_transfer_params={})
    assert stream._prepared.requests[0].stop_conditions.max_tokens == 1
    sent = {"disaggregated_params": {"kv_transfer_params": {"remote": "x"}}}
    stream.choices[0].push(token("junk", log_probs=[-1.0], finish_reason="length", **sent))
    body = unary(stream)
    assert body["kv_transfer_params"] == {"remote": "x"}
    assert body["choices"][0]["text"] == "Hello there"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == len(ids_of("Hello there"))
    assert body["usage"]["completion_tokens"] == 0


def test_the_best_of_several() -> None:
    stream = completion(prompt=["a", "b"], best_of=3, n=2)
    requests = stream._prepared.requests
    assert len(requests) == 6 and requests[0].output_options.logprobs == 0
    for index, logprob in enumerate((-2.0, -0.5, -1.0, -3.0, -3.0, -0.1)):
        text = f" {'abcdef'[index]}"
        stream.choices[index].push(token(text, log_probs=[logprob], finish_reason="stop"))
    choices = unary(stream)["choices"]
    assert [choice["text"].strip() for choice in choices] == ["b", "c", "f", "d"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in choices)


def test_transfer_parameters_come_back() -> None:
    stream = completion(kv_transfer_params={"a": 1})
    facts = {KV_TRANSFER: {"remote": "x"}}
    stream.choices[0].push(token("a", finish_reason="stop", disaggregated_params=facts))
    assert unary(stream)["kv_transfer_params"] == {"remote": "x"}


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "One"}]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_a_chat_repeats_the_message_that_it_continues(generation_prompt: bool) -> None:
    fields = {"messages": MESSAGES, "echo": True, "return_prompt_text": True}
    stream = chat(**fields, add_generation_prompt=generation_prompt)
    stream.choices[0].push(token(" two"))
    body = unary(stream)
    assert body["choices"][0]["message"]["content"] == "One two"
    assert "One" in body["prompt_text"]
    stream = chat(echo=True)
    stream.choices[0].push(token("two"))
    assert unary(stream)["choices"][0]["message"]["content"] == "two"


@cache
def thinking() -> Preprocessor:
    return Preprocessor(card(runtime_config=RuntimeConfig(reasoning_parser="qwen3")))


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_may_be_left_out(streams: bool) -> None:
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    request, model = parse_chat(chat_body(**fields, stream=streams)), thinking()
    stream = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 1)
    raw = b""
    for part in ("<think>", "secret", "</think>", "open"):
        ids = ids_of(part)
        stream.choices[0].push(EngineOutput(token_ids=ids, log_probs=[-1.0] * len(ids)))
        raw += stream.flush() if streams else b""
    if streams:
        chunks = events(raw + stream.end())
        assert b"secret" not in raw and chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        contents = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(contents) == "open"
        shown = [number for chunk in chunks for number in chunk["choices"][0]["token_ids"]]
        assert not set(ids_of("secret")) & set(shown)
    else:
        choice = unary(stream)["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "open", "refusal": None}
        assert choice["logprobs"] is None and choice["token_ids"] == []


def test_an_item_of_many_alternatives_is_refused() -> None:
    """Writing 1,024 tokens with 128 alternatives each would hold the event loop for 180 ms."""
    top = [{"token_id": number, "logprob": -1.5, "rank": number} for number in range(128)]
    for count, fits in ((180, True), (1024, False)):
        output = token("a", log_probs=[-0.5] * count, top_logprobs=[top] * count)
        output.token_ids = [1] * count
        request = prepared(logprobs=128).requests[0]
        if fits:
            assert len(decode_output(encode(output), request).token_ids) == count
        else:
            with pytest.raises(InvalidOutput, match="send the output in parts"):
                decode_output(encode(output), request)


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_options_of_images_need_trust(field: str) -> None:
    request = parse_chat(chat_body(**{field: {"image": {"size": 100_000}}}))
    with pytest.raises(InvalidArgument, match=f"'{field}'.*--trust-request-mm-kwargs"):
        example_preprocessor().chat(request)
    trusting = FrontendSettings(trust_request_mm_kwargs=True)
    assert Preprocessor(card(), settings=trusting).chat(request).prompt_tokens
    assert example_preprocessor().chat(parse_chat(chat_body(**{field: {}}))).prompt_tokens
