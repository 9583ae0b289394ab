"""Workers at capacity, with real processes: another one is asked, then the client gets 503."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from capacity_kit import CHAT, MockerPage, OpenRequest, chat
from deployment import Deployment
from http_bench import error_json

LIMITS = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2"}
CAPACITY = 3  # of a worker: N + Q


def full(worker: MockerPage) -> bool:
    """Whether N requests run and Q wait."""
    return (worker.sample("dynamo_engine_request"), worker.sample("dynamo_request_queue")) == (1, 2)


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_another_worker_answers_then_503(deployment: Deployment, mode: str) -> None:
    workers = [MockerPage(deployment, **LIMITS) for _ in range(2)]
    deployment.frontend("--router-mode", mode)
    deployment.wait_for_workers(2)
    ids = [one["instance_id"] for one in instances(deployment)]
    clients = fill(deployment, ids[0])
    deployment.until(lambda: sum(map(full, workers)) == 1, "one worker is full")
    taken, idle = workers if full(workers[0]) else reversed(workers)

    # The other one takes what the full one rejects; no client notices.
    for _ in range(6):
        assert deployment.request("POST", CHAT, chat(1))[0] == 200
    rejected = taken.sample("dynamo_rejection_request_total")
    if mode == "round-robin":
        assert rejected >= 1
    assert idle.sample("dynamo_rejection_request_total") == 0
    assert deployment.sample("dynamo_frontend_model_rejection_total") == 0

    clients += fill(deployment, ids[1])
    deployment.until(lambda: all(map(full, workers)), "both are full")
    before = sum(one.sample("dynamo_rejection_request_total") for one in workers)
    status, headers, body = deployment.request("POST", CHAT, chat(1))
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body) == error_json(
        "Service temporarily unavailable: All workers are busy, please retry later",
        "service_unavailable",
        503,
        ("server_error", None, "overloaded"),
    )
    after = sum(one.sample("dynamo_rejection_request_total") for one in workers)
    assert 1 <= after - before <= 2  # each worker at most once
    labels = {"model": "tiny", "endpoint": "chat_completions"}
    assert deployment.sample("dynamo_frontend_model_rejection_total", **labels) == 1

    for client in clients:
        client.drop()
    deployment.until(
        lambda: not any(one.sample("dynamo_engine_request") for one in workers), "the engines idle"
    )
    deployment.until(lambda: deployment.request("POST", CHAT, chat(1))[0] == 200, "room again")
    assert deployment.sample("dynamo_frontend_inflight_requests") == 0


def test_a_full_worker_costs_no_hop_until_it_may_have_room(deployment: Deployment) -> None:
    """A burst of requests for one full worker: most are rejected without asking it."""
    worker = MockerPage(deployment, **LIMITS)
    deployment.frontend("--router-mode", "round-robin")
    deployment.wait_for_workers()
    clients = fill(deployment, instances(deployment)[0]["instance_id"])
    deployment.until(lambda: full(worker), "the worker is full")
    begun = time.monotonic()
    statuses = {deployment.request("POST", CHAT, chat(1))[0] for _ in range(50)}
    spent_s = time.monotonic() - begun
    assert statuses == {503}
    assert deployment.sample("dynamo_frontend_model_rejection_total") == 50
    # The worker is asked once, and again at most once a second.
    assert worker.sample("dynamo_rejection_request_total") <= 2 + spent_s
    for client in clients:
        client.drop()
    deployment.until(lambda: deployment.request("POST", CHAT, chat(1))[0] == 200, "room again")


def fill(deployment: Deployment, worker_id: int) -> list[OpenRequest]:
    """Send as many long requests to the worker as it takes."""
    pin = {"x-worker-instance-id": str(worker_id)}
    return [OpenRequest(deployment, chat(8000, stream=True), **pin) for _ in range(CAPACITY)]


def instances(deployment: Deployment) -> list[dict[str, Any]]:
    found = json.loads(deployment.request("GET", "/health")[2])["instances"]
    return [one for one in found if one["endpoint"] == "generate"]
