"""Applies a changed graph to a running deployment: the command to its arbiter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from dynamo.errors import ConfigError, DynamoError, StatefileError, Unavailable
from dynamo.operations.steps.circus import CircusEndpoint, retried
from dynamo.serve.state.document import Document
from dynamo.serve.state.events import actor
from dynamo.serve.state.process_table import runs_here
from dynamo.serve.state.statefile import Statefile
from dynamo.status.deployment import check_answers, hang_of


def running(statefile: Statefile) -> Document:
    """Return the statefile of a deployment whose arbiter runs. Raises StatefileError."""
    document = statefile.read()
    if document is None or not runs_here(document.arbiter):
        raise StatefileError(
            f"no deployment runs in namespace {statefile.namespace!r} ({statefile.path}); "
            "start it with dynamo serve, or name another one with --namespace"
        )
    return document


def reload_graph(document: Document, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send the request to the arbiter, wait for the reply. ConfigError: the graph is wrong.

    Is repeated while the arbiter runs another command, for half a minute.
    """
    check_answers(document)
    reply = asyncio.run(_exchanged(document, {**request, "by": actor()}))
    if reply.get("status") != "ok":
        kind = ConfigError if reply.get("graph_is_wrong") else DynamoError
        raise kind(str(reply.get("reason")))
    return reply


async def _exchanged(document: Document, request: Mapping[str, Any]) -> Mapping[str, Any]:
    def is_running() -> bool:
        if not runs_here(document.arbiter):
            raise StatefileError("the deployment ended before the reload was complete")
        if hang := hang_of(document, 0):
            raise Unavailable(hang)
        return True

    with contextlib.closing(CircusEndpoint(document.circus_endpoint)) as circus:
        return await retried(lambda: circus.reload_graph(request, is_running))
