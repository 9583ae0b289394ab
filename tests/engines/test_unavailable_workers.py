"""Workers that stop answering, as the frontend shows them: /health, metrics, logs, requests."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from deployment import Deployment

SHORT = {"DYN_REQUEST_PLANE_SILENCE_TIMEOUT": "1", "DYN_TCP_REQUEST_TIMEOUT": "4"}


def complete(deployment: Deployment) -> int:
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 2}
    return deployment.request("POST", "/v1/completions", body)[0]


def health(deployment: Deployment) -> tuple[int, dict[str, Any]]:
    status, _, body = deployment.request("GET", "/health")
    return status, json.loads(body)


def outages(deployment: Deployment) -> list[str]:
    rows = health(deployment)[1]["instances"]
    return [one["unavailable"]["reason"] for one in rows if "unavailable" in one]


def requests_until(deployment: Deployment, reasons: list[str]) -> None:
    """Send requests until the frontend shows these outages."""

    def found() -> bool:
        if outages(deployment) == reasons:
            return True
        complete(deployment)
        return False

    deployment.until(found, f"outages {reasons}")


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_a_stopped_worker_gets_no_requests_until_it_resumes(
    deployment: Deployment, mode: str
) -> None:
    flags = ("--speedup-ratio", "0")
    workers = [deployment.mocker(*flags), deployment.mocker(*flags)]
    deployment.frontend("--router-mode", mode, **SHORT)
    deployment.wait_for_workers(2)
    assert complete(deployment) == 200 and outages(deployment) == []
    workers[0].send_signal(signal.SIGSTOP)
    try:
        requests_until(deployment, ["silent"])
        assert health(deployment)[0] == 200
        assert [complete(deployment) for _ in range(20)] == [200] * 20
        endpoint = f"{deployment.namespace}/backend/generate"
        name = "dynamo_request_plane_unavailable_workers"
        assert deployment.sample(name, endpoint=endpoint) == 1
        name = "dynamo_request_plane_worker_outages_total"
        assert deployment.sample(name, endpoint=endpoint, reason="silent") >= 1
        workers[1].send_signal(signal.SIGSTOP)
        requests_until(deployment, ["silent", "silent"])
        status, body = health(deployment)
        assert status == 503 and body["message"] == "No instance answers"
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
    deployment.until(lambda: outages(deployment) == [], "all workers back")
    assert health(deployment)[0] == 200
    assert [complete(deployment) for _ in range(4)] == [200] * 4
    assert "gets requests again" in deployment.tail()


def test_a_failed_health_check_shows_in_the_frontend_and_on_the_worker(
    deployment: Deployment,
) -> None:
    """The engine takes longer than its health check may."""
    checks = {
        "DYN_HEALTH_CHECK_ENABLED": "1",
        "DYN_CANARY_WAIT_TIME": "1",
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "0.01",
    }
    slow = ("--speedup-ratio", "0.01")
    deployment.mocker(*slow, **checks)
    deployment.frontend(**SHORT)
    deployment.wait_for_workers(1)
    deployment.until(lambda: outages(deployment) == ["unhealthy"], "the failed check")
    status, body = health(deployment)
    [row] = body["instances"]
    assert status == 503 and "no answer to a health check" in row["unavailable"]["message"]
    assert complete(deployment) == 200  # the only worker is tried all the same
    deployment.until(lambda: outages(deployment) == [], "the end of the outage")
