"""A client that leaves costs nothing any more, whatever stage its request is in."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from capacity_kit import CHAT, MockerPage, OpenRequest, chat
from deployment import MODEL, Deployment
from worker_stubborn import SILENT_S

LONG = "word " * 6000  # seconds of prefill at the speeds below
AREA = "dynamo_frontend"
STREAMS = [False, True]


class Site:
    """A frontend and its workers; the kind of request that the test drops."""

    def __init__(self, deployment: Deployment, stream: bool) -> None:
        self.deployment = deployment
        self.stream = stream

    def send(self, text: str = "hello") -> OpenRequest:
        messages = [{"role": "user", "content": text}]
        body = chat(8000, stream=self.stream, messages=messages)
        return OpenRequest(self.deployment, body)

    def until(self, condition: Callable[[], object], what: str) -> None:
        self.deployment.until(condition, what)

    def until_sample(self, name: str, value: float) -> None:
        name = f"{AREA}_{name}"
        self.until(lambda: self.deployment.sample(name) == value, f"{name} is {value}")

    def cancellations(self, count: float) -> None:
        """The frontend has counted ``count`` cancellations, each once, and nothing is left."""
        self.until_sample("active_requests", 0)
        kind = "stream" if self.stream else "unary"
        labels = {"endpoint": "chat_completions", "model": "tiny", "request_type": kind}
        found = self.deployment.sample(f"{AREA}_model_cancellation_total", **labels)
        assert found == count
        ended = {"error_type": "cancelled", "status": "error", **labels}
        assert self.deployment.sample(f"{AREA}_requests_total", **ended) == count
        for gauge in ("inflight_requests", "queued_requests", "stage_requests"):
            assert self.deployment.sample(f"{AREA}_{gauge}") == 0
        assert self.deployment.sample("dynamo_request_plane_inflight_requests") == 0


@pytest.fixture(params=STREAMS, ids=["unary", "stream"])
def site(deployment: Deployment, request: pytest.FixtureRequest) -> Site:
    return Site(deployment, request.param)


def test_in_the_queue_of_the_router(site: Site) -> None:
    worker = MockerPage(site.deployment, "--speedup-ratio", "0.03")
    flags = ("--router-mode", "kv", "--router-queue-threshold", "0.001")
    site.deployment.frontend(*flags)
    site.deployment.wait_for_workers()
    first = site.send(LONG)
    site.until(lambda: worker.inflight() == 1, "the worker has the first")
    second = site.send(LONG)
    site.until_sample("router_queue_pending_requests", 1)
    second.drop()
    site.until_sample("router_queue_pending_requests", 0)
    first.drop()
    site.until(lambda: worker.inflight() == 0, "the worker is idle")
    site.cancellations(2)
    assert worker.cancelled() == 1  # it never received the second
    assert site.deployment.sample(f"{AREA}_router_queue_left_total") == 1


def test_in_the_queue_of_a_worker(site: Site) -> None:
    worker = MockerPage(site.deployment, DYN_ENGINE_REQUEST_LIMIT="1")
    site.deployment.frontend()
    site.deployment.wait_for_workers()
    clients = [site.send() for _ in range(3)]
    site.until(lambda: worker.inflight() == 3, "the worker has all")
    assert worker.sample("dynamo_engine_request") == 1
    clients[2].drop()
    clients[1].drop()
    site.until(lambda: worker.inflight() == 1, "two have left its queue")
    assert worker.sample("dynamo_engine_request") == 1
    clients[0].drop()
    site.until(lambda: worker.sample("dynamo_engine_request") == 0, "the engine is idle")
    site.cancellations(3)
    assert worker.cancelled() == 3 and worker.inflight() == 0


def test_while_the_prompt_is_computed(site: Site) -> None:
    worker = MockerPage(site.deployment, "--speedup-ratio", "0.01")
    site.deployment.frontend("--router-mode", "kv")
    site.deployment.wait_for_workers()
    client = site.send(LONG)
    site.until(lambda: worker.sample("vllm:num_requests_running") == 1, "the engine computes")
    assert worker.sample("vllm:time_to_first_token_seconds_count") == 0
    client.drop()
    site.until(lambda: worker.sample("vllm:num_requests_running") == 0, "the engine is idle")
    assert worker.sample("vllm:kv_cache_usage_perc") == 0
    site.cancellations(1)
    assert worker.cancelled() == 1


def test_at_a_prefill_worker_and_in_the_queue_before_it(site: Site) -> None:
    slow = ("--speedup-ratio", "0.01")
    prefill = MockerPage(site.deployment, "--disaggregation-mode", "prefill", *slow)
    decode = MockerPage(site.deployment, "--disaggregation-mode", "decode")
    site.deployment.frontend("--router-mode", "kv", "--router-prefill-slots", "1")
    site.deployment.wait_for_workers(2)
    site.until_sample("prefill_workers", 1)
    running, queued = site.send(LONG), None
    site.until(lambda: prefill.sample("vllm:num_requests_running") == 1, "the prompt is computed")
    queued = site.send(LONG)
    site.until_sample("prefill_queue_depth", 1)
    queued.drop()
    site.until_sample("prefill_queue_depth", 0)
    assert site.deployment.sample(f"{AREA}_prefill_active_requests") == 1
    running.drop()
    site.until(lambda: prefill.sample("vllm:num_requests_running") == 0, "the engine is idle")
    site.until_sample("prefill_active_requests", 0)
    site.cancellations(2)
    assert (prefill.cancelled(), decode.cancelled()) == (1, 0)


def drop_behind_pipelined_bytes(client: OpenRequest) -> None:
    client.send(b"x" * 100_000)
    client.drop()


def test_while_tokens_are_generated(site: Site) -> None:
    worker = MockerPage(site.deployment)
    front = site.deployment.frontend("--router-mode", "kv")
    site.deployment.wait_for_workers()

    def kill_frontend(client: OpenRequest) -> None:
        """No frame says that the client is gone: the worker notices the closed connection."""
        front.kill()
        front.wait()

    ways = (OpenRequest.drop, OpenRequest.half_close, drop_behind_pipelined_bytes, kill_frontend)
    for count, leave in enumerate(ways, 1):
        leave_while_tokens_are_generated(site, worker, leave, count)
        if leave is not kill_frontend:
            site.cancellations(count)


def leave_while_tokens_are_generated(
    site: Site, worker: MockerPage, leave: Callable[[OpenRequest], None], count: int
) -> None:
    """``leave`` in the ``count``-th request of a worker that has no other."""
    client = site.send()
    first = "vllm:time_to_first_token_seconds_count"
    site.until(lambda: worker.sample(first) == count, "the first token")
    leave(client)
    site.until(lambda: worker.sample("vllm:num_requests_running") == 0, "the engine is idle")
    assert worker.cancelled() == count and worker.inflight() == 0
    client.drop()


def test_while_the_body_is_read(deployment: Deployment) -> None:
    """Nothing has begun, so nothing is counted; the connection and its bytes are forgotten."""
    MockerPage(deployment)
    deployment.frontend()
    deployment.wait_for_workers()
    client = OpenRequest(deployment, {}, **{"X-Padding": "1"})
    assert client.read().startswith(b"HTTP/1.1 400")
    client.send(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: 500000\r\n\r\n".encode()
        + b"{"
        + b" " * 300_000
    )
    before = deployment.sample(f"{AREA}_http_connections")
    assert before >= 2
    client.drop()
    deployment.until(
        lambda: deployment.sample(f"{AREA}_http_connections") < before, "the connection closed"
    )
    assert deployment.sample(f"{AREA}_model_cancellation_total") == 0
    assert deployment.request("POST", CHAT, chat(1))[0] == 200


def test_an_engine_that_ignores_it_does_not_hold_the_frontend(site: Site) -> None:
    deployment = site.deployment
    log = deployment.logs / "stubborn.log"
    worker = Path(__file__).with_name("worker_stubborn.py")
    with log.open("wb") as out:
        command = [sys.executable, str(worker), str(MODEL)]
        deployment.processes.append(
            subprocess.Popen(command, env=deployment.env, stdout=out, stderr=out)
        )
    front = deployment.frontend()
    deployment.wait_for_workers()
    client = site.send()
    site.until_sample("inflight_requests", 1)
    if site.stream:
        assert client.read()
    site.until(lambda: deployment.sample(f"{AREA}_time_to_first_token_seconds_count"), "a token")
    left_s = time.monotonic()
    client.drop()
    site.cancellations(1)
    assert deployment.request("GET", "/health")[0] == 200
    front.terminate()
    assert front.wait(10) == 0
    assert time.monotonic() - left_s < SILENT_S, "the frontend has waited for the engine"
    assert "ended" not in log.read_text()
    # Its output is discarded, and its generator is closed at the second item.
    site.until(lambda: "ended after 1\n" in log.read_text(), "the generator is closed")
