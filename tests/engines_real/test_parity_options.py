"""Every option of a request has the effect that it has on vLLM's own server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from answers_kit import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_streamed,
    assert_equal,
    chat,
    completion,
    prompts,
)
from servers_kit import EngineDeployment

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
PROMPT = "Once upon a time"

OPTIONS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 40, "max_tokens": 60},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 60},
    "stop_token_ids": {"stop_token_ids": list(range(0, 4000, 50)), "max_tokens": 60},
    "logit_bias": {"logit_bias": {"1234": 100}, "max_tokens": 4},
    "many biases": {"logit_bias": dict.fromkeys(map(str, range(0, 4000, 2)), -100)},
    "bad words": {"bad_words": ["the", "a", ", "], "max_tokens": 40},
    "seed": {"temperature": 1.0, "seed": 42},
    "top_p": {"temperature": 0.9, "top_p": 0.5, "seed": 7},
    "top_k": {"temperature": 1.5, "top_k": 3, "seed": 7},
    "min_p": {"temperature": 1.5, "min_p": 0.2, "seed": 7},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "special tokens": {"skip_special_tokens": False, "max_tokens": 60},
    "one token": {"max_tokens": 1},
    "allowed tokens": {"allowed_token_ids": list(range(100, 160))},
    "repetition": {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
    "the end of the prompt": {"truncate_prompt_tokens": 3},
    "the begin of the prompt": {"truncate_prompt_tokens": 3, "truncation_side": "right"},
    "what fits of the prompt": {"truncate_prompt_tokens": -1},
    "numbers as texts": {"max_tokens": "8", "temperature": "0", "seed": 5.0, "top_k": "3"},
    "large values": {"logit_bias": {"1234": 1000}, "repetition_penalty": 4.0},
    "several choices": {"n": 3, "temperature": 0.8, "seed": 5},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(path: str, name: str, ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    make = chat if path == CHAT else completion
    for text in prompts(4):
        body = make(text, model="tiny", **OPTIONS[name])
        where = f"{name}: {text}"
        assert_equal(ask(ours, path, body), ask(vllm_tiny, path, body), where)
        assert_equal(ask_streamed(ours, path, body), ask_streamed(vllm_tiny, path, body), where)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("model", ["tiny", "bytes"])
def test_stop_strings(
    include: bool, model: str, ours: EngineDeployment, request: pytest.FixtureRequest
) -> None:
    """A stop string over several tokens ends the text at the same character."""
    theirs: EngineDeployment = request.getfixturevalue(f"vllm_{model}")
    for text in prompts(6):
        whole = ask(theirs, COMPLETIONS, completion(text, model=model, max_tokens=40))[0]["text"]
        middle = whole[len(whole) // 2 - 2 : len(whole) // 2 + 3]
        body = completion(
            text,
            model=model,
            max_tokens=40,
            stop=[middle, "not in the text"],
            include_stop_str_in_output=include,
        )
        expected = ask(theirs, COMPLETIONS, body)
        assert expected[0]["finish_reason"] == "stop"
        assert_equal(ask(ours, COMPLETIONS, body), expected, text)
        assert_equal(ask_streamed(ours, COMPLETIONS, body), ask_streamed(theirs, COMPLETIONS, body))


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": NAMED},
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}},
    "choice": {"structured_outputs": {"choice": ["positive", "negative"]}},
}
OURS: dict[str, dict[str, Any]] = {
    "regex": {"guided_regex": "[a-c]{3}-[0-9]{2}"},
    "choice": {"guided_choice": ["positive", "negative"]},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_structured_output(
    path: str, name: str, ours: EngineDeployment, vllm_tiny: EngineDeployment
) -> None:
    make = chat if path == CHAT else completion
    constraint: dict[str, Any] = CONSTRAINTS[name]
    theirs = make(PROMPT, model="tiny", max_tokens=60, **constraint)
    expected = ask(vllm_tiny, path, theirs)
    for spelled in (constraint, OURS.get(name, constraint)):
        mine = make(PROMPT, model="tiny", max_tokens=60, **spelled)
        assert_equal(ask(ours, path, mine), expected, str(spelled))


def test_a_schema_is_followed(ours: EngineDeployment) -> None:
    body = chat(PROMPT, model="tiny", max_tokens=200, response_format=NAMED)
    (choice, _) = ask(ours, CHAT, body)
    if choice["finish_reason"] == "stop":
        found = json.loads(choice["text"])
        assert isinstance(found["name"], str) and isinstance(found["age"], int)


def test_default_sampling_options_of_the_model(
    ours: EngineDeployment, vllm_bytes: EngineDeployment
) -> None:
    """generation_config.json has a repetition penalty, which a request may override."""
    plain = completion(PROMPT, model="bytes")
    without = completion(PROMPT, model="bytes", repetition_penalty=1.0)
    assert_equal(ask(ours, COMPLETIONS, plain), ask(vllm_bytes, COMPLETIONS, plain))
    assert_equal(ask(ours, COMPLETIONS, without), ask(vllm_bytes, COMPLETIONS, without))


def test_echo(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    body = completion(PROMPT, model="tiny", echo=True, max_tokens=4)
    assert_equal(ask(ours, COMPLETIONS, body), ask(vllm_tiny, COMPLETIONS, body))


def test_no_room_for_the_answer(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    """A prompt that fills the context is refused by both, one token less is answered."""
    for length, status in ((2048, 400), (2047, 200)):
        body = completion([100] * length, model="tiny", max_tokens=1)
        assert ours.request("POST", COMPLETIONS, body)[0] == status
        assert vllm_tiny.request("POST", COMPLETIONS, body)[0] == status


@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs(count: int, ours: EngineDeployment, vllm_bytes: EngineDeployment) -> None:
    """Once in a chat, in every choice of a completion."""
    for path, make in ((CHAT, chat), (COMPLETIONS, completion)):
        body = make(prompts(4)[3], model="bytes", max_tokens=2, prompt_logprobs=count)
        mine, theirs = ours.post(path, body), vllm_bytes.post(path, body)
        place = mine if path == CHAT else mine["choices"][0]
        other = theirs if path == CHAT else theirs["choices"][0]
        assert_equal(_by_id(place["prompt_logprobs"]), _by_id(other["prompt_logprobs"]), path)


def test_echo_with_logprobs(ours: EngineDeployment, vllm_bytes: EngineDeployment) -> None:
    """As evaluation harnesses ask for the probability of a text."""
    body = completion(prompts(3)[2], model="bytes", max_tokens=1, echo=True, logprobs=1)
    expected = ask(vllm_bytes, COMPLETIONS, body)
    assert expected[0]["logprobs"][0][1] is None and expected[0]["logprobs"][1][1] < 0
    assert_equal(ask(ours, COMPLETIONS, body), expected)
    assert_equal(ask_streamed(ours, COMPLETIONS, body), expected)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_and_reasons(path: str, ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    """Token ids of prompt and answer, and what ended it, where vLLM's server has them."""
    make = chat if path == CHAT else completion
    for fields in (
        {},
        {"n": 2, "seed": 3, "temperature": 1},
        {"stop_token_ids": list(range(0, 2000, 2))},
    ):
        body = make(PROMPT, model="tiny", return_token_ids=True, request_id="mine-7", **fields)
        mine, theirs = ours.post(path, body), vllm_tiny.post(path, body)
        assert mine["id"] == theirs["id"]
        assert mine.get("prompt_token_ids") == theirs.get("prompt_token_ids")
        names = {"index", "token_ids", "stop_reason", "finish_reason", "prompt_token_ids"}
        for choice, other in zip(mine["choices"], theirs["choices"], strict=True):
            shown = {name: choice[name] for name in names & choice.keys()}
            assert shown == {name: other[name] for name in names & other.keys()}, fields
        assert _streamed_ids(ours, path, body) == _streamed_ids(vllm_tiny, path, body)


def test_named_tokens_are_refused_where_they_harm_others(
    ours: EngineDeployment, vllm_tiny: EngineDeployment
) -> None:
    """In one step of vLLM's model runner V1, which the CPU build has, others get wrong values."""
    named = chat(PROMPT, model="tiny", logprobs=True, logprob_token_ids=[5, 17], max_tokens=40)
    plain = [
        chat(text, model="tiny", logprobs=True, top_logprobs=3, max_tokens=40)
        for text in prompts(6)
    ]
    status, _, answer = ours.request("POST", CHAT, named)
    assert status == 400 and b"model runner V2" in answer
    alone = [ask(vllm_tiny, CHAT, body) for body in plain]
    with ThreadPoolExecutor(12) as threads:
        for _ in plain:
            threads.submit(vllm_tiny.post, CHAT, named)
        beside = list(threads.map(lambda body: ask(vllm_tiny, CHAT, body), plain))
    with pytest.raises(AssertionError):  # a release that mends it makes the refusal needless
        assert_equal(beside, alone)


def test_the_best_of_several(ours: EngineDeployment) -> None:
    """Choices with the same seeds, ranked by the mean log probability of their tokens."""
    fields = {"model": "tiny", "temperature": 1.2, "seed": 5, "max_tokens": 12}
    all_three = ours.post(COMPLETIONS, completion(PROMPT, **fields, n=3, logprobs=0))["choices"]

    def likelihood(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    ranked = [choice["text"] for choice in sorted(all_three, key=likelihood, reverse=True)]
    answer = ours.post(COMPLETIONS, completion(PROMPT, **fields, n=2, best_of=3))
    assert [choice["text"] for choice in answer["choices"]] == ranked[:2]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 36


def test_only_the_log_probabilities_of_a_prompt(
    ours: EngineDeployment, vllm_bytes: EngineDeployment
) -> None:
    """As newer evaluation harnesses ask for them."""
    body = completion(prompts(3)[2], model="bytes", max_tokens=0, echo=True, logprobs=1)
    assert_equal(ask(ours, COMPLETIONS, body)[0], ask(vllm_bytes, COMPLETIONS, body)[0])


def _streamed_ids(server: EngineDeployment, path: str, body: dict[str, Any]) -> list[list[int]]:
    """The ids of prompt and answer in the chunks of each choice."""
    events = server.stream(path, body)
    ids: dict[int, list[int]] = {}
    prompt = [events[0].get("prompt_token_ids")]
    for event in events:
        for choice in event["choices"]:
            prompt.append(choice.get("prompt_token_ids"))
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    return [*filter(None, prompt), *ids.values()]


def test_prompt_logprobs_beside_adapters_are_refused(ours: EngineDeployment) -> None:
    """VLLM 0.32 with adapters dies of several such prompts in one step."""
    for options in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        body = completion(PROMPT, model="tiny", max_tokens=1, **options)
        status, _, answer = ours.request("POST", COMPLETIONS, {**body, "prompt": [PROMPT] * 8})
        assert status == 400 and b"without --lora-modules" in answer


def _by_id(rows: list[dict[str, Any] | None]) -> list[Any]:
    """Without the texts: vLLM shows a part of a character as what it completes."""
    return [
        row and {token: [entry["logprob"], entry["rank"]] for token, entry in row.items()}
        for row in rows
    ]
