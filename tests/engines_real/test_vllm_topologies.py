"""Data-parallel ranks, prefill and decode workers, and the driver over AsyncLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers_kit import COMPLETIONS
from servers_kit import EngineDeployment, closing

START_S = 200.0
E2E, GAPS, FIRST = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
)
PROMPT = list(range(100, 164))
"""Two blocks of 32 tokens; the last one is computed again."""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[EngineDeployment]:
    with closing(EngineDeployment(tmp_path / "deployment")) as deployment:
        deployment.frontend("--router-mode", "kv")
        yield deployment


def ask(made: EngineDeployment, **more: Any) -> dict[str, Any]:
    nvext = {"extra_fields": ["worker_id"], **more.pop("nvext", {})}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "nvext": nvext}
    return made.post(COMPLETIONS, {**body, **more})


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_router_chooses_the_rank_that_has_the_blocks(
    made: EngineDeployment, tiny_model: Path
) -> None:
    made.worker(tiny_model, "tiny", "--data-parallel-size", "2", **made.status_server())
    made.wait_for_models("tiny", timeout_s=START_S)
    first = ask(made, nvext={"dp_rank": 1})
    assert cached(first) == 0
    assert first["nvext"]["worker_id"]["decode_dp_rank"] == 1
    again = [ask(made) for _ in range(4)]
    assert [each["nvext"]["worker_id"]["decode_dp_rank"] for each in again] == [1] * 4
    assert [cached(each) for each in again] == [32] * 4
    other = ask(made, nvext={"dp_rank": 0})
    assert cached(other) == 0
    assert other["choices"][0]["text"] == first["choices"][0]["text"]
    for metric, by_rank in ((E2E, (1, 5)), (GAPS, (7, 5 * 7)), (FIRST, (1, 5))):
        counted = [made.engine_sample(f"{metric}_count", engine=rank) for rank in "01"]
        assert counted == list(by_rank), metric


def test_a_decode_worker_fetches_the_blocks_of_a_prefill_worker(
    made: EngineDeployment, tiny_model: Path, tmp_path: Path
) -> None:
    """Over vLLM's ExampleConnector, which shares blocks in files."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    flags = ("--kv-transfer-config", json.dumps(connector))
    made.worker(tiny_model, "tiny", "--disaggregation-mode", "decode", *flags)
    made.worker(tiny_model, "tiny", "--disaggregation-mode", "prefill", *flags)
    made.wait_for_models("tiny", timeout_s=START_S)
    made.until(lambda: "prompts go to" in made.tail(), "a prefill worker", START_S)
    answer = ask(made)
    places = answer["nvext"]["worker_id"]
    assert places["prefill_worker_id"] != places["decode_worker_id"]
    assert cached(answer) == 32, "the decode worker had nothing of its own"
    assert answer["usage"]["completion_tokens"] == 8


def test_async_llm_gives_the_same_answers(
    made: EngineDeployment, ours: EngineDeployment, tiny_model: Path
) -> None:
    made.worker(tiny_model, "tiny", "--use-async-llm", **made.status_server())
    made.wait_for_models("tiny", timeout_s=START_S)
    expected = ask(ours, logprobs=2)["choices"]
    assert ask(made, logprobs=2)["choices"] == expected
    assert cached(ask(made)) == 32
    status, _, body = made.request(
        "POST", COMPLETIONS, {"model": "tiny", "prompt": [1], "stop_token_ids": [10**6]}
    )
    assert status == 400, body
    for metric, count in ((E2E, 2), (GAPS, 14), (FIRST, 2)):
        assert made.engine_sample(f"{metric}_count") == count, metric
