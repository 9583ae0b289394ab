"""A lease of this process in etcd: kept alive, granted again after an outage, lost when revoked.

A lease that etcd does not have was revoked, or it expired during an outage. It was revoked if there
is a tombstone (``v1/revoked/<hex>``, written by :meth:`EtcdDiscovery.revoke`), or if it cannot have
expired: it was kept alive less than its ttl ago, and the connection has not failed since. Otherwise
it expired, and is granted again with all its keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from dynamo.errors import ConfigError, WorkerUnavailable
from dynamo.observability.logs import counted
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.etcd.link import (
    Compacted,
    EtcdLink,
    NoLease,
    Unreachable,
    boot_time_s,
)
from dynamo.runtime.process.tasks import Tasks, raise_if_cancelled

RETRY_S = 0.25
REVOKE_TIMEOUT_S = 2.0
_CALLS_PER_TTL = 3
log = logging.getLogger(__name__)


def marker_key(lease_id: int) -> str:
    """Return the key that exists exactly as long as the lease; its owner watches it."""
    return f"v1/leases/{lease_id:x}"


def tombstone_key(lease_id: int) -> str:
    """Return the key that records that the lease was revoked on purpose."""
    return f"v1/revoked/{lease_id:x}"


class EtcdLease:
    """Keeps the lease ``record.lease_id``, which was just granted, and the keys put under it.

    ``keys`` is the wanted state in etcd; ``_unwritten`` names the keys that still differ from it.
    """

    def __init__(
        self, link: EtcdLink, record: LeaseRecord, on_end: Callable[[EtcdLease], None]
    ) -> None:
        self.id = record.lease_id
        self.ttl_s = record.ttl_s
        self.lost = asyncio.Event()
        self.keys: dict[str, bytes] = {marker_key(self.id): msgspec.json.encode(record)}
        self.grants = 1
        self._unwritten: set[str] = set(self.keys)
        self._link = link
        self._on_end = on_end
        self._renewed_at_s = boot_time_s()
        self._renewed_breaks = link.breaks
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._unavailable = False
        self._tasks = Tasks(f"lease {self.id:x}")
        self._tasks.spawn(self._keep(), name="keep alive")
        self._tasks.spawn(self._watch_marker(), name="watch marker")
        self._wake.set()

    async def put(self, key: str, value: bytes) -> None:
        """Write ``key``; wait while etcd is unavailable. WorkerUnavailable: the lease is lost."""
        # Before the write: a lease that is granted again is written with this key.
        self.keys[key] = value
        await self._change(key)
        while key in self._unwritten:
            if self.lost.is_set():
                raise WorkerUnavailable(f"lease {self.id:x} has ended")
            self._progress.clear()
            await self._progress.wait()

    async def delete(self, key: str) -> None:
        """Remove ``key``; after an outage if etcd is unavailable."""
        self.keys.pop(key, None)
        await self._change(key)

    async def revoke(self) -> None:
        """End the lease; if etcd is unavailable, it expires after its ttl."""
        if self.lost.is_set():
            return
        await self._tasks.close()  # first: a renewal would grant the revoked lease again
        try:
            async with asyncio.timeout(REVOKE_TIMEOUT_S):
                await self._link.revoke(self.id)
        except (Unreachable, TimeoutError) as error:
            log.warning(
                "cannot revoke lease %x in etcd, it expires in %g s: %s",
                self.id,
                self.ttl_s,
                error,
            )
        except NoLease:
            log.debug("lease %x had ended already", self.id)
        finally:
            self._end()

    async def _change(self, key: str) -> None:
        self._unwritten.add(key)
        try:
            await self._write()
        except (Unreachable, NoLease):
            self._wake.set()

    async def _write(self) -> None:
        # One write at a time: of two, the older one could arrive at etcd last.
        async with self._writing:
            while self._unwritten and not self.lost.is_set():
                # Values may change during the call: only those that were written are done.
                values = {key: self.keys.get(key) for key in self._unwritten}
                await self._link.write(values, self.id)
                for key, value in values.items():
                    if self.keys.get(key) == value:
                        self._unwritten.discard(key)
                self._progress.set()

    async def _keep(self) -> None:
        # A call may take this long until it fails: the next one still reaches etcd in time.
        pause_s = self.ttl_s / _CALLS_PER_TTL
        while not self.lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._unavailable else pause_s):
                    await self._wake.wait()
            # Before the call: a change during it starts another round.
            self._wake.clear()
            try:
                await self._renew(pause_s)
            except (Unreachable, ConfigError) as error:
                raise_if_cancelled()
                self._set_unavailable(True, error)
            else:
                self._set_unavailable(False)

    async def _renew(self, timeout_s: float) -> None:
        sent_at_s, breaks = boot_time_s(), self._link.breaks
        # Both taken before the call: the lease lasts a ttl from some moment after it, and a break
        # during the call must count as one since the renewal.
        try:
            await self._link.keep_alive(self.id, max(1.0, timeout_s))
            self._renewed_at_s, self._renewed_breaks = sent_at_s, breaks
            await self._write()
        except NoLease:
            if await self._was_revoked():
                self._end()
            else:
                await self._grant_again()

    async def _was_revoked(self) -> bool:
        since_s = boot_time_s() - self._renewed_at_s
        # Before the query: a break during it says nothing about the time before.
        unbroken = self._link.breaks == self._renewed_breaks
        if await self._link.exists(tombstone_key(self.id)):
            return True
        return unbroken and since_s < self.ttl_s

    async def _grant_again(self) -> None:
        sent_at_s, breaks = boot_time_s(), self._link.breaks
        await self._link.grant(self.id, self.ttl_s)
        self.grants += 1
        self._renewed_at_s, self._renewed_breaks = sent_at_s, breaks
        # Keys went with the expired lease.
        self._unwritten.update(self.keys)
        with contextlib.suppress(NoLease):
            await self._write()
            log.warning(
                "lease %x expired while etcd was unavailable: registered again with %s",
                self.id,
                counted(len(self.keys) - 1, "key"),
            )

    async def _watch_marker(self) -> None:
        """Renew at once when the marker is removed, or after a possible outage."""
        key = marker_key(self.id)
        while not self.lost.is_set():
            try:
                async for step in self._link.watch(key, prefix=False):
                    if not step.changes or any(change.value is None for change in step.changes):
                        self._wake.set()
            except (Unreachable, Compacted, ConfigError) as error:
                raise_if_cancelled()
                log.debug("lease %x: %s", self.id, error)
                self._wake.set()
            await asyncio.sleep(RETRY_S)

    def _set_unavailable(self, unavailable: bool, error: Exception | None = None) -> None:
        if unavailable and not self._unavailable:
            log.warning("etcd unavailable, lease %x may expire: %s", self.id, error)
        elif self._unavailable and not unavailable:
            log.info("etcd available again, lease %x still valid", self.id)
        self._unavailable = unavailable

    def _end(self) -> None:
        if not self.lost.is_set():
            self.lost.set()
            self._progress.set()
            self._on_end(self)
