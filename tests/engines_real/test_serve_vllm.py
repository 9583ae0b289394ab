"""`dynamo serve examples/vllm.yaml` with a real engine: it serves, is killed, comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from deployment import free_port
from load_kit import under_load
from servers_kit import CACHE_BYTES, ENGINE_ENV, ENGINE_START_S, UNIPROC
from serving import ROOT, Serving
from weights_kit import CONTEXT

GRAPH = ROOT / "examples/vllm.yaml"
PROMPT = "one two three four five six seven eight nine ten " * 12


def flags(model: Path, port: int) -> list[str]:
    options = {
        "model": model,
        "served-model-name": "tiny",
        "dtype": "float32",
        "enforce-eager": "true",
        "block-size": 32,
        "max-model-len": CONTEXT,
        "kv-cache-memory-bytes": CACHE_BYTES,
        "distributed-executor-backend": UNIPROC,
    }
    return [
        f"--Frontend.http-port={port}",
        *(f"--Worker.{key}={value}" for key, value in options.items()),
    ]


def complete(port: int, timeout_s: float = 60) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def answers(port: int) -> bool:
    try:
        return bool(complete(port)["choices"])
    except OSError:
        return False


@pytest.mark.timeout(600)  # three starts of an engine
def test_a_worker_is_killed_and_comes_back_and_is_then_restarted_under_load(
    serving: Serving, tiny_model: Path
) -> None:
    """One deployment for both: with vLLM it takes 35 s of CPU time to start."""
    serving.namespace, port = "vllm", free_port()
    serving.start(GRAPH, *flags(tiny_model, port), wait="", **ENGINE_ENV)
    line = serving.wait_for("ready: |stopped", ENGINE_START_S)
    assert "model: tiny   workers: 1" in line, serving.text()
    assert complete(port)["usage"]["completion_tokens"] == 4
    usage = complete(port)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 32
    (old,) = serving.pids("Worker")
    os.kill(old, signal.SIGKILL)
    serving.wait_for("was killed by SIGKILL; restarting it now")
    serving.wait_for_pids("Worker", unlike=old)
    serving.until(lambda: answers(port), ENGINE_START_S)

    before = len(serving.text())
    restart_under_load(serving, port)
    assert serving.stop(timeout_s=60) == 0
    # vLLM may kill its own engine process, and says so in its own words.
    assert not re.search("killing (it|the remaining)", serving.text()[before:])
    serving.assert_clean()


def restart_under_load(serving: Serving, port: int) -> None:
    """Without GPUs the new engine starts beside the old one."""
    (old,) = serving.pids("Worker")
    tree = psutil.Process(old).children(recursive=True)
    # With pauses: a busy engine on two cores keeps the other one from loading.
    with under_load(port, clients=1, tokens=4, pause_s=3) as load:
        serving.until(lambda: load.answered > 1, 60)
        assert serving.circusctl("restart", "vllm_Worker") == "ok"
        serving.until(lambda: not psutil.pid_exists(old), ENGINE_START_S)
        enough = load.answered + 3
        serving.until(lambda: load.answered > enough, 60)
    assert serving.pids("Worker") != [old]
    assert not psutil.wait_procs(tree, timeout=5)[1]


def test_the_first_request_starts_an_engine_which_leaves_when_idle(
    serving: Serving, tiny_model: Path
) -> None:
    serving.namespace, port = "vllm", free_port()
    planner = {"run": "dynamo.planner", "min-gpu-budget": 0, "idle-timeout": 3}
    planner["log-dir"] = str(serving.tmp_path)
    services = yaml.safe_load(GRAPH.read_text()) | {"Planner": planner}
    del services["namespace"]
    services["Worker"]["ServiceArgs"]["workers"] = 0
    graph = serving.graph(yaml.safe_dump(services))
    serving.start(graph, *flags(tiny_model, port), wait="", **ENGINE_ENV)
    assert "model: tiny   workers: 0   started on demand: Worker" in serving.wait_for("ready: ")
    assert complete(port, ENGINE_START_S)["usage"]["completion_tokens"] == 4
    (worker,) = serving.pids("Worker_1")
    tree = [psutil.Process(worker), *psutil.Process(worker).children(recursive=True)]
    serving.wait_for("removed vllm_Worker_1 from Worker", 60)
    assert not psutil.wait_procs(tree, timeout=5)[1]
    # The wait for the start is no cost of a request, for which more engines would be started.
    assert not re.search(r"decode \d+ -> [2-9]", serving.text())
    assert serving.document()["components"]["vllm_Worker"]["resources"] == {}
    assert serving.stop(timeout_s=60) == 0
    serving.assert_clean()


def test_a_dry_run_checks_the_flags_of_vllm(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "dynamo", "serve", str(GRAPH), "--dry-run", "--gpus", "1"]
    words = [*command, f"--Worker.model={tiny_model}", "--Worker.max-modle-len=5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "no flag --max-modle-len (did you mean --max-model-len?)" in done.stderr
