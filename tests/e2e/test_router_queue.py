"""The router's queue through a real frontend before one slow worker."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from deployment import Deployment

Answer = tuple[int, Any, float]


def body(text: str, **nvext: Any) -> dict[str, Any]:
    # More than 8 tokens, 0.001 of the worker's 8192. The first request takes long, whatever else
    # this machine does, the others are quick.
    prompt = f"{text} " * (1000 if text == "alpha" else 20)
    user = "held" if text == "alpha" else text  # an attached server holds that one
    return {"model": "tiny", "prompt": prompt, "max_tokens": 1, "nvext": nvext, "user": user}


class Clients:
    """Concurrent requests, each on its own connection."""

    def __init__(self, deployment: Deployment, pool: ThreadPoolExecutor) -> None:
        self.deployment = deployment
        self.pool = pool

    def send(
        self, text: str, headers: dict[str, str] | None = None, **nvext: Any
    ) -> Future[Answer]:
        return self.pool.submit(self._ask, body(text, **nvext), headers)

    def _ask(self, request: dict[str, Any], headers: dict[str, str] | None) -> Answer:
        status, _, answer = self.deployment.request("POST", "/v1/completions", request, headers)
        return status, json.loads(answer), time.monotonic()

    def leaver(self, text: str) -> http.client.HTTPConnection:
        """Send a request whose client is closed before the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.deployment.port, timeout=30)
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body(text)), head)
        return connection

    def until(self, name: str, value: float, **labels: str) -> None:
        """Wait until the metric is ``value``."""
        sample = self.deployment.sample
        self.deployment.until(lambda: sample(name, **labels) == value, f"{name} is {value}")


@pytest.mark.parametrize("worker", ["mocker", "attached"])
def test_order_disconnects_and_the_bound(deployment: Deployment, worker: str) -> None:
    if worker == "mocker":
        deployment.mocker("--speedup-ratio", "0.03")
        threshold = "0.001"
    else:
        server = deployment.openai_server()
        deployment.attached(server, "--engine-request-limit", "1")
        threshold = "0.0000008"  # of 10,000,000, for the server does not say what its batch is
    flags = ("--router-mode", "kv", "--router-queue-threshold", threshold)
    deployment.frontend(*flags, DYN_ROUTER_QUEUE_LIMIT="3")
    deployment.wait_for_workers(1)
    area = "dynamo_frontend_router"
    labels = {"model": "tiny", "policy_class": "default", "worker_type": "decode"}
    with ThreadPoolExecutor(8) as pool:
        clients = Clients(deployment, pool)
        running = clients.send("alpha")
        clients.until(f"{area}_admission_received_total", 1, **labels)
        usual = clients.send("bravo", extra_fields=["timing"])
        clients.until(f"{area}_queue_pending_requests", 1, **labels)
        leaver = clients.leaver("charlie")
        clients.until(f"{area}_queue_pending_requests", 2, **labels)
        hasty = clients.send("delta", agent_hints={"latency_sensitivity": 30.0})
        clients.until(f"{area}_queue_pending_requests", 3, **labels)
        status, refused, _ = clients.send("echo").result()
        assert (status, refused["code"], refused["type"]) == (503, 503, "service_unavailable")
        assert "queue requests limit reached (current=3, limit=3)" in refused["message"]
        assert not running.done(), "the test was too slow for the worker"
        found = json.loads(deployment.request("POST", "/v1/route", body("echo"))[2])
        assert found["queued_requests"] == 3
        leaver.close()
        clients.until(f"{area}_queue_left_total", 1, **labels)
        strict = clients.send("foxtrot", {"x-dynamo-request-strict-priority": "2"})
        clients.until(f"{area}_queue_backpressure_total", 3, reason="backlog", **labels)
        if worker == "attached":
            deployment.request("GET", "/release", port=server)

        answers = [one.result() for one in (running, strict, hasty, usual)]
        assert [status for status, _, _ in answers] == [200] * 4
        times = [at for _, _, at in answers]
        assert times == sorted(times)
        if worker == "mocker":
            timing = answers[3][1]["nvext"]["timing"]
            assert timing["router_queue_depth"] == 0
            assert timing["prefill_wait_time_ms"] > 2 * timing["prefill_time_ms"]
        assert deployment.sample(f"{area}_queue_backpressure_total", reason="prefill_load") == 1
        assert deployment.sample(f"{area}_admission_rejected_total", reason="queue_limit") == 1
        assert deployment.sample(f"{area}_queue_wait_seconds_count") == 3
        clients.until(f"{area}_queue_pending_requests", 0)
        clients.until(f"{area}_queue_pending_isl_tokens", 0)
        clients.until("dynamo_frontend_worker_active_prefill_tokens", 0)
        clients.until("dynamo_frontend_worker_active_decode_blocks", 0)
