"""Generated tokens as load, through a real frontend: they grow it, or an expected end fades it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deployment import Deployment
from prometheus_client.parser import text_string_to_metric_families


def test_load_grows_and_fades_with_the_output(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "1", "--block-size", "4")  # 6 ms a token
    deployment.frontend("--router-mode", "kv", "--router-track-output-blocks")
    deployment.wait_for_workers(1)

    def generate(hints: dict[str, Any]) -> int:
        body = {
            "model": "tiny",
            "prompt": "hello " * 120,
            "max_tokens": 200,
            "nvext": {"agent_hints": hints},
        }
        return deployment.request("POST", "/v1/completions", body)[0]

    def blocks() -> float:
        text = deployment.request("GET", "/metrics")[2].decode()
        for family in text_string_to_metric_families(text):
            if family.name == "dynamo_frontend_worker_active_decode_blocks":
                return sum(one.value for one in family.samples)
        return 0.0

    def until(condition: Callable[[float], bool]) -> float:
        deadline = time.monotonic() + 20
        while not condition(seen := blocks()):
            assert time.monotonic() < deadline, f"{seen} blocks"
        return seen

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, {})
        prompt = until(lambda seen: seen > 0)
        until(lambda seen: seen >= prompt + 20)
        assert not running.done() and running.result() == 200
        until(lambda seen: seen == 0)
        running = pool.submit(generate, {"osl": 100})
        until(lambda seen: seen > 0)
        until(lambda seen: 0 < seen < prompt / 2)
        until(lambda seen: seen == 0)
        assert not running.done(), "100 of 200 tokens are there"
        assert running.result() == 200
