"""The guard: the parent of the arbiter, which outlives it by the moment that clean-up takes.

``dynamo serve`` is two processes. The one that was started keeps to three things: it hands signals
on, it waits for the arbiter, and as a subreaper it ends whatever the arbiter left behind, however
the arbiter died. The arbiter in turn stops everything when the guard dies. So no single ``kill -9``
leaves a process of ours behind, and what the two agree on is kept by the kernel, not by a protocol.
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

from dynamo.runtime.stop_signals import StopSignals
from dynamo.serve.processes import become_subreaper, die_with_parent, end_descendants

__all__ = ["KILL_NOW", "STOP_SIGNALS", "hold_signals", "run_guarded"]

STOP_SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
KILL_NOW = signal.SIGUSR1
"""The guard's word to the arbiter that the user asked twice; stop signals themselves may repeat."""

_WATCHED = STOP_SIGNALS | {signal.SIGCHLD}
_PATIENCE = 3
_SWEEP_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


def hold_signals() -> None:
    """A stop signal now waits for :func:`run_guarded`: what is begun is also cleaned up."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED | {KILL_NOW})


def run_guarded(body: Callable[[], int], clean_up: Callable[[], None]) -> int:
    """Run ``body`` in a child of its own session; its exit status, or 128 + the signal it died of.

    ``body`` starts with the stop signals and KILL_NOW blocked: none is lost while it sets itself
    up. It must unblock them. ``clean_up`` runs here when everything below has ended, or in the
    child if we are killed before. The second stop request arrives in the child as KILL_NOW, the
    third one kills it. See StopSignals for what counts as a request.
    """
    hold_signals()
    become_subreaper()
    _flush()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _child(body, clean_up, guard)
    status = _wait(child)
    if left := end_descendants(_SWEEP_TIMEOUT_S):
        log.error("processes %s cannot be killed: the kernel holds them", left)
    if status:
        log.debug("the arbiter ended with %d", status)
    clean_up()
    return status


def _child(body: Callable[[], int], clean_up: Callable[[], None], guard: int) -> None:
    """The arbiter's side of the fork; never returns."""
    status = 1
    try:
        os.setsid()  # a Ctrl-C at the terminal reaches the guard alone
        become_subreaper()
        if die_with_parent(signal.SIGTERM, guard):
            status = body()
        if os.getppid() != guard:
            clean_up()  # the guard is dead
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last frame of this process: show it and exit
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it was closed
            stream.flush()


def _wait(child: int) -> int:
    stops = StopSignals()
    while True:
        signum = signal.sigwait(_WATCHED)
        if signum == signal.SIGCHLD:
            status = _reap(child)
            if status is not None:
                return status
            continue
        count = stops.received(signum, time.monotonic())
        if count == 1:
            os.kill(child, signum)
        elif count:
            os.kill(child, signal.SIGKILL if count >= _PATIENCE else KILL_NOW)


def _reap(child: int) -> int | None:
    """Reap all zombies; the exit status of ``child`` if it was one of them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code
