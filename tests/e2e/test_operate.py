"""Restart, drain, sleep, wake, load, unload and the planner's pause on a real deployment."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from deployment import MODEL, free_port
from forked_kit import run_verb
from load_kit import Load
from pty_screen import PtyScreen
from serving import ROOT, Serving

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError, InvalidArgument
from dynamo.operations.operate import BoxControl, Steps
from dynamo.runtime.process.os_process import host_id
from dynamo.serve.state.document import Document, OperationOwner
from dynamo.serve.state.statefile import Statefile
from dynamo.status.logs import planner_summary, read_planner

SCHEMA = json.loads((ROOT / "statefiles/statefile.schema.json").read_text())
GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
Worker:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  enable-sleep-mode: true
  ServiceArgs: {{workers: 2, resources: {{gpu: 1}}}}
Other:
  run: dynamo.mocker
  model-path: {model}
  model-name: other
  ServiceArgs: {{workers: 0, min: 0, resources: {{gpu: 1}}}}
Planner:
  run: dynamo.planner
  mode: auto
  adjustment-interval: 600
  max-gpu-budget: 2
  log-dir: {logs}
"""


class Box:
    """A deployment on two GPUs, and its control."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.port = free_port()
        graph = GRAPH.format(port=self.port, model=MODEL, logs=serving.tmp_path / "tensorboard")
        serving.start(serving.graph(graph), "--gpus", "2", wait="ready: http://")
        settings = RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))
        self.control = BoxControl(settings)
        self.run_dir = serving.state_dir / serving.namespace
        serving.until(lambda: self.planner_state() == "running")

    def name(self, worker: str) -> str:
        return f"{self.serving.namespace}_{worker}"

    def states(self) -> dict[str, str]:
        """The state of each worker with a process; `!` behind it while it is reserved."""
        document = self.serving.document()
        jsonschema.validate(document, SCHEMA)
        cut = len(self.serving.namespace) + 1
        return {
            name[cut:]: entry["state"] + ("!" if "reserved_by" in entry else "")
            for name, entry in document["components"].items()
            if entry["processes"] and entry["service"] in ("Worker", "Other")
        }

    def planner_state(self) -> str:
        report = read_planner(self.run_dir)
        return planner_summary(report).state if report else ""

    def dynamo(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {**self.serving.env, "DYN_NAMESPACE": self.serving.namespace}
        return run_verb(*words, env=env)

    def act(self, action: Callable[..., Steps], *names: str) -> str:
        """Run an action of the control to its end; return its last sentence."""
        assert self.control.begin(partial(action, *names))
        assert self.control.wait(30)
        outcome = self.control.outcomes[-1]
        assert not outcome.failed, outcome
        return outcome.text


class Followed:
    """A ``dynamo logs -f``."""

    def __init__(self, box: Box, name: str) -> None:
        env = {**box.serving.env, "DYN_NAMESPACE": box.serving.namespace}
        command = [sys.executable, "-m", "dynamo", "logs", "-f", name]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self.text = ""

    def until(self, word: str, count: int) -> str:
        """Read until ``count`` lines had ``word``; return all that was read."""
        assert self.process.stdout is not None
        while self.text.count(word) < count and (line := self.process.stdout.readline()):
            self.text += line
        return self.text

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(10) == 130
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def box(serving: Serving) -> Iterator[Box]:
    made = Box(serving)
    yield made
    made.control.close()


def test_each_verb_and_the_statefile_after_it(box: Box) -> None:
    load = Load(box.port, clients=2, tokens=20)
    logs = Followed(box, "Worker")
    _restart(box)
    _sleep_and_wake(box)
    _drain_and_load(box)
    load.close()
    assert load.answered
    assert load.failures == []
    _unload(box)
    assert box.serving.stop() == 0
    text = logs.until("dynamo.mocker: exited", 4)  # two restarts, a drain, the end
    assert text.count("engine_control as instance") >= 4  # of two workers, each restarted
    assert "Worker   | " in text
    assert "Worker_1 | " in text
    assert "Frontend | " not in text
    logs.close()
    box.serving.assert_clean()
    after = box.dynamo("logs", "-n", "1")
    assert [line.split()[0] for line in after.stdout.splitlines()].count("Frontend") == 1
    assert "there are" in box.dynamo("logs", "Work").stderr


def _restart(box: Box) -> None:
    before = {*box.serving.pids("Worker"), *box.serving.pids("Worker_1")}
    done = box.dynamo("restart", "Worker")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("restarted")
    after = {*box.serving.pids("Worker"), *box.serving.pids("Worker_1")}
    assert len(after) == 2
    assert before.isdisjoint(after)
    frontend = box.serving.pids("Frontend")
    assert "restarted" in box.act(box.control.actions.restart, "Frontend")
    assert box.serving.pids("Frontend") != frontend


def _sleep_and_wake(box: Box) -> None:
    name = box.name("Worker_1")
    pids = box.serving.pids("Worker_1")
    begun = box.dynamo("sleep", name).stdout
    assert "the planner may wake it (to prevent that: dynamo planner pause)" in begun
    assert "GPU 1 is free" in begun
    assert box.states() == {"Worker": "running", "Worker_1": "asleep"}
    with pytest.raises(DynamoError, match=f"sleeps; wake it first with: dynamo wake {name}"):
        box.control.begin(partial(box.control.actions.restart, name))
    # Its GPU goes to another model: it cannot be woken, and the error says by whom and what to do.
    assert "loaded" in box.act(box.control.actions.load, "other")
    assert box.states()["Other_1"] == "running"
    with pytest.raises(DynamoError, match=r"GPU 1 is in use by .*Other_1; free it with: dynamo"):
        box.control.begin(partial(box.control.actions.wake, "Worker_1"))
    assert "drained" in box.act(box.control.actions.drain, "Other")
    assert "awake" in box.act(box.control.actions.wake, name)
    assert box.states() == {"Worker": "running", "Worker_1": "running"}
    assert box.serving.pids("Worker_1") == pids


def _drain_and_load(box: Box) -> None:
    done = box.dynamo("drain", "Worker_1")
    assert "requests in flight finish" in done.stdout, done.stderr
    assert done.stdout.endswith("drained; GPU 1 is free\n")
    assert box.states() == {"Worker": "running"}
    with pytest.raises(DynamoError, match="is served already"):
        box.control.begin(partial(box.control.actions.load, "tiny"))
    with pytest.raises(InvalidArgument, match=r"no model 'x' in namespace .*: other, tiny"):
        box.control.begin(partial(box.control.actions.load, "x"))
    wrong = box.dynamo("drain", "Work")
    assert wrong.returncode == 2
    assert f"Worker ({box.name('Worker')})" in wrong.stderr
    assert "only dynamo restart applies to it" in box.dynamo("sleep", "Frontend").stderr
    refused = box.dynamo("unload", "tiny")
    assert refused.returncode == 1
    assert "the planner keeps a worker of tiny: pause it first with: dynamo planner" in (
        refused.stderr
    )


def _unload(box: Box) -> None:
    assert box.dynamo("planner", "pause").returncode == 0
    assert box.planner_state() == "paused"
    explained = json.loads(box.dynamo("planner", "explain", "--json").stdout)
    assert all(model["paused"] for model in explained["models"])
    assert "unloaded" in box.act(box.control.actions.unload, "tiny")
    assert box.states() == {"Worker": "asleep"}
    assert "loaded, ready" in box.act(box.control.actions.load, "tiny")
    assert box.states() == {"Worker": "running"}
    _kill_planner(box)  # it stays paused
    assert "resumed" in box.act(box.control.actions.resume_planner)
    assert box.planner_state() == "running"


def _kill_planner(box: Box) -> None:
    shown = box.dynamo("planner", "set", "--ttft", "900", "--min", "Other=0", "--json")
    assert json.loads(shown.stdout)["ttft_ms"] == 900
    assert box.dynamo("planner", "set").returncode == 0  # shows them: nothing has changed
    events = box.dynamo("events", "--name", "planner", "--json").stdout.splitlines()
    assert sum(json.loads(line)["kind"] == "planner" for line in events) == 1
    report = json.loads((box.run_dir / "planner.json").read_text())
    os.kill(report["pid"], signal.SIGKILL)

    def restarted() -> bool:
        path = box.run_dir / "planner.json"
        found = json.loads(path.read_text()) if path.exists() else report
        return bool(found["pid"] != report["pid"] and found["state"] == "paused")

    box.serving.until(restarted)
    url = f"http://127.0.0.1:{box.port}/v1/planner"
    box.serving.until(lambda: httpx.get(url, timeout=20).status_code == 200)
    state = httpx.get(url, timeout=20).json()
    assert (state["paused"], state["ttft_ms"], state["mode"]) == (True, 900, "auto")
    changed = httpx.post(url, json={"itl_ms": 40, "minima": {"Other": None}}, timeout=20)
    assert changed.status_code == 200 and changed.json()["itl_ms"] == 40
    refused = httpx.post(url, json={"minima": {"None": 1}}, timeout=20)
    assert refused.status_code == 400 and "there are: Other, Worker" in refused.text
    assert httpx.post(url, json={"itl": 1}, timeout=20).status_code == 400
    assert "must be SERVICE=N" in box.dynamo("planner", "set", "--min", "Worker").stderr


def test_top_and_its_keys(box: Box) -> None:
    env = {**box.serving.env, "DYN_NAMESPACE": box.serving.namespace}
    top = PtyScreen([sys.executable, "-m", "dynamo", "top"], env)
    load = Load(box.port, clients=1, tokens=5, pause_s=0.1)
    try:
        top.wait_for(r"tiny +ready +2/2")
        top.wait_for(r"\d+ ms +0\.\d+ s +\d+ +5 +\S+_Worker")  # a request, with its worker's name
        load.close()
        _press_keys(box, top)
        top.press("q")
        assert top.ended() == 0
    finally:
        load.close()
        top.close()
    once = box.dynamo("top", "--once")
    assert once.returncode == 0
    assert "\x1b" not in once.stdout
    assert re.search(r"tiny +ready", once.stdout)
    assert "\nplanner: running, mode auto, next decision in " in once.stdout


def _press_keys(box: Box, top: PtyScreen) -> None:
    top.press("\x1b[B")  # down, from Worker to Worker_1
    top.wait_for("s sleep")
    top.press("s")
    top.wait_for("Worker_1: asleep; GPU 1 is free")
    top.wait_for(r"_Worker_1 +asleep")
    top.wait_for("s wake")
    assert box.states() == {"Worker": "running", "Worker_1": "asleep"}
    top.press("s")
    top.wait_for("Worker_1: awake")
    top.wait_for(r"_Worker_1 +ready")
    top.press("l")
    top.wait_for("log of .*_Worker_1")
    top.wait_for("the engine is awake")
    top.press("q")
    top.wait_for("workers by name")
    top.press("o")
    top.wait_for("workers by state")
    top.press("p")
    top.wait_for("planner: paused")
    top.press("p")
    top.wait_for("planner: running")
    top.press("dn")
    top.press("d")
    top.wait_for("drain .*_Worker_1: it finishes its requests and exits; y/n")
    assert box.states() == {"Worker": "running", "Worker_1": "running"}
    top.press("y")
    top.wait_for("_Worker_1: drained; GPU 1 is free")
    box.serving.until(lambda: box.states() == {"Worker": "running"})
    top.resize(12, 60)
    top.wait_for("^.{59,60}$")


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_top_restores_the_terminal(tmp_path: Path, signum: int, status: int) -> None:
    env = {**os.environ, "DYN_LOCAL_STATE_DIR": str(tmp_path), "DYN_NAMESPACE": "none"}
    top = PtyScreen([sys.executable, "-m", "dynamo", "top"], env)
    try:
        top.wait_for("no deployment runs in namespace 'none'; start one: dynamo run MODEL")
        top.process.send_signal(signum)
        assert top.ended() == status
    finally:
        top.close()


def test_top_ignores_a_hangup_that_was_ignored(tmp_path: Path) -> None:
    env = {**os.environ, "DYN_LOCAL_STATE_DIR": str(tmp_path), "DYN_NAMESPACE": "none"}
    command = f"trap '' HUP; exec {shlex.quote(sys.executable)} -m dynamo top"
    top = PtyScreen(["sh", "-c", command], env)
    try:
        top.wait_for("no deployment runs in namespace 'none'")
        top.process.send_signal(signal.SIGHUP)
        top.press("q")
        assert top.ended() == 0
    finally:
        top.close()


def test_a_worker_of_ones_own_is_drained(serving: Serving) -> None:
    """Its program is not one of ours, but it has registered a model."""
    command = ["python", str(ROOT / "examples/worker_hello.py"), str(MODEL)]
    frontend = f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
    path = serving.graph(
        f"{frontend}Own: {{run: {json.dumps(command)}}}\nOther: {{run: SLEEPER}}\n"
    )
    serving.start(path, wait="ready: http://.*model: hello")
    settings = RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))
    control = BoxControl(settings)
    try:
        with pytest.raises(InvalidArgument, match=r"only dynamo restart applies .*are Own"):
            control.begin(partial(control.actions.drain, "Other"))
        with pytest.raises(DynamoError, match="its engine has no sleep mode"):
            control.begin(partial(control.actions.sleep, "Own"))
        control.begin(partial(control.actions.drain, "Own"))
        assert control.wait(20)
        assert control.outcomes[-1].text.endswith("_Own: drained")
        with pytest.raises(InvalidArgument, match="Own has no process now; try: dynamo reload"):
            control.begin(partial(control.actions.drain, "Own"))
    finally:
        control.close()
    assert serving.document()["components"][f"{serving.namespace}_Own"]["processes"] == []
    assert serving.stop() == 0


def test_a_sleep_reverts_an_interrupted_wake(serving: Serving) -> None:
    """The engine goes on to wake when its verb has ended."""
    serving.start(
        f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
        f"Worker:\n  run: dynamo.mocker\n  model-path: {MODEL}\n  model-name: tiny\n"
        "  enable-sleep-mode: true\n  wake-time: 3\n  ServiceArgs: {resources: {gpu: 1}}\n",
        *("--gpus", "1"),
        wait="ready: http://",
    )
    name = f"{serving.namespace}_Worker"

    def begin(verb: str) -> subprocess.Popen[str]:
        env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "dynamo", verb, name]
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    def entry() -> dict[str, Any]:
        found: dict[str, Any] = serving.document()["components"][name]
        return found

    first = begin("sleep")
    assert first.communicate(timeout=60) and first.returncode == 0
    waking = begin("wake")
    serving.until(lambda: "reserved_by" in entry() or waking.poll() is not None)
    waking.send_signal(signal.SIGINT)
    waking.communicate(timeout=60)
    again = begin("sleep")
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert entry()["state"] == "asleep" and "reserved_by" not in entry()
    last = begin("wake")
    assert last.communicate(timeout=60) and last.returncode == 0
    assert entry()["state"] == "running"
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_planner_finishes_the_wake_of_a_command_that_was_killed(box: Box) -> None:
    """The worker holds its GPU until then, and requests for another model would wait for ever."""
    assert "asleep" in box.act(box.control.actions.sleep, "Worker_1")
    with subprocess.Popen(["true"]) as gone:
        owner = OperationOwner(pid=gone.pid, start_ticks=1, host=host_id(), operation="wake")

    def interrupted(document: Document) -> None:
        document.components[box.name("Worker_1")].reserved_by = owner

    Statefile(box.serving.state_dir, box.serving.namespace).update(interrupted)
    box.serving.wait_for("Worker_1: finished its wake")
    assert box.states() == {"Worker": "running", "Worker_1": "running"}
    assert box.serving.stop() == 0
    box.serving.assert_clean()


def test_the_id_of_a_worker_outside_of_the_deployment_is_no_name(box: Box) -> None:
    done = box.dynamo("drain", "1a2b")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no service or worker '1a2b' in namespace" in done.stderr


def test_a_failed_worker_is_started_again(serving: Serving) -> None:
    flag = serving.tmp_path / "flag"
    script = f"test -e {flag} && exec sleep 1000"
    graph = f"Worker: {{run: {json.dumps(['sh', '-c', script])}}}\nOther: {{run: SLEEPER}}\n"
    serving.start(graph, wait="gave up .*_Worker", DYN_SERVE_RESTART_BURST="1")
    flag.touch()
    settings = RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))
    control = BoxControl(settings)
    try:
        control.begin(partial(control.actions.restart, "Worker"))
        assert control.wait(20)
        assert not control.outcomes[-1].failed
        serving.wait_for_pids("Worker")
    finally:
        control.close()


def test_after_circusctl_decr_to_zero_all_verbs_agree(box: Box) -> None:
    """The last process of a worker with GPUs: stopped, until `dynamo load` starts it again."""
    box.act(box.control.actions.drain, "Worker_1")
    assert box.dynamo("planner", "pause").returncode == 0  # it would keep its minimum
    name = box.name("Worker")
    assert "Singleton" in box.serving.circusctl("incr", name)
    assert box.serving.circusctl("decr", name, "--waiting") == "0"
    box.serving.until(lambda: not box.serving.pids("Worker"))

    def shown() -> tuple[str, str, str, bool]:
        found = json.loads(box.dynamo("ps", "--json").stdout)
        (worker,) = [one for one in found["workers"] if one["name"] == name]
        state = json.loads(box.dynamo("state", "show", "--json").stdout)
        (component,) = [one for one in state["components"] if one["component"] == name]
        entry = box.serving.document()["components"][name]
        return worker["state"], component["state"], entry["watcher"]["status"], "state" in entry

    box.serving.until(lambda: shown() == ("stopped", "stopped", "stopped", False))
    assert box.dynamo("state", "repair", "--dry-run").stdout == "nothing to repair\n"
    assert box.dynamo("state", "repair").stdout == "nothing to repair\n"
    assert box.serving.circusctl("numprocesses", name) == "0"
    done = box.dynamo("load", "tiny")
    assert done.returncode == 0 and f"starting {name} again" in done.stdout, done.stderr
    assert shown() == ("ready", "ready", "active", True)
    assert box.serving.circusctl("numprocesses", name) == "1"
    assert box.dynamo("state", "repair").stdout == "nothing to repair\n"
