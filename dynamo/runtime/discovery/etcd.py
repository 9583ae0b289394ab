"""Discovery in etcd, for deployments of more than one box. The extra ``dynamo-appliance[etcd]``.

Keys are those of the other stores, each under an etcd lease of its process. Two more belong to each
lease: ``v1/leases/<hex>`` exists as long as the lease, and ``v1/revoked/<hex>`` records for an hour
that the lease was revoked on purpose.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets

from dynamo.config.etcd import EtcdSettings
from dynamo.errors import ConfigError, InvalidArgument, WorkerUnavailable
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.base import OnKeyEvent
from dynamo.runtime.discovery.etcd_lease import RETRY_S, EtcdLease, tombstone_key
from dynamo.runtime.discovery.etcd_link import EtcdLink, NoLease, Unreachable
from dynamo.runtime.discovery.etcd_watcher import ROOT, EtcdWatcher, is_usable
from dynamo.runtime.discovery.key_cache import KeyCache, PrefixWatch
from dynamo.runtime.discovery.layout import check_value, split_key
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.runtime.process.tasks import Tasks

__all__ = ["EtcdDiscovery"]

TOMBSTONE_TTL_S = 3600.0
log = logging.getLogger(__name__)


class EtcdDiscovery:
    """A :class:`Discovery` over the cluster that ``settings`` names.

    A process that only registers itself holds its lease and one watch on it; it starts to follow
    the store with its first ``watch``.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._link = EtcdLink(settings)
        self._cache = KeyCache(opened=False)
        self._tasks = Tasks("etcd discovery")
        self._watcher: EtcdWatcher | None = None
        self._owned: dict[int, EtcdLease] = {}

    async def start(self) -> None:
        """See :class:`Discovery`; tries for ``DYN_ETCD_START_TIMEOUT`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.start_timeout_s
        warned = False
        while True:
            try:
                await self._link.exists(ROOT)
                return
            except Unreachable as error:
                if loop.time() + RETRY_S >= deadline:
                    raise ConfigError(
                        f"cannot reach etcd at {self._settings.endpoints}: {error}; start it, or "
                        "set ETCD_ENDPOINTS, or choose --discovery-backend file for one box"
                    ) from error
                if not warned:
                    log.warning("waiting for etcd at %s: %s", self._settings.endpoints, error)
                    warned = True
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """See :class:`Discovery`."""
        self._cache.close()
        await self._tasks.close()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        for lease in list(self._owned.values()):
            await lease.revoke()
        await self._link.close()

    async def grant(self, ttl_s: float, lease_id: int | None = None) -> EtcdLease:
        """See :class:`Discovery`; waits while etcd is unavailable."""
        chosen = lease_id or secrets.randbits(62) + 1
        attempts = 0
        while True:
            attempts += 1
            try:
                granted = await self._link.grant(chosen, ttl_s)
                break
            except (
                Unreachable
            ) as error:  # the grant may have succeeded, and only its answer is lost
                log.warning("no lease from etcd yet, retrying: %s", error)
                await asyncio.sleep(RETRY_S)
        # After a retry "exists already" may be our own lost grant; after one attempt it is not.
        if chosen in self._owned or not (granted or attempts > 1):
            raise InvalidArgument(f"lease {chosen:x} exists")
        pid = os.getpid()
        record = LeaseRecord(chosen, pid, start_ticks(pid) or 0, ttl_s, host_id())
        lease = self._owned[chosen] = EtcdLease(self._link, record, self._forget)
        return lease

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        """See :class:`Discovery`. Under a lease of this process the call waits for etcd, and the
        key is written again after an outage. Under another lease an outage is WorkerUnavailable."""
        split_key(key)
        check_value(key, value)
        owned = self._owned.get(lease_id)
        if owned is not None:
            await owned.put(key, value)
            return
        try:
            await self._link.write({key: value}, lease_id)
        except NoLease as error:
            raise WorkerUnavailable(f"lease {lease_id:x} has ended") from error
        except Unreachable as error:
            raise _unavailable(error) from error

    async def delete(self, key: str) -> None:
        """See :class:`Discovery`. A key of this process is removed as soon as etcd is available."""
        for lease in self._owned.values():
            if key in lease.keys:
                await lease.delete(key)
                return
        try:
            await self._link.write({key: None}, 0)
        except Unreachable as error:
            raise _unavailable(error) from error

    async def list(self, prefix: str) -> dict[str, bytes]:
        """See :class:`Discovery`. During an outage returns the last copy of a running watch."""
        try:
            found = (await self._link.list(prefix)).keys
        except Unreachable as error:
            if self._watcher is None or not self._watcher.relisted:
                raise _unavailable(error) from error
            return self._cache.list(prefix)
        return {key: value for key, value in found.items() if is_usable(key, value)}

    async def revoke(self, lease_id: int) -> None:
        """See :class:`Discovery`. Writes a tombstone, so that an owner without a connection does
        not grant its lease again as one that expired."""
        owned = self._owned.get(lease_id)
        if owned is not None:
            await owned.revoke()
            return
        try:
            tombstone_lease = secrets.randbits(62) + 1
            await self._link.grant(tombstone_lease, TOMBSTONE_TTL_S)
            await self._link.write({tombstone_key(lease_id): b""}, tombstone_lease)
            await self._link.revoke(lease_id)
        except NoLease:
            log.debug("lease %x had ended already", lease_id)
        except Unreachable as error:
            raise _unavailable(error) from error

    def watch(self, prefix: str, on_event: OnKeyEvent) -> PrefixWatch:
        """See :class:`Discovery`. Waits for the first listing; survives outages."""
        if self._watcher is None:
            self._watcher = EtcdWatcher(self._link, self._cache)
            self._tasks.spawn(self._watcher.follow(), name="follow the store")
        return self._cache.watch(prefix, on_event)

    def _forget(self, lease: EtcdLease) -> None:
        self._owned.pop(lease.id, None)


def _unavailable(error: Unreachable) -> WorkerUnavailable:
    return WorkerUnavailable(f"etcd is unavailable: {error}")
