"""Each verb of an owner, ended by Ctrl-C and by kill -9 at moments of its work, with a client.

Afterwards the graph file is as before or as after the verb, the statefile is true, no process is
left, and the same verb succeeds. A sample of moments; ``DYN_TEST_INTERRUPTIONS=all`` tries five
moments with both signals for each verb.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import jsonschema
import pytest
from deployment import MODEL, free_port
from hub_server import Hub
from load_kit import Load, under_load
from serving import ROOT, Serving

from dynamo.serve.state.document import Document
from dynamo.serve.state.process_table import ledger_of

SCHEMA = json.loads((ROOT / "statefiles/statefile.schema.json").read_text())
MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)
SIGNALS = (signal.SIGINT, signal.SIGKILL)
GRAPH = f"""
# The door
Frontend: {{{{run: dynamo.frontend, http-port: {{port}}}}}}
A:
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: a
  speedup-ratio: 20
  ServiceArgs: {{{{workers: 2, resources: {{{{gpu: 1}}}}}}}}
B:   # comes and goes
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: b
  startup-time: 0.5
  enable-sleep-mode: true
  ServiceArgs: {{{{resources: {{{{gpu: 1}}}}}}}}
"""


@dataclass(frozen=True)
class Verb:
    """A verb, and what it says if it has been done already."""

    words: tuple[str, ...]
    done: str = "^$"


RESTARTS = (Verb(("restart", "b")), Verb(("restart", "a")))
RUN_C = Verb(("run", str(MODEL), "--engine", "mocker", "--name", "c"), "is a model of namespace")
LOAD = Verb(("load", "b"), "served already")
PAIRS = (
    (Verb(("sleep", "b"), "sleeps already"), Verb(("wake", "b"), "is not asleep")),
    (Verb(("unload", "b"), "holds no GPU"), LOAD),
    (Verb(("drain", "b"), "has no process now|being drained already|removed by another"), LOAD),
    (RUN_C, Verb(("remove", "c"), "no model 'c'")),
)
"""There and back."""


Point = tuple[float, signal.Signals]
"""A part of the time that a verb takes, and what interrupts it then."""


def points(number: int) -> list[Point]:
    """When the verb with this ``number`` is interrupted, and by what."""
    if os.environ.get("DYN_TEST_INTERRUPTIONS") == "all":
        return [*product(MOMENTS, SIGNALS)]
    return [(MOMENTS[number % 5], SIGNALS[number % 2])]


class Terminal:
    """Runs verbs as an owner does, each in a process group of its own."""

    def __init__(self, serving: Serving, **env: str) -> None:
        self.serving = serving
        self.env = {**serving.env, "DYN_NAMESPACE": serving.namespace, **env}
        self.interrupted = 0
        self._took_s: dict[tuple[str, ...], float] = {}

    def begin(self, words: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dynamo", *words],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, verb: Verb) -> None:
        """Run a verb; it succeeds, or says that it has been done."""
        begin_s = time.monotonic()
        process = self.begin(verb.words)
        output, _ = process.communicate(timeout=120)
        ok = process.returncode == 0 or re.search(verb.done, output)
        text = f"{verb.words}: status {process.returncode}\n{output}\n{self.serving.text()}"
        assert ok, text  # as a text pytest shows all of it
        self._took_s.setdefault(verb.words, time.monotonic() - begin_s)

    def follow(self, verb: Verb) -> None:
        """Run a start again that was interrupted: it may still be starting, or ending."""
        deadline_s = time.monotonic() + 60
        while True:
            process = self.begin(verb.words)
            output, _ = process.communicate(timeout=120)
            if process.returncode == 0 or re.search(verb.done, output):
                return
            assert time.monotonic() < deadline_s, (verb.words, output)

    def interrupt(self, verb: Verb, point: Point) -> None:
        """Run a verb that has run before, and interrupt it."""
        moment, signum = point
        process = self.begin(verb.words)
        time.sleep(self._took_s[verb.words] * moment)
        if process.poll() is None:
            # Ctrl-C reaches the whole process group of a terminal.
            (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
            self.interrupted += 1
        output, _ = process.communicate(timeout=120)
        # Python itself reports Ctrl-C until dynamo/__main__.py runs.
        traceback = re.search(r'File ".*/dynamo/[a-z]', output)
        assert not traceback, (verb.words, point, output)


class Box:
    """A deployment of two models, and the graph file that verbs change."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.terminal = serving, Terminal(serving)
        self.port = free_port()
        self.file = serving.graph(GRAPH.format(port=self.port))
        serving.start(self.file, "--gpus", "4", wait="ready: .*model: a, b")
        self.texts = {self.file.read_text()}

    def models(self) -> set[str]:
        url = f"http://127.0.0.1:{self.port}/v1/models"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return {one["id"] for one in json.load(answer)["data"]}

    def run(self, verb: Verb) -> str:
        """Run a verb to its end; return the graph file, which is as after a run before."""
        self.terminal.run(verb)
        self.settle()
        return self.file.read_text()

    def try_out(self, verb: Verb, after: str, point: Point) -> None:
        """Interrupt a verb, look at what it left, and run it again."""
        self.terminal.interrupt(verb, point)
        text = self.file.read_text()
        assert text in self.texts, (verb.words, point, text)
        jsonschema.validate(self.serving.document(), SCHEMA)
        self.run(verb)
        # The arbiter may still be at work on the first one: the file is the last that it changes.
        self.serving.until(lambda: self.file.read_text() == after)

    def problems(self) -> list[object]:
        """What is not true of the statefile: reservations, processes, GPUs that nothing holds."""
        document = self.serving.document()
        entries = document["components"].values()
        recorded = {one["pid"] for entry in entries for one in entry["processes"]}
        alive = {entry["watcher_name"] for entry in entries if entry["processes"]}
        known = recorded | {self.serving.pid, self.serving.arbiter_pid}
        living = {one.pid for one in self.serving.survivors()}
        return [
            *(one for one in entries if "reserved_by" in one or one.get("state") == "draining"),
            *(ledger_of(Document.of(document)).held.keys() - alive),
            *(known ^ living),
        ]

    def settle(self) -> None:
        """Wait until the statefile is true."""
        try:
            self.serving.until(lambda: not self.problems())
        except AssertionError as error:
            raise AssertionError(self.problems()) from error


def test_verbs_beside_a_running_deployment(serving: Serving) -> None:
    box = Box(serving)
    (before,) = box.texts
    with under_load(box.port, clients=2, model="a", tokens=20, pause_s=0.05) as load:
        for number, verb in enumerate(RESTARTS):
            assert box.run(verb) == before
            for point in points(number + 3):
                box.try_out(verb, before, point)
        for number, (there, back) in enumerate(PAIRS):
            after = box.run(there)
            box.texts = {before, after}
            assert box.run(back) == before
            for first, second in zip(points(number), points(number + 2), strict=True):
                box.try_out(there, after, first)
                box.try_out(back, before, second)
        assert load.answered > 20
    assert box.models() == {"a", "b"}
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_load_that_is_repeated_waits_for_the_worker_of_the_first(
    serving: Serving, signum: signal.Signals
) -> None:
    graph = GRAPH.format(port=free_port()).replace("startup-time: 0.5", "startup-time: 3")
    graph = graph.replace("enable-sleep-mode: true\n  ServiceArgs: {", "ServiceArgs: {workers: 0, ")
    serving.start(
        serving.graph(graph), "--gpus", "4", wait="ready: .*model: a .*started by dynamo load: B"
    )
    terminal = Terminal(serving)
    first = terminal.begin(LOAD.words)
    assert first.stdout is not None and "starting" in first.stdout.readline()
    serving.until(lambda: serving.pids("B_1"))
    (worker,) = serving.pids("B_1")
    os.kill(worker, signal.SIGSTOP)  # it loads for as long as the test wants
    os.kill(first.pid, signum)
    first.communicate(timeout=60)
    second = terminal.begin(LOAD.words)
    assert second.stdout is not None
    assert "_B_1: kept; the process of its load has exited" in second.stdout.readline()
    assert "_B_1 is starting, waiting for it" in second.stdout.readline()
    os.kill(worker, signal.SIGCONT)
    output, _ = second.communicate(timeout=60)
    assert (second.returncode, output) == (0, "b: loaded, ready for requests\n")
    assert serving.pids("B_1") == [worker]
    third = terminal.begin(LOAD.words)
    assert "it is served already, by " in third.communicate(timeout=60)[0]
    assert third.returncode == 1
    assert serving.stop() == 0
    serving.assert_clean()


NOTHING = "no deployment runs in namespace"
SERVED = "is already served|is a model of namespace"


def test_verbs_that_start_and_stop_a_deployment(serving: Serving) -> None:
    terminal, port = Terminal(serving), free_port()
    graph = str(serving.graph(GRAPH.format(port=port)))
    run = ("run", str(MODEL), "-d", "--engine", "mocker", "--name", "a", "--port", str(port))
    starts = (
        Verb(("serve", "-d", graph, "--gpus", "4"), SERVED),
        Verb((*run, "--namespace", serving.namespace), SERVED),
    )
    stop = Verb(("stop",), NOTHING)
    try:
        for number, start in enumerate(starts):
            terminal.run(start)
            terminal.run(stop)
            for first, second in zip(points(number + 2), points(number + 1), strict=True):
                terminal.interrupt(start, first)
                terminal.follow(start)
                # dynamo run's mocker ends answers by itself.
                tokens = None if number else 20
                client = Load(port, clients=2, tokens=tokens, model="a", pause_s=0.05)
                serving.until(partial(answers, client))
                terminal.interrupt(stop, second)
                terminal.run(stop)
                serving.assert_clean()
                client.close()
                # What it had accepted was answered; then it refuses, or is gone.
                broken = [one for one in client.failures if not REFUSED.match(one)]
                assert not broken, (start.words, second, broken)
    finally:
        terminal.run(stop)


def answers(client: Load) -> bool:
    return client.answered > 2


REFUSED = re.compile(
    "503 |ConnectionRefusedError|ConnectionResetError|RemoteDisconnected|BrokenPipe"
)


def test_verbs_of_models_on_disk(serving: Serving, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"w" * 3_000_000}
    hub = Hub("acme/tiny", files)
    terminal = Terminal(serving, HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=hub.url)
    pull, remove = Verb(("pull", "acme/tiny")), Verb(("rm", "acme/tiny", "--yes"), "no model")
    try:
        terminal.run(pull)
        terminal.run(remove)
        for first, second in zip(points(3), points(4), strict=True):
            terminal.interrupt(pull, first)
            terminal.run(pull)
            (weights,) = (tmp_path / "hf").rglob("model.safetensors")
            assert weights.read_bytes() == files["model.safetensors"]
            terminal.interrupt(remove, second)
            terminal.run(remove)
            assert not [*(tmp_path / "hf").rglob("model.safetensors")]
    finally:
        hub.close()
