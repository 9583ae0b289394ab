"""`dynamo ps` on real deployments: every state, as text and as JSON, within a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certificates import Authority, needs_openssl
from deployment import free_port
from forked_kit import run_verb
from serving import ROOT, Serving

from dynamo.config.runtime import RuntimeSettings
from dynamo.frontend.ui.requests import PeerRequests
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import LOCAL_KEY
from dynamo.serve.state.statefile import Statefile

GRAPH = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT, router-mode: kv}}
Worker:
  run: dynamo.mocker
  model-path: {ROOT / "examples/model"}
  model-name: tiny
  startup-time: 6
  ServiceArgs: {{workers: 2}}
Slow: {{run: SLEEPER, drain: 6}}
Broken: {{run: [python, -c, "print('no such model'); raise SystemExit(2)"]}}
"""
SECURED = GRAPH.replace("http-port: PORT", "http-port: PORT, OPTIONS").partition("Slow")[0]
VISIBLE_S = 5.0


class Ps:
    """Runs ``dynamo ps`` beside a deployment."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.env = {**serving.env, "DYN_NAMESPACE": serving.namespace}

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.verb("ps", *words, **env)

    def verb(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run_verb(*words, env={**self.env, **env}, timeout=30)

    def status(self, *words: str, **env: str) -> Any:
        """The BoxStatus as JSON."""
        return json.loads(self.run("--json", *words, **env).stdout)

    def worker(self, name: str) -> Any:
        """The status of the process ``name`` of the deployment."""
        found = self.status()
        full = f"{self.serving.namespace}_{name}"
        rows = [*found["workers"], *found["others"]]
        return next((one for one in rows if one["name"] == full), {"state": "gone"})

    def within(self, name: str, holds: Callable[[Any], bool], timeout_s: float) -> Any:
        """Wait until the status of a process holds; return it."""
        deadline_s = time.monotonic() + timeout_s
        while not holds(found := self.worker(name)):
            assert time.monotonic() < deadline_s, (found, self.serving.text())
        return found

    def mark(self, name: str, state: str) -> None:
        """Set the state of an entry, as a planner does."""
        statefile = Statefile(self.serving.state_dir, self.serving.namespace)

        def change(document: Document) -> None:
            document.components[f"{self.serving.namespace}_{name}"].state = state

        statefile.update(change)


def test_the_states_of_a_deployment(serving: Serving, unused_tcp_port: int) -> None:
    ps = Ps(serving)
    none = ps.run()
    assert none.returncode == 1 and "no deployment runs in namespace" in none.stdout
    serving.start(GRAPH.replace("PORT", str(unused_tcp_port)), wait="ready: ")
    ready(ps, unused_tcp_port)
    given_up(ps)
    killed(ps)
    drained_and_asleep(ps)
    stopped(ps)
    hung_frontend(ps, unused_tcp_port)
    assert serving.stop() == 1  # Broken was given up
    serving.assert_clean()
    assert ps.run().returncode == 1


def ready(ps: Ps, port: int) -> None:
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": 20}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
    found = ps.status()
    assert (found["state"], found["frontend"]) == ("running", "ready")
    (model,) = found["models"]
    assert (model["state"], model["ready"], model["wanted"]) == ("ready", 2, 2)
    assert model["figures"]["output_tokens_per_s"] > 0 and model["figures"]["ttft_p50_s"] > 0
    workers = {one["worker"] for one in found["workers"] if one.get("model") == "tiny"}
    assert {one["worker"] for one in model["figures"]["workers"]} == workers
    (request_row,) = found["requests"]
    explained = ps.verb("explain").stdout
    name = next(one["name"] for one in found["workers"] if one["worker"] == request_row["worker"])
    assert f" worker {name}, " in explained and request_row["worker"] not in explained
    assert ps.verb("explain", "--json").stdout.count(request_row["worker"]) >= 2
    names = [one["name"] for one in found["workers"] if one.get("worker") in workers]
    candidates = ps.verb("route", "a b c", "--explain").stdout
    assert all(f" {name} " in candidates for name in names)
    routed = ps.verb("route", "a b c").stdout  # once: equal workers are chosen at random
    assert any(f"worker {name} dp_rank 0" in routed for name in names)
    assert request_row["worker"] in workers and request_row["completion_tokens"] == 20
    text = ps.run().stdout
    assert "tiny" in text and "2/2" in text and "frontend: ready at http://127.0.0.1" in text


def given_up(ps: Ps) -> None:
    done, full = ps.run(), f"{ps.serving.namespace}_Broken"
    assert done.returncode == 1
    assert f"{full} failed: its command line was rejected (exit status 2)" in done.stdout
    assert "last output: no such model" in done.stdout
    assert f"then: dynamo restart {full}" in done.stdout


def killed(ps: Ps) -> None:
    (pid,) = ps.serving.pids("Worker_1")
    os.kill(pid, signal.SIGKILL)
    found = ps.within("Worker_1", lambda one: one.get("pids") != [pid], VISIBLE_S)
    assert found["state"] == "loading"
    found = ps.within("Worker_1", lambda one: one["state"] == "ready", 40)
    assert (found["restarts"], found["last_exit"]) == (1, "was killed by SIGKILL")


def drained_and_asleep(ps: Ps) -> None:
    for state in ("draining", "asleep"):
        ps.mark("Worker_1", state)
        found = ps.status()["models"][0]
        assert ps.worker("Worker_1")["state"] == state
        assert (found["state"], found["ready"], found["wanted"]) == ("ready", 1, 2)
    assert ps.worker("Worker_1")["remedy"].startswith("dynamo wake ")
    ps.mark("Worker_1", "running")
    assert ps.worker("Worker_1")["state"] == "ready"


def stopped(ps: Ps) -> None:
    name = f"{ps.serving.namespace}_Slow"
    assert ps.worker("Slow")["state"] == "ready"
    ps.serving.circusctl("stop", name)
    ps.within("Slow", lambda one: one["state"] == "draining", VISIBLE_S)
    found = ps.within("Slow", lambda one: one["state"] == "stopped", 30)
    assert found["remedy"] == f"dynamo restart {name}" and not found.get("pids")
    assert ps.status()["models"][0]["state"] == "ready"


def hung_frontend(ps: Ps, port: int) -> None:
    (pid,) = ps.serving.pids("Frontend")
    os.kill(pid, signal.SIGSTOP)
    try:
        done = ps.run()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"frontend: down at http://127.0.0.1:{port}" in done.stdout
    assert "it listens but does not answer" in done.stdout and "2/2" in done.stdout
    ps.within("Frontend", lambda one: one["state"] == "ready", 20)


@needs_openssl
def test_keys_and_tls(serving: Serving, unused_tcp_port: int, tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).sign("serve")
    keys = str(tmp_path / "keys")
    operator = subprocess.run(
        [sys.executable, "-m", "dynamo", "key", "add", "o", "--role", "operator"],
        env={**os.environ, "DYN_API_KEY_FILE": keys},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    options = f"tls-cert-path: {cert}, tls-key-path: {key}, api-key-file: {keys}"
    graph = SECURED.replace("PORT", str(unused_tcp_port)).replace("OPTIONS", options)
    second = free_port()
    graph += f"Second: {{run: dynamo.frontend, http-port: {second}, api-key-file: {keys}}}\n"
    serving.start(graph, wait="ready: ")
    ps = Ps(serving)
    headers = {"content-type": "application/json", "authorization": f"Bearer {operator}"}
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
    url = f"http://127.0.0.1:{second}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        assert answer.status == 200
    # Its user needs no key on this machine: the deployment has one of its own.
    found = ps.status()
    assert found["models"][0]["figures"]["model"] == "tiny" and not found["problems"]
    assert [one["model"] for one in found["requests"]] == ["tiny"]
    runtime = RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))
    lists = PeerRequests(runtime).all(10)
    assert sorted(len(one.requests) for one in lists) == [0, 1]
    assert not any(one.problems for one in lists)
    own = serving.state_dir / serving.namespace / LOCAL_KEY
    assert own.stat().st_mode & 0o777 == 0o600
    own.rename(own.with_suffix(".away"))
    done = ps.run()
    assert done.returncode == 0 and "figures are missing" in done.stdout
    assert "--api-key" in done.stdout
    own.with_suffix(".away").rename(own)
    for found in (ps.status("--api-key", operator), ps.status(DYN_API_KEY=operator)):
        assert found["models"][0]["figures"]["model"] == "tiny" and not found["problems"]
    assert "give another one" in ps.run("--api-key", "wrong").stdout
    os.kill(serving.arbiter_pid, signal.SIGSTOP)  # it cannot report: ps collects by itself
    try:
        found = ps.status("--api-key", operator)
    finally:
        os.kill(serving.arbiter_pid, signal.SIGCONT)
    assert found["models"][0]["ready"] == 2 and found["models"][0]["figures"]
    assert serving.stop() == 0
    serving.assert_clean()
