"""Generated tokens as load, through a real frontend: they grow it, or an expected end fades it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

from deployment import Deployment
from prometheus_client.parser import text_string_to_metric_families


def test_load_grows_and_fades_with_the_output(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "1", "--block-size", "4")  # 6 ms a token
    deployment.frontend("--router-mode", "kv", "--router-track-output-blocks")
    deployment.wait_for_workers(1)

    def begin(hints: dict[str, Any]) -> http.client.HTTPConnection:
        """A long answer, until the connection is closed."""
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

    def sample(name: str) -> float:
        text = deployment.request("GET", "/metrics")[2].decode()
        families = text_string_to_metric_families(text)
        return sum(one.value for each in families if each.name == name for one in each.samples)

    def until(condition: Callable[[float], bool]) -> float:
        deadline = time.monotonic() + 20
        while not condition(blocks := sample("dynamo_frontend_worker_active_decode_blocks")):
            assert time.monotonic() < deadline, f"{blocks} blocks"
        return blocks

    running = begin({})
    prompt = until(lambda blocks: blocks > 0)
    until(lambda blocks: blocks >= prompt + 20)
    running.close()
    until(lambda blocks: blocks == 0)
    running = begin({"osl": 300})
    until(lambda blocks: blocks > 0)
    until(lambda blocks: blocks < prompt / 2)
    until(lambda blocks: blocks == 0)
    assert sample("dynamo_frontend_inflight_requests") == 1, "it goes on, against expectation"
    running.close()
