"""The history of the charts, across restarts of a real deployment."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from deployment import free_port
from serving import ROOT, Serving

GRAPH = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT}}
Worker:
  run: dynamo.mocker
  model-path: {ROOT}/examples/model
  model-name: tiny
  speedup-ratio: 100
"""


def test_the_history_of_the_charts_outlives_stop_kill_and_damage(tmp_path: Path) -> None:
    port = free_port()
    serving = Serving(tmp_path)

    def seconds() -> list[int]:
        """The seconds of which the history has a value."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ui/history?range=10m") as answer:
            found: dict[str, Any] = json.load(answer)
        values = found["series"].get("in_flight", [])
        return [found["start_s"] + i for i, value in enumerate(values) if value is not None]

    try:
        serving.start(GRAPH.replace("PORT", str(port)), wait="ready: ")
        serving.until(seconds, 60)
        first_s = seconds()[0]
        assert serving.stop() == 0
        serving.start(GRAPH.replace("PORT", str(port)), wait="ready: ")
        serving.until(lambda: len(seconds()) > 1, 60)
        assert seconds()[0] == first_s
        (pid,) = serving.wait_for_pids("Frontend")
        os.kill(pid, signal.SIGKILL)  # the file has what was written at the stop before
        serving.wait_for_pids("Frontend", unlike=pid, timeout_s=60)
        serving.until(lambda: answers(seconds) and seconds()[0] == first_s, 60)
        assert serving.stop() == 0
        file = serving.state_dir / serving.namespace / "logs" / "history"
        file.write_bytes(file.read_bytes()[:-1])
        serving.start(GRAPH.replace("PORT", str(port)), wait="ready: ")
        serving.until(seconds, 60)
        assert seconds()[0] > first_s
        log = serving.state_dir / serving.namespace / "logs" / f"{serving.namespace}_Frontend.log"
        assert "history cannot be used: it is damaged" in log.read_text()
        assert serving.stop() == 0
        serving.assert_clean()
    finally:
        serving.close()


def answers(question: Any) -> bool:
    """Whether the frontend answers."""
    try:
        question()
    except OSError:
        return False
    return True
