"""Keeps the statefile true while a deployment runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from dynamo.errors import StatefileError
from dynamo.runtime.discovery.process import host_id
from dynamo.runtime.tasks import Tasks
from dynamo.serve.processes import stat
from dynamo.serve.statefile import Document, Statefile
from dynamo.serve.watchers import WatcherPlan, WatcherSpec

__all__ = ["Record", "RecordedComponent", "RecordedProcess", "document_of"]

log = logging.getLogger(__name__)


class RecordedProcess(Protocol):
    """What the statefile keeps of a process."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class RecordedComponent:
    """A watcher of the arbiter, or one that was removed and still has processes."""

    spec: WatcherSpec
    processes: Sequence[RecordedProcess]
    lease: int | None


def document_of(plan: WatcherPlan) -> Document:
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
    return {
        "watcher_name": spec.name,
        "cmd": shlex.join(spec.argv),
        "argv": list(spec.argv),
        "service": spec.service,
        "resources": _resources(spec),
        "state": "running",
        "processes": [],
        "lease": None,
    }


def _resources(spec: WatcherSpec) -> dict[str, Any]:
    gpus = [int(gpu) if gpu.isdigit() else gpu for gpu in spec.gpus]
    return {"allocated_gpus": gpus} if gpus else {}


class Record:
    """The statefile of a running deployment; changes within one moment are written once."""

    def __init__(
        self,
        statefile: Statefile,
        plan: WatcherPlan,
        components: Callable[[], Sequence[RecordedComponent]],
    ) -> None:
        self._statefile = statefile
        self._plan = plan
        self._components = components
        self._templates = {spec.name for spec in plan.specs if not spec.index}
        self._written = {spec.name for spec in plan.specs}
        self._dirty = asyncio.Event()

    def create(self) -> None:
        """Write the statefile. Raises StatefileError."""
        self._statefile.create(document_of(self._plan))

    def keep(self, tasks: Tasks) -> None:
        """Write every change until ``tasks`` closes."""
        tasks.spawn(self._write_changes(), name="statefile")

    def changed(self) -> None:
        """A process started or ended, a watcher or a lease came or went."""
        self._dirty.set()

    def is_draining(self, name: str) -> bool:
        """Whether somebody set this component's ``state`` to draining."""
        try:
            document = self._statefile.read()
        except StatefileError as error:
            log.warning("%s", error)
            return False
        entry = (document or {}).get("components", {}).get(name)
        return isinstance(entry, dict) and entry.get("state") == "draining"

    async def _write_changes(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            components = self._components()
            try:
                await asyncio.to_thread(self._write, components)
            except (StatefileError, OSError) as error:
                log.error("the statefile could not be written: %s", error)

    def _write(self, components: Sequence[RecordedComponent]) -> None:
        present = {component.spec.name for component in components}
        gone = self._written - present
        change = partial(
            _apply, components=components, removed=gone - self._templates, emptied=gone
        )
        try:
            self._statefile.update(change)
        except StatefileError as error:  # removed or torn by somebody: write what we know
            log.warning("writing the statefile anew: %s", error)
            document = document_of(self._plan)
            change(document)
            self._statefile.create(document)
        self._written = present | (self._templates & self._written)


def _apply(
    document: Document,
    components: Iterable[RecordedComponent],
    removed: Set[str],
    emptied: Set[str],
) -> None:
    entries = document["components"]
    for component in components:
        spec = component.spec
        entry = entries.get(spec.name)
        if not isinstance(entry, dict):
            entry = entries[spec.name] = _component(spec)
        entry["cmd"], entry["argv"] = shlex.join(spec.argv), list(spec.argv)
        if spec.gpus and not _holds(entry, spec.gpus):
            entry["resources"] = _resources(spec)
        entry["processes"] = [
            {"pid": process.pid, "start_ticks": process.start_ticks}
            for process in component.processes
        ]
        entry["lease"] = component.lease
    for name in removed:
        entries.pop(name, None)
    for name in emptied - removed:  # the first of a service stays: its command makes the next
        if isinstance(entry := entries.get(name), dict):
            entry.update(resources={}, state="running", processes=[], lease=None)


def _holds(entry: dict[str, Any], gpus: Sequence[str]) -> bool:
    """Whether ``entry`` has these GPUs; one writer writes numbers, another strings."""
    resources = entry.get("resources")
    given = resources.get("allocated_gpus") if isinstance(resources, dict) else None
    return isinstance(given, list) and [str(gpu) for gpu in given] == list(gpus)
