"""A live copy of the keys in etcd: listed once, then watched from that revision on.

During an outage the copy does not change. Workers lose their leases in the same outage and register
again shortly after it, so their keys disappear for a moment. For :data:`SETTLE_S` after an outage
removals are therefore delayed, so that routing does not flicker.
"""

from __future__ import annotations

import asyncio
import logging

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.runtime.discovery.etcd_link import Change, Compacted, EtcdLink, Unreachable
from dynamo.runtime.discovery.key_cache import KeyCache
from dynamo.runtime.discovery.layout import BUCKETS, check_value, split_key

__all__ = ["ROOT", "EtcdWatcher", "is_record", "is_usable"]

ROOT = "v1/"
SETTLE_S = 3.0
RETRY_S = 0.25
_PREFIXES = tuple(f"{ROOT}{bucket}/" for bucket in BUCKETS)
log = logging.getLogger(__name__)


def is_record(key: str) -> bool:
    """Return whether the key is a record of discovery."""
    return key.startswith(_PREFIXES)


def is_usable(key: str, value: bytes) -> bool:
    """Return whether it is a well-formed record of bounded size."""
    return is_record(key) and not _problem(key, value)


class EtcdWatcher:
    """Keeps ``cache`` equal to the store; run :meth:`follow` as a task."""

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
                if not self._revision:
                    await self._list()
                async for step in self._link.watch(ROOT, True, self._revision):
                    self._check_store(step.store)
                    self._set_available()
                    for change in step.changes:
                        self._apply(change)
                    self._revision = step.revision or self._revision
            except Compacted as error:  # revisions are missing: only a new listing is complete
                log.info("etcd cannot resume the watch (%s): listing again", error)
                self._revision = 0
            except (Unreachable, ConfigError) as error:
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
        found = {key: value for key, value in listing.keys.items() if is_record(key)}
        for key in self._cache.list(""):
            if key not in found:
                self._apply(Change(key, None))
        for key, value in found.items():
            self._apply(Change(key, value))
        self._revision = listing.revision
        self.relisted += 1
        self._cache.open()

    def _check_store(self, store: tuple[int, int]) -> None:
        before, self._store_id = self._store_id, store
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
