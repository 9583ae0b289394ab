"""Routes of vLLM's server beside the usual ones: batches of chats, /invocations, probes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from answers_kit import completion, prompts
from servers_kit import EngineDeployment

BATCH = "/v1/chat/completions/batch"


def batch(**fields: Any) -> dict[str, Any]:
    conversations = [[{"role": "user", "content": text}] for text in prompts(4)]
    conversations[1] = [
        *conversations[0],
        {"role": "assistant", "content": "Yes."},
        *conversations[1],
    ]
    return {
        "model": "tiny",
        "messages": conversations,
        "temperature": 0,
        "max_tokens": 12,
        **fields,
    }


def figures(answer: dict[str, Any]) -> Any:
    usage = answer["usage"]
    choices = [
        (
            choice["index"],
            choice["message"]["role"],
            choice["message"]["content"],
            choice["finish_reason"],
            # vLLM shows a part of a character as nothing.
            [
                entry["token"].strip("\ufffd")
                for entry in (choice["logprobs"] or {"content": []})["content"]
            ],
        )
        for choice in answer["choices"]
    ]
    return choices, usage["prompt_tokens"], usage["completion_tokens"], answer["object"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_batch_is_answered_as_by_vllm(
    ours: EngineDeployment, vllm_tiny: EngineDeployment, fields: dict[str, Any]
) -> None:
    answers = [server.post(BATCH, batch(**fields)) for server in (ours, vllm_tiny)]
    assert figures(answers[0]) == figures(answers[1])
    assert len(answers[0]["choices"]) == 4


@pytest.mark.parametrize("field", [{"n": 2}, {"messages": []}, {"messages": [[]]}])
def test_a_wrong_batch_is_refused_as_by_vllm(
    ours: EngineDeployment, vllm_tiny: EngineDeployment, field: dict[str, Any]
) -> None:
    for server in (ours, vllm_tiny):
        assert server.request("POST", BATCH, batch(**field))[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0},
        completion("The quick brown fox", max_tokens=6),
    ],
)
def test_an_invocation_is_answered_as_by_vllm(
    ours: EngineDeployment, vllm_tiny: EngineDeployment, body: dict[str, Any]
) -> None:
    answers = [
        server.post("/invocations", {"model": "tiny", **body}) for server in (ours, vllm_tiny)
    ]
    assert answers[0]["object"] == answers[1]["object"]
    texts = [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in (answer["choices"][0] for answer in answers)
    ]
    assert texts[0] == texts[1]


def test_probes_answer_as_those_of_vllm(
    ours: EngineDeployment, vllm_tiny: EngineDeployment
) -> None:
    for server in (ours, vllm_tiny):
        assert [server.request(method, "/ping")[0] for method in ("GET", "POST")] == [200, 200]
        assert server.request("POST", "/invocations", {"model": "tiny"})[0] == 400
        load = json.loads(server.request("GET", "/load")[2])
        assert load == {"server_load": 0}
        assert list(json.loads(server.request("GET", "/version")[2])) == ["version"]
