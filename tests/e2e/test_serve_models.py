"""`dynamo serve` with a model of Hugging Face: downloaded, then served from the cache."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

from deployment import free_port
from hub_server import Hub
from serving import QUICKSTART, Serving

NAME = "acme/tiny-1.5B"
GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}, router-mode: kv}}
Worker: {{run: dynamo.mocker, model-path: acme/tiny-1.5B, ServiceArgs: {{workers: 2}}}}
"""


def complete(port: int) -> int:
    body = json.dumps({"model": NAME, "prompt": "one two", "max_tokens": 3}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return int(json.loads(answer.read())["usage"]["completion_tokens"])


def test_a_model_is_downloaded_once_and_served(serving: Serving, tmp_path: Path) -> None:
    files = {
        path.name: path.read_bytes()
        for path in (QUICKSTART.parent / "model").iterdir()
        if path.suffix == ".json"
    }
    hub, port = Hub(NAME, {**files, "model.safetensors": b"w" * 1000}), free_port()
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    graph, ready = GRAPH.format(port=port), f"ready: .*model: {NAME}   workers: 2"
    try:
        serving.start(graph, wait=ready, HF_ENDPOINT=hub.url, **env)
        assert complete(port) == 3
        assert hub.downloaded() == set(files)  # a simulated engine needs no weights
        assert serving.stop() == 0
    finally:
        hub.close()
    serving.start(graph, wait=ready, HF_HUB_OFFLINE="1", **env)
    assert complete(port) == 3
    assert serving.stop() == 0
    serving.assert_clean()


def test_run_ends_when_its_model_cannot_be_downloaded(serving: Serving, tmp_path: Path) -> None:
    """An interactive command ends; a service goes on, see below."""
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    words = ("--engine", "mocker", "--port", str(free_port()), "--namespace", serving.namespace)
    serving.start(NAME, *words, verb="run", wait="", **env)
    assert serving.wait(60) == 1
    text = serving.text()
    assert re.search(r"gave up \S+: .*dynamo pull \S+.*HF_HUB_OFFLINE.*\(3 starts\)", text)
    serving.assert_clean()


def test_offline_without_the_model_nothing_starts(serving: Serving, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    serving.start(GRAPH.format(port=free_port()), wait="", **env)
    assert serving.wait() == 2
    assert f"not (complete) in the Hugging Face cache: the model '{NAME}'" in serving.text()
    assert "starting" not in serving.text()


def test_a_failed_download_is_repeated_and_a_broken_model_is_not(
    serving: Serving, tmp_path: Path
) -> None:
    """Each is named by its cause."""
    hub = Hub(NAME, {"config.json": b"{}", "tokenizer.json": b'{"cut": '}, status=408)
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url}
    try:
        serving.start(GRAPH.format(port=free_port()), wait="", **env)
        line = serving.wait_for("a temporary failure; restarting it in 1 s")
        assert "cannot be downloaded from " in line and "replied with status 408" in line
        hub.status = 200
        assert serving.wait(60) == 1
    finally:
        hub.close()
    gave_up = r"gave up \S+_Worker: \S+/tokenizer.json is not a tokenizer: .* \(exit status 2\)"
    assert re.search(gave_up, serving.text())
    assert "no worker is left; stopping" in serving.text() and "ready: " not in serving.text()
    assert "command line" not in serving.text()
