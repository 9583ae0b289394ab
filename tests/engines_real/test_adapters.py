"""LoRA adapters given at start are models of their own over the weights of another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from answers_kit import CHAT, COMPLETIONS, ask, assert_equal, chat, completion, prompts
from servers_kit import EngineDeployment
from test_engine_events import BLOCK, overlap


def test_an_adapter_answers_as_in_vllm(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    """One at a time: in a batch with others, vLLM's CPU build computes wrong tokens."""
    names = ("pirate", "tiny")
    bodies = [chat(text, model=name, logprobs=True) for text in prompts(5) for name in names]
    mine = [ask(ours, CHAT, body) for body in bodies]
    assert_equal(mine, [ask(vllm_tiny, CHAT, body) for body in bodies])
    assert all(mine[place][0] != mine[place + 1][0] for place in range(0, len(mine), 2))


def test_adapters_do_not_share_cached_blocks(ours: EngineDeployment) -> None:
    prompt = [13 + number % 700 for number in range(5 * BLOCK + 1)]
    bodies = {name: completion(prompt, model=name, max_tokens=1) for name in ("pirate", "tiny")}
    ours.post(COMPLETIONS, bodies["pirate"])
    ours.until(lambda: overlap(ours, bodies["pirate"]) == 5, "the router has the blocks")
    assert overlap(ours, bodies["tiny"]) == 0
    for name, cached in (("tiny", 0), ("pirate", 5 * BLOCK)):
        usage = ours.post(COMPLETIONS, bodies[name])["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}, name


def test_adapters_are_listed(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    listed = json.loads(ours.request("GET", "/v1/models")[2])["data"]
    assert {"tiny", "pirate", "bytes"} == {model["id"] for model in listed}
    own = {model["id"]: model for model in listed}
    for row in json.loads(vllm_tiny.request("GET", "/v1/models")[2])["data"]:
        for member in ("id", "object", "root", "parent"):
            assert own[row["id"]][member] == row[member], member
        # vLLM names no length for an adapter.
        if row["parent"] is None:
            assert own[row["id"]]["max_model_len"] == row["max_model_len"]


def test_a_missing_adapter_is_refused_before_the_engine_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "dynamo.vllm", "--model", str(tiny_model)]
    found = subprocess.run(
        [*command, "--lora-modules", f"x={tmp_path}"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 2
    assert "the directory has no adapter_config.json" in found.stderr
