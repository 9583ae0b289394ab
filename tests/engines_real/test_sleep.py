"""A sleeping worker is not registered, and returns when it wakes up."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from answers_kit import CHAT, chat
from servers_kit import EngineDeployment
from weights_kit import write_llama


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(ours: EngineDeployment, level: int) -> None:
    """As on a GPU, except that the CPU build keeps its memory. Level 2 reads the weights again."""
    body = chat("Good night", model="tiny", max_tokens=4)
    before = ours.post(CHAT, body)["choices"]
    assert ours.control("is_sleeping") == (200, {"is_sleeping": False})
    assert shown_states(ours) == {"awake"}
    try:
        assert ours.control("sleep", {"level": level})[0] == 200
        assert ours.control("is_sleeping") == (200, {"is_sleeping": True})
        assert shown_states(ours) == {"weights_offloaded" if level == 1 else "discard_all"}
        ours.until(lambda: instances(ours) == 1, "the worker of tiny has left")
        assert ours.request("POST", CHAT, body)[0] == 503
        assert ours.control("sleep")[0] == 200  # again
    finally:
        assert ours.control("wake_up")[0] == 200
    assert ours.control("is_sleeping") == (200, {"is_sleeping": False})
    ours.until(lambda: instances(ours) == 2, "the worker of tiny has returned")
    assert ours.post(CHAT, body)["choices"] == before


def test_a_pause_holds_a_running_request(ours: EngineDeployment) -> None:
    """The worker leaves; the request goes on where it was, with the same tokens."""
    body = chat("Good night", model="tiny", max_tokens=600, ignore_eos=True)
    whole = ours.post(CHAT, body)["choices"][0]["message"]["content"]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(ours.post, CHAT, body)
        ours.until(lambda: ours.engine_sample("vllm:num_requests_running") > 0, "it runs")
        try:
            assert ours.control("pause", {"mode": "keep", "clear_cache": False})[0] == 200
            assert ours.control("is_paused") == (200, {"is_paused": True})
            ours.until(lambda: instances(ours) == 1, "the worker of tiny has left")
            assert ours.request("POST", CHAT, body)[0] == 503
            assert not running.done()
            assert ours.control("sleep")[0] == 503
        finally:
            assert ours.control("resume")[0] == 200
        assert running.result(60)["choices"][0]["message"]["content"] == whole
    ours.until(lambda: instances(ours) == 2, "the worker of tiny has returned")


def test_other_weights(ours: EngineDeployment, tiny_model: Path, tmp_path: Path) -> None:
    """An answer is that of the new weights, also where the prompt was cached with the old ones."""
    body = chat("Good night " * 40, model="tiny", max_tokens=8)
    before = ours.post(CHAT, body)["choices"]
    other = write_llama(tmp_path / "other", seed=9)
    try:
        assert ours.control("update_weights", {"weights_path": str(other)})[0] == 200
        assert ours.post(CHAT, body)["choices"] != before
    finally:
        assert ours.control("update_weights", {"weights_path": str(tiny_model)})[0] == 200
    assert ours.post(CHAT, body)["choices"] == before


def test_a_profile_needs_a_profiler(ours: EngineDeployment) -> None:
    status, answer = ours.control("start_profile")
    assert status == 400 and "--profiler-config" in answer["error"]


def test_bad_bodies_are_refused(ours: EngineDeployment) -> None:
    for route, body in (("sleep", {"level": 3}), ("wake_up", {"tags": ["x"]}), ("sleep", {"a": 1})):
        status, answer = ours.control(route, body)
        assert status == 400 and "must be" in answer["error"]
    assert ours.control("is_sleeping") == (200, {"is_sleeping": False})


def instances(server: EngineDeployment) -> int:
    found = json.loads(server.request("GET", "/health")[2])
    return sum(one["endpoint"] == "generate" for one in found["instances"])


def shown_states(server: EngineDeployment) -> set[str]:
    """The states of sleep in which vLLM's metrics show the engine."""
    states = ("awake", "weights_offloaded", "discard_all")
    return {
        state
        for state in states
        if server.engine_sample("vllm:engine_sleep_state", sleep_state=state)
    }
