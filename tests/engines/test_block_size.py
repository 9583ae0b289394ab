"""Workers whose KV block size differs from the frontend's are rejected, with a log and a metric."""

from __future__ import annotations

import json

from deployment import Deployment


def rejected(deployment: Deployment) -> bool:
    page = deployment.request("GET", "/metrics")[2].decode()
    return any("rejected" in line and 'reason="block_size"' in line for line in page.splitlines())


def models(deployment: Deployment) -> list[str]:
    return [one["id"] for one in json.loads(deployment.request("GET", "/v1/models")[2])["data"]]


def test_a_forced_size_that_no_worker_has(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
    deployment.frontend("--router-mode", "kv", "--kv-cache-block-size", "32")
    deployment.until(lambda: rejected(deployment), "the refusal")
    assert models(deployment) == []
    text = "has KV blocks of 16 tokens, this frontend hashes blocks of 32"
    assert text in deployment.tail() and "--kv-cache-block-size 16" in deployment.tail()


def test_two_workers_that_differ(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(1)
    deployment.mocker("--speedup-ratio", "0", "--block-size", "32")
    deployment.until(lambda: rejected(deployment), "the refusal")
    assert "they have KV blocks of 16 tokens, it has 32" in deployment.tail()
    assert models(deployment) == ["tiny"]


def test_the_standalone_router_rejects_too(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
    path = f"{deployment.namespace}.backend.generate"
    deployment.start("dynamo.router", "--endpoint", path)  # blocks of 128
    text = "has KV blocks of 16 tokens, this router hashes blocks of 128: it gets no requests"
    deployment.until(lambda: text in deployment.tail(), "the refusal")
