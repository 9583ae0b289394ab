"""The way of a model to its first worker: one is woken, started again, or added; and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from dynamo.box.actions.access import LocalAccess
from dynamo.box.actions.patience import retried, wait_until
from dynamo.box.actions.ports import STOPPED, ActionFailed, CircusBusy, EngineControls
from dynamo.box.actions.sleeping import check_sleepable, sleeper_to_wake, wake_worker
from dynamo.box.actions.starting import WorkerStart
from dynamo.serve.entries import Entry, ServiceEntries
from dynamo.serve.reservations import is_reserved

__all__ = ["ServiceLoad", "Worker", "load_model", "sleepers_and_others", "wait_until_served"]

_COMMAND_TIMEOUT_S = 30.0
Worker = tuple[ServiceEntries, Entry]


@dataclass(frozen=True, kw_only=True)
class ServiceLoad:
    """What makes a service serve: ``text`` says it, ``work`` does it and ends when it serves."""

    text: str
    work: Callable[[], Awaitable[object]]


async def load_model(
    access: LocalAccess, engines: EngineControls, services: Collection[ServiceEntries]
) -> list[ServiceLoad]:
    """Prepare a worker for each pool (prefill, decode) of a model that has none.

    Raises ActionFailed if all have one, or a worker gets no GPU.
    """
    statuses = await access.statuses()
    found: list[ServiceLoad] = []
    serving: list[str] = []
    for is_prefill in (True, False):
        pool = [one for one in services if one.is_prefill == is_prefill]
        awake = [e.name for one in pool for e in one.entries if _is_awake(access, e, statuses)]
        serving += awake
        if pool and not awake:
            found.append(await _load_service(access, engines, pool[0], statuses))
    if not found:
        raise ActionFailed(
            f"{', '.join(serving)} serves or loads it already; "
            "workers of the graph that were drained start with: dynamo reload"
        )
    return found


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

    limit_s = access.settings.start_timeout_s
    deadline_s = asyncio.get_running_loop().time() + limit_s
    if not await wait_until(served, access.registrations, deadline_s):
        raise ActionFailed(f"{', '.join(names)} did not serve within {limit_s:g} s")


async def sleepers_and_others(
    engines: EngineControls, services: Iterable[ServiceEntries], watchers: Collection[str]
) -> tuple[list[Worker], list[Worker]]:
    """Return the workers of ``services`` that are to sleep, one of each, and those to remove."""
    sleepers: list[Worker] = []
    drained: list[Worker] = []
    for service in services:
        sleeps = any(entry.asleep for entry in service.entries)
        for entry in service.entries:
            if entry.asleep or entry.draining or not (entry.pids or entry.name in watchers):
                continue
            if not sleeps and await _can_sleep(engines, entry):
                sleepers.append((service, entry))
                sleeps = True
            else:
                drained.append((service, entry))
    return sleepers, drained


async def _load_service(
    access: LocalAccess,
    engines: EngineControls,
    service: ServiceEntries,
    statuses: Mapping[str, str],
) -> ServiceLoad:
    for entry in service.entries:
        if statuses.get(entry.name) == STOPPED and not entry.asleep and not entry.draining:
            work = partial(_start_again, access, entry.name)
            return ServiceLoad(text=f"starting {entry.name} again", work=work)
    asleep = sleeper_to_wake(access.document(), service)
    if asleep is not None:
        wake = partial(wake_worker, access, engines, service, asleep)
        return ServiceLoad(text=f"waking {asleep.name}", work=wake)
    start = WorkerStart(access, service.name)
    try:
        await start.prepare()
    except ActionFailed as error:
        raise ActionFailed(f"{error.message}; free a GPU with: dynamo drain NAME") from error
    return ServiceLoad(text=f"starting {start.name}", work=start.run)


async def _start_again(access: LocalAccess, name: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + _COMMAND_TIMEOUT_S
    await retried(lambda: access.circus.start(name), deadline_s)
    await wait_until_served(access, [name])


def _is_awake(access: LocalAccess, entry: Entry, statuses: Mapping[str, str]) -> bool:
    """Whether the worker serves, or is about to."""
    if entry.draining or entry.asleep:
        return is_reserved(entry, access.active) and not entry.draining
    kept = statuses.get(entry.name, STOPPED) != STOPPED
    return kept or is_reserved(entry, access.active)


def _entries(access: LocalAccess, names: Iterable[str]) -> list[Entry]:
    found = {entry.name: entry for entry in access.entries()}
    missing = [name for name in names if name not in found]
    if missing:
        raise ActionFailed(f"{', '.join(missing)}: removed by another command")
    return [found[name] for name in names]


async def _can_sleep(engines: EngineControls, entry: Entry) -> bool:
    try:
        await check_sleepable(engines, entry)
    except ActionFailed:
        return False
    return True
