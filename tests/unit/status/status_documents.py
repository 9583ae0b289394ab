"""Statefiles and what was seen of their processes, for tests of ``dynamo.box``."""

from __future__ import annotations

import json
from typing import Any

from dynamo.serve.state.document import Document
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.serve.state.view import DeploymentView
from dynamo.status.models import BoxView

PYTHON = ["python", "-m"]
MOCKER = [*PYTHON, "dynamo.mocker", "--model-path", "m", "--model-name", "tiny"]


def entry(name: str, argv: list[str], pid: int = 0, **more: Any) -> dict[str, Any]:
    """Return an entry with one process, or none if ``pid`` is 0."""
    return {
        "watcher_name": name,
        "cmd": " ".join(argv),
        "argv": argv,
        "service": name.split("_")[1],
        "resources": {},
        "state": "running",
        "processes": [{"pid": pid, "start_ticks": 1}] if pid else [],
        "lease": None,
        "watcher": {"status": "active"},
        **more,
    }


def document(*entries: dict[str, Any], **workers: int) -> dict[str, Any]:
    """Return a statefile; ``workers`` are those of each service in the graph, 1 by default."""
    counts = {**{str(one["service"]): 1 for one in entries}, **workers}
    config = {name: {"ServiceArgs": {"workers": count}} for name, count in counts.items()}
    return {
        "namespace": "d",
        "circus_endpoint": "ipc:///nowhere",
        "components": {one["watcher_name"]: one for one in entries},
        "environment": {"DYNAMO_SERVICE_CONFIG": json.dumps(config)},
    }


def seen(found: dict[str, Any], *serving: int, **more: Any) -> BoxView:
    """Return a view in which every process lives, and those in ``serving`` have a model."""
    pids = [p["pid"] for one in found["components"].values() for p in one["processes"]]
    uptimes = more.pop("uptimes", dict.fromkeys(pids, 5.0))
    reserved = more.pop("reserved", ())
    workers = {
        pid: RegisteredWorker(pid=pid, leases=(pid,), worker_id=pid, model="tiny")
        for pid in serving
    }
    deployment = DeploymentView(
        document=Document.of(found),
        registered=more.pop("registered", workers),
        changes=lambda entry: entry.name in reserved,
        lives=lambda process: process.pid in uptimes,
    )
    return BoxView(**{"deployment": deployment, "at_s": 1000.0, "uptimes": uptimes, **more})
