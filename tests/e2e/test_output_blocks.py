"""Generated tokens as load, through a real frontend: it grows, or falls towards the end."""

from __future__ import annotations

import http.client
import json
from typing import Any

from deployment import Deployment


def test_load_follows_the_output(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "1", "--block-size", "4")  # 6 ms a token
    deployment.frontend("--router-mode", "kv", "--router-track-output-blocks")
    deployment.wait_for_workers(1)

    def begin(hints: dict[str, Any]) -> http.client.HTTPConnection:
        """Start a long answer that lasts until the connection is closed."""
        body = {
            "model": "tiny",
            "prompt": "hello " * 120,
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
            "nvext": {"agent_hints": hints},
        }
        connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        return connection

    def blocks() -> float:
        return deployment.sample("dynamo_frontend_worker_active_decode_blocks")

    running = begin({})
    deployment.until(lambda: blocks() > 0)
    prompt = blocks()
    deployment.until(lambda: blocks() >= prompt + 20)
    running.close()
    deployment.until(lambda: blocks() == 0)
    running = begin({"osl": 300})
    deployment.until(lambda: blocks() > 0)
    deployment.until(lambda: blocks() < prompt / 2)
    deployment.until(lambda: blocks() == 0)
    assert deployment.sample("dynamo_frontend_inflight_requests") == 1, (
        "the answer should still be running"
    )
    running.close()
