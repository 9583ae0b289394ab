"""LoRA adapters, given at start or loaded later, are models over the weights of another."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from answers_kit import CHAT, COMPLETIONS, ask, assert_equal, chat, completion, prompts
from servers_kit import EngineDeployment, closing
from test_engine_events import BLOCK, overlap
from weights_kit import Numbers, write_lora, write_safetensors

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def load(server: EngineDeployment, name: str, path: Path, **more: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path), "model": "tiny", **more}
    status, _, answer = server.request("POST", LOAD, body)
    return status, answer.decode()


def unload(server: EngineDeployment, name: str) -> None:
    assert server.request("POST", UNLOAD, {"lora_name": name})[0] == 200


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


def test_an_adapter_that_is_loaded_later_answers_as_one_given_at_start(
    ours: EngineDeployment, lora: Path
) -> None:
    assert load(ours, "later", lora)[0] == 200
    try:
        for text in prompts(3):
            mine, its = (chat(text, model=name, logprobs=True) for name in ("later", "pirate"))
            assert_equal([ask(ours, CHAT, mine)], [ask(ours, CHAT, its)])
        prompt = [17 + number % 600 for number in range(5 * BLOCK + 1)]
        body = completion(prompt, model="later", max_tokens=1)
        ours.post(COMPLETIONS, body)
        ours.until(lambda: overlap(ours, body) == 5, "the router has the blocks")
        assert overlap(ours, {**body, "model": "pirate"}) == 0
    finally:
        unload(ours, "later")


def test_changed_weights_never_answer_from_blocks_of_the_old(
    ours: EngineDeployment, tmp_path: Path
) -> None:
    """Also in the same directory, where vLLM's server would use the cached blocks."""
    path, prompt = write_lora(tmp_path / "a", 11), list(range(20, 20 + 3 * BLOCK + 1))
    other = write_lora(tmp_path / "b", 12)
    body = completion(prompt, model="changing", max_tokens=8)

    def text() -> str:
        answer: str = ours.post(COMPLETIONS, body)["choices"][0]["text"]
        return answer

    assert load(ours, "changing", path)[0] == 200
    first = text()
    assert text() == first  # now from the cache
    assert load(ours, "changing", other)[0] == 400
    assert load(ours, "changing", other, load_inplace=True)[0] == 200
    second = text()
    assert second != first
    shutil.copy(other / "adapter_model.safetensors", path)
    assert load(ours, "changing", path, load_inplace=True)[0] == 200
    assert text() == second
    unload(ours, "changing")
    shutil.rmtree(path)
    assert load(ours, "changing", write_lora(path, 11))[0] == 200
    assert text() == first
    unload(ours, "changing")


def test_no_adapter_gets_the_weights_of_another(ours: EngineDeployment, tmp_path: Path) -> None:
    """Their ids in the engine are never used again."""
    paths = [write_lora(tmp_path / str(seed), seed) for seed in (21, 22, 23)]
    body = completion("Once upon a time", max_tokens=8)

    def text(name: str) -> str:
        answer: str = ours.post(COMPLETIONS, {**body, "model": name})["choices"][0]["text"]
        return answer

    assert [load(ours, f"a{number}", paths[number])[0] for number in (0, 1)] == [200, 200]
    second = text("a1")
    unload(ours, "a0")
    gone = {**body, "model": "a0"}
    ours.until(lambda: ours.request("POST", COMPLETIONS, gone)[0] == 404, "a0 is forgotten")
    assert load(ours, "a2", paths[2])[0] == 200
    assert text("a1") == second != text("a2")
    unload(ours, "a1")
    unload(ours, "a2")


def test_what_vllm_refuses_is_a_400_and_changes_nothing(
    ours: EngineDeployment, tmp_path: Path, lora: Path
) -> None:
    config = json.loads((lora / "adapter_config.json").read_text())

    def variant(name: str, **changes: Any) -> Path:
        path = Path(shutil.copytree(lora, tmp_path / name))
        (path / "adapter_config.json").write_text(json.dumps(config | changes))
        return path

    before = [ask(ours, CHAT, chat("Hello", model=name)) for name in ("tiny", "pirate")]
    no_weights = variant("none")
    (no_weights / "adapter_model.safetensors").unlink()
    other_model, smaller = variant("model"), variant("smaller")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    numbers = Numbers(5)
    for directory, size in ((other_model, 512), (smaller, 96)):
        shapes = {f"{layer}.lora_A.weight": (8, size), f"{layer}.lora_B.weight": (size, 8)}
        weights = directory / "adapter_model.safetensors"
        write_safetensors(weights, shapes, lambda name, shape: numbers.tensor(shape, 0.1))
    for path, text in (
        (other_model, "is not one of this model"),
        (smaller, "is not one of this model"),
        (variant("rank", r=64), "max_lora_rank"),
        (no_weights, "cannot be loaded"),
        (variant("type", r="x"), "cannot be loaded"),
    ):
        status, answer = load(ours, "bad", path)
        assert status == 400 and text in answer, answer
    status, answer = load(ours, "bad", lora, model="bytes")
    assert status == 400 and "--enable-lora" in answer
    listed = json.loads(ours.request("GET", "/v1/models")[2])["data"]
    assert "bad" not in {row["id"] for row in listed}
    after = [ask(ours, CHAT, chat("Hello", model=name)) for name in ("tiny", "pirate")]
    assert_equal(after, before)


def test_running_requests_end_with_the_adapter_that_they_began_with(
    ours: EngineDeployment, lora: Path
) -> None:
    body = completion("Once upon a time", model="leaving", max_tokens=300, ignore_eos=True)
    assert load(ours, "leaving", lora)[0] == 200
    whole = ours.post(COMPLETIONS, body)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ours.post, COMPLETIONS, body)
        ours.until(lambda: ours.sample("dynamo_frontend_inflight_requests", model="leaving") == 1)
        unload(ours, "leaving")
        assert not running.done(), "the request was too short for this test"
        assert running.result()["choices"][0]["text"] == whole
    ours.until(lambda: ours.request("POST", COMPLETIONS, body)[0] == 404, "it is forgotten")


def test_a_watched_directory(tmp_path: Path, tiny_model: Path, lora: Path) -> None:
    directory = tmp_path / "adapters"
    shutil.copytree(lora, directory / "first")
    with closing(EngineDeployment(tmp_path / "server")) as server:
        server.frontend()
        server.worker(tiny_model, "tiny", "--lora-dir", str(directory), **server.status_server())
        server.wait_for_models("tiny", "first")
        shutil.copytree(lora, directory / "second")
        server.wait_for_models("second", timeout_s=10)
        assert ask(server, CHAT, chat("Hello", model="second"))
        status, answer = server.control("unload_lora", {"lora_name": "second"})
        assert status == 400 and "--lora-dir" in answer["error"]
        shutil.rmtree(directory / "first")

        def names() -> set[str]:
            listed = json.loads(server.request("GET", "/v1/models")[2])["data"]
            return {row["id"] for row in listed}

        server.until(lambda: names() == {"tiny", "second"}, "first has left", 10)
