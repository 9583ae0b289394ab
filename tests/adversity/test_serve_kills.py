"""Signals and kills at random moments, start-up included: afterwards nothing is left.

Nothing means: no process with our marker in its environment, wherever it hides; no socket, no
statefile, no lease, no lock. The moments are random, the seeds are not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from deployment import free_port, interrupt_again
from serving import ROOT, Serving, is_running

GRAPH = """
Front: {run: SLEEPER, drain: 0.05}
Worker: {run: SLEEPER, children: 1, drain: 0.05, ServiceArgs: {workers: 2}}
Escaping: {run: SLEEPER, children: 1, escape: true}
"""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LATEST_S = 1.2


def arbiter_of(serving: Serving) -> int | None:
    """The guard's child, which leads a session; it may have no statefile yet."""
    try:
        children = psutil.Process(serving.pid).children()
        return next((c.pid for c in children if os.getsid(c.pid) == c.pid), None)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def wait_for_arbiter(serving: Serving) -> int:
    deadline = time.monotonic() + 30
    while (pid := arbiter_of(serving)) is None:
        assert time.monotonic() < deadline
    return pid


@pytest.mark.parametrize("seed", range(12))
def test_a_stop_signal_at_any_moment(serving: Serving, seed: int) -> None:
    dice = random.Random(seed)
    serving.start(GRAPH, wait="")
    time.sleep(dice.uniform(0.0, LATEST_S))
    assert serving.process is not None
    serving.process.send_signal(dice.choice(STOPS))
    if dice.random() < 0.3:  # an impatient person
        time.sleep(dice.uniform(0.0, 0.2))
        serving.process.send_signal(signal.SIGINT)
    serving.wait()
    serving.assert_clean()


@pytest.mark.parametrize("seed", range(8))
def test_kill_9_of_the_arbiter_at_any_moment(serving: Serving, seed: int) -> None:
    dice = random.Random(100 + seed)
    serving.start(GRAPH, wait="")
    arbiter = wait_for_arbiter(serving)
    time.sleep(dice.uniform(0.0, LATEST_S))
    os.kill(arbiter, signal.SIGKILL)
    assert serving.wait() == 128 + signal.SIGKILL
    assert f"the arbiter (pid {arbiter}) was killed by SIGKILL" in serving.text()
    serving.assert_clean()


@pytest.mark.parametrize("seed", range(8))
def test_kill_9_of_the_guard_at_any_moment(serving: Serving, seed: int) -> None:
    dice = random.Random(200 + seed)
    serving.start(GRAPH, wait="")
    wait_for_arbiter(serving)
    time.sleep(dice.uniform(0.0, LATEST_S))
    os.kill(serving.pid, signal.SIGKILL)
    assert serving.wait() == -signal.SIGKILL
    serving.assert_clean()


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_of_workers_again_and_again(serving: Serving, seed: int) -> None:
    """Each restarts, with new children; the old children have ended."""
    dice = random.Random(300 + seed)
    serving.start(GRAPH, DYN_SERVE_RESTART_BURST="1000")
    for _ in range(6):
        service = dice.choice(("Front", "Worker", "Worker_1", "Escaping"))
        (old,) = serving.wait_for_pids(service)
        children = psutil.Process(old).children()
        time.sleep(dice.uniform(0.0, 0.3))
        os.kill(old, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        serving.wait_for_pids(service, unlike=old)
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.003, 0.01, 0.03])
def test_a_death_and_a_stop_at_once(serving: Serving, gap_s: float) -> None:
    """The stop finds the arbiter about to start a replacement."""
    serving.start(GRAPH)
    (worker,) = serving.wait_for_pids("Worker")
    assert serving.process is not None
    os.kill(worker, signal.SIGKILL)
    time.sleep(gap_s)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.wait() == 0
    serving.assert_clean()


@pytest.mark.parametrize("seed", range(4))
def test_kills_during_the_stop(serving: Serving, seed: int) -> None:
    """The arbiter or the guard dies while the workers finish their work."""
    dice = random.Random(400 + seed)
    serving.start(GRAPH.replace("drain: 0.05", "drain: 1"), wait="started")
    for _ in range(3):
        serving.wait_for("started")
    arbiter = serving.arbiter_pid
    assert serving.process is not None
    serving.process.send_signal(signal.SIGTERM)
    time.sleep(dice.uniform(0.0, 0.8))
    with contextlib.suppress(ProcessLookupError):  # on a busy machine the stop may have ended
        os.kill(dice.choice((arbiter, serving.pid)), signal.SIGKILL)
    serving.process.wait(15)
    serving.assert_clean()


def test_the_process_group_of_the_terminal_is_killed(serving: Serving) -> None:
    """`kill -9 -PGID` hits only the guard: the arbiter leads its own session."""
    serving.start(GRAPH)
    os.killpg(serving.pid, signal.SIGKILL)
    serving.wait()
    serving.assert_clean()


def test_a_stopped_guard_does_not_stop_the_supervision(serving: Serving) -> None:
    """Ctrl-Z: the services continue, and a worker that dies then is restarted."""
    serving.start(GRAPH)
    (old,) = serving.wait_for_pids("Worker")
    os.kill(serving.pid, signal.SIGSTOP)
    os.kill(old, signal.SIGKILL)
    serving.wait_for_pids("Worker", unlike=old)
    os.kill(serving.pid, signal.SIGCONT)
    assert serving.stop() == 0
    serving.assert_clean()


def pending_signals(pid: int) -> int:
    """The number of signals that were sent to a process and not delivered."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = dict(line.split(":\t", 1) for line in lines)
    return int(masks["ShdPnd"], 16).bit_count()


def test_a_hung_arbiter_is_killed_by_the_third_ctrl_c(serving: Serving) -> None:
    serving.start(GRAPH)
    serving.wait_for_pids("Worker")
    arbiter = serving.arbiter_pid
    os.kill(arbiter, signal.SIGSTOP)
    assert serving.process is not None
    interrupt_again(serving.process)
    serving.until(lambda: pending_signals(arbiter) == 1)  # passed on, and not taken
    interrupt_again(serving.process)
    serving.until(lambda: pending_signals(arbiter) == 2)
    interrupt_again(serving.process)
    assert serving.wait() == 128 + signal.SIGKILL
    serving.assert_clean()


@pytest.mark.parametrize("both", [False, True])
def test_it_starts_again_after_a_crash(serving: Serving, both: bool) -> None:
    graph = GRAPH.replace(", escape: true", "")
    for _ in range(2):
        serving.start(graph)
        serving.wait_for_pids("Worker")
        arbiter = serving.arbiter_pid
        os.kill(arbiter, signal.SIGKILL)
        if both:
            os.kill(serving.pid, signal.SIGKILL)
        assert serving.process is not None
        serving.process.wait(15)
        serving.until(lambda arbiter=arbiter: not is_running(arbiter))  # type: ignore[misc]
    serving.start(graph)
    assert serving.stop() == 0
    serving.assert_clean()


def victims(serving: Serving) -> dict[str, list[int]]:
    """Pids by name as far as the deployment has come."""
    found = {"guard": [serving.pid]}
    arbiter = arbiter_of(serving)
    if arbiter is not None:
        found["arbiter"] = [arbiter]
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(arbiter).children():
                found.setdefault("service", []).append(child.pid)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_the_quickstart_at_any_moment(serving: Serving, seed: int) -> None:
    """The real frontend and mockers: no lease and no request-plane socket is left either."""
    dice = random.Random(600 + seed)
    flags = ("--namespace", serving.namespace, f"--Frontend.http-port={free_port()}")
    serving.start(ROOT / "examples/quickstart.yaml", *flags, wait="")
    time.sleep(dice.uniform(0.3, 2.5))
    found = victims(serving)
    name = dice.choice(sorted(found))
    signum = dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
    with contextlib.suppress(ProcessLookupError):  # it may just have been given up or replaced
        os.kill(dice.choice(found[name]), signum)
    time.sleep(dice.uniform(0.0, 0.5))
    assert serving.process is not None
    if serving.process.poll() is None:
        serving.process.send_signal(signal.SIGTERM)
    serving.wait(60)
    if found.keys() == {"guard"} and signum == signal.SIGKILL:
        # Before its arbiter there is no process that could remove the lock file; it is not locked.
        (serving.state_dir / serving.namespace / "serve.lock").unlink(missing_ok=True)
    serving.assert_clean()
