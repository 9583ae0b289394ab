"""Engine requests made from client requests."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import orjson
import pytest
from text_kit import EXAMPLE, card, chat_body, completion_body, example_preprocessor, ids_of

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.messages.prompt import parse_messages
from dynamo.frontend.apis.messages.route import prepare_message
from dynamo.frontend.apis.responses.prompt import parse_response
from dynamo.frontend.prompt.engine_options import routing_of
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat, parse_completion
from dynamo.protocols import codec
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.openai import NvExt

CHAT = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"


def chat(**fields: Any) -> Prepared:
    return example_preprocessor().chat(parse_chat(chat_body(**fields)))


def completion(**fields: Any) -> Prepared:
    return example_preprocessor().completion(parse_completion(completion_body(**fields)))


def error(call: Any, **fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        call(**fields)
    message: str = caught.value.message
    return message


def test_chat_crosses_the_wire_as_an_array() -> None:
    prepared = chat()
    assert prepared.prompts[0].text == CHAT
    (request,) = prepared.requests
    assert request.token_ids == array("I", ids_of(CHAT))
    assert prepared.prompt_tokens == len(ids_of(CHAT))
    decoded = codec.decoder(PreprocessedRequest).decode(codec.encode(request))
    assert decoded == request
    assert codec.plain_decode(codec.encode(request))["token_ids"] == ids_of(CHAT)


def test_stop_conditions_and_eos() -> None:
    (request,) = chat(stop="END", min_tokens=2, stop_token_ids=[5], max_tokens=7).requests
    conditions = request.stop_conditions
    assert (conditions.stop, conditions.min_tokens, conditions.max_tokens) == (["END"], 2, 7)
    assert conditions.stop_token_ids == [5]
    assert conditions.stop_token_ids_hidden == request.eos_token_ids == [4098, 4096]
    (request,) = chat(ignore_eos=True, stop=[]).requests
    assert request.stop_conditions.ignore_eos
    assert request.stop_conditions.stop is request.stop_conditions.stop_token_ids_hidden is None  # type: ignore[comparison-overlap]


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    length = len(ids_of(CHAT))
    assert chat().requests[0].stop_conditions.max_tokens == 131072 - length
    given = chat(max_tokens=5, max_completion_tokens=9).requests[0]
    assert given.stop_conditions.max_tokens == 9


def test_context_length_comes_from_the_card_first() -> None:
    length = len(ids_of(CHAT))
    small = Preprocessor(card(context_length=length + 4))
    assert small.chat(parse_chat(chat_body())).requests[0].stop_conditions.max_tokens == 4
    full = Preprocessor(card(runtime_config=RuntimeConfig(context_length=length)))
    with pytest.raises(InvalidArgument, match=f"your prompt has {length} tokens") as caught:
        full.chat(parse_chat(chat_body()))
    assert f"maximum context length is {length} tokens" in caught.value.message


def test_an_answer_that_does_not_fit_is_shortened() -> None:
    """In all APIs, as vLLM's server does; a prompt that fills the context alone is refused."""
    small = Preprocessor(card(context_length=len(ids_of(CHAT)) + 4))
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 10**6, "min_tokens": 7}):
        stop = small.chat(parse_chat(chat_body(**fields))).requests[0].stop_conditions
        assert stop.max_tokens == 4
        assert stop.min_tokens == (4 if "min_tokens" in fields else None)
    response = parse_response(
        orjson.dumps({"model": "m", "input": "Hello there", "max_output_tokens": 5})
    )
    response.add_history([])
    assert small.chat(response).requests[0].stop_conditions.max_tokens == 4
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello there"}]}
    message = parse_messages(orjson.dumps(body))
    assert prepare_message(small, message).requests[0].stop_conditions.max_tokens == 4
    short = Preprocessor(card(context_length=len(ids_of("Hello there")) + 2))
    prompts = ["Hello there", ids_of("Hello")]
    asked = parse_completion(completion_body(prompt=prompts[0], max_tokens=3))
    assert short.completion(asked).requests[0].stop_conditions.max_tokens == 2


def test_sampling_and_output_options() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 3,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 5},
        "include_stop_str_in_output": True,
    }
    (request,) = chat(**fields, logprobs=True, top_logprobs=2, skip_special_tokens=False).requests
    for name, value in fields.items():
        assert getattr(request.sampling_options, name) == value
    assert (request.output_options.logprobs, request.output_options.skip_special_tokens) == (
        2,
        False,
    )
    assert chat(logprobs=True).requests[0].output_options.logprobs == 0
    assert chat().requests[0].output_options.logprobs is None
    assert completion(logprobs=3).requests[0].output_options.logprobs == 3
    greedy = chat(nvext={"greed_sampling": True}, top_p=0.5).requests[0].sampling_options
    assert (greedy.temperature, greedy.top_p) == (0.0, None)


def test_each_choice_is_a_request() -> None:
    prepared = completion(prompt=["a b", "c"], n=2, seed=10)
    assert [each.sampling_options.seed for each in prepared.requests] == [10, 11, 10, 11]
    assert [each.token_ids.tolist() for each in prepared.requests] == [
        ids_of("a b"),
        ids_of("a b"),
        ids_of("c"),
        ids_of("c"),
    ]
    largest = completion(n=2, best_of=2, seed=2**63 - 1).requests
    assert [each.sampling_options.seed for each in largest] == [2**63 - 1, -(2**63)]
    assert largest[0].sampling_options.best_of is None
    assert len({id(each) for each in prepared.requests}) == 4
    assert prepared.prompt_tokens == len(ids_of("a b")) + len(ids_of("c"))
    assert prepared.n == 2


@pytest.mark.parametrize(
    ("prompt", "ids"), [("hi", None), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])]
)
def test_prompt_forms(prompt: Any, ids: list[list[int]] | None) -> None:
    found = [each.token_ids.tolist() for each in completion(prompt=prompt).requests]
    assert found == (ids or [ids_of("hi")])


def test_ids_outside_the_vocabulary_are_refused() -> None:
    text = "token id 4103 is out of range, the vocabulary has 4103 tokens"
    assert text in error(completion, prompt=[1, 4103])
    assert text in error(chat, nvext={"token_data": [4103]})


def test_nvext() -> None:
    nvext = {
        "token_data": [1, 2, 3],
        "annotations": ["token_ids"],
        "backend_instance_id": 2**63 + 1,
        "prefill_worker_id": 5,
        "decode_worker_id": 6,
        "max_thinking_tokens": 8,
        "agent_hints": {"latency_sensitivity": 1.5, "priority": 2, "strict_priority": 3, "osl": 4},
    }
    prepared = chat(nvext=nvext)
    (request,) = prepared.requests
    assert request.token_ids.tolist() == [1, 2, 3]
    assert request.annotations == ["token_ids"]
    routing = request.routing
    assert routing is not None
    assert routing.backend_instance_id == request.backend_instance_id == 2**63 + 1
    assert (routing.prefill_worker_id, routing.decode_worker_id) == (5, 6)
    assert (routing.priority_jump, routing.priority, routing.strict_priority) == (1.5, 2, 3)
    assert routing.expected_output_tokens == 4
    assert request.stop_conditions.max_thinking_tokens == 8
    assert chat().requests[0].routing is None
    assert chat(nvext={"use_raw_prompt": True}).prompts[0].text == "Hello there"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json": {"a": 1}},
        ),
        ({"guided_regex": "a+", "guided_decoding_backend": "x"}, {"regex": "a+", "backend": "x"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, {"regex": "a"}),
    ],
)
def test_guided_decoding(fields: dict[str, Any], expected: Any) -> None:
    assert chat(**fields).requests[0].sampling_options.guided_decoding == expected


def test_guided_decoding_faults() -> None:
    assert "only one" in error(chat, guided_regex="a", guided_choice=["b"])
    both = {"guided_json": {}, "response_format": {"type": "json_object"}}
    assert "only one" in error(chat, **both)
    assert "got type `yaml`" in error(chat, response_format={"type": "yaml"})


def test_template_variables_and_tools() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    assert "weather" in (chat(tools=[tool]).prompts[0].text or "")
    assert "weather" not in (chat(tools=[tool], tool_choice="none").prompts[0].text or "")
    variables = {"messages": [], "tools": 3, "enable_thinking": True}
    assert chat(chat_template_kwargs=variables, reasoning_effort="low").prompts[0].text == CHAT
    assert not (chat(add_generation_prompt=False).prompts[0].text or "").endswith("assistant\n")


def test_model_without_a_template(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    bare = Preprocessor(card(source_path=str(tmp_path)))
    with pytest.raises(InvalidArgument, match="has no chat template; use /v1/completions"):
        bare.chat(parse_chat(chat_body()))
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    own = Preprocessor(card(source_path=str(tmp_path)), custom_template_path=tmp_path / "own.jinja")
    assert own.chat(parse_chat(chat_body())).prompts[0].text == "Hello there"


async def test_off_loop_gives_the_same() -> None:
    preprocessor, threads = example_preprocessor(), OffLoop()
    long = "word " * 200_000
    assert len(long) > preprocessor.inline_limit_bytes
    request = parse_completion(completion_body(prompt=["a", long], max_tokens=1))
    with pytest.raises(InvalidArgument, match="maximum context length"):
        await preprocessor.completion_off_loop(request, threads)
    request = parse_completion(completion_body(prompt=[[5], [6, 7]], n=2))
    prepared = await preprocessor.completion_off_loop(request, threads)
    assert prepared == preprocessor.completion(request)
    chat_request = parse_chat(chat_body())
    chat = await preprocessor.chat_off_loop(chat_request, threads)
    expected = preprocessor.chat(chat_request)
    assert (chat.requests, chat.prompts, chat.n) == (
        expected.requests,
        expected.prompts,
        expected.n,
    )
    assert chat.rendered_s is not None and len(chat.tokenized_s) == 1


NUMBERS = ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank")


@pytest.mark.parametrize("name", [*NUMBERS, "prefill_dp_rank", "allowed_worker_ids"])
def test_ids_of_workers_fit_into_64_bits(name: str) -> None:
    def routing(number: int) -> object:
        value: Any = [1, number] if name == "allowed_worker_ids" else number
        return getattr(routing_of(NvExt(**{name: value}), None, None), name)

    largest = 2**64 - 1
    assert routing(largest) in (largest, [1, largest]) and routing(0) in (0, [1, 0])
    with pytest.raises(InvalidArgument, match=rf"nvext\.{name} must be at most {largest}, got "):
        routing(largest + 1)


def test_a_large_body_takes_a_thread_whatever_its_tokenizer_can_do() -> None:
    preprocessor = Preprocessor(card())
    assert preprocessor.inline_limit_bytes <= 128 * 1024
    assert preprocessor.inline_limit_bytes <= preprocessor.tokenizer.inline_limit_bytes
