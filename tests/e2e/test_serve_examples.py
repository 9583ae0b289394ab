"""The other examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployment import free_port
from forked_kit import run_verb
from serving import ROOT, Serving

PROMPT = "a document that both frontends should know " * 40


def test_replicas_find_each_other_and_the_same_cache(serving: Serving) -> None:
    serving.namespace = "replicas"
    first, second = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    ports = (f"--Frontend.http-port={_port(first)}", f"--SecondFrontend.http-port={_port(second)}")
    serving.start(ROOT / "examples/replicas.yaml", *ports)
    assert f"ready: {first}/v1, {second}/v1   model: tiny   workers: 2" in serving.text()
    _complete(first)
    urls = (first, second)
    serving.until(lambda: all(_held(url) == 1 and _replicas(url) == 1 for url in urls))
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("overload", "queue above 2 batches (fcfs), prefill load fitted, admission control"),
        ("without-events", "cost in seconds, caches predicted from decisions (lru)"),
    ],
)
def test_the_example_enables_its_feature(serving: Serving, name: str, words: str) -> None:
    serving.namespace = name
    url = f"http://127.0.0.1:{free_port()}"
    serving.start(ROOT / f"examples/{name}.yaml", f"--Frontend.http-port={_port(url)}")
    assert words in serving.text() and "no effect" not in serving.text()
    _complete(url)
    if name == "without-events":
        assert _held(url) == 1
    assert serving.stop() == 0
    serving.assert_clean()


REAL = ("vllm", "vllm-disagg", "attach-llama", "attach-ollama", "attach-sglang")


@pytest.mark.parametrize("name", REAL)
def test_a_graph_of_real_engines_passes_a_dry_run(name: str) -> None:
    """Without the engine: its absence is a warning, since the graph may be for another machine."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "HF_"))}
    path = ROOT / f"examples/{name}.yaml"
    done = run_verb("serve", str(path), "--dry-run", "--json", "--gpus", "2", env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["watchers"]
    gpus = [gpu for row in rows for gpu in row["gpus"]]
    assert len(gpus) == {"vllm": 1, "vllm-disagg": 2, "attach-sglang": 2}.get(name, 0)
    assert "# Needs: " in path.read_text()


def test_the_planner_adds_workers_under_load_and_removes_them(serving: Serving) -> None:
    serving.namespace = "planner"
    url = f"http://127.0.0.1:{free_port()}"
    flags: tuple[str, ...] = (
        "--Planner.adjustment-interval=1",
        "--Planner.metric-pulling-interval=0.2",
    )
    flags += (f"--Planner.log-dir={serving.tmp_path}", "--Worker.num-gpu-blocks-override=128")
    flags += (
        "--Worker.startup-time=0",
        "--Worker.speedup-ratio=6",
        f"--Frontend.http-port={_port(url)}",
    )
    serving.start(ROOT / "examples/planner.yaml", *flags)
    with ThreadPoolExecutor(24) as clients:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 150}
        answers = [clients.submit(_post, f"{url}/v1/completions", body) for _ in range(36)]
        serving.wait_for("added planner_Worker_1 to Worker", 30)
        assert {json.loads(a.result())["usage"]["completion_tokens"] for a in answers} == {150}
    serving.wait_for("removed planner_Worker_1 from Worker", 30)
    assert serving.stop() == 0


def test_prefill_and_decode_workers_beside_a_planner_pass_a_dry_run() -> None:
    path = ROOT / "examples/planner_disagg.yaml"
    command = [sys.executable, "-m", "dynamo", "serve", str(path), "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    names = [row["service"] for row in json.loads(done.stdout)["watchers"]]
    assert names == ["Frontend", "PrefillWorker", "DecodeWorker", "Planner"]


def test_the_size_of_the_engine_decides_its_gpus() -> None:
    flags = ("--Worker.tensor-parallel-size=4", "--Worker.ServiceArgs.workers=2", "--gpus=8")
    command = [sys.executable, "-m", "dynamo", "serve", str(ROOT / "examples/vllm.yaml")]
    done = subprocess.run(
        [*command, "--dry-run", "--json", *flags], capture_output=True, text=True, timeout=60
    )
    rows = json.loads(done.stdout)["watchers"]
    assert [row["gpus"] for row in rows] == [[], ["0", "1", "2", "3"], ["4", "5", "6", "7"]]


def _port(url: str) -> str:
    return url.rpartition(":")[2]


def _complete(url: str) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
    assert json.loads(_post(f"{url}/v1/completions", body))["usage"]["completion_tokens"] == 2


def _held(url: str) -> int:
    """The number of workers that hold the whole prompt, according to the frontend."""
    found = json.loads(_post(f"{url}/v1/route", {"model": "tiny", "prompt": PROMPT}))
    assert found["prompt_blocks"] > 0
    return sum(row["overlap_blocks"] == found["prompt_blocks"] for row in found["candidates"])


def _replicas(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (one for one in lines if one.startswith("dynamo_component_router_replicas{"))
    return float(line.rpartition(" ")[2])


def _post(url: str, body: dict[str, object]) -> bytes:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())
