"""The deployment that a command means, and what its arbiter answers; imports little."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.config import environ, from_env
from dynamo.config.runtime import RuntimeSettings, check_namespace
from dynamo.errors import ConfigError, StatefileError, Unavailable
from dynamo.runtime.process.paths import state_path

if TYPE_CHECKING:
    from dynamo.serve.state.document import Document

STATUS_SOCKET = "status.sock"
"""Name of the socket in the run directory."""


def chosen_runtime(namespace: str | None) -> RuntimeSettings:
    """Return the settings of the deployment that a command means.

    That is the one of ``namespace`` or ``DYN_NAMESPACE``; without them the default one if it
    exists, else the only one. Raises ConfigError if several run, or the name is no namespace.
    """
    runtime = from_env(RuntimeSettings)
    check_namespace(runtime.namespace if namespace is None else namespace)
    if namespace is not None:
        return replace(runtime, namespace=namespace)
    directory = state_path(runtime)
    default = directory / f"{runtime.namespace}.json"
    if "DYN_NAMESPACE" in environ() or default.exists():
        return runtime
    names = sorted(path.stem for path in directory.glob("*.json"))
    if len(names) > 1:
        # A crash leaves a statefile: it counts only if no deployment runs.
        names = [*_running(directory, names)] or names
    if len(names) > 1:
        raise ConfigError(
            f"several deployments exist; choose one with --namespace: {', '.join(names)}"
        )
    return replace(runtime, namespace=names[0]) if names else runtime


def not_running(namespace: str) -> str:
    """Return that no deployment runs there, and how to start one."""
    return (
        f"no deployment runs in namespace {namespace!r}; start one: dynamo run MODEL, or dynamo "
        "serve GRAPH"
    )


def running_deployment(runtime: RuntimeSettings) -> Document | None:
    """Return the statefile of the namespace of ``runtime`` if its arbiter runs, else None."""
    return _read_running(state_path(runtime), runtime.namespace)


def running_documents(runtime: RuntimeSettings) -> list[Document]:
    """Return the statefiles of all running deployments in the state directory of ``runtime``."""
    directory = state_path(runtime)
    names = sorted(path.stem for path in directory.glob("*.json"))
    return [document for name in names if (document := _read_running(directory, name)) is not None]


def main_pid(document: Document) -> int:
    """Return the process that a user started: the guard of a running deployment."""
    return document.arbiter.guard_pid or document.arbiter.pid


def _running(directory: Path, namespaces: list[str]) -> Iterator[str]:
    for namespace in namespaces:
        if _read_running(directory, namespace) is not None:
            yield namespace


def _read_running(directory: Path, namespace: str) -> Document | None:
    # Imported here: it takes 20 ms, and `dynamo ps` seldom reads a statefile.
    from dynamo.serve.state.process_table import runs_here
    from dynamo.serve.state.statefile import Statefile

    try:
        document = Statefile(directory, namespace).read()
    except StatefileError:
        return None
    return document if document is not None and runs_here(document.arbiter) else None


def hang_of(document: Document, timeout_s: float = 2.0) -> str:
    """Return why the running arbiter of ``document`` does nothing now, and what helps; else "".

    Waits ``timeout_s`` for an answer to a command; with 0, only looks whether it is stopped.
    """
    from dynamo.serve.state.process_table import is_halted

    pid, remedy = document.arbiter.pid, f"dynamo stop --namespace {document.namespace}"
    if is_halted(pid):
        return (
            f"the arbiter (pid {pid}) was stopped by a signal or a debugger, so nothing is "
            f"restarted or changed; continue it: kill -CONT {pid}; or end all: {remedy}"
        )
    if timeout_s and not _answers(document.circus_endpoint, timeout_s):
        return (
            f"the arbiter (pid {pid}) did not answer within {timeout_s:g} s, so nothing is "
            f"restarted or changed; if it stays so, end all: {remedy}"
        )
    return ""


def check_answers(document: Document) -> None:
    """Raise Unavailable with the :func:`hang_of` the arbiter, if any. Blocks for 2 s at most."""
    if hang := hang_of(document):
        raise Unavailable(hang)


def _answers(endpoint: str, timeout_s: float) -> bool:
    """Whether circus answers; true without its socket, which every command reports itself."""
    import zmq  # takes 20 ms

    path = Path(endpoint.removeprefix("ipc://"))
    if path != Path(endpoint) and not path.exists():
        return True
    message = {"id": "0", "command": "numwatchers", "properties": {}}
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        # Else the end of the context waits until the arbiter takes the message.
        connection.linger = 0
        try:
            connection.connect(endpoint)
            connection.send(json.dumps(message).encode())
            return bool(connection.poll(int(timeout_s * 1000)))
        except zmq.ZMQError:
            return True  # not an address: as above


def ask(path: str, api_key: str | None, timeout_s: float = 1.0) -> bytes:
    """Return the answer of the arbiter that listens on ``path``, "" if it has none. OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(json.dumps(api_key).encode() + b"\n")
        answer = bytearray()
        while piece := connection.recv(1 << 16):
            answer += piece
        return bytes(answer)
