"""The prefill load model in real processes: fitted to mockers, observed through /v1/route."""

from __future__ import annotations

import http.client
import importlib.util
import json

import pytest
from deployment import Deployment


def complete(deployment: Deployment, words: int, number: int) -> None:
    body = {"model": "tiny", "prompt": f"{number} " * words, "max_tokens": 1}
    assert deployment.request("POST", "/v1/completions", body)[0] == 200


def active_prefill(deployment: Deployment) -> int:
    found = json.loads(deployment.request("GET", "/v1/route?prompt=x")[2])
    (row,) = found["candidates"]
    tokens: int = row["active_prefill_tokens"]
    return tokens


@pytest.mark.parametrize("model", ["none", "fitted"])
def test_prefill_load_decreases_while_a_prompt_is_computed(
    deployment: Deployment, model: str
) -> None:
    deployment.mocker("--speedup-ratio", "0.02", "--block-size", "16", "--no-enable-prefix-caching")
    deployment.frontend("--router-mode", "kv", "--router-prefill-load-model", model)
    deployment.wait_for_workers(1)
    for number, words in enumerate((10, 100, 300, 50, 200, 20, 400, 150, 30)):
        complete(deployment, words, number)
    prompt = json.dumps({"model": "tiny", "prompt": "long " * 8000, "max_tokens": 1})
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
    connection.request("POST", "/v1/completions", prompt, {"content-type": "application/json"})
    deployment.until(lambda: active_prefill(deployment))
    seen: list[int] = []

    def seen_enough() -> bool:
        seen.append(active_prefill(deployment))
        return len(set(seen) if model == "fitted" else seen) > 3

    deployment.until(seen_enough)
    connection.close()  # which ends the request, long before its prompt is computed
    assert seen == sorted(seen, reverse=True) and seen[-1] > 0
    assert (len(set(seen)) > 3) is (model == "fitted"), seen
    deployment.until(lambda: not active_prefill(deployment))


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator") is not None, reason="AIConfigurator is installed"
)
def test_a_model_that_is_not_installed_fails_the_start(deployment: Deployment) -> None:
    aic = ("--aic-backend", "vllm", "--aic-system", "h200_sxm", "--aic-model-path", "m")
    flags = ("--router-mode", "kv", "--router-prefill-load-model", "aic", *aic)
    assert deployment.frontend(*flags).wait(20) == 1
    assert "pip install 'dynamo-appliance[aic]'" in deployment.tail()
    path = f"{deployment.namespace}.backend.generate"
    assert deployment.start("dynamo.router", "--endpoint", path, *flags[2:]).wait(20) == 1
