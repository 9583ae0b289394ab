"""The frontends of a statefile, and the key of its deployment.

Frontends with API keys also admit the key of the deployment, which only its user can read: a
program that reads their figures needs no key of an operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo.config import environ
from dynamo.config.programs import FRONTEND
from dynamo.config.runtime import RuntimeSettings
from dynamo.runtime.process.paths import state_path
from dynamo.serve.graph.command import listen_facts
from dynamo.serve.graph.facts import ListenFacts
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.process_table import same_process

LOCAL_KEY = "local.key"
"""File in the run directory of a deployment, for its user alone: the key of the deployment."""


@dataclass(frozen=True, kw_only=True)
class KnownFrontend:
    """A frontend of a statefile. ``pid`` is 0 and ``runs`` false without a process."""

    entry: Entry
    listens: ListenFacts
    pid: int
    runs: bool


def local_key(runtime: RuntimeSettings) -> str | None:
    """Return the key of the deployment of ``runtime``; None if none runs."""
    path: Path = state_path(runtime) / runtime.namespace / LOCAL_KEY
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def frontends_in(document: Document) -> Iterator[KnownFrontend]:
    """Yield the frontends of a statefile."""
    for entry in document.components.values():
        if entry.program == FRONTEND:
            process = next(iter(entry.processes), None)
            yield KnownFrontend(
                entry=entry,
                # Of another writer than our arbiter: as its command and our variables say.
                listens=entry.listens or listen_facts(entry.argv, environ(), ""),
                pid=process.pid if process is not None else 0,
                runs=process is not None and same_process(process.pid, process.start_ticks),
            )
