"""The state of each process of a deployment, with the cause and the remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dynamo.config.programs import FRONTEND, MODEL_PROGRAMS, PLANNER
from dynamo.protocols.status import WorkerFigures, WorkerStatus
from dynamo.serve.state.document import (
    ABSENT,
    DRAIN,
    GIVEN_UP,
    LOAD,
    SLEEP,
    STOPPED,
    Entry,
    Supervision,
)
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.status.gpus import vram_by_worker
from dynamo.status.logs import progress_in
from dynamo.status.models import BoxSighting, worker_figures

OTHER_PROGRAMS = (FRONTEND, PLANNER)
"""Programs whose processes are no workers."""
_PARTS = re.compile(r"(\D*)(\d*)")


def worker_statuses(seen: BoxSighting) -> tuple[WorkerStatus, ...]:
    """Return one status for each entry that has or will have a process.

    By service, in the order of the graph; then the second worker comes before the tenth.
    """
    services = read_services(seen.document)
    figures, vram = worker_figures(seen), vram_by_worker(seen.gpus)
    found = []
    entries = seen.document.components.values()
    first = {entry.service: place for place, entry in reversed(list(enumerate(entries)))}
    for entry in sorted(entries, key=lambda one: (first[one.service], natural_order(one.name))):
        process = _Process(seen, entry, services)
        if process.exists:
            found.append(process.status(figures, vram.get(entry.name)))
    return tuple(found)


def natural_order(name: str) -> list[tuple[str, int]]:
    """Return a key to sort names by that compares the numbers in them as numbers."""
    return [(text, int(digits or 0)) for text, digits in _PARTS.findall(name)]


class _Process:
    """One entry of the statefile with what was seen of its processes."""

    def __init__(
        self, seen: BoxSighting, entry: Entry, services: Mapping[str, ServiceEntries]
    ) -> None:
        self.seen = seen
        self.entry = entry
        self.service_name = entry.service
        self.service = services.get(self.service_name)
        self.others = [one for one in services.values() if one.name != self.service_name]
        self.watcher = entry.watcher or Supervision()
        self.kept = self.watcher.status
        self.last_exit = self.watcher.last_exit
        self.reserved = entry.name in seen.reserved
        self.alive = tuple(pid for pid in entry.pids if pid in seen.uptimes)
        mine = [seen.registered[pid] for pid in self.alive if pid in seen.registered]
        self.leased = bool(mine)
        self.silent = bool(mine) and all(one.silent for one in mine)
        self.registered = next((one for one in mine if one.model is not None), None)
        owner = entry.reserved_by
        self.falls_asleep = self.reserved and owner is not None and owner.operation == SLEEP
        self.interrupted = "" if self.reserved else self._operation()

    @property
    def exists(self) -> bool:
        """Whether it is more than the command of the next worker."""
        return self.kept != ABSENT or bool(self.entry.pids) or self.reserved

    def status(self, figures: Mapping[str, WorkerFigures], vram: int | None) -> WorkerStatus:
        """Return the status; ``figures`` are those of all workers, by their id."""
        state = self._state()
        last = self.seen.last_output(self.entry.name) if state in ("loading", "failed") else ""
        cause, remedy = self._cause(state, last)
        found, service = self.registered, self.service
        worker = "" if found is None or found.worker_id is None else f"{found.worker_id:x}"
        figure = figures.get(worker)
        registered_model = found.model if found else None
        return WorkerStatus(
            name=self.entry.name,
            service=self.service_name,
            state=state,
            worker=worker,
            model=registered_model or (service.model if service else ""),
            pool=service.facts.pool if service else "",
            pids=self.alive,
            gpus=self.entry.gpus,
            vram_bytes=vram,
            progress=progress_in(last) if state == "loading" and self.alive else None,
            restarts=self.watcher.restarts,
            last_exit=self.last_exit,
            cause=cause,
            remedy=remedy,
            can_sleep=state == "ready" and self._can_sleep(),
            in_flight=figure.in_flight if figure else None,
            kv_use=figure.kv_use if figure else None,
            uptime_s=max((self.seen.uptimes[pid] for pid in self.alive), default=None),
        )

    def _operation(self) -> str:
        """Return the operation of a process that has exited; "" if it goes on without it."""
        owner = self.entry.reserved_by
        begun = "" if owner is None else owner.operation or LOAD
        started = self.kept not in ("", STOPPED)  # its watcher is added before it is started
        goes_on = (begun == LOAD and started) or (begun == DRAIN and self.registered is None)
        return "" if goes_on else begun

    def _can_sleep(self) -> bool:
        found = self.registered
        return found is not None and found.can_sleep and len(self.alive) == 1

    def _state(self) -> str:
        entry, stopped = self.entry, self.kept == STOPPED and not self.reserved
        if entry.draining or (stopped and self.alive):
            return "draining"
        if self.interrupted in (LOAD, SLEEP):
            return "failed"
        if self.falls_asleep and self.alive:
            return "draining"  # its model stays registered, but it gets no requests
        if entry.asleep and self.alive:
            return "loading" if self.reserved else "asleep"
        if self.alive:
            return self._living_state()
        if self.kept == GIVEN_UP:
            return "failed"
        return "stopped" if stopped else "loading"

    def _living_state(self) -> str:
        if self.entry.program == FRONTEND:
            return self._frontend_state()
        if self.service is None and self.entry.program not in MODEL_PROGRAMS:
            # Of a program that registers no model nothing more is known.
            return "failed" if self.silent else "ready"
        if self.seen.uses_files:
            if self.registered is None:
                return "loading"
            return "failed" if self._rejected() or self.silent else "ready"
        known = any(frontend.status for frontend in self.seen.frontends)
        model = self.service.model if self.service is not None else ""
        return "ready" if self.seen.serves(model) or not known else "loading"

    def _frontend_state(self) -> str:
        found = next((one for one in self.seen.frontends if one.name == self.entry.name), None)
        if found is None or found.state != "down":
            return found.state if found else "ready"
        # It has a lease once it listens, and two processes while one replaces the other.
        return "failed" if self.leased and len(self.alive) == 1 else "loading"

    def _rejected(self) -> str:
        """Return why frontends give the registered worker no requests; "" if they do."""
        found = self.registered
        known = found is not None and found.worker_id is not None
        return self.seen.rejected(f"{found.worker_id:x}") if found and known else ""

    def _agree(self) -> str:
        """Return the command that makes a rejected worker agree with others of its model."""
        model = self.registered.model if self.registered else None
        ids = [o.worker_id for o in self.seen.registered.values() if o.model == model]
        if all(self.seen.rejected(f"{one:x}") for one in ids if one is not None):
            return f"dynamo restart {self.entry.name}"  # there are no others: it is its files
        if self.service is not None and self.service.is_prefill:
            return "dynamo reload GRAPH  # with the model and flags of the decode workers"
        if any(one.model == model for one in self.others):
            return f"dynamo reload GRAPH  # with another served-model-name of {self.service_name}"
        return f"dynamo restart {self.service_name}  # the others read the changed files, too"

    def _cause(self, state: str, last: str) -> tuple[str, str]:
        """Return why the worker is in this state, if that is not plain, and what to do."""
        name = self.entry.name
        output = f"last output: {last}" if last else ""
        if state == "failed" and (rejected := self._rejected()):
            return f"the frontend gives it no requests: {rejected}", self._agree()
        if self.interrupted:
            return f"its {self.interrupted} was interrupted", "dynamo state repair"
        if state == "failed" and self.alive:
            hangs = "it does not renew its lease: it is stopped, or hangs"
            unanswered = "it listens but does not answer"
            return hangs if self.silent else unanswered, f"dynamo restart {name}"
        if state == "failed":
            reason = self.watcher.reason or "given up"
            return _joined(reason, self.last_exit, output), f"dynamo restart {name}"
        if state == "draining":
            then = "sleeps" if self.falls_asleep else "exits"
            return f"it finishes its requests, then {then}", ""
        if state == "stopped":
            stopping = ("the deployment stops", "")
            by_command = ("stopped by a command", f"dynamo restart {name}")
            return stopping if self.seen.stopping else by_command
        if state == "asleep":
            return "its engine sleeps and holds no GPU memory", f"dynamo wake {name}"
        if state == "loading" and self.entry.asleep:
            return "its engine wakes up", ""
        if state == "loading" and self.last_exit:
            again = "started again" if self.alive else "restarting"
            why = f" ({self.watcher.last_words})" if self.watcher.last_words else ""
            return _joined(f"{self.last_exit}{why}, {again}", output), f"dynamo logs {name}"
        return output, ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
