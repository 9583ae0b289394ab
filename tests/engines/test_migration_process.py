"""Workers fail in the middle of answers; the clients notice nothing. Real processes."""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployment import Deployment
from fault_kit import Answer, Workers, stream, unary

MIGRATIONS = "dynamo_frontend_model_migration_total"


def migrated(deployment: Deployment) -> float:
    return deployment.sample(MIGRATIONS, migration_type="ongoing_request")


def idle(deployment: Deployment) -> None:
    """Wait until no request is counted as running."""
    names = "active_requests", "inflight_requests", "queued_requests"
    deployment.until(
        lambda: not any(deployment.sample(f"dynamo_frontend_{name}") for name in names),
        "no running request",
    )


@pytest.fixture
def workers(deployment: Deployment) -> Workers:
    return Workers(deployment)


def aggregated(deployment: Deployment, workers: Workers, count: int = 2, **env: str) -> None:
    """Start workers of 1 s for an answer, and a frontend whose requests migrate."""
    for _ in range(count):
        workers.start(**env)
    deployment.frontend("--router-mode", "kv", "--migration-limit", "3", **env)
    deployment.wait_for_workers(count)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_killed_worker(deployment: Deployment, workers: Workers, streaming: bool) -> None:
    aggregated(deployment, workers, 3)
    expected = stream(deployment)
    assert expected.usage["completion_tokens"] == 150 and expected.reason == "length"

    def kill(answer: Answer) -> None:
        workers.signal(answer.worker_id, signal.SIGKILL)

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(unary, deployment) for _ in range(6)] if not streaming else []
        first = stream(deployment, kill)
        answers = [first, *(other.result() for other in others)]
    assert [one.error for one in answers] == [None] * len(answers), deployment.tail()
    assert {repr(one.content) for one in answers} == {repr(expected.content)}
    assert migrated(deployment) >= 1
    idle(deployment)
    name = "dynamo_frontend_model_migration_duration_seconds"
    assert deployment.sample(f"{name}_count", outcome="success") == migrated(deployment)


def test_cut_connections(deployment: Deployment, workers: Workers) -> None:
    """The only worker gets the rest of the request on a new connection, three times."""
    aggregated(deployment, workers, 1)
    expected = stream(deployment)

    def cut(answer: Answer) -> None:
        assert workers.cut_connections(answer.worker_id)

    assert stream(deployment, cut, calls=3).content == expected.content
    assert migrated(deployment) == 3
    idle(deployment)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_limit(deployment: Deployment, workers: Workers, streaming: bool) -> None:
    everyone = {workers.start() for _ in range(3)}
    deployment.frontend("--router-mode", "kv", "--migration-limit", "1")
    deployment.wait_for_workers(3)
    assert deployment.sample("dynamo_frontend_model_migration_limit") == 1

    def kill_all(answer: Answer) -> None:
        workers.signal(answer.worker_id, signal.SIGKILL)
        deployment.until(lambda: migrated(deployment) >= 1, "a migration")
        for other in everyone - {answer.worker_id}:
            workers.signal(other, signal.SIGKILL)

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(unary, deployment) for _ in range(6)] if not streaming else []
        error = stream(deployment, kill_all).error
        found = [other.result().error for other in others]
    message = "Migration limit exhausted"
    assert error == {"message": message, "type": "service_unavailable", "param": None, "code": 503}
    assert streaming or any(one["message"] == message and one["code"] == 503 for one in found)
    idle(deployment)


def test_an_aborted_drain(deployment: Deployment, workers: Workers) -> None:
    """SIGTERM, and a grace period that ends before the answer."""
    aggregated(
        deployment,
        workers,
        DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0",
        DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.1",
    )
    expected = stream(deployment)
    stopped: list[int] = []

    def stop(answer: Answer) -> None:
        stopped.append(answer.worker_id)
        workers.signal(answer.worker_id, signal.SIGTERM)

    assert stream(deployment, stop).content == expected.content
    assert workers.wait(stopped[0]) == 0
    assert migrated(deployment) == 1
    idle(deployment)


@pytest.mark.parametrize("bound", ["of the stream", "of the worker"])
def test_a_stopped_worker(deployment: Deployment, workers: Workers, bound: str) -> None:
    """SIGSTOP: the worker is silent, and its connection stays open."""
    if bound == "of the stream":
        aggregated(deployment, workers, 2, DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS="0.5")
    else:
        aggregated(deployment, workers)
    expected = stream(deployment)
    stopped: list[int] = []

    def stop(answer: Answer) -> None:
        stopped.append(answer.worker_id)
        workers.signal(answer.worker_id, signal.SIGSTOP)

    try:
        assert stream(deployment, stop).content == expected.content
        assert unary(deployment).content == expected.content, "the stopped worker is avoided"
    finally:
        workers.signal(stopped[0], signal.SIGCONT)
    assert migrated(deployment) == 1
    idle(deployment)


@pytest.mark.parametrize("killed", ["decode", "both"])
def test_disaggregated(deployment: Deployment, workers: Workers, killed: str) -> None:
    """The rest of the answer goes through a prefill worker again, if there is one."""
    prefill = workers.start("--disaggregation-mode", "prefill")
    for _ in range(2):
        workers.start("--disaggregation-mode", "decode")
    deployment.frontend("--router-mode", "kv", "--migration-limit", "3")
    deployment.wait_for_workers(3)
    deployment.until(lambda: deployment.sample("dynamo_frontend_prefill_workers") == 1)
    expected = stream(deployment)

    def kill(answer: Answer) -> None:
        if killed == "both":
            workers.signal(prefill, signal.SIGKILL)
        workers.signal(answer.worker_id, signal.SIGKILL)

    assert stream(deployment, kill).content == expected.content
    assert migrated(deployment) >= 1
    prefills = deployment.sample("dynamo_frontend_prefill_requests_total")
    assert prefills == (2 if killed == "both" else 3)
    idle(deployment)


def test_full_workers(deployment: Deployment, workers: Workers) -> None:
    """The only other worker is at capacity: its requests end first."""
    slots = {"DYN_ENGINE_REQUEST_LIMIT": "1", "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2"}
    aggregated(deployment, workers, 2, **slots)
    expected = stream(deployment, max_tokens=60)

    def kill(answer: Answer) -> None:
        workers.signal(answer.worker_id, signal.SIGKILL)

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(unary, deployment, max_tokens=60) for _ in range(5)]
        first = stream(deployment, kill, max_tokens=60)
        answers = [first, *(other.result() for other in others)]
    assert [one.error for one in answers] == [None] * 6, deployment.tail()
    assert {repr(one.content) for one in answers} == {repr(expected.content)}
    assert migrated(deployment) >= 1
    refused = deployment.sample(MIGRATIONS, migration_type="new_request")
    assert refused, "the other worker was full at first"
    idle(deployment)


def test_without_a_limit_the_client_gets_an_error(deployment: Deployment, workers: Workers) -> None:
    for _ in range(2):
        workers.start()
    deployment.frontend("--router-mode", "round-robin")
    deployment.wait_for_workers(2)
    answer = stream(deployment, lambda one: workers.signal(one.worker_id, signal.SIGKILL))
    assert answer.error["message"] == "Service temporarily unavailable"
    assert migrated(deployment) == 0
    idle(deployment)


def test_bad_limits_are_refused(deployment: Deployment) -> None:
    for flag in ("--migration-limit=-1", "--migration-max-seq-len=0"):
        frontend = deployment.frontend(flag)
        assert frontend.wait(20) == 2
        deployment.processes.remove(frontend)
        assert isinstance(frontend, subprocess.Popen)
