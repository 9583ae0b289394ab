"""The removal of one worker: it finishes its requests, exits, and its GPUs are free again.

The end of a watcher: its processes exit, and the arbiter frees its GPUs in the statefile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable

from dynamo.errors import DynamoError, StatefileError
from dynamo.operations.steps.access import LocalAccess, wait_until
from dynamo.operations.steps.circus import (
    COMMAND_TIMEOUT_S,
    CircusBusy,
    CircusError,
    NoSuchWatcher,
    retried,
)
from dynamo.operations.steps.limits import ActionFailed, reserve
from dynamo.serve.state.document import DRAIN, DRAINING, Document, Entry
from dynamo.serve.state.entries import ServiceEntries, delete_entry, is_freed, release

log = logging.getLogger(__name__)
_EXIT_MARGIN_S = 15.0
_ARBITER_WRITES_WITHIN_S = 5.0


async def wait_until_gone(access: LocalAccess, name: str, graceful_s: float) -> None:
    """Wait until a removed watcher's processes have exited and its entry is free of GPUs.

    The arbiter kills what has not exited after ``graceful_s``. Raises ActionFailed, StatefileError,
    CircusError.
    """
    loop = asyncio.get_running_loop()

    async def exited() -> bool:
        return await has_exited(access, name)

    async def freed() -> bool:
        return is_freed(access.document(), name)

    limit_s = graceful_s + _EXIT_MARGIN_S
    deadline_s = loop.time() + limit_s
    # The arbiter frees an entry after its last look at the processes. To do it first would let a
    # late write of the arbiter bring the entry of a removed worker back.
    while await wait_until(exited, access.registrations, deadline_s):
        until_s = loop.time() + _ARBITER_WRITES_WITHIN_S
        if await wait_until(freed, access.registrations, until_s):
            return
        if await exited():  # its processes may have been written only now
            log.warning("%s: the arbiter did not free its entry; freeing it", name)
            access.statefile.update(lambda document: delete_entry(document, name))
            return
    raise ActionFailed(f"{name} has not exited within {limit_s:g} s")


async def has_exited(access: LocalAccess, name: str) -> bool:
    """Whether the arbiter has neither the watcher nor a process of it. Raises CircusError."""
    entry = access.document().components.get(name)
    if entry is not None and entry.processes:
        return False
    try:
        return name not in await access.circus.statuses()
    except CircusBusy:
        return False


async def remove_worker(access: LocalAccess, service: ServiceEntries, entry: Entry) -> str:
    """Remove a worker, or one of several processes of its watcher; return it at its exit.

    Raises ActionFailed, StatefileError. After a crash the planner's reconcile finishes a removal.
    """
    access.active.add(entry.name)
    try:
        if len(entry.pids) > 1:
            await _decrease(access, entry)
        else:
            await remove_entry(access, service, entry)
    except CircusError as error:
        raise ActionFailed(f"{entry.name}: not removed: {error.message}") from error
    finally:
        access.active.discard(entry.name)
    return entry.name


async def remove_entry(access: LocalAccess, service: ServiceEntries, entry: Entry) -> None:
    """Remove a worker with all its processes. Raises as :func:`remove_worker`."""
    try:
        mark_draining(access, [entry.name])
        await finish_removal(access, entry, service.is_prefill)
    except (CircusError, StatefileError) as error:
        raise ActionFailed(f"{entry.name}: not removed: {error.message}") from error


async def finish_removal(access: LocalAccess, entry: Entry, is_prefill: bool) -> None:
    """Let a worker that is marked as draining finish and exit, remove its watcher, free its GPUs.

    Raises ActionFailed, CircusError, StatefileError; then it is to be tried again.
    """
    try:
        await _finish(access, entry, is_prefill)
    except BaseException as error:  # also when cancelled: a later action repairs it
        access.needs_repair = True
        if isinstance(error, DynamoError):  # this process goes on: let others finish it, too
            with contextlib.suppress(StatefileError):
                access.statefile.update(lambda document: release(document, entry.name))
        raise


async def _finish(access: LocalAccess, entry: Entry, is_prefill: bool) -> None:
    loop = asyncio.get_running_loop()
    graceful_s = await access.graceful_timeout_s(entry.name)
    await _drain(access, entry, is_prefill)

    async def ended() -> bool:
        current = access.document().components.get(entry.name)
        return current is None or not current.processes

    async def exited() -> bool:
        return await has_exited(access, entry.name)

    if entry.pids:
        if await wait_until(ended, access.registrations, loop.time() + graceful_s):
            # The arbiter removes the watcher at the exit of a draining worker, not of one that had
            # exited before it was marked.
            until_s = loop.time() + _ARBITER_WRITES_WITHIN_S
            await wait_until(exited, access.registrations, until_s)
        else:
            log.warning("%s: has not finished within %g s; stopping it", entry.name, graceful_s)
    await access.remove_watcher(entry.name, loop.time() + graceful_s + COMMAND_TIMEOUT_S)
    await wait_until_gone(access, entry.name, graceful_s)


def mark_draining(access: LocalAccess, names: Iterable[str]) -> None:
    """Mark workers as draining, so that they are not restarted: all of them, or none.

    Raises ActionFailed if one is gone, or another process changes it.
    """

    def change(document: Document) -> None:
        for name in names:
            before = document.components.get(name)
            # A wake-up that failed or was interrupted has taken its GPUs, and maybe their memory.
            sleeps = before is not None and before.asleep and before.reserved_by is None
            reserve(document, name, DRAIN)
            entry = document.components[name]
            entry.holds_gpus = entry.holds_gpus and not sleeps
            entry.state = DRAINING

    access.statefile.update(change)


async def _decrease(access: LocalAccess, entry: Entry) -> None:
    """Stop one of several processes of a watcher, as ``circusctl incr`` made them."""
    loop = asyncio.get_running_loop()
    options = await retried(lambda: access.circus.options(entry.name))
    if options.numprocesses < len(entry.pids):
        raise ActionFailed(f"{entry.name}: its process is being replaced; try again later")
    limit_s = loop.time() + options.graceful_timeout_s + COMMAND_TIMEOUT_S
    await retried(lambda: access.circus.decrease(entry.name), limit_s)

    async def fewer() -> bool:
        current = access.document().components.get(entry.name, Entry())
        return len(current.processes) < len(entry.pids)

    if not await wait_until(fewer, access.registrations, limit_s):
        raise ActionFailed(f"{entry.name}: none of its processes exited in time")


async def _drain(access: LocalAccess, entry: Entry, is_prefill: bool) -> None:
    """Let the processes of a worker finish and exit. Raises CircusError.

    A decode worker's lease is revoked, a prefill worker gets SIGTERM; so does a worker without a
    lease. Both leave discovery at once, finish what they hold, and exit with 0. Idempotent.
    """
    leases = [] if is_prefill else access.leases(entry.pids)
    for lease in leases:
        log.info("%s: revoking its lease %x", entry.name, lease)
        await access.registrations.revoke(lease)
    if leases or not entry.pids:
        return
    log.info("%s: sending SIGTERM", entry.name)
    try:
        await retried(lambda: access.circus.signal(entry.name, signal.SIGTERM))
    except NoSuchWatcher:
        log.info("%s: its watcher is removed already", entry.name)
