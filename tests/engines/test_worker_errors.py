"""The exception of a worker's handler decides the error that a client gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import MODEL, Deployment, free_port

WORKER = Path(__file__).with_name("worker_failing.py")
UNAVAILABLE = (503, "Service temporarily unavailable", "Service Unavailable")


def start(deployment: Deployment, name: str = "failing") -> None:
    with (deployment.logs / f"{name}.log").open("wb") as log:
        command = [sys.executable, str(WORKER), str(MODEL)]
        process = subprocess.Popen(command, env=deployment.env, stdout=log, stderr=log)
    deployment.processes.append(process)


def complete(deployment: Deployment, token: int, **more: Any) -> tuple[int, bytes]:
    body = {"model": "tiny", "prompt": [token, 9, 9], "max_tokens": 4, **more}
    status, _, answer = deployment.request("POST", "/v1/completions", body)
    return status, answer


@pytest.fixture
def failing(deployment: Deployment) -> Deployment:
    start(deployment)
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(1)
    return deployment


def test_every_exception_has_its_status(failing: Deployment) -> None:
    for token, expected in {
        1: (400, "n is odd", "Bad Request"),
        2: (418, "short and stout", "I'm a Teapot"),
        3: UNAVAILABLE,
        4: (500, "Internal server error", "Internal Server Error"),
        5: (500, "Internal server error", "Internal Server Error"),
        6: (499, "Request cancelled", "Client Closed Request"),
        **dict.fromkeys(
            (9, 11, 12, 13, 14), (500, "Internal server error", "Internal Server Error")
        ),
    }.items():
        for stream in (False, True):
            status, answer = complete(failing, token, stream=stream)
            said = json.loads(answer)
            assert (status, said["message"], said["type"]) == expected
            assert said["code"] == status and b"secret" not in answer
    assert complete(failing, 8)[0] == 200


def test_an_engine_route_that_asks_to_end_the_worker_does_not(deployment: Deployment) -> None:
    port = free_port()
    deployment.env["DYN_SYSTEM_PORT"] = str(port)
    start(deployment)
    deployment.env.pop("DYN_SYSTEM_PORT")
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(1)
    for way in (5, 9, 10, 11, 12, 13, 14):
        status, _, answer = deployment.request("POST", "/engine/end", {"way": way}, port=port)
        assert status == 500 and json.loads(answer)["error"], way
        assert deployment.processes[0].poll() is None
    assert complete(deployment, 8)[0] == 200


@pytest.mark.parametrize("token", [7, 10])
def test_a_worker_whose_engine_shut_down_gets_no_requests(failing: Deployment, token: int) -> None:
    status, answer = complete(failing, token)
    said = json.loads(answer)
    assert (status, said["message"], said["type"]) == UNAVAILABLE
    failing.wait_for_workers(0)
    status, answer = complete(failing, 8)
    assert status == 503 and b"is not ready to serve requests" in answer


def test_other_workers_serve_after_an_engine_shutdown(failing: Deployment) -> None:
    start(failing, "second")
    failing.wait_for_workers(2)
    extra = {"nvext": {"extra_fields": ["worker_id"]}}

    def where() -> int:
        status, answer = complete(failing, 8, **extra)
        assert status == 200
        return int(json.loads(answer)["nvext"]["worker_id"]["decode_worker_id"])

    assert len({where() for _ in range(40)}) == 2
    leaving = where()
    assert complete(failing, 7, nvext={"backend_instance_id": leaving})[0] == 503
    assert leaving not in {where() for _ in range(20)}


def test_an_unreachable_worker_fails_no_request(deployment: Deployment) -> None:
    start(deployment)
    start(deployment, "second")
    deployment.frontend("--router-mode", "round-robin")
    deployment.wait_for_workers(2)
    run_dir = deployment.state_dir / deployment.namespace
    sockets = [path for path in run_dir.glob("*.sock") if path.name.count(".") == 1]
    assert len(sockets) == 2, sockets
    sockets[0].unlink()
    assert [complete(deployment, 8)[0] for _ in range(10)] == [200] * 10
