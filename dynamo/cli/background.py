"""A deployment in the background: started by ``serve -d`` and ``run -d``, ended by ``stop``."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dynamo.cli.options import DeploymentSettings
from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.runtime.process.paths import open_private, run_dir, state_path
from dynamo.runtime.process.stop_order import STOP_STAGE
from dynamo.serve.state.document import ACTIVE, GIVEN_UP, Document, Entry
from dynamo.serve.state.events import BoxEventLog, actor
from dynamo.serve.state.process_table import is_halted, runs_here
from dynamo.serve.state.rundir import OWNER_LOCK
from dynamo.serve.state.statefile import FileLock
from dynamo.status.deployment import chosen_runtime, main_pid, running_deployment

DESCRIPTION = """End the running deployment: frontends refuse new requests and finish those in
flight, then the workers exit. Returns when all have exited."""
EPILOG = """Ctrl-C ends only the command: the deployment goes on to stop.
Exit status: 0 stopped, 1 no deployment runs, or another user's, 2 a bad flag."""
_FLAGS = ("-d", "--detach")
_OWN = "dynamo: "
_STARTED = f"{_OWN}started: "
_READY = (f"{_OWN}ready: ", _STARTED)
_POLL_S = 0.05
_BEGIN_S = 2.0
_KILL_S = 8.0
"""How long after that an arbiter may take to write that it stops: it may be about to start."""
_LIVES_S = 6.0
"""How long a process has to live to count as started: longer than it may try to reach etcd."""
_LOG_BYTES = 1 << 20
"""A log of earlier deployments that is larger becomes ``serve.log.1`` at a start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo stop", DESCRIPTION, [DeploymentSettings], argv, epilog=EPILOG)
    runtime = chosen_runtime(settings.namespace)
    document = running_deployment(runtime)
    if document is not None:
        _stop(document, runtime)
    elif not _stop_start(runtime):
        raise DynamoError(f"no deployment runs in namespace {runtime.namespace!r}")
    print("stopped")
    return 0


def _stop_start(runtime: RuntimeSettings) -> bool:
    """Stop a deployment that has no statefile yet, if one starts: it holds the namespace's lock."""
    lock = FileLock(state_path(runtime) / runtime.namespace / OWNER_LOCK)
    try:
        pid = int(lock.path.read_text(encoding="ascii"))
        starting = os.pidfd_open(pid)
    except (OSError, ValueError):
        return False
    try:
        if lock.try_acquire():  # its process was killed: the number may be another's by now
            lock.release(remove=True)
            return False
        _terminate(starting, pid)
        print(f"stopping {runtime.namespace}, which is about to start", flush=True)
        select.select([starting], [], [])
        return True
    finally:
        os.close(starting)


def _stop(document: Document, runtime: RuntimeSettings) -> None:
    """Send SIGTERM, of which a second one changes nothing, and wait until all has ended."""
    try:
        main_process = os.pidfd_open(main_pid(document))
    except ProcessLookupError:
        return  # it ended since
    try:
        # Looked at again with the pidfd open: the number may be another process's by now.
        if running_deployment(runtime) is None:
            return
        _terminate(main_process, main_pid(document))
        events = BoxEventLog(state_path(runtime) / runtime.namespace)
        events.add("stop", runtime.namespace, "dynamo stop", by=actor())
        print(f"stopping {runtime.namespace}; requests in flight may finish", flush=True)
        _wait(main_process, document, state_path(runtime) / runtime.namespace / STOP_STAGE)
    finally:
        os.close(main_process)


def _wait(main_process: int, document: Document, stage: Path) -> None:
    """Wait for the end; continue or kill an arbiter that does not begin to stop."""
    _continue_halted(document)
    if _ended(main_process, _BEGIN_S):
        return
    arbiter = document.arbiter
    for patience_s in (_KILL_S, 0.0):
        _continue_halted(document)
        # An arbiter that stops has written its stage: from then on requests may take their time.
        if stage.exists() or not runs_here(arbiter):
            break
        if patience_s:
            text = f"the arbiter (pid {arbiter.pid}) does not react; in {patience_s:g} s it is"
            print(f"{text} killed, and requests in flight are lost", flush=True)
            if _ended(main_process, patience_s):
                return
        else:
            os.kill(arbiter.pid, signal.SIGKILL)  # its guard ends what it leaves
    _ended(main_process, None)


def _ended(process: int, timeout_s: float | None) -> bool:
    return bool(select.select([process], [], [], timeout_s)[0])


def _continue_halted(document: Document) -> None:
    """Continue the arbiter and its guard if a signal stopped them: else they end nothing."""
    for pid in {document.arbiter.pid, main_pid(document)}:
        if is_halted(pid):
            print(f"process {pid} was stopped by a signal: continuing it", flush=True)
            os.kill(pid, signal.SIGCONT)


def _terminate(process: int, pid: int) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise DynamoError(f"process {pid} is another user's: stop it as that user") from None
    except ProcessLookupError:
        pass  # it ended since


def detach(verb: str, words: Sequence[str], namespace: str) -> int:
    """Run the same command line in a session of its own; return when it is ready, or has failed.

    Its messages go to ``serve.log`` beside the logs of the services, and are shown until then.
    Ctrl-C ends it. Returns the exit status of the command, 0 if it goes on.
    """
    runtime = from_env(RuntimeSettings, namespace=namespace)
    directory = run_dir(runtime) / "logs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Locks the directory until the deployment is ready: that leaves no file.
    start = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(start, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _detach(verb, words, runtime, directory)
    except BlockingIOError:
        when = "when it is ready, run it again" if verb == "run" else "see: dynamo ps"
        text = f"namespace {namespace!r} is being started by another command; {when}"
        raise DynamoError(text) from None
    finally:
        os.close(start)


def _detach(verb: str, words: Sequence[str], runtime: RuntimeSettings, directory: Path) -> int:
    path = directory / "serve.log"
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
    with open(path, "ab", opener=open_private) as log:
        begin = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "dynamo", verb, *_in_background(words)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    survival = _Survival(runtime)
    try:
        ready = _follow(child, path, begin, survival)
    except KeyboardInterrupt:
        # In its session it gets no Ctrl-C of this terminal.
        child.send_signal(signal.SIGTERM)
        child.wait()
        return 130
    if not ready:
        if survival.begun:
            print(f"logs: {directory}", file=sys.stderr)
        # Status 0, of a deployment that was stopped before it was ready, is a failure here.
        return child.wait() or 1
    print(f"  stop: dynamo stop --namespace {runtime.namespace}   logs: {directory}")
    for name, reason in survival.given_up.items():
        print(f"{name} failed: {reason}; its log: {directory / name}.log", file=sys.stderr)
    return 1 if survival.given_up else 0


class _Survival:
    """Whether the processes of a deployment keep running, where no lease proves that they serve.

    A process has to run for ``_LIVES_S``, and for more than twice the longest run of its watcher's
    processes that ended: one that fails only after a while is not taken for started.
    """

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._runtime = runtime
        #: When each process of each watcher was first and last seen.
        self._seen_s: dict[str, dict[int, tuple[float, float]]] = {}
        #: Whether the command printed a line of its own: then there are logs.
        self.begun = False
        #: The watchers that are given up, and why.
        self.given_up: dict[str, str] = {}

    def is_proven(self, is_ready: bool) -> bool:
        """Look again; in a deployment that ``is_ready`` only restarted services are looked at."""
        document = running_deployment(self._runtime)
        if document is None:
            return False  # it ends: the end of the command says so
        watched = [(e, e.watcher) for e in document.components.values() if e.watcher is not None]
        self.given_up = {e.name: w.reason for e, w in watched if w.status == GIVEN_UP}
        active = [(entry, watcher) for entry, watcher in watched if watcher.status == ACTIVE]
        if watched and not active:
            return False  # it ends: all are given up or stopped
        new = [entry for entry, watcher in active if watcher.restarts or not is_ready]
        return all([self._lives(entry) for entry in new])  # noqa: C419 - looks at each

    def _lives(self, entry: Entry) -> bool:
        now_s, seen_s = time.monotonic(), self._seen_s.setdefault(entry.name, {})
        for pid in entry.pids:
            seen_s[pid] = (seen_s.get(pid, (now_s, now_s))[0], now_s)
        lives_s = {pid: last - first for pid, (first, last) in seen_s.items()}
        past_s = max((life for pid, life in lives_s.items() if pid not in entry.pids), default=0.0)
        least_s = max(_LIVES_S, 2 * past_s)
        proven = entry.lease is not None or all(lives_s[pid] > least_s for pid in entry.pids)
        return bool(entry.pids) and proven


def _in_background(words: Sequence[str]) -> list[str]:
    """Return the words without the flag; services have logs of their own, so less is printed."""
    cut = words.index("--") if "--" in words else len(words)
    return [*(word for word in words[:cut] if word not in _FLAGS), "--quiet", *words[cut:]]


def _follow(child: subprocess.Popen[bytes], path: Path, begin: int, survival: _Survival) -> bool:
    """Show what the command says until it is ready (True), or all of it if it ends before."""
    partial, others, ready = b"", list[str](), ""
    with path.open("rb") as log:
        log.seek(begin)
        while True:
            ended = child.poll() is not None  # before reading: then nothing follows what is read
            *lines, partial = (partial + log.read()).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(_READY):
                    ready = text
                elif text.startswith(_OWN):
                    survival.begun = True
                    print(text, flush=True)
                else:
                    others.append(text)
            if ended:
                print("\n".join(others), file=sys.stderr)
                return False
            # Without a frontend nothing shows that the models serve: the processes must survive.
            is_ready = not ready.startswith(_STARTED)
            if ready and survival.is_proven(is_ready):
                if is_ready or not survival.given_up:
                    print(ready, flush=True)
                return True
            time.sleep(_POLL_S)
