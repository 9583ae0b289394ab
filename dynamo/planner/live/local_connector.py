"""The running ``dynamo serve`` that the planner scales: its workers, its GPUs, and changes to them.

GPUs are reserved before a watcher exists and freed after its processes have exited, so that
:func:`dynamo.operations.reconcile.reconcile` can repair what a crash leaves at any step.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from dynamo.config.planner import PlannerSettings
from dynamo.config.programs import ATTACH
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.operations.reconcile import reconcile
from dynamo.operations.steps.access import LocalAccess, open_access
from dynamo.operations.steps.circus import STOPPED, STOPPING
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.operations.steps.removal import remove_worker
from dynamo.operations.steps.sleeping import (
    RemoteEngines,
    check_sleepers,
    finish_interrupted,
    put_to_sleep,
    wake_worker,
)
from dynamo.operations.steps.starting import WorkerStart
from dynamo.planner.connector import (
    ASLEEP,
    DRAINING,
    READY,
    STARTING,
    ScaledService,
    ScaledWorker,
)
from dynamo.planner.sharing.gpu_sharing import GpuCapacity
from dynamo.planner.sharing.sharing import GpuRoom
from dynamo.serve.state.document import STOPPED as STOPPED_BY_COMMAND
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.process_table import is_reserved, ledger_of
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.serve.state.room import sleeper_to_wake
from dynamo.serve.state.statefile import Statefile

log = logging.getLogger(__name__)
_SPARE_RAM = 0.1
"""Share of the RAM that stays available when one more worker sleeps."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What was seen of a deployment at one time.

    ``statuses`` are those of the watchers, by name. ``reserved`` are the watchers
    that are being added, ``wakeable`` those of sleeping workers whose GPUs are free.
    """

    statuses: Mapping[str, str]
    registered: Mapping[int, RegisteredWorker]
    reserved: Collection[str] = ()
    wakeable: Collection[str] = ()

    def is_kept(self, entry: Entry) -> bool:
        """Whether the arbiter has this watcher and keeps its processes running."""
        return self.statuses.get(entry.name, STOPPED) not in (STOPPED, STOPPING)


def service_now(service: ServiceEntries, sighting: Sighting, limits: ActionLimits) -> ScaledService:
    """Return ``service`` with its workers, oldest first.

    A stopped watcher, by command or after too many deaths, has no worker. Whether it holds its
    GPUs is in the ledger.
    """
    facts = service.facts
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
        pool=facts.pool,
        gpus_per_worker=limits.worker_gpus(service.gpus, service.is_prefill),
        workers=workers,
        assigned=service.gpus,
        minimum=facts.minimum,
        maximum=facts.maximum,
        priority=facts.priority,
        idle_timeout_s=facts.model_args.idle_timeout,
        asked_at=service.asked_at,
        groups=facts.model_args.group,
        relayed=facts.program == ATTACH,
        stopped="" if workers else _stopped(service, sighting),
    )


def _stopped(service: ServiceEntries, sighting: Sighting) -> str:
    """Return a worker that a command has stopped, "" without one.

    Not one that was given up, nor one whose start was interrupted, which a repair removes.
    """
    for entry in service.entries:
        if entry.reserved_by is not None:
            continue
        by_command = entry.watcher is not None and entry.watcher.status == STOPPED_BY_COMMAND
        if by_command and sighting.statuses.get(entry.name) == STOPPED:
            return entry.name
    return ""


def newest(service: ServiceEntries, sighting: Sighting, spared: Collection[str]) -> Entry | None:
    """Return the entry of the worker to remove: that with the highest number, the template last.

    One that sleeps comes after all others. Never one that drains already, nor one that is being
    added or ``spared``.
    """
    by_number = service.entries[::-1]
    for entry in sorted(by_number, key=lambda one: one.asleep):
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
        yield _worker(entry, state, one.worker_id, sighting)
    kept = entry.name in sighting.reserved or sighting.is_kept(entry)
    if not serving and (entry.pids or kept):
        state = _state(entry, sighting, False)
        worker_id = found[0].worker_id if found else None
        yield _worker(entry, state, worker_id, sighting)


def _worker(entry: Entry, state: str, worker_id: int | None, sighting: Sighting) -> ScaledWorker:
    return ScaledWorker(
        name=entry.name,
        state=state,
        worker_id=worker_id,
        gpus=entry.gpus,
        wakeable=state == ASLEEP and entry.name in sighting.wakeable,
    )


def _state(entry: Entry, sighting: Sighting, serves: bool) -> str:
    leaving = not sighting.is_kept(entry) and entry.name not in sighting.reserved
    if entry.draining or leaving:  # by us, or by circusctl rm or stop
        return DRAINING
    if entry.asleep:
        return STARTING if entry.name in sighting.reserved else ASLEEP
    return READY if serves else STARTING


def gpu_capacity(statefile: Statefile, limits: ActionLimits) -> GpuCapacity:
    """Return the GPUs that services leave which are not scaled.

    Infinite where none are assigned, and where the statefile cannot be read: the connector has the
    last word.
    """
    try:
        document = statefile.read()
    except StatefileError:
        document = None
    return GpuCapacity(math.inf) if document is None else capacity_of(document, limits)


def capacity_of(document: Document, limits: ActionLimits) -> GpuCapacity:
    """Return the same for a statefile."""
    ledger = ledger_of(document)
    if not ledger.ids:
        return GpuCapacity(math.inf)
    scaled = {
        entry.name
        for service in read_services(document).values()
        if limits.scales(service.model)
        for entry in service.entries
    }
    usable = sum(ledger.free(without=scaled).values())
    return GpuCapacity(usable, GpuRoom(ledger))


class LocalConnector:
    """A :class:`Connector`. Several actions may run at once; the statefile's lock keeps them apart.

    With ``engines``, a worker whose engine can sleep does so instead of being removed, and is woken
    before a new one starts. ``most_asleep`` workers of a service may sleep. By default one does,
    and further ones while a tenth of the RAM stays available.
    """

    def __init__(
        self,
        access: LocalAccess,
        engines: RemoteEngines | None = None,
        most_asleep: int | None = None,
    ) -> None:
        self._access = access
        self._engines = engines
        self._most_asleep = most_asleep
        self._falling: Counter[str] = Counter()
        self._asleep_bytes: dict[str, int] = {}
        self._starts: dict[str, list[WorkerStart]] = {}

    def configure(self, settings: PlannerSettings) -> None:
        """Keep within the limits of ``settings`` from now on."""
        self._access.limits = ActionLimits.of_planner(settings)
        self._most_asleep = settings.max_sleeping_workers

    async def services(self) -> Mapping[str, ScaledService]:
        """See :class:`Connector`."""
        statuses = await self._access.statuses()
        document = self._access.document()
        sighting = self._sighting(document, statuses)
        return {
            name: service_now(service, sighting, self._access.limits)
            for name, service in read_services(document).items()
        }

    async def reconcile(self) -> list[str]:
        """Repair what an earlier crash left; return what was repaired, one sentence each.

        Call it before the first action. Raises ActionFailed, StatefileError.
        """
        self._access.needs_repair = False
        found = await reconcile(self._access)
        found += await self.finish_interrupted()
        if self._engines is not None:
            found += await check_sleepers(self._access, self._engines)
        return found

    async def finish_interrupted(self) -> list[str]:
        """Finish or undo each sleep and wake whose process has exited; log and return them.

        Until then the worker keeps its GPUs. Raises StatefileError.
        """
        if self._engines is None:
            return []
        found = await finish_interrupted(self._access, self._engines)
        for sentence in found:
            log.info("%s", sentence)
        return found

    async def add(self, service: str) -> str:
        """See :class:`Connector`."""
        try:
            await self._repair()
            if self._engines is not None:
                document = self._access.document()
                entries = self._access.service(document, service)
                asleep = sleeper_to_wake(document, entries, self._access.active)
                if asleep is not None:
                    return await wake_worker(self._access, self._engines, entries, asleep)
            return await self._start(service)
        except StatefileError as error:
            raise ActionFailed(f"{service}: {error.message}") from error

    async def _start(self, service: str) -> str:
        start, starts = WorkerStart(self._access, service), self._starts.setdefault(service, [])
        starts.append(start)
        try:
            return await start.run()
        finally:
            starts.remove(start)

    def give_up(self, service: str, reason: str) -> None:
        """See :class:`Connector`. A wake goes on: it takes seconds."""
        for start in self._starts.get(service, ()):
            start.give_up(reason)

    async def remove(self, service: str) -> str:
        """See :class:`Connector`."""
        try:
            await self._repair()
            statuses = await self._access.statuses()
            sighting = self._sighting(self._access.document(), statuses)
            asleep = await self._put_to_sleep(service, sighting)
            return asleep or await self._remove(service, sighting)
        except StatefileError as error:
            raise ActionFailed(f"{service}: {error.message}") from error

    async def _remove(self, name: str, sighting: Sighting) -> str:
        service = self._access.service(self._access.document(), name)
        entry = newest(service, sighting, self._access.active)
        if entry is None:
            raise ActionFailed(f"{name}: no worker to remove")
        return await remove_worker(self._access, service, entry)

    async def _repair(self) -> None:
        """Finish what an earlier action could not finish or undo."""
        if self._access.needs_repair and not self._access.active:
            await self.reconcile()

    async def _put_to_sleep(self, name: str, sighting: Sighting) -> str:
        """Put the newest worker to sleep; return its watcher, "" if it is to be removed."""
        service = self._access.service(self._access.document(), name)
        entry = newest(service, sighting, self._access.active)
        if self._engines is None or entry is None or entry.asleep or not self._may_sleep(service):
            return ""
        self._falling[name] += 1
        try:
            before = psutil.virtual_memory().available
            if not await put_to_sleep(self._access, self._engines, entry):
                return ""
            taken = before - psutil.virtual_memory().available
            self._asleep_bytes[name] = max(taken, memory_of(entry.pids))
            return entry.name
        finally:
            self._falling[name] -= 1

    def _may_sleep(self, service: ServiceEntries) -> bool:
        """Whether one more worker of ``service`` may sleep; see the class."""
        asleep = [entry for entry in service.entries if entry.asleep]
        falling = self._falling[service.name]
        if self._most_asleep is not None:
            return len(asleep) + falling < self._most_asleep
        if not asleep:
            return not falling
        # A planner that was restarted sees what its processes hold.
        each = self._asleep_bytes.get(service.name) or memory_of(asleep[0].pids)
        ram = psutil.virtual_memory()
        return each > 0 and ram.available - (falling + 1) * each >= _SPARE_RAM * ram.total

    def _sighting(self, document: Document, statuses: Mapping[str, str]) -> Sighting:
        active, ledger = self._access.active, ledger_of(document)
        return Sighting(
            statuses=statuses,
            registered=self._access.registrations.workers(),
            reserved={
                entry.name
                for service in read_services(document).values()
                for entry in service.entries
                if is_reserved(entry, active)
            },
            wakeable={
                name
                for name, entry in document.components.items()
                if entry.asleep and ledger.can_hold(name)
            },
        )


def memory_of(pids: Iterable[int]) -> int:
    """Return the bytes of RAM that the processes ``pids`` and their children hold."""
    held = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                held += one.memory_info().rss
    return held


@contextlib.asynccontextmanager
async def open_connector(
    runtime: RuntimeSettings, settings: PlannerSettings, engines: RemoteEngines | None = None
) -> AsyncIterator[LocalConnector]:
    """Open a connector to the deployment of ``runtime``'s namespace for the block."""
    async with open_access(runtime, ActionLimits.of_planner(settings)) as access:
        yield LocalConnector(access, engines, settings.max_sleeping_workers)
