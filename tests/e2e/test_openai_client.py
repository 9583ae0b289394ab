"""The ``openai`` Python client, unchanged, against real mockers behind the real frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from deployment import Deployment
from lazy_module import openai

MESSAGES: Any = [{"role": "user", "content": "Tell me about key-value caches, please."}]


@pytest.fixture(scope="module")
def client(shared_deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared_deployment.url}/v1", api_key="none", timeout=30) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_chat_unary(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finishes[-1] == "length" and set(finishes[:-1]) <= {None}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_second_time_the_prompt_is_cached(
    client: openai.OpenAI, shared_deployment: Deployment
) -> None:
    """As soon as the router has the events of the first time."""
    long: Any = [{"role": "user", "content": "The same long prompt, many times. " * 40}]

    def is_cached() -> bool:
        usage = client.chat.completions.create(model="tiny", messages=long, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        return bool(cached >= usage.prompt_tokens - 2 * 16)

    assert not is_cached()
    shared_deployment.until(is_cached, "the prompt is cached")


def test_n_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, n=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens == 12


@pytest.mark.parametrize(
    "prompt", ["Once upon a time", ["One", "Two"], [1001, 1002, 1003], [[1001], [1002, 1003]]]
)
def test_completions(client: openai.OpenAI, prompt: object) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(answer.choices) == (2 if several else 1)
    assert all(choice.finish_reason == "length" for choice in answer.choices)
    assert answer.usage.completion_tokens == 5 * len(answer.choices)


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="Go", max_tokens=6, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "nope"}, 404, "nope"),
        ({"temperature": 3}, 400, "Temperature must be between 0 and 2, got 3"),
        ({"messages": []}, 400, "The 'messages' field cannot be empty"),
        ({"max_tokens": 0}, 400, "Max tokens must be greater than 0, got 0"),
        ({"extra_body": {"foo_bar": 1}}, 400, "Unsupported parameter(s): `foo_bar`"),
        ({"max_tokens": 10_000_000}, 400, "Max tokens"),
    ],
)
def test_bad_input_names_the_field(
    client: openai.OpenAI, fields: dict[str, object], status: int, words: str
) -> None:
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **fields}
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(**request)
    assert error.value.status_code == status
    assert words in error.value.response.text


async def test_async_client_many_at_once(shared_deployment: Deployment) -> None:
    base = f"{shared_deployment.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", timeout=60) as client:

        async def one(number: int) -> int:
            answer = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"Number {number}"}],
                max_tokens=8,
            )
            return answer.usage.completion_tokens if answer.usage else 0

        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(one(number)) for number in range(64)]
    assert [task.result() for task in made] == [8] * 64
