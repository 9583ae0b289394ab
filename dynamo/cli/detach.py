"""Start a deployment in the background: ``dynamo serve -d``, ``dynamo run -d``."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.runtime.process.paths import run_dir

_FLAGS = ("-d", "--detach")
_OWN = "dynamo: "
_READY = (f"{_OWN}ready: ", f"{_OWN}started: ")
_POLL_S = 0.05


def detach(verb: str, words: Sequence[str], namespace: str) -> int:
    """Run the same command line in a session of its own; return when it is ready, or has failed.

    Its messages go to ``serve.log`` beside the logs of the services, and are shown until then.
    Ctrl-C ends it. Returns the exit status of the command, 0 if it goes on.
    """
    directory = run_dir(from_env(RuntimeSettings, namespace=namespace)) / "logs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "serve.log"
    with path.open("ab") as log:
        begin = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "dynamo", verb, *_in_background(words)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        ready = _follow(child, path, begin)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        return 130
    if not ready:
        return child.wait() or 1
    print(f"  stop: dynamo stop --namespace {namespace}   logs: {directory}")
    return 0


def _in_background(words: Sequence[str]) -> list[str]:
    """Return the words without the flag; services have logs of their own, so less is printed."""
    cut = words.index("--") if "--" in words else len(words)
    return [*(word for word in words[:cut] if word not in _FLAGS), "--quiet", *words[cut:]]


def _follow(child: subprocess.Popen[bytes], path: Path, begin: int) -> bool:
    """Show what the command says until it is ready (True), or all of it if it ends before."""
    partial, others = b"", list[str]()
    with path.open("rb") as log:
        log.seek(begin)
        while True:
            ended = child.poll() is not None  # before reading: then nothing follows what is read
            *lines, partial = (partial + log.read()).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(_OWN):
                    print(text, flush=True)
                else:
                    others.append(text)
                if text.startswith(_READY):
                    return True
            if ended:
                print("\n".join(others), file=sys.stderr)
                return False
            time.sleep(_POLL_S)
