"""A worker that is told to stop, under load: requests go to others, its streams end in time."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from deployment import Deployment, interrupt_again
from load_kit import under_load

SPEED = ("--speedup-ratio", "2", "--reply", "random")


def lease_of(deployment: Deployment, process: subprocess.Popen[bytes]) -> str:
    """The name of the lease of a worker."""
    store = deployment.state_dir / deployment.namespace / "store" / "leases"
    for path in store.iterdir():
        if json.loads(path.read_bytes()).get("pid") == process.pid:
            return str(path)
    raise AssertionError(f"no lease of {process.pid} in {list(store.iterdir())}")


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "lease"])
def test_a_draining_worker_costs_no_request(deployment: Deployment, end: str) -> None:
    workers = [deployment.mocker(*SPEED) for _ in range(2)]
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(2)
    with under_load(deployment.port) as load:
        deployment.until(lambda: load.answered > 20)
        if end == "lease":
            Path(lease_of(deployment, workers[0])).unlink()
        else:
            workers[0].send_signal(signal.Signals[end])
        assert workers[0].wait(20) == 0
        enough = load.answered + 20
        deployment.until(lambda: load.answered > enough)


@contextmanager
def stream(deployment: Deployment, tokens: int) -> Iterator[http.client.HTTPResponse]:
    """A completion of which the first bytes have arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=60)
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": tokens, "stream": True}
    data = json.dumps(body | {"ignore_eos": True})
    with closing(connection):
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200 and answer.readline().startswith(b"data: ")
            yield answer


@pytest.mark.parametrize("again", [False, True])
def test_the_drain_ends_at_its_timeout_or_a_second_signal(
    deployment: Deployment, again: bool
) -> None:
    timeout_s = "60" if again else "0.5"
    worker = deployment.mocker(DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS=timeout_s)
    deployment.frontend()
    deployment.wait_for_workers()
    with stream(deployment, 8000) as answer:
        tree = psutil.Process(worker.pid).children(recursive=True)
        worker.send_signal(signal.SIGINT)
        if again:
            deployment.until(lambda: deployment.request("GET", "/health")[0] == 503)
            interrupt_again(worker)
        assert worker.wait(20) == 0  # the stream alone takes longer
        events = answer.read().split(b"\n\n")
    assert b'"error"' in events[-3] and events[-2] == b"data: [DONE]"
    assert not psutil.wait_procs(tree, timeout=20)[1]
    deployment.until(lambda: deployment.sample("dynamo_frontend_inflight_requests") == 0)


def test_streams_that_outlast_the_drain_go_on_elsewhere(deployment: Deployment) -> None:
    """A short drain under load: every request still gets all of its tokens."""
    short = {"DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "0.05"}
    slow = ("--speedup-ratio", "0.5", "--reply", "random")
    workers = [deployment.mocker(*slow, **short) for _ in range(2)]
    deployment.frontend("--router-mode", "round-robin", "--migration-limit", "3")
    deployment.wait_for_workers(2)
    with under_load(deployment.port, tokens=200) as load:
        # The clients are in step: all of them have begun a round, and none has ended it.
        deployment.until(
            lambda: (
                load.answered > 0
                and load.answered % 6 == 0
                and deployment.sample("dynamo_frontend_inflight_requests") == 6
            )
        )
        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(60) == 0
        enough = load.answered + 8
        deployment.until(lambda: load.answered > enough)
    assert deployment.sample("dynamo_frontend_model_migration_total") > 0
