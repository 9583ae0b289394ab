"""Collects the state of a deployment: what ``ps``, ``top`` and ``/ui`` show."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dynamo.box.components import arbiter_is_alive
from dynamo.box.frontends import ask_frontends
from dynamo.box.models import model_statuses
from dynamo.box.sighting import BoxSighting, FrontendSighting
from dynamo.box.workers import OTHER_PROGRAMS, program_of, worker_statuses
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.protocols.status import BoxStatus, RequestRecord, WorkerStatus
from dynamo.runtime.paths import state_path, store_path
from dynamo.serve.entries import read_entries
from dynamo.serve.processes import stat
from dynamo.serve.registered import registered_workers
from dynamo.serve.reservations import is_reserved
from dynamo.serve.statefile import Document, Statefile

__all__ = ["BoxCollector"]

_TAIL_BYTES = 4096
_LINE_CHARACTERS = 200
_REQUESTS = 50
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BoxCollector:
    """Reads statefile, discovery store, frontends and GPUs of the namespace of ``runtime``.

    ``api_key`` is an operator's, for frontends that need one. Blocks; cheap at 1 Hz. Use it in one
    thread at a time.
    """

    def __init__(self, runtime: RuntimeSettings, api_key: str | None = None) -> None:
        self._runtime = runtime
        self._api_key = api_key
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._logs = state_path(runtime) / runtime.namespace / "logs"

    def collect(self) -> BoxStatus:
        """Return the state now. A part that cannot be read is missing, and a problem says so."""
        try:
            document = self._statefile.read()
        except StatefileError as error:
            return self._stopped(error.message)
        if document is None:
            return self._stopped("")
        if not arbiter_is_alive(document):
            return self._stopped(
                f"the deployment of namespace {self._runtime.namespace!r} ended without clean-up: "
                "dynamo state repair"
            )
        return self._running(document)

    def _running(self, document: Document) -> BoxStatus:
        frontends = tuple(ask_frontends(document, self._api_key))
        seen = BoxSighting(
            document=document,
            at_s=time.time(),
            uptimes=_uptimes(document),
            registered=registered_workers(store_path(self._runtime)),
            reserved=[one.name for one in read_entries(document) if is_reserved(one, ())],
            last_output=self._last_output,
            frontends=frontends,
        )
        processes = worker_statuses(seen)
        others = {one.name for one in read_entries(document) if program_of(one) in OTHER_PROGRAMS}
        workers = tuple(one for one in processes if one.name not in others)
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="running",
            at_s=seen.at_s,
            frontend=_frontend_state(frontends),
            url=next((one.url for one in frontends), ""),
            models=model_statuses(seen, workers),
            workers=workers,
            others=tuple(one for one in processes if one.name in others),
            requests=_requests(frontends),
            problems=_problems(processes, frontends),
        )

    def _stopped(self, problem: str) -> BoxStatus:
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="stopped",
            at_s=time.time(),
            frontend="none",
            problems=(problem,) if problem else (),
        )

    def _last_output(self, name: str) -> str:
        lines = _tail(self._logs / f"{name}.log").splitlines()
        return lines[-1][-_LINE_CHARACTERS:] if lines else ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _uptimes(document: Document) -> dict[int, float]:
    """Return the recorded processes that live, with their age in seconds."""
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    found: dict[int, float] = {}
    for entry in document["components"].values():
        for process in entry.get("processes") or ():
            pid, ticks = process.get("pid"), process.get("start_ticks")
            state = stat(pid) if isinstance(pid, int) else None
            if state is not None and state.start_ticks == ticks and state.state != "Z":
                found[pid] = max(0.0, since_boot_s - ticks / _TICKS_PER_S)
    return found


def _frontend_state(frontends: tuple[FrontendSighting, ...]) -> str:
    states = {one.state for one in frontends}
    return next((one for one in ("ready", "draining", "down") if one in states), "none")


def _requests(frontends: tuple[FrontendSighting, ...]) -> tuple[RequestRecord, ...]:
    found = [record for one in frontends if one.status for record in one.status.requests]
    found.sort(key=lambda record: -(record.received_at_s + record.duration_s))
    return tuple(found[:_REQUESTS])


def _problems(
    processes: tuple[WorkerStatus, ...], frontends: tuple[FrontendSighting, ...]
) -> tuple[str, ...]:
    found = [
        f"{one.name} failed: {one.cause}; try: {one.remedy}"
        for one in processes
        if one.state == "failed"
    ]
    found += [f"{one.name}: {one.problem}" for one in frontends if one.problem]
    return tuple(found)
