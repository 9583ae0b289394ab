"""EngineCore dies: the worker ends with a cause and its whole process tree. It hangs: the worker
leaves routing, and returns with it."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from answers_kit import CHAT, chat
from servers_kit import EngineDeployment, closing, is_alive


def test_the_worker_ends_with_its_engine(tmp_path: Path, tiny_model: Path) -> None:
    with closing(EngineDeployment(tmp_path)) as made:
        made.frontend("--router-mode", "kv")
        worker = made.worker(tiny_model, "tiny")
        made.wait_for_models("tiny")
        started = set(made.descendants())
        body = chat("Tell me more", model="tiny", max_tokens=1900, ignore_eos=True, stream=True)
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=60)
        headers = {"content-type": "application/json"}
        connection.request("POST", CHAT, json.dumps(body).encode(), headers)
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data: ")
        (core,) = made.engine_cores()
        core.kill()
        # The stream ends with an error, not as if the answer were complete.
        rest = stream.read().decode()
        connection.close()
        assert '"error"' in rest and '"finish_reason":"length"' not in rest
        assert worker.wait(30) == 1
        made.until(lambda: sum(map(is_alive, started)) == 1, "only the frontend runs")
        made.processes.remove(worker)  # close() expects status 0
        log = next(tmp_path.glob("*-dynamo.vllm.log")).read_text()
        assert "the vLLM engine died" in log and "Traceback" not in log.split("engine died")[1]
        assert made.request("POST", CHAT, {**body, "stream": False})[0] in (404, 503)


NOTICED_S = 3.0


def test_a_stopped_engine_leaves_routing(tmp_path: Path, tiny_model: Path) -> None:
    with closing(EngineDeployment(tmp_path)) as made:
        made.frontend()
        made.worker(tiny_model, "tiny")
        made.wait_for_models("tiny")
        body = chat("Hello", model="tiny", max_tokens=4)
        before = made.post(CHAT, body)["choices"]
        (core,) = made.engine_cores()
        core.suspend()
        try:
            noticed_s = made.until(lambda: "unavailable" in generate_row(made), "out of routing")
            assert noticed_s < NOTICED_S
            found = generate_row(made)["unavailable"]
            assert found["reason"] == "unhealthy"
            assert f"process {core.pid} is stopped" in found["message"]
        finally:
            core.resume()
        made.until(lambda: "unavailable" not in generate_row(made), "the worker is back")
        assert made.post(CHAT, body)["choices"] == before


def generate_row(made: EngineDeployment) -> dict[str, Any]:
    rows = json.loads(made.request("GET", "/health")[2])["instances"]
    (row,) = [one for one in rows if one["endpoint"] == "generate"]
    return dict(row)
