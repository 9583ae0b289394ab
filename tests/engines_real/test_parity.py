"""Greedy answers are the engine's own: the same from our stack as from vLLM's server."""

from __future__ import annotations

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
from servers_kit import EngineDeployment, in_parallel

BODIES = {
    CHAT: [chat(text, logprobs=True, top_logprobs=3) for text in prompts()],
    COMPLETIONS: [completion(text, logprobs=3) for text in prompts()],
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("model", ["tiny", "bytes"])
def test_fifty_prompts(
    path: str, model: str, ours: EngineDeployment, request: pytest.FixtureRequest
) -> None:
    """Text, tokens, log probabilities, usage and finish reasons, streamed and in one body."""
    theirs: EngineDeployment = request.getfixturevalue(f"vllm_{model}")
    bodies = [{**body, "model": model} for body in BODIES[path]]

    def unary(server: EngineDeployment) -> list[Any]:
        return in_parallel(lambda body: ask(server, path, body), bodies)

    def streamed(server: EngineDeployment) -> list[Any]:
        return in_parallel(lambda body: ask_streamed(server, path, body), bodies)

    expected = unary(theirs)
    reasons = {choice["finish_reason"] for answer in expected for choice in answer[:-1]}
    assert reasons == {"stop", "length"}  # the weights let some answers end by themselves
    assert_equal(unary(ours), expected, f"{path} in one body")
    assert_equal(streamed(ours), streamed(theirs), f"{path} streamed")


def test_token_ids_as_a_prompt(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    body = completion([5, 900, 1200, 77, 3000], model="tiny", logprobs=1)
    assert_equal(ask(ours, COMPLETIONS, body), ask(vllm_tiny, COMPLETIONS, body))


def test_several_prompts_and_choices(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    """VLLM refuses several greedy choices, so they are drawn, each from its own seed."""
    body = completion("", model="tiny", n=2, temperature=1.0, seed=11) | {"prompt": prompts(3)}
    assert_equal(ask(ours, COMPLETIONS, body), ask(vllm_tiny, COMPLETIONS, body))
    assert_equal(ask_streamed(ours, COMPLETIONS, body), ask_streamed(vllm_tiny, COMPLETIONS, body))


@pytest.mark.parametrize("max_tokens", range(8, 13))
def test_characters_of_several_tokens(
    max_tokens: int, ours: EngineDeployment, vllm_bytes: EngineDeployment
) -> None:
    """Chinese and emoji, which the tokenizer has as bytes only, cut after any of their bytes."""
    grammar = {"regex": "[一-龥]{2}[😀-😏]{2}[а-я]{3}x"}
    theirs = completion("Say", model="bytes", max_tokens=max_tokens, structured_outputs=grammar)
    mine = completion("Say", model="bytes", max_tokens=max_tokens, guided_regex=grammar["regex"])
    expected = ask(vllm_bytes, COMPLETIONS, theirs)
    assert expected[0]["text"] and "\ufffd" not in expected[0]["text"]
    assert_equal(ask(ours, COMPLETIONS, mine), expected)
    assert_equal(ask_streamed(ours, COMPLETIONS, mine), expected)
