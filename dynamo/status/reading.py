"""Reads the state of a deployment: statefile, discovery store, frontends, GPUs, decisions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial

import msgspec

from dynamo.box.frontends import ask_frontends
from dynamo.box.output_tail import last_line
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.protocols.status import (
    BoxStatus,
    FrontendStatus,
    GpuStatus,
    RequestRecord,
    WorkerStatus,
)
from dynamo.runtime.process.paths import state_path, store_path
from dynamo.serve.state.entries import Entry, read_entries
from dynamo.serve.state.process_table import stat
from dynamo.serve.state.registered import registered_workers
from dynamo.serve.state.reservations import ledger_of, owner_lives
from dynamo.serve.state.statefile import Document, Statefile
from dynamo.status.components import arbiter_is_alive
from dynamo.status.gpus import read_gpus
from dynamo.status.models import model_statuses
from dynamo.status.planner_file import planner_summary, read_planner
from dynamo.status.sighting import BoxSighting, FrontendSighting
from dynamo.status.workers import OTHER_PROGRAMS, program_of, worker_statuses

__all__ = ["BoxReader", "report"]

_REQUESTS = 50
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BoxReader:
    """Reads the deployment of the namespace of ``runtime``. Blocks for some milliseconds."""

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._runtime = runtime
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._run_dir = state_path(runtime) / runtime.namespace

    def read(self, api_key: str | None, own: FrontendStatus | None = None) -> BoxStatus:
        """Return the state now. A part that cannot be read is missing, and a problem says so.

        ``own`` are the figures of this process, if it is a frontend.
        """
        namespace = self._runtime.namespace
        try:
            document = self._statefile.read()
        except StatefileError as error:
            return self._stopped(error.message)
        if document is None:
            return self._stopped("")
        if not arbiter_is_alive(document):
            return self._stopped(
                f"an earlier deployment of {namespace!r} ended without clean-up; "
                f"try: dynamo state repair --namespace {namespace}"
            )
        return self._running(document, api_key, own)

    def _running(
        self, document: Document, api_key: str | None, own: FrontendStatus | None
    ) -> BoxStatus:
        entries = read_entries(document)
        planner = read_planner(self._run_dir)
        seen = BoxSighting(
            document=document,
            at_s=time.time(),
            uptimes=_uptimes(document),
            registered=registered_workers(store_path(self._runtime)),
            reserved=[one.name for one in entries if _is_changed(one)],
            last_output=partial(self._last_output, _started_at_s(document)),
            frontends=tuple(ask_frontends(document, api_key, own)),
            gpus=_gpus(document, entries),
            planner=planner,
            uses_files=self._runtime.discovery_backend == "file",
        )
        processes = worker_statuses(seen)
        others = {one.name for one in entries if program_of(one) in OTHER_PROGRAMS}
        workers = tuple(one for one in processes if one.name not in others)
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="running",
            at_s=seen.at_s,
            frontend=_frontend_state(seen.frontends, processes),
            url=next((one.url for one in seen.frontends), ""),
            models=model_statuses(seen, workers),
            workers=workers,
            others=tuple(one for one in processes if one.name in others),
            gpus=seen.gpus,
            planner=None if planner is None else planner_summary(planner),
            requests=_requests(seen.frontends),
            problems=_problems(processes, seen.frontends),
        )

    def _stopped(self, problem: str) -> BoxStatus:
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="stopped",
            at_s=time.time(),
            frontend="none",
            gpus=read_gpus({}, {}),
            problems=(problem,) if problem else (),
        )

    def _last_output(self, since_s: float, name: str) -> str:
        """Return the last line of a watcher, "" if it is of an earlier deployment."""
        return last_line(self._run_dir / "logs" / f"{name}.log", since_s)


def report(runtime: RuntimeSettings, api_key: str | None = None) -> bytes:
    """Return the state now as JSON, as the arbiter sends it."""
    return msgspec.json.encode(BoxReader(runtime).read(api_key))


def _is_changed(entry: Entry) -> bool:
    """Whether a living process changes it, this one too."""
    return entry.reserved_by is not None and owner_lives(entry.reserved_by)


def _gpus(document: Document, entries: Iterable[Entry]) -> tuple[GpuStatus, ...]:
    assigned: dict[str, tuple[str, ...]] = {}
    for name, gpus in ledger_of(document).held.items():
        for gpu in gpus:
            assigned[gpu] = (*assigned.get(gpu, ()), name)
    return read_gpus(assigned, {pid: entry.name for entry in entries for pid in entry.pids})


def _started_at_s(document: Document) -> float:
    """Return when the arbiter started, Unix time."""
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks: int = document["arbiter"]["start_ticks"]
    return time.time() - since_boot_s + ticks / _TICKS_PER_S


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


def _frontend_state(
    frontends: tuple[FrontendSighting, ...], processes: tuple[WorkerStatus, ...]
) -> str:
    loading = {one.name for one in processes if one.state == "loading"}
    states = {
        "loading" if one.state == "down" and one.name in loading else one.state for one in frontends
    }
    return next((one for one in ("ready", "draining", "loading", "down") if one in states), "none")


def _requests(frontends: tuple[FrontendSighting, ...]) -> tuple[RequestRecord, ...]:
    found = [record for one in frontends if one.status for record in one.status.requests]
    found.sort(key=lambda record: -(record.received_at_s + record.duration_s))
    return tuple(found[:_REQUESTS])


def _problems(
    processes: tuple[WorkerStatus, ...], frontends: tuple[FrontendSighting, ...]
) -> tuple[str, ...]:
    found = [
        f"{one.name} failed: {one.cause}. See: dynamo logs {one.name}; then: {one.remedy}"
        for one in processes
        if one.state == "failed"
    ]
    starting = {one.name for one in processes if one.state in ("failed", "loading")}
    found += [
        f"{one.name}: {one.problem}"
        for one in frontends
        if one.problem and one.name not in starting
    ]
    return tuple(found)
