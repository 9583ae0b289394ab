"""The connector to a running ``dynamo serve``: statefile, circus watchers, leases.

GPUs are reserved before a watcher exists and freed after its processes have exited, so that
:func:`dynamo.operations.reconcile.reconcile` can repair what a crash leaves at any step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.operations.reconcile import reconcile
from dynamo.operations.steps.access import LocalAccess, open_access
from dynamo.operations.steps.ports import ActionFailed, EngineControls
from dynamo.operations.steps.removal import remove_worker
from dynamo.operations.steps.sleeping import (
    check_sleepers,
    finish_interrupted,
    put_to_sleep,
    sleeper_to_wake,
    wake_worker,
)
from dynamo.operations.steps.starting import WorkerStart
from dynamo.planner.connector import ScaledService
from dynamo.planner.local.view import Sighting, newest, service_now
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.reservations import is_reserved
from dynamo.serve.state.statefile import Document

__all__ = ["LocalConnector", "open_connector"]

log = logging.getLogger(__name__)


class LocalConnector:
    """A :class:`Connector`. Several actions may run at once; the statefile's lock keeps them apart.

    With ``engines``, a worker whose engine can sleep does so instead of being removed, one of each
    service; it is woken before a new one starts.
    """

    def __init__(self, access: LocalAccess, engines: EngineControls | None = None) -> None:
        self._access = access
        self._engines = engines

    async def services(self) -> Mapping[str, ScaledService]:
        """See :class:`Connector`."""
        statuses = await self._access.statuses()
        document = self._access.document()
        sighting = self._sighting(document, statuses)
        return {
            name: service_now(service, sighting, self._access.settings)
            for name, service in read_services(document).items()
        }

    async def reconcile(self) -> list[str]:
        """Repair what an earlier crash left; return what was repaired, one sentence each.

        Call it before the first action. Raises ActionFailed, StatefileError.
        """
        self._access.needs_repair = False
        found = await reconcile(self._access)
        if self._engines is not None:
            found += await finish_interrupted(self._access, self._engines)
            found += await check_sleepers(self._access, self._engines)
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
            return await WorkerStart(self._access, service).run()
        except StatefileError as error:
            raise ActionFailed(f"{service}: {error.message}") from error

    async def remove(self, service: str) -> str:
        """See :class:`Connector`."""
        try:
            await self._repair()
            statuses = await self._access.statuses()
            sighting = self._sighting(self._access.document(), statuses)
            asleep = await self._put_to_sleep(service, sighting)
            if asleep:
                return asleep
            return await self._remove(service, sighting)
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
        if self._engines is None or entry is None or any(one.asleep for one in service.entries):
            return ""
        return entry.name if await put_to_sleep(self._access, self._engines, entry) else ""

    def _sighting(self, document: Document, statuses: Mapping[str, str]) -> Sighting:
        active = self._access.active
        return Sighting(
            statuses=statuses,
            registered=self._access.registrations.workers(),
            reserved={
                entry.name
                for service in read_services(document).values()
                for entry in service.entries
                if is_reserved(entry, active)
            },
        )


@contextlib.asynccontextmanager
async def open_connector(
    runtime: RuntimeSettings, settings: PlannerSettings, engines: EngineControls | None = None
) -> AsyncIterator[LocalConnector]:
    """Open a connector to the deployment of ``runtime``'s namespace for the block."""
    async with open_access(runtime, settings) as access:
        yield LocalConnector(access, engines)
