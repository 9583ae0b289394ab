"""``python -m dynamo.attach.launcher PARENT COMMAND…``: runs a server that no death leaves behind.

This process is between the worker and the server that it started. It forwards a stop, and kills the
whole tree of the server when the worker dies in any way, also by ``kill -9``: as a subreaper it
adopts every process below it. Should this process itself be killed, the server dies with it, and
the worker, also a subreaper, kills the rest. It imports little: it starts in some 50 ms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from dynamo.runtime.process.os_process import heeded
from dynamo.serve.state.process_table import (
    become_subreaper,
    die_with_parent,
    end_descendants,
    reap,
)

STOP_TIMEOUT_S = 10.0
"""Seconds from the stop request to SIGKILL."""

_KILL_TIMEOUT_S = 5.0
_STOPS = heeded(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = _STOPS | {signal.SIGCHLD}
_NOT_FOUND = 127


def main(argv: Sequence[str]) -> int:
    """Return the exit status of the server, or 128 + its signal."""
    parent, command = int(argv[0]), list(argv[1:])
    # First: a signal that arrives from here on waits for sigtimedwait().
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    become_subreaper()
    # The worker may have died before the kernel was asked.
    if not die_with_parent(signal.SIGTERM, parent):
        return 128 + signal.SIGTERM
    here = os.getpid()

    def before_exec() -> None:
        # The mask survives exec(): the server would never receive its SIGTERM.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        if not die_with_parent(signal.SIGKILL, here):
            os._exit(128 + signal.SIGKILL)

    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=before_exec)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error}\n")
        return _NOT_FOUND
    try:
        return _watch(server.pid, parent)
    finally:
        end_descendants(_KILL_TIMEOUT_S)


def _watch(server: int, parent: int) -> int:
    """Return the status of ``server`` at its end, or at the deadline of a stop."""
    deadline_s: float | None = None
    while True:
        # Any time: without a stop the wait begins again.
        left_s = 3600.0 if deadline_s is None else deadline_s - time.monotonic()
        received = signal.sigtimedwait(_WATCHED, max(0.0, left_s))
        status = reap(server)
        if status is not None:
            return status
        if received is None and deadline_s is not None:
            return 128 + signal.SIGKILL
        if received is not None and received.si_signo in _STOPS:
            if os.getppid() != parent:
                return 128 + signal.SIGKILL  # nothing is left to drain for: kill at once
            os.kill(server, signal.SIGTERM)
            deadline_s = deadline_s or time.monotonic() + STOP_TIMEOUT_S


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
