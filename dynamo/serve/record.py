"""Keeps the statefile true while a deployment runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from dynamo.errors import StatefileError
from dynamo.runtime.discovery.process import host_id
from dynamo.runtime.tasks import Tasks
from dynamo.serve.processes import stat
from dynamo.serve.statefile import Document, Statefile
from dynamo.serve.watchers import Plan, WatcherSpec

__all__ = ["Record", "RecordedProcess", "document_of"]

_log = logging.getLogger(__name__)


class RecordedProcess(Protocol):
    """What the statefile keeps of a process."""

    pid: int
    start_ticks: int


def document_of(plan: Plan) -> Document:
    """The statefile of ``plan`` before its first process, for this process as arbiter. Spec 3.2.

    Holds no environment but what the planner needs: variables may be secrets.
    """
    me = stat(os.getpid())
    return {
        "namespace": plan.namespace,
        "circus_endpoint": plan.endpoint,
        "pubsub_endpoint": plan.pubsub_endpoint,
        "arbiter": {
            "pid": os.getpid(),
            "start_ticks": me.start_ticks if me else 0,
            "guard_pid": os.getppid(),
            "host": host_id(),
        },
        "components": {spec.name: _component(spec) for spec in plan.specs},
        "environment": {
            "DYNAMO_SERVICE_CONFIG": json.dumps(plan.config, ensure_ascii=False, default=str),
            "SYSTEM_RESOURCES": {"total_gpus": len(plan.gpu_ids), "gpu_info": [*plan.gpu_ids]},
        },
    }


def _component(spec: WatcherSpec) -> dict[str, Any]:
    gpus = [int(gpu) if gpu.isdigit() else gpu for gpu in spec.gpus]
    return {
        "watcher_name": spec.name,
        "cmd": shlex.join(spec.argv),
        "argv": list(spec.argv),
        "service": spec.service,
        "resources": {"allocated_gpus": gpus} if gpus else {},
        "state": "running",
        "processes": [],
    }


class Record:
    """The statefile of a running deployment; changes within one moment are written once."""

    def __init__(
        self,
        statefile: Statefile,
        plan: Plan,
        alive: Callable[[], Mapping[str, Sequence[RecordedProcess]]],
    ) -> None:
        self._statefile = statefile
        self._plan = plan
        self._alive = alive
        self._dirty = asyncio.Event()

    def create(self) -> None:
        """Write the statefile. Raises StatefileError."""
        self._statefile.create(document_of(self._plan))

    def keep(self, tasks: Tasks) -> None:
        """Write every change until ``tasks`` closes."""
        tasks.spawn(self._write_changes(), name="statefile")

    def changed(self) -> None:
        """A process started or ended."""
        self._dirty.set()

    def is_draining(self, name: str) -> bool:
        """Whether somebody set this component's ``state`` to draining."""
        try:
            document = self._statefile.read()
        except StatefileError as error:
            _log.warning("%s", error)
            return False
        entry = (document or {}).get("components", {}).get(name)
        return isinstance(entry, dict) and entry.get("state") == "draining"

    async def _write_changes(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            now = {
                name: [{"pid": p.pid, "start_ticks": p.start_ticks} for p in processes]
                for name, processes in self._alive().items()
            }
            try:
                await asyncio.to_thread(self._write, partial(_apply, processes=now))
            except (StatefileError, OSError) as error:
                _log.error("the statefile could not be written: %s", error)

    def _write(self, change: Callable[[Document], None]) -> None:
        try:
            self._statefile.update(change)
        except StatefileError as error:  # removed or torn by somebody: write what we know
            _log.warning("writing the statefile anew: %s", error)
            document = document_of(self._plan)
            change(document)
            self._statefile.create(document)


def _apply(document: Document, processes: Mapping[str, list[dict[str, int]]]) -> None:
    for name, entry in document["components"].items():
        if isinstance(entry, dict):
            entry["processes"] = processes.get(name, [])
