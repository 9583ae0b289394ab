"""/tokenize and /detokenize of a frontend with a real worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deployment import Deployment


def ask(deployment: Deployment, path: str = "/tokenize", **body: Any) -> tuple[int, Any]:
    status, _, answer = deployment.request("POST", path, body)
    return status, json.loads(answer)


def test_as_the_worker_counts(shared_deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "How long is this?"}]
    status, found = ask(shared_deployment, model="tiny", messages=messages)
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    _, _, answer = shared_deployment.request("POST", "/v1/chat/completions", body)
    usage = json.loads(answer)["usage"]
    assert status == 200 and found["count"] == usage["prompt_tokens"] == len(found["tokens"])
    status, text = ask(shared_deployment, "/detokenize", tokens=found["tokens"])
    assert status == 200 and "How long is this?" in text["prompt"]
    assert ask(shared_deployment, prompt=text["prompt"])[1]["tokens"] == found["tokens"]


def test_a_large_body(shared_deployment: Deployment) -> None:
    status, found = ask(shared_deployment, prompt="word " * 200_000)
    assert status == 200 and found["count"] > 200_000 > found["max_model_len"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model": "nope", "prompt": "a"}, 404, "Model not found: nope"),
        ({"prompt": "a", "truncate": 1}, 400, "truncate"),
        ({"model": "tiny"}, 400, "prompt"),
    ],
)
def test_faults(shared_deployment: Deployment, body: Any, status: int, text: str) -> None:
    found, answer = ask(shared_deployment, **body)
    assert found == status and text in answer["message"]
