"""circusctl on a running deployment: restart, reload, more processes, giving up."""

from __future__ import annotations

import json
import os
import time

import psutil
import pytest
import zmq
from serving import QUICKSTART, Serving

TWO = """
A: {run: SLEEPER, ServiceArgs: {workers: 2}}
B: {run: SLEEPER}
"""


@pytest.mark.parametrize(
    "words", [["restart"], ["restart", "*"], ["reload"], ["reload", "--sequential"]]
)
def test_restart_all(serving: Serving, words: list[str]) -> None:
    """`circusctl restart` without a name must not end the deployment."""
    serving.start(TWO)
    old = {name: serving.wait_for_pids(name) for name in ("A", "A_1", "B")}
    assert "ok" in serving.circusctl(*words, *(["--waiting"] if len(words) == 1 else []))
    for name, (pid,) in old.items():
        assert len(serving.wait_for_pids(name, unlike=pid)) == 1
        assert not psutil.pid_exists(pid)
    assert serving.circusctl("status").count("active") == 3
    assert "gave up" not in serving.text()
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("verb", ["restart", "reload"])
def test_restart_all_of_a_real_deployment(
    serving: Serving, unused_tcp_port: int, verb: str
) -> None:
    """The new frontend starts beside the old one, on the same port."""
    own = ("--namespace", serving.namespace, f"--Frontend.http-port={unused_tcp_port}")
    serving.start(QUICKSTART, *own)
    (old,) = serving.wait_for_pids("Frontend")
    assert serving.circusctl(verb) == "ok"
    serving.wait_for_pids("Frontend", unlike=old, timeout_s=60)  # the last one
    serving.wait_for("Frontend .*OpenAI API at")
    assert serving.stop() == 0
    assert "restarting it" not in serving.text()
    serving.assert_clean()


def test_stop_and_start_all(serving: Serving) -> None:
    serving.start(TWO)
    assert serving.circusctl("stop", "--waiting") == "ok"
    assert serving.circusctl("status").count("stopped") == 3
    assert serving.circusctl("start", "--waiting") == "ok"
    assert serving.circusctl("status").count("active") == 3
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_stop_during_a_restart(serving: Serving) -> None:
    serving.start("A: {run: SLEEPER, drain: 10}\nB: {run: SLEEPER}\n")
    assert serving.circusctl("restart") == "ok"
    name = f"{serving.namespace}_A"
    serving.until(lambda: serving.circusctl("status", name) == "stopping")
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_second_frontend_is_rejected(serving: Serving, unused_tcp_port: int) -> None:
    path = f"Frontend: {{run: dynamo.frontend, http-port: {unused_tcp_port}}}\nA: {{run: SLEEPER}}"
    serving.start(path, wait="OpenAI API at")
    name = f"{serving.namespace}_Frontend"
    for words in (["incr", name], ["incr", name, "3"], ["set", name, "numprocesses", "2"]):
        answer = serving.circusctl(*words, "--waiting")
        assert "cannot share" in answer and "docs/routing/replicas.md" in answer
    assert serving.circusctl("numprocesses", name) == "1"
    assert len(serving.pids("Frontend")) == 1
    assert serving.circusctl("reloadconfig", "--waiting") == "ok"
    assert serving.stop() == 0
    assert "restarting it" not in serving.text()


def test_an_extra_process_that_fails_stops_no_other(serving: Serving) -> None:
    """Only one process at a time can hold the lock: the second one fails, and is given up."""
    lock = serving.tmp_path / "lock"
    serving.start(f"A: {{run: [flock, -n, {lock}, sleep, '1000']}}\n", DYN_SERVE_RESTART_BURST="3")
    (first,) = serving.wait_for_pids("A")
    flock = psutil.Process(first)
    serving.until(lambda: "flock" not in flock.cmdline() or flock.children())
    name = f"{serving.namespace}_A"
    assert serving.circusctl("incr", name, "--waiting") == "2"
    serving.wait_for(f"gave up a process of {name}: 3 deaths within 60 s")
    serving.wait_for(f"{name}: 1 still running")
    assert serving.circusctl("numprocesses", name) == "1"
    assert serving.circusctl("status", name) == "active"
    assert psutil.pid_exists(first) and serving.pids("A") == [first]
    os.kill(first, 9)  # its deaths are counted from zero
    serving.wait_for("A .* was killed by SIGKILL; restarting it now")
    serving.wait_for_pids("A", unlike=first)
    assert serving.stop() == 0
    serving.assert_clean()


def test_the_exit_status_follows_the_end_state(serving: Serving) -> None:
    """A service that is given up, repaired and started by hand does not fail the deployment."""
    (serving.tmp_path / "service.sh").write_text(
        "test -e repaired && exec sleep 1000; echo not repaired; exit 3\n"
    )
    graph = "A: {run: SLEEPER}\nB: {run: [sh, service.sh]}\n"
    name = f"{serving.namespace}_B"
    serving.start(graph, wait=f"gave up {name}: 2 deaths", DYN_SERVE_RESTART_BURST="2")
    serving.wait_for("the other services continue")
    said = {"last_exit": "exited with status 3", "last_words": "not repaired"}
    serving.until(lambda: said.items() <= serving.document()["components"][name]["watcher"].items())
    (serving.tmp_path / "repaired").touch()
    serving.until(lambda: serving.circusctl("status", name) == "stopped")
    assert serving.circusctl("start", name, "--waiting").endswith("ok")
    assert serving.circusctl("status", name) == "active"
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_removed_watcher_does_not_count(serving: Serving) -> None:
    name = f"{serving.namespace}_B"
    graph = "A: {run: SLEEPER}\nB: {run: SLEEPER, exit: 3}\n"
    serving.start(graph, wait=f"gave up {name}: 2 deaths", DYN_SERVE_RESTART_BURST="2")
    serving.wait_for("the other services continue")
    assert serving.circusctl("rm", name, "--waiting") == "ok"
    assert serving.stop() == 0
    serving.assert_clean()


def test_no_command_is_refused_for_a_periodic_check(serving: Serving) -> None:
    """The arbiter looks at its watchers each second; commands that come just then are served."""
    serving.start("A: {run: SLEEPER, ServiceArgs: {workers: 4}}\n")
    name = f"{serving.namespace}_A"
    start = {"command": "start", "properties": {"name": name, "match": "simple", "waiting": True}}
    replies = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(serving.endpoint)
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            socket.send(json.dumps({"id": "1", **start}).encode())
            replies.append(json.loads(socket.recv()))
    assert [one for one in replies if one["status"] != "ok"] == []
    assert serving.stop() == 0


def test_removed_watchers_leave_no_descriptor(serving: Serving) -> None:
    """The log files of the newest removed watchers stay open, and no others."""
    serving.start("A: {run: SLEEPER}\n")
    arbiter = psutil.Process(serving.arbiter_pid)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(serving.endpoint)

        def command(verb: str, **properties: object) -> None:
            socket.send(json.dumps({"id": "1", "command": verb, "properties": properties}).encode())
            reply = json.loads(socket.recv())
            assert reply["status"] == "ok", reply

        def add_and_remove(numbers: range) -> list[str]:
            for number in numbers:
                command("add", name=f"extra_{number}", cmd="sleep", args=["60"])
                command("rm", name=f"extra_{number}", waiting=True)
            return [one.path for one in arbiter.open_files() if "extra_" in one.path]

        assert len(add_and_remove(range(25))) < 20
        held = add_and_remove(range(25, 60))
    assert len(held) < 20 and not any(path.endswith("extra_24.log") for path in held)
    assert serving.stop() == 0
    serving.assert_clean()
