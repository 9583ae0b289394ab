"""Repairs what a crash of planner, worker or arbiter left between statefile and circus."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping

from dynamo.operations.steps.access import LocalAccess, complete_all
from dynamo.operations.steps.circus import (
    STOPPED,
    CircusError,
    NoSuchWatcher,
    WatcherOptions,
    retried,
)
from dynamo.operations.steps.limits import ActionFailed
from dynamo.operations.steps.removal import finish_removal, mark_draining, wait_until_gone
from dynamo.serve.state.document import LOAD, RUNNING, SLEEP, WAKE, Document, Entry
from dynamo.serve.state.entries import (
    ServiceEntries,
    ServiceWorker,
    delete_entry,
    read_services,
    release,
)
from dynamo.serve.state.process_table import is_reserved, reclaim

_ARBITER_DELAY_S = 0.5
log = logging.getLogger(__name__)


async def repair_loads(access: LocalAccess) -> None:
    """Repair what loads have left whose process was killed; processes drain by themselves.

    Costs one look at the statefile if there are none. Raises as :func:`reconcile`.
    """
    if any(_is_interrupted_load(access, entry) for entry in access.entries()):
        await reconcile(access, finish_removals=False)


def _is_interrupted_load(access: LocalAccess, entry: Entry) -> bool:
    begun = None if entry.draining and entry.pids else entry.reserved_by
    loads = begun is not None and begun.operation not in (SLEEP, WAKE)
    return loads and not _is_changed(access, entry)


async def reconcile(
    access: LocalAccess, dry_run: bool = False, finish_removals: bool = True
) -> list[str]:
    """Make statefile and circus agree; return what was repaired, one sentence each.

    Safe while the deployment and a planner run: watchers that a living process adds or removes now
    are left alone. ``dry_run`` only says what would be repaired. ``finish_removals`` waits for
    workers that drain. Raises ActionFailed, which leaves the rest as it is, and StatefileError.
    """
    statuses = await access.statuses()
    # The arbiter writes an entry just after circus lists its watcher: read before the write, the
    # document would lack it.
    await asyncio.sleep(_ARBITER_DELAY_S)
    document = access.document()
    services = read_services(document)
    repairs: list[str] = []
    removals: list[ServiceWorker] = []
    try:
        for service in services.values():
            for entry in service.entries:
                if _is_changed(access, entry):
                    continue
                status = statuses.get(entry.name)
                if entry.draining and (status is not None or entry.pids):
                    removals.append(ServiceWorker(service, entry))
                elif status is None:
                    repairs += await _without_watcher(access, service, entry, dry_run)
                else:
                    repairs += await _with_watcher(access, entry, status, dry_run)
        # The arbiter removes the watcher of a draining process when that exits.
        removals = [w for w in removals if finish_removals or not w.entry.pids]
        repairs += [f"{entry.name}: finished its removal" for _, entry in removals]
        for name in _without_entry(services, statuses):
            repairs += await _add_entry(access, services, name, dry_run)
        repairs += _reclaim(access, services, dry_run)
        if not dry_run:
            await _finish(access, removals)
    except CircusError as error:
        access.needs_repair = True
        raise ActionFailed(f"repaired in part: {error.message}") from error
    for sentence in repairs:
        log.warning("%s%s", "would repair: " if dry_run else "repaired: ", sentence)
    return repairs


def _is_changed(access: LocalAccess, entry: Entry) -> bool:
    """Whether a living process changes the worker now."""
    replacing = entry.replacing is not None  # by the arbiter, which lives
    return replacing or entry.name in access.active or is_reserved(entry, access.active)


def _reclaim(
    access: LocalAccess, services: Mapping[str, ServiceEntries], dry_run: bool
) -> list[str]:
    """Delete entries of interrupted starts in services that have left the graph."""
    current = {entry.name for service in services.values() for entry in service.entries}
    names = [name for name in reclaim(access.document()) if name not in current]
    if names and not dry_run:
        access.statefile.update(reclaim)
    return [f"{name}: deleted its entry; its start was interrupted" for name in names]


async def _finish(access: LocalAccess, removals: list[ServiceWorker]) -> None:
    """Finish removals side by side: each may take as long as its worker drains."""
    names = {entry.name for _, entry in removals}
    access.active |= names
    try:
        await complete_all(finish_removal(access, e, service.is_prefill) for service, e in removals)
    except ActionFailed as error:
        raise ActionFailed(f"repaired in part: {error.message}") from None
    finally:
        access.active -= names


async def _without_watcher(
    access: LocalAccess, service: ServiceEntries, entry: Entry, dry_run: bool
) -> list[str]:
    """Free what the entry of a missing watcher holds, unless its processes are still exiting."""
    if entry.pids or (entry.name == service.base and _is_empty(entry)):
        return []
    if entry.name in await access.statuses():
        return []  # a reload has added it since
    if not dry_run:
        access.statefile.update(lambda document: delete_entry(document, entry.name))
    freed = f"; GPU {', '.join(entry.gpus)} is free again" if entry.gpus else ""
    verb = "emptied" if entry.name == service.base else "deleted"
    return [f"{entry.name}: {verb} its entry, which had no watcher{freed}"]


def _is_empty(entry: Entry) -> bool:
    in_use = entry.gpus or entry.draining or entry.reserved_by is not None
    return not in_use and entry.lease is None


async def _with_watcher(access: LocalAccess, entry: Entry, status: str, dry_run: bool) -> list[str]:
    """Keep a worker that a crashed planner had started; remove one that it had only added."""
    if entry.reserved_by is not None and status == STOPPED and not entry.pids:
        if not dry_run and not await _remove_unstarted(access, entry):
            return []
        return [f"{entry.name}: removed its watcher, which was added and never started"]
    repairs: list[str] = []
    operation = (entry.reserved_by and entry.reserved_by.operation) or LOAD
    if operation in (SLEEP, WAKE) and entry.pids:
        return [f"{entry.name}: its {operation} was interrupted"] if dry_run else []  # done later
    if entry.reserved_by is not None:
        repairs.append(f"{entry.name}: kept; the process of its {operation} has exited")
    try:
        options = await retried(lambda: access.circus.options(entry.name))
    except NoSuchWatcher:
        return []  # removed since; the arbiter frees it
    if options.gpus != entry.gpus and not entry.pinned:
        has = ", ".join(options.gpus) or "none"
        repairs.append(f"{entry.name}: corrected its GPUs in the statefile to {has}")
    if repairs and not dry_run:
        access.statefile.update(lambda document: _correct(document, entry, options))
    return repairs


async def _remove_unstarted(access: LocalAccess, entry: Entry) -> bool:
    """Remove a watcher that has no process; False if another process changes it now."""
    access.active.add(entry.name)
    try:
        # Not only released: it would look like a stopped worker, which a load starts again.
        mark_draining(access, [entry.name])
    except ActionFailed:
        return False
    else:
        await access.remove_watcher(entry.name)
        await wait_until_gone(access, entry.name, 0.0)
        return True
    finally:
        access.active.discard(entry.name)


def _correct(document: Document, before: Entry, options: WatcherOptions) -> None:
    """Correct the entry, unless another operation has begun on it since ``before``."""
    entry = document.components.get(before.name)
    if entry is None or entry.replacing is not None or entry.reserved_by != before.reserved_by:
        return
    if entry.reserved_by is not None and entry.asleep:
        entry.state = RUNNING  # it was being woken: its GPUs are its own until it is known
    release(document, entry.name)
    if not entry.pinned:
        entry.assign(options.gpus)


def _without_entry(
    services: Mapping[str, ServiceEntries], statuses: Mapping[str, str]
) -> Iterator[str]:
    """Yield the watchers of scaled services that the statefile does not have."""
    recorded = {entry.name for service in services.values() for entry in service.entries}
    for name in statuses:
        if name not in recorded and _service_of(services, name) is not None:
            yield name


def _service_of(services: Mapping[str, ServiceEntries], name: str) -> ServiceEntries | None:
    for service in services.values():
        if re.fullmatch(re.escape(service.base) + r"_\d+", name):
            return service
    return None


async def _add_entry(
    access: LocalAccess, services: Mapping[str, ServiceEntries], name: str, dry_run: bool
) -> list[str]:
    service = _service_of(services, name)
    try:
        options = await retried(lambda: access.circus.options(name))
    except NoSuchWatcher:
        return []
    if service is None or name in access.document().components:
        return []  # the arbiter has written it since
    if not dry_run:
        entry = service.new_entry(name, options.argv, options.gpus)
        access.statefile.update(lambda document: document.components.setdefault(name, entry))
    return [f"{name}: added the entry of a watcher that had none"]
