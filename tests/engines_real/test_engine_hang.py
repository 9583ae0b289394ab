"""A process of the engine is stopped: the worker leaves routing, and returns with it."""

from __future__ import annotations

import json
from typing import Any

from answers_kit import CHAT, chat
from servers_kit import EngineDeployment, title, tree

NOTICED_S = 3.0


def test_a_stopped_engine_leaves_routing(ours: EngineDeployment) -> None:
    body = chat("Hello", model="tiny", max_tokens=4)
    before = ours.post(CHAT, body)["choices"]
    worker = next(each for each in ours.processes if "tiny" in each.args)  # type: ignore[operator]
    (core,) = (each for each in tree(worker.pid) if "EngineCore" in title(each))
    core.suspend()
    try:
        noticed_s = ours.until(lambda: unavailable(ours), "out of routing")
        assert noticed_s < NOTICED_S
        (found,) = unavailable(ours)
        assert found["reason"] == "unhealthy"
        assert f"process {core.pid} is stopped" in found["message"]
    finally:
        core.resume()
    ours.until(lambda: not unavailable(ours), "the worker is back")
    assert ours.post(CHAT, body)["choices"] == before


def unavailable(server: EngineDeployment) -> list[dict[str, Any]]:
    """Why generate instances are out of routing."""
    rows = json.loads(server.request("GET", "/health")[2])["instances"]
    found = [one for one in rows if one["endpoint"] == "generate" and "unavailable" in one]
    return [one["unavailable"] for one in found]
