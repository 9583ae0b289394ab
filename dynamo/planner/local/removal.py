"""The removal of one worker: it finishes its requests, exits, and its GPUs are free again."""

from __future__ import annotations

import asyncio
import logging
import signal

from dynamo.errors import StatefileError
from dynamo.planner.connector import ActionFailed
from dynamo.planner.local.access import LocalAccess
from dynamo.planner.local.entries import Entry
from dynamo.planner.local.leaving import has_exited, wait_until_gone
from dynamo.planner.local.patience import retried, wait_until
from dynamo.planner.local.ports import CircusError, NoSuchWatcher
from dynamo.planner.local.view import Sighting, newest
from dynamo.serve.statefile import DRAINING, Document

__all__ = ["WorkerRemoval", "drain"]

_COMMAND_TIMEOUT_S = 30.0
log = logging.getLogger(__name__)


class WorkerRemoval:
    """Removes the newest worker of ``service``. Use it once."""

    def __init__(self, access: LocalAccess, service: str) -> None:
        self._access = access
        self._service = service
        self._is_prefill = False
        self._chosen: Entry | None = None

    async def run(self, sighting: Sighting) -> str:
        """Remove it; return the name of its watcher when it has exited. See :class:`Connector`."""
        access = self._access
        # Blocks, so that a cancellation cannot arrive between the write and our note of it.
        access.statefile.update(lambda document: self._choose(document, sighting))
        entry = self._chosen
        if entry is None:  # pragma: no cover - _choose raises
            raise ActionFailed(f"{self._service}: no worker to remove")
        access.active.add(entry.name)
        try:
            if len(entry.pids) > 1:
                await self._decrease(entry)
            else:
                await self._drain(entry)
        except (ActionFailed, CircusError, StatefileError) as error:
            access.needs_repair = True
            raise ActionFailed(f"{entry.name}: not removed: {error.message}") from error
        finally:
            access.active.discard(entry.name)
        return entry.name

    def _choose(self, document: Document, sighting: Sighting) -> None:
        """Mark the newest worker, so that it is not restarted. Raises ActionFailed without one."""
        service = self._access.service(document, self._service)
        entry = newest(service, sighting, self._access.active)
        if entry is None:
            raise ActionFailed(f"{self._service}: no worker to remove")
        self._is_prefill, self._chosen = service.is_prefill, entry
        if len(entry.pids) <= 1:
            document["components"][entry.name]["state"] = DRAINING

    async def _drain(self, entry: Entry) -> None:
        access, loop = self._access, asyncio.get_running_loop()
        graceful_s = await access.graceful_timeout_s(entry.name)
        await drain(access, entry, self._is_prefill)

        async def exited() -> bool:
            return await has_exited(access, entry.name)

        # The arbiter removes the watcher of a draining worker that has exited.
        if entry.pids and not await wait_until(
            exited, access.registrations, loop.time() + graceful_s
        ):
            log.warning("%s: has not finished within %g s; stopping it", entry.name, graceful_s)
        await access.remove_watcher(entry.name, loop.time() + graceful_s + _COMMAND_TIMEOUT_S)
        await wait_until_gone(access, entry.name, graceful_s)

    async def _decrease(self, entry: Entry) -> None:
        """Stop one of several processes of a watcher, as ``circusctl incr`` made them."""
        access, loop = self._access, asyncio.get_running_loop()
        graceful_s = await access.graceful_timeout_s(entry.name)
        limit_s = loop.time() + graceful_s + _COMMAND_TIMEOUT_S
        await retried(lambda: access.circus.decrease(entry.name), limit_s)

        async def fewer() -> bool:
            found = access.document()["components"].get(entry.name) or {}
            return len(found.get("processes") or ()) < len(entry.pids)

        if not await wait_until(fewer, access.registrations, limit_s):
            raise ActionFailed(f"none of its processes exited within {graceful_s:g} s")


async def drain(access: LocalAccess, entry: Entry, is_prefill: bool) -> None:
    """Let the processes of a worker finish and exit: seed planner.txt. Raises CircusError.

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
    deadline_s = asyncio.get_running_loop().time() + _COMMAND_TIMEOUT_S
    try:
        await retried(lambda: access.circus.signal(entry.name, signal.SIGTERM), deadline_s)
    except NoSuchWatcher:
        log.info("%s: its watcher is removed already", entry.name)
