"""The guard: the parent of the arbiter, which cleans up after it.

``dynamo serve`` is two processes. The guard is the first: it forwards signals, waits for the
arbiter, and as a subreaper kills every process that a dead arbiter left behind. The arbiter in turn
stops everything when the guard dies. So no single ``kill -9`` leaves a process behind. Both
directions rely on the kernel (subreaper, parent-death signal), not on a protocol.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from dynamo.runtime.process.os_process import StopSignals, heeded
from dynamo.serve.state.process_table import (
    become_subreaper,
    die_with_parent,
    end_descendants,
    reap,
)

STOP_SIGNALS = heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KILL_NOW = signal.SIGUSR1
"""The guard's signal for a second stop request. Stop signals cannot serve: copies of one arrive."""

_WATCHED = STOP_SIGNALS | {signal.SIGCHLD}
_KILL_AT_REQUEST = 3
_SWEEP_TIMEOUT_S = 10.0
_SIGNALLED = 128
log = logging.getLogger(__name__)


def hold_signals() -> None:
    """Block the stop signals until :func:`run_guarded`, so that none skips the clean-up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED | {KILL_NOW})


def run_guarded(
    body: Callable[[], int], clean_up: Callable[[], None], on_killed: Callable[[str], None]
) -> int:
    """Run ``body`` in a child in a new session; return its exit status, or 128 + its signal.

    ``body`` starts with the stop signals and KILL_NOW blocked, so that none is lost during its
    set-up; it must unblock them. ``clean_up`` runs here after all descendants have exited, or in
    the child if the guard is killed. ``on_killed`` gets a text if a signal ended the child. The
    child gets the first stop request as it is and the second as KILL_NOW; the third kills the
    child. StopSignals defines what counts as a request.
    """
    hold_signals()
    become_subreaper()
    # Before the fork: the child would write what is still buffered a second time.
    _flush()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _child(body, clean_up, guard)
    status = _wait(child)
    if status > _SIGNALLED:  # else it has said itself why it exits
        number = status - _SIGNALLED
        name = next((signum.name for signum in signal.Signals if signum == number), number)
        text = f"the arbiter (pid {child}) was killed by {name}; killing what it started"
        log.error("dynamo serve: %s", text)
        on_killed(text)
    if left := end_descendants(_SWEEP_TIMEOUT_S):
        log.error("cannot kill processes %s: uninterruptible in the kernel", left)
    if status:
        log.debug("the arbiter exited with status %d", status)
    clean_up()
    return status


def _child(body: Callable[[], int], clean_up: Callable[[], None], guard: int) -> None:
    """Run the arbiter's side of the fork; never returns."""
    status = 1
    try:
        os.setsid()  # Ctrl-C at the terminal then reaches only the guard
        become_subreaper()
        if die_with_parent(signal.SIGTERM, guard):
            status = body()
        if os.getppid() != guard:
            clean_up()  # the guard died and cannot do it
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last frame of this process: print it and exit
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader exited, or it is closed
            stream.flush()


def _wait(child: int) -> int:
    stops = StopSignals()
    while True:
        signum = signal.sigwait(_WATCHED)
        if signum == signal.SIGCHLD:
            status = reap(child)
            if status is not None:
                return status
            continue
        count = stops.received(signum, time.monotonic())  # 0 for a copy of an earlier signal
        if count == 1:
            os.kill(child, signum)
        elif count:
            os.kill(child, signal.SIGKILL if count >= _KILL_AT_REQUEST else KILL_NOW)
