"""A client that leaves reaches EngineCore: decoding, waiting in the engine, waiting before it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from answers_kit import chat
from capacity_kit import OpenRequest
from servers_kit import EngineDeployment, closing

LONG = 1900  # tokens: more than a minute on a CPU
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest.fixture(scope="module")
def narrow(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[EngineDeployment]:
    """An engine that computes one request and queues one more; a third waits before it."""
    with closing(EngineDeployment(tmp_path_factory.mktemp("narrow"))) as made:
        made.frontend("--router-mode", "kv")
        limits = {"DYN_ENGINE_REQUEST_LIMIT": "2", **made.status_server()}
        made.worker(tiny_model, "tiny", "--max-num-seqs", "1", **limits)
        made.wait_for_models("tiny")
        yield made


@pytest.mark.parametrize("stream", [True, False])
def test_every_stage_is_freed(narrow: EngineDeployment, stream: bool) -> None:
    body = chat("Tell me more", model="tiny", max_tokens=LONG, ignore_eos=True, stream=stream)
    before = narrow.engine_sample("vllm:generation_tokens_total")
    clients = []
    stages = ({RUNNING: 1}, {RUNNING: 1, WAITING: 1}, {"dynamo_engine_request": 2})
    for expected in stages:
        clients.append(OpenRequest(narrow, body))
        narrow.until(partial(holds, narrow, expected), f"it is {expected}")
    narrow.until(
        lambda: holds(narrow, {"dynamo_component_inflight_requests": 3}), "the worker has three"
    )
    decoding, waiting, queued = clients
    queued.drop()
    narrow.until(
        lambda: holds(narrow, {"dynamo_component_inflight_requests": 2}), "it has left the queue"
    )
    assert holds(narrow, {"dynamo_engine_request": 2})
    waiting.drop()
    narrow.until(lambda: holds(narrow, {WAITING: 0, RUNNING: 1}), "the engine queues none")
    decoding.drop()
    narrow.until(lambda: holds(narrow, {WAITING: 0, RUNNING: 0}), "the engine computes none")
    assert holds(narrow, {"dynamo_engine_request": 0, "dynamo_component_inflight_requests": 0})
    # They did not end by themselves.
    assert narrow.engine_sample("vllm:generation_tokens_total") - before < LONG
    kind = "stream" if stream else "unary"
    name = "dynamo_frontend_model_cancellation_total"
    assert narrow.sample(name, model="tiny", request_type=kind) == 3


def holds(narrow: EngineDeployment, expected: dict[str, int]) -> bool:
    """Whether the samples on the worker's page have these values."""
    return all(narrow.engine_sample(name) == value for name, value in expected.items())
