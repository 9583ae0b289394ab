"""The state of each process of a deployment, with the cause and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.box.sighting import BoxSighting
from dynamo.protocols.status import WorkerFigures, WorkerStatus
from dynamo.serve.entries import Entry, ServiceEntries, read_entries, read_services
from dynamo.serve.statefile import ABSENT, GIVEN_UP, STOPPED, WATCHER
from dynamo.serve.watchers import PLANNER

__all__ = ["OTHER_PROGRAMS", "program_of", "worker_statuses"]

FRONTEND = "dynamo.frontend"
OTHER_PROGRAMS = (FRONTEND, PLANNER)
"""Programs whose processes are no workers."""


def worker_statuses(seen: BoxSighting) -> tuple[WorkerStatus, ...]:
    """Return one status for each entry that has or will have a process, in their order."""
    services = read_services(seen.document)
    figures = _figures(seen)
    found = []
    for entry in read_entries(seen.document):
        record = seen.document["components"][entry.name]
        watcher = record.get(WATCHER)
        watcher = watcher if isinstance(watcher, Mapping) else {}
        if watcher.get("status") == ABSENT and not entry.pids and entry.name not in seen.reserved:
            continue
        service = services.get(str(record.get("service", "")))
        found.append(_Process(seen, entry, record, watcher, service).status(figures))
    return tuple(found)


def program_of(entry: Entry) -> str:
    """Return the Python module that an entry runs, "" for another program."""
    argv = entry.argv
    return argv[2] if argv[1:2] == ("-m",) and len(argv) > 2 else ""


class _Process:
    """One entry of the statefile with what was seen of its processes."""

    def __init__(
        self,
        seen: BoxSighting,
        entry: Entry,
        record: Mapping[str, Any],
        watcher: Mapping[str, Any],
        service: ServiceEntries | None,
    ) -> None:
        self.seen = seen
        self.entry = entry
        self.record = record
        self.watcher = watcher
        self.service = service
        self.alive = tuple(pid for pid in entry.pids if pid in seen.uptimes)
        mine = [seen.registered[pid] for pid in self.alive if pid in seen.registered]
        self.registered = next((one for one in mine if one.model is not None), None)
        self.leased = bool(mine)

    def status(self, figures: Mapping[str, WorkerFigures]) -> WorkerStatus:
        """Return the status; ``figures`` are those of all workers, by their id."""
        state = self._state()
        cause, remedy = self._cause(state)
        found = self.registered
        worker = "" if found is None or found.worker_id is None else f"{found.worker_id:x}"
        figure = figures.get(worker)
        registered_model = found.model if found else None
        service = self.service
        return WorkerStatus(
            name=self.entry.name,
            service=str(self.record.get("service", "")),
            state=state,
            worker=worker,
            model=registered_model or (service.model if service else ""),
            pool=("prefill" if service.is_prefill else "decode") if service else "",
            pids=self.alive,
            gpus=self.entry.gpus,
            progress=self.seen.progress(self.entry.name) if state == "loading" else None,
            restarts=int(self.watcher.get("restarts") or 0),
            last_exit=str(self.watcher.get("last_exit") or ""),
            cause=cause,
            remedy=remedy,
            in_flight=figure.in_flight if figure else None,
            kv_use=figure.kv_use if figure else None,
            uptime_s=max((self.seen.uptimes[pid] for pid in self.alive), default=None),
        )

    def _state(self) -> str:
        entry = self.entry
        reserved = entry.name in self.seen.reserved
        if entry.draining:
            return "draining"
        if entry.asleep and self.alive:
            return "loading" if reserved else "asleep"
        if self._serves():
            return "draining" if self._status() == STOPPED else "ready"
        if self._status() == GIVEN_UP:
            return "failed"
        if self.alive:
            return "draining" if self._status() == STOPPED else "loading"
        if self._status() == STOPPED and not reserved:
            return "stopped"
        return "loading"

    def _serves(self) -> bool:
        """Whether it has registered what its program registers once it can serve."""
        if self.service is not None:
            return self.registered is not None
        program = program_of(self.entry)
        return bool(self.alive) and (self.leased or program != FRONTEND)

    def _status(self) -> str:
        return str(self.watcher.get("status", ""))

    def _cause(self, state: str) -> tuple[str, str]:
        """Return why the worker is not ready, and a command that helps."""
        name = self.entry.name
        last = self.seen.last_output(name) if state in ("loading", "failed") else ""
        output = f"last output: {last}" if last else ""
        if state == "failed":
            reason = str(self.watcher.get("reason") or "given up")
            exited = self._exited()
            parts = (reason, exited, output)
            return "; ".join(part for part in parts if part), f"dynamo restart {name}"
        if state == "stopped":
            return "stopped by a command", f"dynamo restart {name}"
        if state == "asleep":
            return "its engine sleeps", f"dynamo wake {name}"
        if state == "loading" and not self.alive and self._exited():
            return "; ".join(part for part in (self._exited(), "restarting", output) if part), (
                f"dynamo logs {name}"
            )
        return output, ""

    def _exited(self) -> str:
        return str(self.watcher.get("last_exit") or "")


def _figures(seen: BoxSighting) -> dict[str, WorkerFigures]:
    """Return what all frontends together count for each worker, by its id."""
    found: dict[str, WorkerFigures] = {}
    for frontend in seen.frontends:
        for model in frontend.status.models if frontend.status else ():
            for one in model.workers:
                before = found.get(one.worker)
                found[one.worker] = one if before is None else _merged(before, one)
    return found


def _merged(one: WorkerFigures, other: WorkerFigures) -> WorkerFigures:
    uses = [use for use in (one.kv_use, other.kv_use) if use is not None]
    return WorkerFigures(
        worker=one.worker,
        in_flight=one.in_flight + other.in_flight,
        kv_use=max(uses, default=None),
        busy=one.busy or other.busy,
    )
