"""What the planner counts as workers of a service, and which one it removes next. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from dynamo.box.actions.budget import budget_share
from dynamo.config.planner import PlannerSettings
from dynamo.operations.steps.ports import STOPPED, STOPPING
from dynamo.planner.connector import (
    ASLEEP,
    DRAINING,
    READY,
    STARTING,
    ScaledService,
    ScaledWorker,
)
from dynamo.planner.policies.base import DECODE, PREFILL
from dynamo.serve.state.entries import Entry, ServiceEntries
from dynamo.serve.state.registered import RegisteredWorker

__all__ = ["Sighting", "newest", "service_now"]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What was seen of a deployment at one time.

    ``statuses`` are those of the watchers, by name. ``reserved`` are the watchers
    that are being added.
    """

    statuses: Mapping[str, str]
    registered: Mapping[int, RegisteredWorker]
    reserved: Collection[str] = ()

    def is_kept(self, entry: Entry) -> bool:
        """Whether the arbiter has this watcher and keeps its processes running."""
        return self.statuses.get(entry.name, STOPPED) not in (STOPPED, STOPPING)


def service_now(
    service: ServiceEntries, sighting: Sighting, settings: PlannerSettings
) -> ScaledService:
    """Return ``service`` with its workers, oldest first.

    A stopped watcher, by command or after too many deaths, has no worker. Whether it holds its
    GPUs is in the ledger.
    """
    workers = tuple(worker for entry in service.entries for worker in _workers(entry, sighting))
    models = (
        sighting.registered[pid].model
        for entry in service.entries
        for pid in entry.pids
        if pid in sighting.registered
    )
    return ScaledService(
        name=service.name,
        model=next((model for model in models if model), service.model),
        pool=PREFILL if service.is_prefill else DECODE,
        gpus_per_worker=budget_share(service, settings),
        workers=workers,
        assigned=service.gpus,
        minimum=service.minimum,
        maximum=service.maximum,
        priority=service.priority,
    )


def newest(service: ServiceEntries, sighting: Sighting, spared: Collection[str]) -> Entry | None:
    """Return the entry of the worker to remove: that with the highest number, the template last.

    One that sleeps comes after all others. Never one that drains already, nor one that is being
    added or ``spared``.
    """
    for entry in sorted(service.entries, key=lambda one: (one.asleep, -one.index)):
        states = {worker.state for worker in _workers(entry, sighting)}
        skipped = entry.name in spared or entry.name in sighting.reserved
        if not skipped and states and DRAINING not in states:
            return entry
    return None


def _workers(entry: Entry, sighting: Sighting) -> Iterator[ScaledWorker]:
    """Yield one worker for each process that serves; without any, one for all that will.

    While a restart or a reload replaces a process, the watcher has two, and is one worker.
    """
    found = [sighting.registered[pid] for pid in entry.pids if pid in sighting.registered]
    serving = [one for one in found if one.model is not None]
    for one in serving:
        state = _state(entry, sighting, True)
        yield ScaledWorker(name=entry.name, state=state, worker_id=one.worker_id, gpus=entry.gpus)
    kept = entry.name in sighting.reserved or sighting.is_kept(entry)
    if not serving and (entry.pids or kept):
        state = _state(entry, sighting, False)
        worker_id = found[0].worker_id if found else None
        yield ScaledWorker(name=entry.name, state=state, worker_id=worker_id, gpus=entry.gpus)


def _state(entry: Entry, sighting: Sighting, serves: bool) -> str:
    leaving = not sighting.is_kept(entry) and entry.name not in sighting.reserved
    if entry.draining or leaving:  # by us, or by circusctl rm or stop
        return DRAINING
    if entry.asleep:
        return STARTING if entry.name in sighting.reserved else ASLEEP
    return READY if serves else STARTING
