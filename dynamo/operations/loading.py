"""The way of a model to its first worker: one is woken, started again, or added; and back.

A worker that another command starts or wakes is followed until it serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from dynamo.operations.reconcile import repair_loads
from dynamo.operations.steps.access import LocalAccess, wait_until
from dynamo.operations.steps.circus import STOPPED, CircusBusy, retried
from dynamo.operations.steps.limits import ActionFailed, reserve
from dynamo.operations.steps.sleeping import (
    RemoteEngines,
    can_sleep,
    finish_wake,
    wake_worker,
)
from dynamo.operations.steps.starting import WorkerStart
from dynamo.serve.state.document import LOAD, SLEEP, WAKE, Document, Entry
from dynamo.serve.state.entries import ServiceEntries, ServiceWorker, read_services, release
from dynamo.serve.state.process_table import is_reserved
from dynamo.serve.state.room import group_rivals, sleeper_to_wake

_BEGUN = {WAKE: "is being woken", SLEEP: "falls asleep first"}


@dataclass(frozen=True, kw_only=True)
class ServiceLoad:
    """What makes a service serve: ``text`` says it, ``work`` does it and ends when it serves.

    The worker ``name`` is reserved until then, by another command if it is ``followed``.
    """

    name: str
    text: str
    work: Callable[[], Awaitable[object]]
    followed: bool = False


class ModelLoad:
    """Prepares a worker for each pool (prefill, decode) of a model that has none. Use it once."""

    def __init__(
        self, access: LocalAccess, engines: RemoteEngines, services: Collection[ServiceEntries]
    ) -> None:
        self._access = access
        self._engines = engines
        self._services = services
        self._starts = {service.name: WorkerStart(access, service.name) for service in services}
        self._statuses: Mapping[str, str] = {}

    async def prepare(self) -> list[ServiceLoad]:
        """Reserve all workers in one change of the statefile, so that no other load does too.

        Its services note the time: the idle clock of the model begins again. Raises ActionFailed if
        all pools have a worker, or one gets no GPU: then none is reserved.
        """
        access = self._access
        self._statuses = await access.statuses()
        for service, entry in self._pools(access.document()):
            if entry is None and not self._entry_to_use(access.document(), service):
                # Before the lock is held: it asks the driver, and may wait for sleepers to exit.
                await self._starts[service.name].find_room()
        loads: list[ServiceLoad] = []
        # Blocks, so that a cancellation cannot arrive between the write and our note of it.
        access.statefile.update(lambda document: loads.extend(self._reserve(document)), True)
        if not loads:
            serving = [entry.name for _, entry in self._pools(access.document()) if entry]
            raise ActionFailed(
                f"it is served already, by {', '.join(serving)}; workers of the graph that were "
                "drained start with: dynamo reload; an idle time begins again"
            )
        access.active.update(load.name for load in loads if not load.followed)
        return loads

    def _reserve(self, document: Document) -> list[ServiceLoad]:
        pools = self._pools(document)
        starting = [
            (service, entry)
            for service, entry in pools
            if entry is not None and not serves(self._access, entry)
        ]
        cold = [service for service, entry in pools if entry is None]
        check_turn(document, cold, self._access.active)
        loads = [self._load(document, service) for service in cold]
        loads += [self._follow(service, entry) for service, entry in starting]
        served = [entry.name for _, entry in pools if entry is not None]
        note_load(document, [*served, *(load.name for load in loads)])
        return loads

    def _follow(self, service: ServiceEntries, entry: Entry) -> ServiceLoad:
        begun = entry.reserved_by.operation if entry.reserved_by is not None else ""
        return ServiceLoad(
            name=entry.name,
            text=f"{entry.name} {_BEGUN.get(begun, 'is starting')}, waiting for it",
            work=partial(follow, self._access, self._engines, service, entry.name),
            followed=True,
        )

    def _pools(self, document: Document) -> list[tuple[ServiceEntries, Entry | None]]:
        """Return a worker of each pool that is awake, with its service: one that serves if any.

        For a pool without one, return the service of the worker to come.
        """
        now = read_services(document)
        services = [now.get(before.name, before) for before in self._services]
        workers: list[tuple[ServiceEntries, Entry | None]] = []
        for is_prefill in (True, False):
            pool = [candidate for candidate in services if candidate.is_prefill == is_prefill]
            awake = [
                ServiceWorker(service, entry)
                for service in pool
                for entry in service.entries
                if self._is_awake(entry)
            ]
            # False comes first: a worker that serves.
            awake.sort(key=lambda worker: not serves(self._access, worker.entry))
            if pool:
                workers.append(awake[0] if awake else (pool[0], None))
        return workers

    def _entry_to_use(self, document: Document, service: ServiceEntries) -> Entry | None:
        """Return a worker to start again or to wake, if there is one."""
        for entry in service.entries:
            stopped = self._statuses.get(entry.name) == STOPPED
            if stopped and not entry.asleep and not entry.draining:
                return entry
        return sleeper_to_wake(document, service, self._access.active)

    def _load(self, document: Document, service: ServiceEntries) -> ServiceLoad:
        """Reserve a worker of ``service`` in ``document``. Raises ActionFailed."""
        access, entry = self._access, self._entry_to_use(document, service)
        if entry is None:
            start = self._starts[service.name]
            try:
                start.reserve(document, self._statuses)
            except ActionFailed as error:
                remedy = "free a GPU with: dynamo drain NAME"
                raise ActionFailed(f"{error.message}; {remedy}") from error
            return ServiceLoad(name=start.name, text=f"starting {start.name}", work=start.run)
        reserve(document, entry.name, WAKE if entry.asleep else LOAD)
        if entry.asleep:
            wake = partial(finish_wake, access, self._engines, service, entry)
            return ServiceLoad(name=entry.name, text=f"waking {entry.name}", work=wake)
        work = partial(_start_again, access, entry.name)
        return ServiceLoad(name=entry.name, text=f"starting {entry.name} again", work=work)

    def _is_awake(self, entry: Entry) -> bool:
        """Whether the worker serves, or is about to."""
        if is_reserved(entry, self._access.active):
            return not entry.draining
        if entry.draining or entry.asleep:
            return False
        return bool(entry.pids) or self._statuses.get(entry.name, STOPPED) != STOPPED


def note_load(document: Document, names: Iterable[str]) -> None:
    """Note that an operator loads the model of the workers ``names`` now, awake already or not."""
    for name in names:
        if name in document.components:
            document.components[name].asked_at = time.time()


def check_turn(
    document: Document, services: Collection[ServiceEntries], active: Collection[str]
) -> None:
    """Raise ActionFailed if a model of a group of ``services`` is awake."""
    if rivals := group_rivals(document, services, active):
        raise ActionFailed(
            f"models of a group take turns, and {', '.join(rivals)} is awake: first put its model "
            "to sleep with dynamo unload; or send a request, and the planner does both"
        )


def serves(access: LocalAccess, entry: Entry) -> bool:
    """Whether a worker that is awake has registered its model, and no command is changing it."""
    return access.model(entry) is not None and not is_reserved(entry, access.active)


async def follow(
    access: LocalAccess, engines: RemoteEngines, service: ServiceEntries, name: str
) -> None:
    """Wait until a worker serves that another command, or the arbiter, starts or wakes.

    What a command has begun that has exited since is completed. Raises ActionFailed.
    """

    async def is_free() -> bool:
        (entry,) = _entries(access, [name])
        return not is_reserved(entry, access.active)

    limit_s = access.limits.start_timeout_s
    deadline_s = asyncio.get_running_loop().time() + limit_s
    if not await wait_until(is_free, access.registrations, deadline_s):
        raise ActionFailed(f"{name} did not serve within {limit_s:g} s")
    await repair_loads(access)
    (entry,) = _entries(access, [name])
    if entry.asleep:
        await wake_worker(access, engines, service, entry)
    else:
        await wait_until_served(access, [name])


async def wait_until_served(access: LocalAccess, names: Collection[str]) -> None:
    """Wait until the workers ``names`` have registered their models.

    Raises ActionFailed for one that is removed, stopped, given up or too slow.
    """

    async def served() -> bool:
        try:
            statuses = await access.circus.statuses()
        except CircusBusy:
            return False
        pending = [worker for worker in _entries(access, names) if access.model(worker) is None]
        for entry in pending:
            if statuses.get(entry.name, STOPPED) == STOPPED:
                why = access.why_stopped(entry.name)
                raise ActionFailed(f"{entry.name} does not serve: it was {why}")
        return not pending

    limit_s = access.limits.start_timeout_s
    deadline_s = asyncio.get_running_loop().time() + limit_s
    if not await wait_until(served, access.registrations, deadline_s):
        raise ActionFailed(f"{', '.join(names)} did not serve within {limit_s:g} s")


async def sleepers_and_others(
    engines: RemoteEngines, services: Iterable[ServiceEntries], watchers: Collection[str]
) -> tuple[list[ServiceWorker], list[ServiceWorker]]:
    """Return the workers of ``services`` that are to sleep, one of each, and those to remove."""
    sleepers: list[ServiceWorker] = []
    drained: list[ServiceWorker] = []
    for service in services:
        sleeps = any(entry.asleep for entry in service.entries)
        for entry in service.entries:
            if entry.asleep or entry.draining or not (entry.pids or entry.name in watchers):
                continue
            if not sleeps and await can_sleep(engines, entry):
                sleepers.append(ServiceWorker(service, entry))
                sleeps = True
            else:
                drained.append(ServiceWorker(service, entry))
    return sleepers, drained


async def _start_again(access: LocalAccess, name: str) -> None:
    try:
        await retried(lambda: access.circus.start(name))
        await wait_until_served(access, [name])
    finally:
        access.active.discard(name)
        # After a failure, too: the worker stays as the arbiter left it, for the next command.
        access.statefile.update(lambda document: release(document, name))


def _entries(access: LocalAccess, names: Iterable[str]) -> list[Entry]:
    """Return the entries of workers. Raises ActionFailed for one that is removed."""
    entries = {entry.name: entry for entry in access.entries()}
    for name in names:
        if name not in entries or entries[name].draining:
            owner = entries[name].reserved_by if name in entries else None
            undone = owner is not None and owner.operation == LOAD
            cause = "given up" if undone else "drained" if name in entries else "removed"
            raise ActionFailed(f"{name} was {cause} before it served{access.last_output(name)}")
    return [entries[name] for name in names]
