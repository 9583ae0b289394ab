"""/v1/embeddings over vLLM's pooling runner: the vectors of vLLM's own server."""

from __future__ import annotations

import base64
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers_kit import CHAT, prompts
from lazy_module import openai
from servers_kit import AttachedEngine, EngineDeployment, closing

PATH = "/v1/embeddings"
POOLING = ("--runner", "pooling", "--hf-overrides", '{"is_matryoshka": true}')
INPUTS: list[Any] = [
    "Hello there",
    prompts(8),
    [5, 900, 1200, 77],
    [[5, 900], [1200, 77, 3000], [9] * 100],
]


@pytest.fixture(scope="module")
def pooling(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[tuple[EngineDeployment, EngineDeployment]]:
    """A frontend with our worker, and vLLM's server, both with the weights of ``tiny``."""
    directory = tmp_path_factory.mktemp("pooling")
    with (
        closing(EngineDeployment(directory / "ours")) as ours,
        closing(EngineDeployment(directory / "theirs")) as theirs,
    ):
        ours.frontend("--router-mode", "kv")
        ours.worker(tiny_model, "tiny", *POOLING)
        theirs.vllm_server(tiny_model, "tiny", *POOLING)
        ours.wait_for_models("tiny")
        theirs.wait_for_models("tiny")
        yield ours, theirs


@pytest.mark.parametrize("given", INPUTS, ids=["text", "texts", "ids", "lists of ids"])
@pytest.mark.parametrize("dimensions", [None, 32])
def test_the_vectors_are_the_engines(
    given: Any, dimensions: int | None, pooling: tuple[EngineDeployment, EngineDeployment]
) -> None:
    ours, theirs = pooling
    body = {"model": "tiny", "input": given}
    if dimensions is not None:
        body["dimensions"] = dimensions
    mine, other = ours.post(PATH, body), theirs.post(PATH, body)
    assert [each["index"] for each in mine["data"]] == [each["index"] for each in other["data"]]
    for one, expected in zip(mine["data"], other["data"], strict=True):
        assert len(one["embedding"]) == (dimensions or 256)
        assert one["embedding"] == pytest.approx(expected["embedding"], abs=1e-5)
        assert sum(each * each for each in one["embedding"]) == pytest.approx(1, abs=1e-3)
    for name in ("prompt_tokens", "total_tokens"):
        assert mine["usage"][name] == other["usage"][name]


CHAT_OF = [{"role": "system", "content": "Find songs"}, {"role": "user", "content": "Hello there"}]


@pytest.mark.parametrize(
    "more",
    [
        {"messages": CHAT_OF},
        {"messages": [CHAT_OF, CHAT_OF[1:]]},
        {"messages": CHAT_OF, "add_generation_prompt": True},
        {"messages": CHAT_OF, "continue_final_message": True, "add_special_tokens": True},
        {"messages": CHAT_OF, "truncate_prompt_tokens": 5},
        {"input": prompts(4), "truncate_prompt_tokens": 3, "truncation_side": "left"},
        {"input": [[5, 900, 1200, 77]], "truncate_prompt_tokens": 2},
        {"input": prompts(4), "use_activation": False},
    ],
    ids=lambda more: " ".join(more),
)
def test_instructions_and_cuts(
    more: dict[str, Any], pooling: tuple[EngineDeployment, EngineDeployment]
) -> None:
    mine, other = (side.post(PATH, {"model": "tiny", **more}) for side in pooling)
    assert len(mine["data"]) == len(other["data"])
    for row, expected in zip(mine["data"], other["data"], strict=True):
        assert row["embedding"] == pytest.approx(expected["embedding"], abs=1e-5, rel=1e-4)
    assert mine["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def test_base64(pooling: tuple[EngineDeployment, EngineDeployment]) -> None:
    ours, _ = pooling
    body = {"model": "tiny", "input": "Hello there"}
    plain = ours.post(PATH, body)["data"][0]["embedding"]
    encoded = ours.post(PATH, {**body, "encoding_format": "base64"})["data"][0]["embedding"]
    assert array("f", base64.b64decode(encoded)).tolist() == plain


def test_the_openai_client(pooling: tuple[EngineDeployment, EngineDeployment]) -> None:
    ours, _ = pooling
    with openai.OpenAI(base_url=f"{ours.url}/v1", api_key="none", timeout=30) as client:
        found = client.embeddings.create(model="tiny", input=["one", "two"])
        assert [len(each.embedding) for each in found.data] == [256, 256]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="tiny", prompt="not a generator")


def test_faults_name_the_field(pooling: tuple[EngineDeployment, EngineDeployment]) -> None:
    ours, _ = pooling
    for fields, text in (
        ({"input": []}, "'input' and its entries cannot be empty"),
        ({"input": "x", "dimensions": 100_000}, "dimensions"),
        ({"input": [1] * 3000}, "maximum context length is 2048 tokens"),
    ):
        status, _, answer = ours.request("POST", PATH, {"model": "tiny", **fields})
        assert status == 400 and text in answer.decode(), answer


def test_an_attached_server(
    pooling: tuple[EngineDeployment, EngineDeployment], tmp_path: Path
) -> None:
    """The last test of this module: it kills the engine of vLLM's server."""
    _, engine = pooling
    made = AttachedEngine(tmp_path / "attached", engine)
    with closing(made):
        made.frontend()
        made.attach("--poll-interval-secs", "0.1")
        made.wait_for_models("tiny")
        body = {"model": "tiny", "input": ["hello", "a longer text"]}
        relayed, direct = (one.post(PATH, body)["data"] for one in (made, engine))
        assert [len(row["embedding"]) for row in relayed] == [256, 256]
        assert relayed == direct
        status, _, answer = made.request("POST", CHAT, {**body, "messages": []})
        assert status == 404 and b"has no /v1/chat/completions" in answer
        (core,) = engine.engine_cores()
        core.send_signal(signal.SIGKILL)
        made.until(lambda: made.request("POST", PATH, body)[0] == 503, "down")
        engine.processes[0].wait(30)
        engine.processes.clear()
