"""A worker of ``ModelInput.Text`` as a real process, behind a real frontend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import MODEL, Deployment
from lazy_module import openai

WORKER = Path(__file__).with_name("worker_text.py")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("text"))
    with (made.logs / "text.log").open("wb") as log:
        command = [sys.executable, str(WORKER), str(MODEL)]
        made.processes.append(subprocess.Popen(command, env=made.env, stdout=log, stderr=log))
    made.frontend("--router-mode", "kv")
    try:
        made.wait_for_workers()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(text: Deployment) -> Iterator[openai.OpenAI]:
    url = f"{text.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=30, max_retries=0) as made:
        yield made


def messages(content: str) -> Any:
    return [{"role": "user", "content": content}]


def test_a_stream_of_its_chunks(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="text", messages=messages("one two three"), stream=True
    )
    chunks = list(stream)
    deltas = [one.choices[0].delta.content for one in chunks if one.choices]
    assert deltas == ["one ", "two ", "three ", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


def test_one_body_of_its_chunks(client: openai.OpenAI, text: Deployment) -> None:
    answer = client.chat.completions.create(model="text", messages=messages("one two"))
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    labels = {"model": "text", "status": "success", "request_type": "unary"}
    assert text.sample("dynamo_frontend_requests_total", **labels) >= 1


def test_an_embedding(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="text", input="hello", encoding_format="float")
    assert made.data[0].embedding == [5.0]


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="short and stout") as raised:
        client.chat.completions.create(model="text", messages=messages("teapot"), stream=True)
    assert raised.value.status_code == 418
    with pytest.raises(openai.BadRequestError, match="Temperature must be between 0 and 2"):
        client.chat.completions.create(model="text", messages=messages("a"), temperature=3)
    with pytest.raises(openai.NotFoundError, match="has no /v1/completions, it has /v1/chat"):
        client.completions.create(model="text", prompt="hi")


def test_it_is_listed_and_routed(client: openai.OpenAI, text: Deployment) -> None:
    assert [one.id for one in client.models.list().data] == ["text"]
    status, _, body = text.request(
        "POST", "/v1/route", {"model": "text", "messages": messages("a")}
    )
    assert status == 200 and len(json.loads(body)["candidates"]) == 1
