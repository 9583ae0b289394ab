"""Parents, sessions and the guard, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
from circus.process import RUNNING, UNEXISTING

from dynamo.runtime.process.os_process import host_id
from dynamo.serve.state.document import Arbiter
from dynamo.serve.state.process_table import (
    children,
    environment,
    runs_here,
    same_process,
    snapshot,
    stat,
)
from dynamo.serve.supervision.supervised_process import SupervisedProcess


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *words],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_stat_detects_a_reused_pid() -> None:
    me = stat(os.getpid())
    assert me is not None and me.parent == os.getppid() and me.session == os.getsid(0)
    assert same_process(me.pid, me.start_ticks)
    assert not same_process(me.pid, me.start_ticks + 1)
    assert stat(2**22 + 1) is None and stat(-1) is None
    assert runs_here(Arbiter(pid=me.pid, start_ticks=me.start_ticks, host=host_id()))
    assert not runs_here(Arbiter(pid=me.pid, start_ticks=me.start_ticks, host="another"))
    assert me.pid in {process.pid for process in snapshot()}


def test_a_zombie_does_not_count_as_a_process() -> None:
    child = subprocess.Popen(["sleep", "0"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (found,) = [one for one in children(os.getpid()) if one.pid == child.pid]
    assert found.state == "Z" and not same_process(child.pid, found.start_ticks)
    child.wait()


def test_environment_of_another_process() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={"A": "b=c", "E": ""}) as child:
        while environment(child.pid) != {"A": "b=c", "E": ""}:  # until it has become cat
            assert child.poll() is None
    assert environment(2**22 + 1) == {}


def test_daemons_in_other_sessions_are_killed() -> None:
    """A daemon that forked twice and left its session is adopted by the subreaper."""
    done = run(
        """
        import os, subprocess, time
        from dynamo.serve.state.process_table import children
        from dynamo.serve.state.process_table import become_subreaper, end_descendants
        become_subreaper()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                subprocess.Popen(["sleep", "1000"], start_new_session=True)
                time.sleep(1000)
            os._exit(0)
        os.wait()
        while not any(child.state == "S" for child in children(os.getpid())):
            pass
        assert end_descendants(5) == []
        assert children(os.getpid()) == []
        """
    )
    assert done.returncode == 0, done.stderr


GUARDED = """
    import os, signal, sys
    from pathlib import Path
    from dynamo.serve.supervision.guard import STOP_SIGNALS, run_guarded

    def body():
        {body}

    def clean_up():
        print("clean", os.getpid() == guard, flush=True)

    guard = os.getpid()
    status = run_guarded(body, clean_up, lambda text: print(text.partition(') ')[2]))
    print("status", status, flush=True)
"""


def guarded(body: str) -> list[str]:
    done = run(GUARDED.replace("{body}", body.replace("\n", "\n        ")))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_the_guard_returns_the_status_and_cleans_up_once() -> None:
    assert guarded("return 7") == ["clean True", "status 7"]
    assert guarded("sys.exit(3)") == ["clean True", "status 3"]
    assert guarded("raise ValueError") == ["clean True", "status 1"]
    killed = "was killed by SIGKILL; killing what it started"
    assert guarded("os.kill(os.getpid(), signal.SIGKILL)") == [killed, "clean True", "status 137"]


def test_the_arbiter_leads_a_session_and_starts_with_blocked_signals() -> None:
    body = (
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "return 0 if STOP_SIGNALS <= blocked and os.getsid(0) == os.getpid() else 1"
    )
    assert guarded(body)[-1] == "status 0"


def test_a_signal_to_the_guard_reaches_the_arbiter() -> None:
    body = "os.kill(os.getppid(), signal.SIGINT)\nreturn int(signal.sigwait(STOP_SIGNALS))"
    assert guarded(body)[-1] == f"status {int(signal.SIGINT)}"


def test_a_dead_guard_stops_the_arbiter_which_cleans_up(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    body = (
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "found = signal.sigwait(STOP_SIGNALS)\n"
        f"Path({str(proof)!r}).write_text(found.name)\n"
        "return 0"
    )
    done = run(GUARDED.replace("{body}", body.replace("\n", "\n        ")))
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "clean False\n"  # the pipe's end waits for the arbiter
    assert proof.read_text() == "SIGTERM"


def test_processes_that_outlive_the_arbiter_are_killed() -> None:
    body = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid, _, clean, status = guarded(body)
    assert (clean, status) == ("clean True", "status 137")
    assert stat(int(pid)) is None


def test_circus_sees_an_exit_when_it_is_reaped() -> None:
    """It would replace a zombie at its periodic check, also one that was drained."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        process = object.__new__(SupervisedProcess)
        process._worker = worker = psutil.Process(child.pid)
        process.exited = asyncio.Event()
        assert worker.status() == psutil.STATUS_ZOMBIE
        assert process.status == RUNNING
        process.exited.set()
        assert process.status == UNEXISTING
