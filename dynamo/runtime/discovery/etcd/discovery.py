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

from dynamo.config.runtime import EtcdSettings
from dynamo.errors import ConfigError, InvalidArgument, WorkerUnavailable
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.base import KeyCache, OnKeyEvent, PrefixWatch
from dynamo.runtime.discovery.etcd.lease import RETRY_S, EtcdLease, tombstone_key
from dynamo.runtime.discovery.etcd.link import Change, Compacted, EtcdLink, NoLease, Unreachable
from dynamo.runtime.discovery.layout import BUCKETS, check_value, split_key
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.runtime.process.tasks import Tasks, raise_if_cancelled

TOMBSTONE_TTL_S = 3600.0
log = logging.getLogger(__name__)
ROOT = "v1/"
SETTLE_S = 3.0
_PREFIXES = tuple(f"{ROOT}{bucket}/" for bucket in BUCKETS)


def is_record(key: str) -> bool:
    """Return whether the key is a record of discovery."""
    return key.startswith(_PREFIXES)


def is_usable(key: str, value: bytes) -> bool:
    """Return whether it is a well-formed record of bounded size."""
    return is_record(key) and not _problem(key, value)


class EtcdWatcher:
    """Keeps ``cache`` equal to the store; run :meth:`follow` as a task.

    During an outage the copy does not change. Workers lose their leases in the same outage and
    register again shortly after it, so their keys disappear for a moment. For :data:`SETTLE_S`
    after an outage removals are therefore delayed, so that routing does not flicker.
    """

    def __init__(self, link: EtcdLink, cache: KeyCache) -> None:
        self.relisted = 0
        self._link = link
        self._cache = cache
        self._revision = 0
        self._store_id: tuple[int, int] | None = None
        self._settled_at_s = 0.0
        self._pending_removals: dict[str, asyncio.TimerHandle] = {}
        self._bad: set[str] = set()
        self._unavailable = False
        self._loop = asyncio.get_running_loop()

    async def follow(self) -> None:
        """List, then watch; start again after every failure. Runs until it is cancelled."""
        while True:
            try:
                # 0: nothing was listed yet, or the revisions since then were compacted.
                if not self._revision:
                    await self._list()
                async for step in self._link.watch(ROOT, True, self._revision):
                    self._check_store(step.store)
                    self._set_available()
                    for change in step.changes:
                        self._apply(change)
                    # A step that only confirms the watch has revision 0.
                    self._revision = step.revision or self._revision
            except Compacted as error:  # revisions are missing: only a new listing is complete
                log.info("etcd cannot resume the watch (%s): listing again", error)
                self._revision = 0
            except (Unreachable, ConfigError) as error:
                raise_if_cancelled()
                self._set_unavailable(error)
                await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Cancel delayed removals."""
        for timer in self._pending_removals.values():
            timer.cancel()
        self._pending_removals.clear()

    async def _list(self) -> None:
        listing = await self._link.list(ROOT)
        self._set_available()
        records = {key: value for key, value in listing.keys.items() if is_record(key)}
        for key in self._cache.list(""):
            if key not in records:
                self._apply(Change(key, None))
        for key, value in records.items():
            self._apply(Change(key, value))
        self._revision = listing.revision
        self.relisted += 1
        self._cache.open()

    def _check_store(self, store: tuple[int, int]) -> None:
        before, self._store_id = self._store_id, store
        # A new cluster at the old address: a revision of the old one means nothing there.
        if before is not None and (before[0] != store[0] or before[1] > store[1]):
            raise Compacted("the store is a new one")

    def _apply(self, change: Change) -> None:
        key, value = change
        if not is_record(key):
            return
        if value is not None and (problem := _problem(key, value)):
            if key not in self._bad:
                self._bad.add(key)
                log.warning("skipping %a: %s", key, problem)
            value = None
        else:
            self._bad.discard(key)
        removal = self._pending_removals.pop(key, None)
        # The key has a newer state: a delayed removal would delete it later.
        if removal is not None:
            removal.cancel()
        wait_s = self._settled_at_s - self._loop.time()
        if value is None and wait_s > 0:
            self._pending_removals[key] = self._loop.call_later(wait_s, self._remove, key)
        else:
            self._cache.set(key, value)

    def _remove(self, key: str) -> None:
        self._pending_removals.pop(key, None)
        self._cache.set(key, None)

    def _set_unavailable(self, error: Exception) -> None:
        if not self._unavailable:
            self._unavailable = True
            log.warning("etcd unavailable, keeping the known workers: %s", error)

    def _set_available(self) -> None:
        if self._unavailable:
            self._unavailable = False
            self._settled_at_s = self._loop.time() + SETTLE_S
            log.info("etcd available again")


def _problem(key: str, value: bytes) -> str:
    """Return why the record is skipped, or ""."""
    try:
        split_key(key)
        check_value(key, value)
    except InvalidArgument as error:
        return error.message
    return ""


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
        # Not 0: etcd would choose an id itself. At most 62 bits: its ids are signed.
        chosen = secrets.randbits(62) + 1 if lease_id is None else lease_id
        attempts = 0
        while True:
            attempts += 1
            try:
                granted = await self._link.grant(chosen, ttl_s)
                break
            except Unreachable as error:  # it may have been granted, and only the answer is lost
                raise_if_cancelled()
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
            records = (await self._link.list(prefix)).keys
        except Unreachable as error:
            if self._watcher is None or not self._watcher.relisted:
                raise _unavailable(error) from error
            return self._cache.list(prefix)
        return {key: value for key, value in records.items() if is_usable(key, value)}

    async def revoke(self, lease_id: int) -> None:
        """See :class:`Discovery`. Writes a tombstone, so that an owner without a connection does
        not grant its lease again as one that expired."""
        owned = self._owned.get(lease_id)
        if owned is not None:
            await owned.revoke()
            return
        try:
            # The tombstone first: the owner may see the end of its lease at once, and looks for it.
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
