"""The way of a model to its first worker: one is woken, started again, or added; and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from dynamo.operations.steps.access import LocalAccess, wait_until
from dynamo.operations.steps.circus import STOPPED, CircusBusy, retried
from dynamo.operations.steps.limits import ActionFailed, reserve
from dynamo.operations.steps.sleeping import RemoteEngines, can_sleep, finish_wake
from dynamo.operations.steps.starting import WorkerStart
from dynamo.serve.gpus.room import group_rivals, sleeper_to_wake
from dynamo.serve.state.document import LOAD, WAKE, Document, Entry
from dynamo.serve.state.entries import ServiceEntries, read_services, release
from dynamo.serve.state.process_table import is_reserved

Worker = tuple[ServiceEntries, Entry]


@dataclass(frozen=True, kw_only=True)
class ServiceLoad:
    """What makes a service serve: ``text`` says it, ``work`` does it and ends when it serves.

    The worker ``name`` is reserved until then.
    """

    name: str
    text: str
    work: Callable[[], Awaitable[object]]


class ModelLoad:
    """Prepares a worker for each pool (prefill, decode) of a model that has none. Use it once."""

    def __init__(
        self, access: LocalAccess, engines: RemoteEngines, services: Collection[ServiceEntries]
    ) -> None:
        self._access = access
        self._engines = engines
        self._services = services
        self._starts = {one.name: WorkerStart(access, one.name) for one in services}
        self._statuses: Mapping[str, str] = {}

    async def prepare(self) -> list[ServiceLoad]:
        """Reserve all workers in one change of the statefile, so that no other load does too.

        Raises ActionFailed if all pools have one, or a worker gets no GPU: then none is reserved.
        """
        access = self._access
        self._statuses = await access.statuses()
        for service in self._cold(access.document(), []):
            if not self._entry_to_use(access.document(), service):
                await self._starts[service.name].find_room()
        loads: list[ServiceLoad] = []
        # Blocks, so that a cancellation cannot arrive between the write and our note of it.
        access.statefile.update(lambda document: loads.extend(self._reserve(document)))
        access.active.update(one.name for one in loads)
        return loads

    def _reserve(self, document: Document) -> list[ServiceLoad]:
        serving: list[str] = []
        cold = self._cold(document, serving)
        if not cold:
            raise ActionFailed(
                f"it is served or being loaded already, by {', '.join(serving)}; "
                "workers of the graph that were drained start with: dynamo reload"
            )
        check_turn(document, cold, self._access.active)
        return [self._load(document, service) for service in cold]

    def _cold(self, document: Document, serving: list[str]) -> list[ServiceEntries]:
        """Return a service of each pool without a worker; append the workers of the others."""
        now = read_services(document)
        services = [now.get(one.name, one) for one in self._services]
        cold = []
        for is_prefill in (True, False):
            pool = [one for one in services if one.is_prefill == is_prefill]
            awake = [entry.name for one in pool for entry in one.entries if self._is_awake(entry)]
            serving += awake
            if pool and not awake:
                cold.append(pool[0])
        return cold

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


def check_turn(
    document: Document, services: Collection[ServiceEntries], active: Collection[str]
) -> None:
    """Raise ActionFailed if a model of a group of ``services`` is awake."""
    if rivals := group_rivals(document, services, active):
        raise ActionFailed(
            f"models of a group take turns, and {', '.join(rivals)} is awake: first put its model "
            "to sleep with dynamo unload; or send a request, and the planner does both"
        )


async def wait_until_served(access: LocalAccess, names: Collection[str]) -> None:
    """Wait until the workers ``names`` have registered their models.

    Raises ActionFailed for one that is stopped, given up or too slow.
    """

    async def served() -> bool:
        try:
            statuses = await access.circus.statuses()
        except CircusBusy:
            return False
        pending = [one for one in _entries(access, names) if access.model(one) is None]
        for entry in pending:
            if statuses.get(entry.name, STOPPED) == STOPPED:
                line = access.last_line(entry.name)
                raise ActionFailed(
                    f"{entry.name} was stopped or given up before it served"
                    + (f"; last output: {line}" if line else "")
                )
        return not pending

    limit_s = access.limits.start_timeout_s
    deadline_s = asyncio.get_running_loop().time() + limit_s
    if not await wait_until(served, access.registrations, deadline_s):
        raise ActionFailed(f"{', '.join(names)} did not serve within {limit_s:g} s")


async def sleepers_and_others(
    engines: RemoteEngines, services: Iterable[ServiceEntries], watchers: Collection[str]
) -> tuple[list[Worker], list[Worker]]:
    """Return the workers of ``services`` that are to sleep, one of each, and those to remove."""
    sleepers: list[Worker] = []
    drained: list[Worker] = []
    for service in services:
        sleeps = any(entry.asleep for entry in service.entries)
        for entry in service.entries:
            if entry.asleep or entry.draining or not (entry.pids or entry.name in watchers):
                continue
            if not sleeps and await can_sleep(engines, entry):
                sleepers.append((service, entry))
                sleeps = True
            else:
                drained.append((service, entry))
    return sleepers, drained


async def _start_again(access: LocalAccess, name: str) -> None:
    try:
        await retried(lambda: access.circus.start(name))
        await wait_until_served(access, [name])
    finally:
        access.active.discard(name)
        access.statefile.update(lambda document: release(document, name))


def _entries(access: LocalAccess, names: Iterable[str]) -> list[Entry]:
    found = {entry.name: entry for entry in access.entries()}
    missing = [name for name in names if name not in found]
    if missing:
        raise ActionFailed(f"{', '.join(missing)}: removed by another command")
    return [found[name] for name in names]
