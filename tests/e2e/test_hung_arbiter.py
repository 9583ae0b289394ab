"""An arbiter that does nothing: every verb says so and what to do, and a stop works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from deployment import MODEL
from forked_kit import run_verb
from serving import Serving

STARTS = """
import signal, sys
from pathlib import Path
from dynamo.serve.state.rundir import RunDirectory
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.supervision.guard import hold_signals
state, namespace = Path(sys.argv[1]), sys.argv[2]
(state / namespace).mkdir(parents=True, mode=0o700)
hold_signals()
RunDirectory(state / namespace, state / "store", Statefile(state, namespace)).acquire()
print("locked", flush=True)
signal.sigwait({signal.SIGTERM})
"""
GRAPH = "A: {run: SLEEPER}\n"
SOON_S = 30  # generous: the verbs wait for some seconds, before they waited for ever


def verb(serving: Serving, *words: str) -> tuple[int, str]:
    found = run_verb(
        *words, env={**serving.env, "DYN_NAMESPACE": serving.namespace}, timeout=SOON_S
    )
    return found.returncode, found.stdout + found.stderr


def arbiter(serving: Serving) -> int:
    return int(serving.document()["arbiter"]["pid"])


def test_every_verb_says_that_the_arbiter_was_stopped(serving: Serving) -> None:
    serving.start(GRAPH)
    assert verb(serving, "ps")[0] == 0
    pid = arbiter(serving)
    graph = str(serving.graph("A: {run: SLEEPER}\nB: {run: SLEEPER}\n"))
    os.kill(pid, signal.SIGSTOP)
    try:
        for words in (
            ["ps"],
            ["state", "show"],
            ["reload", graph],
            ["run", str(MODEL), "--engine", "mocker", "--name", "more"],
            ["restart", "A"],
            ["state", "repair"],
        ):
            status, text = verb(serving, *words)
            assert f"the arbiter (pid {pid}) was stopped by a signal" in text, (words, text)
            assert f"kill -CONT {pid}" in text, (words, text)
            assert f"dynamo stop --namespace {serving.namespace}" in text, (words, text)
            assert status == (0 if words == ["state", "show"] else 1), (words, text)
        findings = json.loads(verb(serving, "doctor", "--json")[1])["findings"]
        (found,) = (one for one in findings if one["check"] == "arbiter")
        assert found["severity"] == "error" and f"kill -CONT {pid}" in found["remedy"]
        assert json.loads(verb(serving, "ps", "--json")[1])["hung"]
    finally:
        os.kill(pid, signal.SIGCONT)
    status, text = verb(serving, "reload", graph)
    assert status == 0, text
    serving.stop()


@pytest.mark.parametrize("halted", [("arbiter",), ("guard",), ("arbiter", "guard")])
def test_a_stop_continues_what_was_halted(serving: Serving, halted: tuple[str, ...]) -> None:
    serving.start(GRAPH)
    (worker,) = serving.wait_for_pids("A")
    for name in halted:
        os.kill(arbiter(serving) if name == "arbiter" else serving.pid, signal.SIGSTOP)
    status, text = verb(serving, "stop")
    assert status == 0 and text.count("continuing it") == len(halted), text
    assert serving.wait() == 0
    assert not psutil.pid_exists(worker)


def test_a_stop_ends_an_arbiter_that_does_not_react(serving: Serving) -> None:
    """Its loop blocks for ever, as on a file system that does not answer."""
    blocks = serving.tmp_path / "sitecustomize.py"
    blocks.write_text(
        "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: time.sleep(1e6))\n"
    )
    serving.start(GRAPH, PYTHONPATH=str(serving.tmp_path))
    (worker,) = serving.wait_for_pids("A")
    pid = arbiter(serving)
    os.kill(pid, signal.SIGUSR2)
    status, text = verb(serving, "ps")
    assert status == 1 and f"the arbiter (pid {pid}) did not answer within 1 s" in text, text
    status, text = verb(serving, "reload")
    assert status == 1 and f"the arbiter (pid {pid}) did not answer within 2 s" in text, text
    status, text = verb(serving, "stop")
    assert status == 0 and "does not react" in text, text
    assert serving.wait() == 128 + signal.SIGKILL
    assert not psutil.pid_exists(worker)
    assert not serving.statefile.exists()


def test_a_stop_finds_a_start_without_a_statefile(serving: Serving) -> None:
    words = [sys.executable, "-c", STARTS, str(serving.state_dir), serving.namespace]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as starting:
        assert starting.stdout is not None and starting.stdout.readline() == "locked\n"
        status, text = verb(serving, "stop")
        assert status == 0 and "about to start" in text, text
        assert starting.wait() == 0
    status, text = verb(serving, "stop")  # its lock file is left, as after kill -9
    assert status == 1 and "no deployment runs" in text, text
