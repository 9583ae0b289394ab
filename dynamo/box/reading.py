"""Reads the state of a deployment: statefile, discovery store, frontends, GPUs, decisions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from dynamo.box.components import arbiter_is_alive
from dynamo.box.frontends import ask_frontends
from dynamo.box.gpus import read_gpus
from dynamo.box.models import model_statuses
from dynamo.box.output_tail import last_line
from dynamo.box.planner import DECISIONS_FILE, PlannerWishes, newest_decisions, planner_wishes
from dynamo.box.planner_file import planner_summary, read_planner
from dynamo.box.sighting import BoxSighting, FrontendSighting
from dynamo.box.workers import OTHER_PROGRAMS, program_of, worker_statuses
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.protocols.status import (
    BoxStatus,
    GpuStatus,
    PlannerSummary,
    RequestRecord,
    WorkerStatus,
)
from dynamo.runtime.paths import state_path, store_path
from dynamo.serve.entries import Entry, argv_flags, read_entries
from dynamo.serve.gpu_holders import held_gpus
from dynamo.serve.process_table import stat
from dynamo.serve.programs import PLANNER
from dynamo.serve.registered import announced_on_demand, registered_workers
from dynamo.serve.reservations import is_reserved
from dynamo.serve.statefile import Document, Statefile

__all__ = ["BoxReader", "report"]

_REQUESTS = 50
_IDLE_TIMEOUT_S = "300"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class BoxReader:
    """Reads the deployment of the namespace of ``runtime``. Blocks for some milliseconds."""

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._runtime = runtime
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._run_dir = state_path(runtime) / runtime.namespace

    def read(self, api_key: str | None) -> BoxStatus:
        """Return the state now. A part that cannot be read is missing, and a problem says so."""
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
        return self._running(document, api_key)

    def _running(self, document: Document, api_key: str | None) -> BoxStatus:
        entries = read_entries(document)
        uptimes = _uptimes(document)
        wishes = self._wishes(entries, uptimes)
        seen = BoxSighting(
            document=document,
            at_s=time.time(),
            uptimes=uptimes,
            registered=registered_workers(store_path(self._runtime)),
            reserved=[one.name for one in entries if is_reserved(one, ())],
            last_output=partial(self._last_output, _started_at_s(document)),
            frontends=tuple(ask_frontends(document, api_key)),
            gpus=_gpus(document, entries),
            wanted=wishes.wanted if wishes else {},
            idle_timeouts=self._idle_timeouts(entries),
            uses_files=self._runtime.discovery_backend == "file",
        )
        processes = worker_statuses(seen)
        others = {one.name for one in entries if program_of(one) in OTHER_PROGRAMS}
        workers = tuple(one for one in processes if one.name not in others)
        return BoxStatus(
            namespace=self._runtime.namespace,
            state="running",
            at_s=seen.at_s,
            frontend=_frontend_state(seen.frontends),
            url=next((one.url for one in seen.frontends), ""),
            models=model_statuses(seen, workers),
            workers=workers,
            others=tuple(one for one in processes if one.name in others),
            gpus=seen.gpus,
            planner=self._planner(wishes),
            requests=_requests(seen.frontends),
            problems=_problems(processes, seen.frontends),
        )

    def _planner(self, wishes: PlannerWishes | None) -> PlannerSummary | None:
        """Return what the planner reports about itself, else what its decisions say."""
        report = read_planner(self._run_dir)
        if report is not None:
            return planner_summary(report)
        return wishes.summary if wishes else None

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

    def _wishes(
        self, entries: Iterable[Entry], uptimes: Mapping[int, float]
    ) -> PlannerWishes | None:
        """Return what the planner of the graph wants; None without one."""
        entry = next((one for one in entries if program_of(one) == PLANNER), None)
        if entry is None:
            return None
        alive = [uptimes[pid] for pid in entry.pids if pid in uptimes]
        since_s = time.time() - max(alive, default=0.0)
        decisions = newest_decisions(self._run_dir / DECISIONS_FILE, since_s)
        mode = argv_flags(entry.argv).get("mode", "load")
        return planner_wishes(decisions, "running" if alive else "stopped", mode)

    def _idle_timeouts(self, entries: Iterable[Entry]) -> dict[str, float]:
        """Return the idle time after which each model on demand loses its workers."""
        planner = next((one for one in entries if program_of(one) == PLANNER), None)
        if planner is None:
            return {}
        given = argv_flags(planner.argv).get("idle-timeout", _IDLE_TIMEOUT_S)
        try:
            timeout_s = float(given)
        except ValueError:
            return {}
        return dict.fromkeys(announced_on_demand(store_path(self._runtime)), timeout_s)


def report(runtime: RuntimeSettings, api_key: str | None = None) -> bytes:
    """Return the state now as JSON, as the arbiter sends it. Never raises for a missing part."""
    try:
        return msgspec.json.encode(BoxReader(runtime).read(api_key))
    except ConfigError as error:
        return msgspec.json.encode({"error": error.message})


def _gpus(document: Document, entries: Iterable[Entry]) -> tuple[GpuStatus, ...]:
    held = held_gpus(document)
    assigned: dict[str, tuple[str, ...]] = {}
    for name, (gpus, _) in held.items():
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
