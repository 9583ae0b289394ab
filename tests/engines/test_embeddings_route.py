"""/v1/embeddings: bodies, errors and shapes, over a worker in Dynamo's Python API."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import MODEL, Deployment
from lazy_module import openai

WORKER = Path(__file__).with_name("worker_embedding.py")
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("vectors"))
    made.frontend("--router-mode", "kv")
    with (made.logs / "worker.log").open("wb") as log:
        command = [sys.executable, str(WORKER), str(MODEL)]
        made.processes.append(subprocess.Popen(command, env=made.env, stdout=log, stderr=log))
    try:
        made.wait_for_workers()
        yield made
    finally:
        made.close()


def embed(deployment: Deployment, given: Any, **fields: Any) -> tuple[int, Any]:
    body = {"model": "vectors", "input": given, **fields}
    status, _, answer = deployment.request("POST", PATH, body)
    return status, json.loads(answer)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ([1, 2, 3], [3]),
        ([[1], [2, 3]], [1, 2]),
        ("a", [1]),
        (["a", "a a"], [1, 2]),
        (["a " * 9000], [9001]),  # a long text is tokenized in a thread
        (["a " * 90_000, "a"], [90_001, 1]),  # a large body is read in a thread
    ],
)
def test_inputs(given: Any, lengths: list[int], vectors: Deployment) -> None:
    status, answer = embed(vectors, given)
    assert status == 200, answer
    assert answer["object"] == "list" and answer["model"] == "vectors"
    assert answer["data"] == [
        {"object": "embedding", "index": index, "embedding": [length, 0.5]}
        for index, length in enumerate(lengths)
    ]
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    page = vectors.request("GET", "/metrics")[2].decode()
    assert 'dynamo_frontend_embedding_latency_seconds_count{model="vectors"}' in page


def test_options(vectors: Deployment) -> None:
    _, answer = embed(vectors, [1, 2], dimensions=4, user="me", encoding_format="base64")
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert array("f", raw).tolist() == [2, 0.5, 0.5, 0.5]


def test_the_openai_client(vectors: Deployment) -> None:
    with openai.OpenAI(base_url=f"{vectors.url}/v1", api_key="none", timeout=30) as client:
        found = client.embeddings.create(model="vectors", input=["a", "a a"])
        assert [each.embedding for each in found.data] == [[1, 0.5], [2, 0.5]]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="vectors", prompt="not a generator")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="unknown", input="a")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"input": ""}, "'input' and its entries cannot be empty"),
        ({"input": []}, "'input' and its entries cannot be empty"),
        ({"input": [[1], []]}, "'input' and its entries cannot be empty"),
        ({"input": ["a", 1]}, "not a mixture"),
        ({"input": ["a"] * 2049}, "'input' takes at most 2048 inputs, got 2049"),
        ({"input": [99_999]}, "token id 99999 is out of range"),
        ({"input": [5] * 131_073}, "maximum context length is 131072 tokens"),
        ({"input": [[5] * 131_072] * 9}, "'input' takes at most 1048576 tokens in all"),
        ({"input": "a", "dimensions": 0}, "dimensions: expected"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: invalid"),
        ({"input": "a", "stream": True}, "stream"),
        ({}, "input"),
    ],
)
def test_faults_name_the_field(fields: dict[str, Any], text: str, vectors: Deployment) -> None:
    body = {"model": "vectors", **fields}
    status, _, answer = vectors.request("POST", PATH, body)
    assert status == 400 and text in answer.decode(), answer


def test_a_worker_that_sends_too_few_vectors(vectors: Deployment) -> None:
    status, answer = embed(vectors, [[1] * 6, [1] * 7])
    assert status == 500, answer
