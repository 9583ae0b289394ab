"""Keeps the statefile up to date while a deployment runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from dynamo.errors import StatefileError
from dynamo.runtime.discovery.process import host_id
from dynamo.runtime.tasks import Tasks
from dynamo.serve.entries import entry_gpus
from dynamo.serve.gpu_holders import can_hold, held_gpus
from dynamo.serve.process_table import stat
from dynamo.serve.statefile import (
    ABSENT,
    ACTIVE,
    ASLEEP,
    DRAINING,
    HOLDS_GPUS,
    RESERVED_BY,
    RUNNING,
    WATCHER,
    Document,
    Statefile,
)
from dynamo.serve.watchers import DeploymentPlan, WatcherSpec

__all__ = ["RecordedComponent", "RecordedProcess", "StatefileWriter", "Supervision", "document_of"]

log = logging.getLogger(__name__)


class RecordedProcess(Protocol):
    """A process as the statefile identifies it."""

    pid: int
    start_ticks: int


class Supervision(NamedTuple):
    """What the arbiter does with a watcher; the entry's ``watcher``.

    ``status`` is active, stopped (by a command), given up (then ``reason`` says why) or absent (an
    entry that only has the command of the next worker). ``restarts`` counts unintended exits,
    ``last_exit`` describes the latest.
    """

    status: str = ACTIVE
    reason: str = ""
    restarts: int = 0
    last_exit: str = ""

    def written(self) -> dict[str, Any]:
        """Return what the statefile has of it, without empty values."""
        return {key: value for key, value in self._asdict().items() if value}


_ACTIVE = Supervision()


@dataclass(frozen=True)
class RecordedComponent:
    """A watcher of the arbiter, or a removed one whose processes still run."""

    spec: WatcherSpec
    processes: Sequence[RecordedProcess]
    lease: int | None
    supervision: Supervision = _ACTIVE


def document_of(plan: DeploymentPlan) -> Document:
    """Return the statefile of ``plan`` before its first process, with this process as arbiter.

    Holds only the variables that the planner needs: others may be secrets. Spec 3.2.
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
        "components": {spec.name: _component(spec) for spec in (*plan.specs, *plan.templates)},
        "environment": _environment(plan),
    }


def _component(spec: WatcherSpec) -> dict[str, Any]:
    return {
        "watcher_name": spec.name,
        "cmd": shlex.join(spec.argv),
        "argv": list(spec.argv),
        "service": spec.service,
        "resources": _resources(spec),
        "gpus_per_worker": spec.gpu,
        "state": "running",
        "processes": [],
        "lease": None,
        WATCHER: Supervision(ACTIVE if spec.starts else ABSENT).written(),
    }


def _resources(spec: WatcherSpec) -> dict[str, Any]:
    gpus = [int(gpu) if gpu.isdigit() else gpu for gpu in spec.gpus]
    return {"allocated_gpus": gpus} if gpus else {}


class StatefileWriter:
    """Writes the statefile of a running deployment; concurrent changes are written once."""

    def __init__(
        self,
        statefile: Statefile,
        plan: DeploymentPlan,
        components: Callable[[], Sequence[RecordedComponent]],
    ) -> None:
        self._statefile = statefile
        self._components = components
        self._written = {spec.name for spec in plan.specs}
        self._plan = plan
        self._dirty = asyncio.Event()

    def create(self) -> None:
        """Write the statefile. Raises StatefileError."""
        self._statefile.create(document_of(self._plan))

    def plan(self, plan: DeploymentPlan) -> None:
        """Write the commands of a changed graph, those of services without workers too."""
        self._plan = plan
        self.changed()

    def start(self, tasks: Tasks) -> None:
        """Write every change until ``tasks`` closes."""
        tasks.spawn(self._write_changes(), name="statefile")

    def changed(self) -> None:
        """Schedule a write: a process, a watcher or a lease appeared or disappeared."""
        self._dirty.set()

    def is_draining(self, name: str) -> bool:
        """Whether an exit is the end of a component: it drains, or sleeps and has no GPU."""
        return self.states().get(name) in (DRAINING, ASLEEP)

    def is_asleep(self, name: str) -> bool:
        """Whether the component's ``state`` says that its engine sleeps."""
        return self.states().get(name) == ASLEEP

    def states(self) -> dict[str, str]:
        """Return the ``state`` of each component."""
        try:
            document = self._statefile.read() or {}
        except StatefileError as error:
            log.warning("%s", error)
            return {}
        entries = document.get("components", {}).items()
        return {name: str(one.get("state")) for name, one in entries if isinstance(one, dict)}

    def take_gpus(self, name: str) -> str:
        """Make a worker that slept hold its GPUs: its next process is awake. Return "", or which
        others have them now. Blocks."""
        try:
            document = self._statefile.read()
            if document is None or not _sleeps(document, name):
                return ""
            self._statefile.update(partial(_wake, name=name))
        except _GpusTaken as taken:
            return f"it slept, and {taken} has its GPU now: stop that one, then start this one"
        except StatefileError as error:
            log.warning("%s", error)
        return ""

    async def _write_changes(self) -> None:
        while True:
            await self._dirty.wait()
            # Cleared before the components are read: a change during the write causes another one.
            self._dirty.clear()
            components = self._components()
            try:
                # In a thread: another process may hold the lock of the statefile.
                await asyncio.to_thread(self.write, components)
            except (StatefileError, OSError) as error:
                log.error("cannot write the statefile: %s; the next change tries again", error)

    def write(self, components: Sequence[RecordedComponent]) -> None:
        """Write ``components``, those that run now. Blocks; raises StatefileError, OSError."""
        present = {component.spec.name for component in components}
        gone = self._written - present
        change = partial(
            _apply,
            environment=_environment(self._plan),
            components=components,
            templates={
                spec.name: spec
                for spec in (*self._plan.specs, *self._plan.templates)
                if not spec.index
            },
            gone=gone,
        )
        try:
            self._statefile.update(change)
        except StatefileError as error:  # removed or damaged from outside: write a complete one
            log.warning("replacing the statefile: %s", error)
            document = document_of(self._plan)
            change(document)
            self._statefile.create(document)
        self._written = present


class _GpusTaken(Exception):
    """The text names another worker."""


def _sleeps(document: Document, name: str) -> bool:
    entry = document["components"].get(name)
    return isinstance(entry, dict) and entry.get("state") == ASLEEP


def _wake(document: Document, name: str) -> None:
    if not _sleeps(document, name):
        return
    entry = document["components"][name]
    if not can_hold(document, name):
        own = {*entry_gpus(entry)}
        holders = held_gpus(document).items()
        others = (one for one, (gpus, _) in holders if one != name and not own.isdisjoint(gpus))
        raise _GpusTaken(next(others))
    entry["state"] = RUNNING


def _environment(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "DYNAMO_SERVICE_CONFIG": json.dumps(plan.config, ensure_ascii=False, default=str),
        "SYSTEM_RESOURCES": {"total_gpus": len(plan.gpu_ids), "gpu_info": [*plan.gpu_ids]},
    }


def _apply(
    document: Document,
    environment: Mapping[str, Any],
    components: Iterable[RecordedComponent],
    templates: Mapping[str, WatcherSpec],
    gone: Set[str],
) -> None:
    document["environment"].update(environment)
    entries = document["components"]
    present = set()
    for component in components:
        spec = component.spec
        present.add(spec.name)
        entry = entries.get(spec.name)
        if not isinstance(entry, dict):
            entry = entries[spec.name] = _component(spec)
        _set_command(entry, spec)
        if spec.gpus and not _holds(entry, spec.gpus):
            entry["resources"] = _resources(spec)
        entry["processes"] = [
            {"pid": process.pid, "start_ticks": process.start_ticks}
            for process in component.processes
        ]
        entry["lease"] = component.lease
        entry[WATCHER] = component.supervision.written()
    for name in gone - templates.keys():
        if _is_taken(entries.get(name)):
            entries[name].update(processes=[], lease=None)
        else:
            entries.pop(name, None)
    for name in templates.keys() - present:
        entry = entries.get(name)
        if not isinstance(entry, dict):
            entry = entries[name] = _component(templates[name])
        _set_command(entry, templates[name])
        entry.update(resources={}, state="running", processes=[], lease=None)
        entry[WATCHER] = Supervision(ABSENT).written()
        entry.pop(RESERVED_BY, None)
        entry.pop(HOLDS_GPUS, None)


def _is_taken(entry: object) -> bool:
    """Whether a planner is adding a worker under this name; the planner deletes the entry."""
    return isinstance(entry, dict) and RESERVED_BY in entry and entry.get("state") != DRAINING


def _set_command(entry: dict[str, Any], spec: WatcherSpec) -> None:
    entry["cmd"], entry["argv"] = shlex.join(spec.argv), list(spec.argv)
    entry["gpus_per_worker"] = spec.gpu


def _holds(entry: dict[str, Any], gpus: Sequence[str]) -> bool:
    """Whether ``entry`` has these GPUs; other writers may write numbers or strings."""
    resources = entry.get("resources")
    given = resources.get("allocated_gpus") if isinstance(resources, dict) else None
    return isinstance(given, list) and [str(gpu) for gpu in given] == list(gpus)
