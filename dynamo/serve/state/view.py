"""A deployment at one time: its statefile, and what the processes in it have registered. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from dynamo.serve.state.document import (
    DRAIN,
    GIVEN_UP,
    LOAD,
    SLEEP,
    STOPPED,
    Document,
    Entry,
    RecordedProcess,
    Supervision,
)
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.registered import RegisteredWorker


class WorkerState(StrEnum):
    """What a worker does. The planner and ``dynamo ps`` have names of their own for some."""

    STARTING = "starting"
    SERVING = "serving"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    DRAINING = "draining"
    #: The process that was starting it or putting it to sleep has exited.
    INTERRUPTED = "interrupted"
    GIVEN_UP = "given up"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """The processes of one watcher, also of one that is no worker."""

    entry: Entry
    #: None if it registers no model.
    service: ServiceEntries | None
    #: The processes that live.
    pids: tuple[int, ...]
    #: What those of ``pids`` that hold a lease have registered.
    registered: tuple[RegisteredWorker, ...]
    #: Whether a living process changes it now.
    reserved: bool
    #: Whether the arbiter keeps its processes running.
    kept: bool

    @property
    def watcher(self) -> Supervision:
        """What the arbiter does with it."""
        return self.entry.watcher or Supervision()

    @property
    def serving(self) -> tuple[RegisteredWorker, ...]:
        """Those of ``registered`` that have a model."""
        return tuple(worker for worker in self.registered if worker.model is not None)

    @property
    def is_expected(self) -> bool:
        """Whether it has a process, or will have one without a further command."""
        return bool(self.pids) or self.kept or self.reserved

    @property
    def falls_asleep(self) -> bool:
        """Whether its engine is being put to sleep; its model stays registered."""
        owner = self.entry.reserved_by
        return bool(self.reserved and owner is not None and owner.operation == SLEEP and self.pids)

    @property
    def interrupted(self) -> str:
        """The operation of a process that has exited; "" without one, or if it goes on so."""
        owner = self.entry.reserved_by
        if self.reserved or owner is None:
            return ""
        operation = owner.operation or LOAD
        # A watcher is added before it is started, and a drain ends when the lease is revoked.
        if operation == LOAD:
            goes_on = self.watcher.status not in ("", STOPPED)
        else:
            goes_on = operation == DRAIN and not self.serving
        return "" if goes_on else operation

    @property
    def settled(self) -> WorkerState:
        """Its state without the sleep that has begun, and without interruptions."""
        if self.entry.draining or (self.pids and not self.kept and not self.reserved):
            return WorkerState.DRAINING
        if self.pids:
            if self.entry.asleep:
                return WorkerState.WAKING if self.reserved else WorkerState.ASLEEP
            return WorkerState.SERVING if self.serving else WorkerState.STARTING
        if self.is_expected:
            return WorkerState.STARTING
        given_up = self.watcher.status == GIVEN_UP
        return WorkerState.GIVEN_UP if given_up else WorkerState.STOPPED

    @property
    def state(self) -> WorkerState:
        """What it does now."""
        if self.settled == WorkerState.DRAINING:
            return WorkerState.DRAINING
        if self.interrupted in (LOAD, SLEEP):
            return WorkerState.INTERRUPTED
        return WorkerState.FALLING_ASLEEP if self.falls_asleep else self.settled


def is_kept(entry: Entry) -> bool:
    """Whether the arbiter keeps the processes of ``entry`` running, as it has written."""
    return (entry.watcher or Supervision()).status not in (STOPPED, GIVEN_UP)


@dataclass(frozen=True, kw_only=True)
class DeploymentView:
    """The services and workers of ``document``.

    ``registered`` has what processes registered, by the pid that the arbiter started. ``changes``
    says whether a living process changes a watcher now, ``lives`` which recorded processes live,
    and ``keeps`` whether the arbiter keeps those of a watcher running.
    """

    document: Document
    registered: Mapping[int, RegisteredWorker]
    changes: Callable[[Entry], bool]
    lives: Callable[[RecordedProcess], bool] = lambda process: bool(process.pid)
    keeps: Callable[[Entry], bool] = is_kept

    @cached_property
    def services(self) -> Mapping[str, ServiceEntries]:
        """The services that register a model, by name, in the order of the graph."""
        return read_services(self.document)

    @cached_property
    def workers(self) -> Mapping[str, WorkerView]:
        """One for each entry, by its name."""
        owners = {
            entry.name: service for service in self.services.values() for entry in service.entries
        }
        return {
            name: self._worker(entry, owners.get(name))
            for name, entry in self.document.components.items()
        }

    def of(self, service: ServiceEntries) -> Sequence[WorkerView]:
        """Return those of ``service``, by number."""
        return [self.workers[entry.name] for entry in service.entries]

    def _worker(self, entry: Entry, service: ServiceEntries | None) -> WorkerView:
        pids = tuple(process.pid for process in entry.processes if self.lives(process))
        return WorkerView(
            entry=entry,
            service=service,
            pids=pids,
            registered=tuple(self.registered[pid] for pid in pids if pid in self.registered),
            reserved=self.changes(entry),
            kept=self.keeps(entry),
        )
