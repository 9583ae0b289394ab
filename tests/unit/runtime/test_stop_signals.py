"""Which signals count as stop requests, and which are copies of one."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals

import pytest

from dynamo.runtime.process.os_process import StopSignals


def counts(*signals: tuple[Signals, float]) -> list[int]:
    received = StopSignals()
    return [received.received(number, 100.0 + at_s) for number, at_s in signals]


@pytest.mark.parametrize("number", [SIGTERM, SIGHUP])
def test_a_supervisors_signal_may_be_repeated(number: Signals) -> None:
    assert counts((number, 0), (number, 0.001), (SIGTERM, 9), (SIGHUP, 20)) == [1, 0, 0, 0]


@pytest.mark.parametrize("number", [SIGINT, SIGQUIT])
def test_a_persons_second_signal_counts(number: Signals) -> None:
    assert counts((number, 0), (number, 1), (number, 2)) == [1, 2, 3]
    assert counts((SIGTERM, 0), (number, 1)) == [1, 2]


def test_timeout_sends_one_signal_twice() -> None:
    assert counts((SIGINT, 0), (SIGINT, 0.0001), (SIGINT, 0.49), (SIGINT, 0.5)) == [1, 0, 0, 2]


@pytest.mark.parametrize("trap", ["trap '' HUP; ", ""])
def test_a_hangup_that_is_ignored_at_entry_stays_so(trap: str) -> None:
    """In every process of ours that handles it: chat and profile ask when they begin."""
    ask = (
        "import signal; from dynamo.attach import launcher; from dynamo.serve.supervision import "
        "guard; from dynamo.runtime.process.os_process import heeded; hup = signal.SIGHUP; "
        "print(hup in launcher._WATCHED, hup in guard._WATCHED, hup in heeded(hup))"
    )
    command = f"{trap}exec {shlex.quote(sys.executable)} -c {shlex.quote(ask)}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == [str(not trap)] * 3, done.stderr


def test_no_handler_takes_a_hangup_unasked() -> None:
    """Each module that names SIGHUP asks heeded() for it."""
    root = Path(__file__).parents[3] / "dynamo"
    lines = [
        (path, line)
        for path in root.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "signal.SIGHUP" in line and path.name != "os_process.py"
    ]
    assert lines
    bare = [(path.name, line) for path, line in lines if "heeded(" not in line]
    assert not bare
