"""A sleeping worker is not registered, and returns when it wakes up."""

from __future__ import annotations

import json

import pytest
from answers_kit import CHAT, chat
from servers_kit import EngineDeployment


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(ours: EngineDeployment, level: int) -> None:
    """As on a GPU, except that the CPU build keeps its memory. Level 2 reads the weights again."""
    body = chat("Good night", model="tiny", max_tokens=4)
    before = ours.post(CHAT, body)["choices"]
    assert ours.control("is_sleeping") == (200, {"is_sleeping": False})
    try:
        assert ours.control("sleep", {"level": level})[0] == 200
        assert ours.control("is_sleeping") == (200, {"is_sleeping": True})
        ours.until(lambda: instances(ours) == 1, "the worker of tiny has left")
        assert ours.request("POST", CHAT, body)[0] == 503
        assert ours.control("sleep")[0] == 200  # again
    finally:
        assert ours.control("wake_up")[0] == 200
    assert ours.control("is_sleeping") == (200, {"is_sleeping": False})
    ours.until(lambda: instances(ours) == 2, "the worker of tiny has returned")
    assert ours.post(CHAT, body)["choices"] == before


def test_bad_bodies_are_refused(ours: EngineDeployment) -> None:
    for route, body in (("sleep", {"level": 3}), ("wake_up", {"tags": ["x"]}), ("sleep", {"a": 1})):
        status, answer = ours.control(route, body)
        assert status == 400 and "must be" in answer["error"]
    assert ours.control("is_sleeping") == (200, {"is_sleeping": False})


def instances(server: EngineDeployment) -> int:
    found = json.loads(server.request("GET", "/health")[2])
    return sum(one["endpoint"] == "generate" for one in found["instances"])
