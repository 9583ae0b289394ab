"""The state of each process of a deployment, with the cause and the remedy. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dynamo.config.programs import FRONTEND, MODEL_PROGRAMS, PLANNER
from dynamo.protocols.status import WorkerFigures, WorkerStatus
from dynamo.serve.state.document import ABSENT
from dynamo.serve.state.view import WorkerState, WorkerView
from dynamo.status.gpus import vram_by_worker
from dynamo.status.logs import progress_in
from dynamo.status.models import BoxView, worker_figures

OTHER_PROGRAMS = (FRONTEND, PLANNER)
"""Programs whose processes are no workers."""
_PARTS = re.compile(r"(\D*)(\d*)")


def worker_statuses(seen: BoxView) -> tuple[WorkerStatus, ...]:
    """Return one status for each entry that has or will have a process.

    By service, in the order of the graph; then the second worker comes before the tenth.
    """
    figures, vram = worker_figures(seen), vram_by_worker(seen.gpus)
    entries = seen.deployment.document.components.values()
    # Reversed, so that the first entry of a service is written last and stays.
    order = {entry.service: number for number, entry in reversed(list(enumerate(entries)))}
    ordered = sorted(entries, key=lambda entry: (order[entry.service], natural_order(entry.name)))
    processes = [_Process(seen, seen.deployment.workers[entry.name]) for entry in ordered]
    return tuple(
        process.status(figures, vram.get(process.entry.name))
        for process in processes
        if process.exists
    )


def natural_order(name: str) -> list[tuple[str, int]]:
    """Return a key to sort names by that compares the numbers in them as numbers."""
    return [(text, int(digits or 0)) for text, digits in _PARTS.findall(name)]


_STATES = {
    WorkerState.STARTING: "loading",
    WorkerState.SERVING: "ready",
    WorkerState.FALLING_ASLEEP: "draining",  # its model stays registered, but it gets no requests
    WorkerState.ASLEEP: "asleep",
    WorkerState.WAKING: "loading",
    WorkerState.DRAINING: "draining",
    WorkerState.INTERRUPTED: "failed",
    WorkerState.GIVEN_UP: "failed",
    WorkerState.STOPPED: "stopped",
}


class _Process:
    """One entry of the statefile with what was seen of its processes."""

    def __init__(self, seen: BoxView, worker: WorkerView) -> None:
        self.seen = seen
        self.worker = worker
        self.entry = worker.entry
        self.service = worker.service
        self.watcher = worker.watcher
        self.alive = worker.pids
        self.leased = bool(worker.registered)
        self.silent = self.leased and all(process.silent for process in worker.registered)
        self.registered = next(iter(worker.serving), None)

    @property
    def exists(self) -> bool:
        """Whether it is more than the command of the next worker."""
        return self.watcher.status != ABSENT or bool(self.entry.pids) or self.worker.reserved

    def status(self, figures: Mapping[str, WorkerFigures], vram: int | None) -> WorkerStatus:
        """Return the status; ``figures`` are those of all workers, by their id."""
        state = self._state()
        last = self.seen.last_output(self.entry.name) if state in ("loading", "failed") else ""
        cause, remedy = self._cause(state, last)
        registered, service = self.registered, self.service
        has_id = registered is not None and registered.worker_id is not None
        worker_id = f"{registered.worker_id:x}" if registered is not None and has_id else ""
        figure = figures.get(worker_id)
        model = registered.model if registered else None
        return WorkerStatus(
            name=self.entry.name,
            service=self.entry.service,
            state=state,
            worker=worker_id,
            model=model or (service.model if service else ""),
            pool=service.facts.pool if service else "",
            pids=self.alive,
            gpus=self.entry.gpus,
            vram_bytes=vram,
            progress=progress_in(last) if state == "loading" and self.alive else None,
            restarts=self.watcher.restarts,
            last_exit=self.watcher.last_exit,
            cause=cause,
            remedy=remedy,
            can_sleep=state == "ready" and self._can_sleep(),
            in_flight=figure.in_flight if figure else None,
            kv_use=figure.kv_use if figure else None,
            uptime_s=max((self.seen.uptimes[pid] for pid in self.alive), default=None),
        )

    def _can_sleep(self) -> bool:
        registered = self.registered
        return registered is not None and registered.can_sleep and len(self.alive) == 1

    def _state(self) -> str:
        state = self.worker.state
        if state in (WorkerState.STARTING, WorkerState.SERVING) and self.alive:
            return self._living_state()
        return _STATES[state]

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
        answered = any(frontend.status for frontend in self.seen.frontends)
        model = self.service.model if self.service is not None else ""
        return "ready" if self.seen.serves(model) or not answered else "loading"

    def _frontend_state(self) -> str:
        frontend = next(
            (candidate for candidate in self.seen.frontends if candidate.name == self.entry.name),
            None,
        )
        if frontend is None or frontend.state != "down":
            return frontend.state if frontend else "ready"
        # A frontend has a lease once it listens. A replacement runs beside the old process.
        return "failed" if self.leased and len(self.alive) == 1 else "loading"

    def _rejected(self) -> str:
        """Return why frontends give the registered worker no requests; "" if they do."""
        registered = self.registered
        has_id = registered is not None and registered.worker_id is not None
        return self.seen.rejected(f"{registered.worker_id:x}") if registered and has_id else ""

    def _agree(self) -> str:
        """Return the command that makes a rejected worker agree with others of its model."""
        model = self.registered.model if self.registered else None
        ids = [o.worker_id for o in self.seen.deployment.registered.values() if o.model == model]
        if all(self.seen.rejected(f"{worker_id:x}") for worker_id in ids if worker_id is not None):
            return f"dynamo restart {self.entry.name}"  # there are no others: it is its files
        if self.service is not None and self.service.is_prefill:
            return "dynamo reload GRAPH  # with the model and flags of the decode workers"
        name = self.entry.service
        others = (
            service for service in self.seen.deployment.services.values() if service.name != name
        )
        if any(service.model == model for service in others):
            return f"dynamo reload GRAPH  # with another served-model-name of {name}"
        return f"dynamo restart {name}  # the others read the changed files, too"

    def _cause(self, state: str, last: str) -> tuple[str, str]:
        """Return why the worker is in this state, if that is not plain, and what to do."""
        name = self.entry.name
        output = f"last output: {last}" if last else ""
        if state == "failed" and (rejected := self._rejected()):
            return f"the frontend gives it no requests: {rejected}", self._agree()
        if interrupted := self.worker.interrupted:
            return f"its {interrupted} was interrupted", "dynamo state repair"
        if state == "failed" and self.alive:
            hangs = "it does not renew its lease: it is stopped, or hangs"
            unanswered = "it listens but does not answer"
            return hangs if self.silent else unanswered, f"dynamo restart {name}"
        if state == "failed":
            reason = self.watcher.reason or "given up"
            return _joined(reason, self.watcher.last_exit, output), f"dynamo restart {name}"
        if state == "draining":
            then = "sleeps" if self.worker.falls_asleep else "exits"
            return f"it finishes its requests, then {then}", ""
        if state == "stopped":
            stopping = ("the deployment stops", "")
            by_command = ("stopped by a command", f"dynamo restart {name}")
            return stopping if self.seen.stopping else by_command
        if state == "asleep":
            return "its engine sleeps and holds no GPU memory", f"dynamo wake {name}"
        if state == "loading" and self.entry.asleep:
            return "its engine wakes up", ""
        if state == "loading" and self.watcher.last_exit:
            again = "started again" if self.alive else "restarting"
            why = f" ({self.watcher.last_words})" if self.watcher.last_words else ""
            return _joined(f"{self.watcher.last_exit}{why}, {again}", output), f"dynamo logs {name}"
        return output, ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
