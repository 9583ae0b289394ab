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

import psutil

from dynamo.config.planner import PlannerSettings
from dynamo.config.programs import ATTACH
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.operations.reconcile import reconcile
from dynamo.operations.steps.access import LocalAccess, open_access
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
from dynamo.planner.live.gpu_sharing import GpuCapacity
from dynamo.planner.sharing import GpuRoom
from dynamo.serve.state.document import STOPPED as STOPPED_BY_COMMAND
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.process_table import ledger_of
from dynamo.serve.state.room import sleeper_to_wake
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.state.view import DeploymentView, WorkerState, WorkerView

log = logging.getLogger(__name__)
_SPARE_RAM = 0.1
"""Share of the RAM that stays available when one more worker sleeps."""


_STATES = {
    WorkerState.STARTING: STARTING,
    WorkerState.WAKING: STARTING,
    WorkerState.SERVING: READY,
    WorkerState.ASLEEP: ASLEEP,
    WorkerState.DRAINING: DRAINING,
}
"""The planner's names of states; a worker in another one has exited."""


def service_now(
    service: ServiceEntries,
    view: DeploymentView,
    limits: ActionLimits,
    wakeable: Collection[str] = (),
) -> ScaledService:
    """Return ``service`` with its workers, oldest first.

    A stopped watcher, by command or after too many deaths, has no worker. Whether it holds its
    GPUs is in the ledger. ``wakeable`` are the sleeping workers whose GPUs are free.
    """
    facts, views = service.facts, view.of(service)
    workers = tuple(worker for watcher in views for worker in _workers(watcher, wakeable))
    models = (registered.model for watcher in views for registered in watcher.serving)
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
        stopped="" if workers else next(filter(None, map(_stopped, views)), ""),
    )


def _stopped(view: WorkerView) -> str:
    """Return the name of a worker that a command has stopped, "" for another.

    Not of one that was given up, nor of one whose start was interrupted, which a repair removes.
    """
    by_command = view.watcher.status == STOPPED_BY_COMMAND and not view.kept
    return view.entry.name if by_command and view.entry.reserved_by is None else ""


def newest(service: ServiceEntries, view: DeploymentView, spared: Collection[str]) -> Entry | None:
    """Return the entry of the worker to remove: that with the highest number, the template last.

    One that sleeps comes after all others. Never one that drains already, nor one that is being
    added or ``spared``.
    """
    by_number = view.of(service)[::-1]
    for worker in sorted(by_number, key=lambda candidate: candidate.entry.asleep):
        skipped = worker.entry.name in spared or worker.reserved
        if not skipped and worker.is_expected and worker.settled != WorkerState.DRAINING:
            return worker.entry
    return None


def _workers(view: WorkerView, wakeable: Collection[str]) -> Iterator[ScaledWorker]:
    """Yield one worker for each process that serves; without any, one for all that will.

    While a restart or a reload replaces a process, the watcher has two, and is one worker.
    """
    state = _STATES.get(view.settled)
    if state is None or not view.is_expected:
        return
    ids = [registered.worker_id for registered in view.serving or view.registered[:1]]
    for worker_id in ids or [None]:
        yield ScaledWorker(
            name=view.entry.name,
            state=state,
            worker_id=worker_id,
            gpus=view.entry.gpus,
            wakeable=state == ASLEEP and view.entry.name in wakeable,
        )


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
        view = self._access.view(await self._access.statuses())
        ledger = ledger_of(view.document)
        asleep = (name for name, entry in view.document.components.items() if entry.asleep)
        wakeable = {name for name in asleep if ledger.can_hold(name)}
        return {
            name: service_now(service, view, self._access.limits, wakeable)
            for name, service in view.services.items()
        }

    async def reconcile(self) -> list[str]:
        """Repair what an earlier crash left; return what was repaired, one sentence each.

        Call it before the first action. Raises ActionFailed, StatefileError.
        """
        # First: a step below that fails sets it again.
        self._access.needs_repair = False
        repairs = await reconcile(self._access)
        repairs += await self.finish_interrupted()
        if self._engines is not None:
            repairs += await check_sleepers(self._access, self._engines)
        return repairs

    async def finish_interrupted(self) -> list[str]:
        """Finish or undo each sleep and wake whose process has exited; log and return them.

        Until then the worker keeps its GPUs. Raises StatefileError.
        """
        if self._engines is None:
            return []
        finished = await finish_interrupted(self._access, self._engines)
        for sentence in finished:
            log.info("%s", sentence)
        return finished

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
            asleep = await self._put_to_sleep(service, statuses)
            return asleep or await self._remove(service, statuses)
        except StatefileError as error:
            raise ActionFailed(f"{service}: {error.message}") from error

    async def _remove(self, name: str, statuses: Mapping[str, str]) -> str:
        view = self._access.view(statuses)
        service = self._access.service(view.document, name)
        entry = newest(service, view, self._access.active)
        if entry is None:
            raise ActionFailed(f"{name}: no worker to remove")
        return await remove_worker(self._access, service, entry)

    async def _repair(self) -> None:
        """Finish what an earlier action could not finish or undo."""
        if self._access.needs_repair and not self._access.active:
            await self.reconcile()

    async def _put_to_sleep(self, name: str, statuses: Mapping[str, str]) -> str:
        """Put the newest worker to sleep; return its watcher, "" if it is to be removed."""
        view = self._access.view(statuses)
        service = self._access.service(view.document, name)
        entry = newest(service, view, self._access.active)
        if self._engines is None or entry is None or entry.asleep or not self._may_sleep(service):
            return ""
        self._falling[name] += 1
        try:
            before = psutil.virtual_memory().available
            if not await put_to_sleep(self._access, self._engines, entry):
                return ""
            # Other programs may have freed memory since: count at least what the worker holds.
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
        worker_bytes = self._asleep_bytes.get(service.name) or memory_of(asleep[0].pids)
        ram = psutil.virtual_memory()
        return (
            worker_bytes > 0
            and ram.available - (falling + 1) * worker_bytes >= _SPARE_RAM * ram.total
        )


def memory_of(pids: Iterable[int]) -> int:
    """Return the bytes of RAM that the processes ``pids`` and their children hold."""
    total_bytes = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                total_bytes += member.memory_info().rss
    return total_bytes


@contextlib.asynccontextmanager
async def open_connector(
    runtime: RuntimeSettings, settings: PlannerSettings, engines: RemoteEngines | None = None
) -> AsyncIterator[LocalConnector]:
    """Open a connector to the deployment of ``runtime``'s namespace for the block."""
    async with open_access(runtime, ActionLimits.of_planner(settings)) as access:
        yield LocalConnector(access, engines, settings.max_sleeping_workers)
