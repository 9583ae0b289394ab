"""The connector to a running ``dynamo serve``: statefile, circus watchers, leases. Seed planner.

GPUs are reserved before a watcher exists and freed after its processes have exited, so that
:func:`dynamo.planner.local.reconcile.reconcile` can repair what a crash leaves at any step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.planner.connector import ActionFailed, ScaledService
from dynamo.planner.local.access import LocalAccess, is_reserved
from dynamo.planner.local.circus import CircusEndpoint
from dynamo.planner.local.entries import read_services
from dynamo.planner.local.ports import Sleepers
from dynamo.planner.local.reconcile import reconcile
from dynamo.planner.local.registered import FileRegistrations
from dynamo.planner.local.removal import remove_worker
from dynamo.planner.local.starting import WorkerStart
from dynamo.planner.local.view import Sighting, service_now
from dynamo.runtime.paths import run_dir, state_dir, store_dir
from dynamo.serve.statefile import Document, Statefile

__all__ = ["LocalConnector", "open_access", "open_connector"]

log = logging.getLogger(__name__)


class LocalConnector:
    """A :class:`Connector`. Several actions may run at once; the statefile's lock keeps them apart.

    ``sleepers`` knows the workers that sleep: one of them is woken before a new one starts.
    """

    def __init__(self, access: LocalAccess, sleepers: Sleepers | None = None) -> None:
        self._access = access
        self._sleepers = sleepers

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
        return await reconcile(self._access)

    async def add(self, service: str) -> str:
        """See :class:`Connector`."""
        try:
            await self._repair()
            asleep = await self._asleep(service)
            if asleep is not None and self._sleepers is not None:
                await self._sleepers.wake(asleep)
                return asleep
            return await WorkerStart(self._access, service).run()
        except StatefileError as error:
            raise ActionFailed(f"{service}: {error.message}") from error

    async def remove(self, service: str) -> str:
        """See :class:`Connector`."""
        try:
            await self._repair()
            statuses = await self._access.statuses()
            sighting = self._sighting(self._access.document(), statuses)
            return await remove_worker(self._access, service, sighting)
        except StatefileError as error:
            raise ActionFailed(f"{service}: {error.message}") from error

    async def _repair(self) -> None:
        """Finish what an earlier action could not finish or undo."""
        if self._access.needs_repair and not self._access.active:
            await self.reconcile()

    async def _asleep(self, service: str) -> str | None:
        """Return the oldest sleeping worker of ``service``, if any."""
        names = set(self._sleepers.asleep()) if self._sleepers is not None else set()
        if not names:
            return None
        entries = self._access.service(self._access.document(), service).entries
        return next((entry.name for entry in entries if entry.name in names), None)

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
            asleep=() if self._sleepers is None else self._sleepers.asleep(),
        )


@contextlib.asynccontextmanager
async def open_access(
    runtime: RuntimeSettings, settings: PlannerSettings
) -> AsyncIterator[LocalAccess]:
    """Open the deployment of ``runtime``'s namespace for the block.

    Raises StatefileError without one, ConfigError if its workers do not register in files.
    """
    if runtime.discovery_backend != "file":
        raise ConfigError(
            f"--discovery-backend {runtime.discovery_backend}: the local planner needs file "
            "discovery, where a lease names its process"
        )
    statefile = Statefile(state_dir(runtime), runtime.namespace)
    document = statefile.read()
    if document is None:
        raise StatefileError(
            f"no statefile {statefile.path}: the planner scales a deployment that dynamo serve "
            "started; start it, or name another one with --namespace"
        )
    circus = CircusEndpoint(document["circus_endpoint"])
    registrations = FileRegistrations(store_dir(runtime), statefile.path)
    try:
        yield LocalAccess(
            settings=settings,
            statefile=statefile,
            circus=circus,
            registrations=registrations,
            logs=run_dir(runtime) / "logs",
        )
    finally:
        registrations.close()
        circus.close()


@contextlib.asynccontextmanager
async def open_connector(
    runtime: RuntimeSettings, settings: PlannerSettings, sleepers: Sleepers | None = None
) -> AsyncIterator[LocalConnector]:
    """Open a connector to the deployment of ``runtime``'s namespace for the block."""
    async with open_access(runtime, settings) as access:
        yield LocalConnector(access, sleepers)
