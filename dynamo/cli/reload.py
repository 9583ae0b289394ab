"""``dynamo reload graph.yaml``: apply a changed graph to a running deployment."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ReloadSettings
from dynamo.errors import ConfigError, DynamoError, StatefileError, Unavailable
from dynamo.operations.steps.circus import BUSY, COMMAND_TIMEOUT_S
from dynamo.runtime.process.paths import state_dir
from dynamo.serve.graph.graph import parse_graph, read_text
from dynamo.serve.graph.overrides import split_overrides
from dynamo.serve.state.document import Document
from dynamo.serve.state.events import actor
from dynamo.serve.state.process_table import runs_here
from dynamo.serve.state.statefile import Statefile
from dynamo.status.deployment import check_answers, chosen_runtime, hang_of

DESCRIPTION = "Apply a changed graph to a running deployment, one process after another."
EPILOG = """Only what changed is touched: services and workers are added, restarted or removed.
Overrides replace those of the start: --Service.key=value. Without a graph file, the file and the
overrides of the start or the last reload are used. A graph with an error changes nothing.
Exit status: 0 reloaded, 1 a new process failed, or no deployment runs, 2 the graph is wrong."""

_RELOAD_GRAPH = "reload_graph"
_CHECK_MS = 1000
_RETRY_S = 0.3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    (settings,) = load("dynamo reload", DESCRIPTION, [ReloadSettings], rest, epilog=EPILOG)
    runtime = from_env(RuntimeSettings) if settings.graph else chosen_runtime(settings.namespace)
    namespace = settings.namespace or runtime.namespace
    request: dict[str, Any] = {"overrides": [override.text for override in overrides]}
    if settings.graph:
        path = Path(settings.graph).absolute()
        namespace = parse_graph(
            read_text(path), str(path), overrides, settings.namespace, namespace
        ).namespace
        request["graph"] = str(path)
    document = running(Statefile(state_dir(runtime), namespace))
    planned = call(document, {**request, "dry_run": True})
    print("\n".join(planned["changes"]) or "nothing to change", flush=True)
    if settings.dry_run:
        print(planned["summary"])
        return 0
    print(f"reloaded: {call(document, request)['summary']}")
    return 0


def running(statefile: Statefile) -> Document:
    """Return the statefile of a deployment whose arbiter runs. Raises StatefileError."""
    document = statefile.read()
    if document is None or not runs_here(document.arbiter):
        raise StatefileError(
            f"no deployment runs in namespace {statefile.namespace!r} ({statefile.path}); "
            "start it with dynamo serve, or name another one with --namespace"
        )
    return document


def call(document: Document, request: Mapping[str, Any]) -> Any:
    """Send the request to the arbiter, wait for the reply. ConfigError: the graph is wrong.

    Is repeated while the arbiter runs another command, for half a minute.
    """
    check_answers(document)
    deadline_s = time.monotonic() + COMMAND_TIMEOUT_S
    while True:
        reply = _answer(document, request)
        if reply.get("status") == "ok":
            return reply
        reason = str(reply.get("reason"))
        if not any(mark in reason for mark in BUSY) or time.monotonic() > deadline_s:
            kind = ConfigError if reply.get("graph_is_wrong") else DynamoError
            raise kind(reason)
        time.sleep(_RETRY_S)


def _answer(document: Document, request: Mapping[str, Any]) -> Any:
    number = uuid.uuid4().hex
    message = {
        "id": number,
        "command": _RELOAD_GRAPH,
        "properties": {**request, "by": actor(), "waiting": True},
    }
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(document.circus_endpoint)
        socket.send(json.dumps(message).encode())
        while not socket.poll(_CHECK_MS):
            if not runs_here(document.arbiter):
                raise StatefileError("the deployment ended before the reload was complete")
            if hang := hang_of(document, 0):
                raise Unavailable(hang)
        return json.loads(socket.recv())
    finally:
        socket.close()
        context.term()
