"""The live keys as one process sees them, and the watches on them."""

from __future__ import annotations

import asyncio
import logging

from dynamo.runtime.discovery.base import KeyEvent, OnKeyEvent

__all__ = ["KeyCache", "PrefixWatch"]

log = logging.getLogger(__name__)


class PrefixWatch:
    """One ``on_event`` for one prefix. Receives nothing before it is primed."""

    __slots__ = ("_cache", "_on_event", "_ready", "prefix", "primed")

    def __init__(self, cache: KeyCache, prefix: str, on_event: OnKeyEvent) -> None:
        self.prefix = prefix
        self.primed = False
        self._cache = cache
        self._on_event: OnKeyEvent | None = on_event
        self._ready = asyncio.Event()

    def close(self) -> None:
        """Stop watching; no callback runs after this."""
        self._on_event = None
        self._cache.forget(self)

    async def ready(self) -> None:
        """Wait until the keys that existed at the start have been delivered."""
        await self._ready.wait()

    def prime(self, existing: dict[str, bytes]) -> None:
        """Deliver the existing keys, then every change."""
        self.primed = True
        for key, value in existing.items():
            self.deliver(KeyEvent("put", key, value))
        self._ready.set()

    def deliver(self, event: KeyEvent) -> None:
        """Pass on one event; a failing callback is logged and stays subscribed."""
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("watch of %s failed on %s %s", self.prefix, event.kind, event.key)


class KeyCache:
    """Stores each live key once, so that every change is delivered exactly once.

    ``set`` is O(watches). With ``opened=False`` no watch is primed before :meth:`open`.
    """

    def __init__(self, opened: bool = True) -> None:
        self._opened = opened
        self._live: dict[str, bytes] = {}
        self._watches: list[PrefixWatch] = []

    def set(self, key: str, value: bytes | None) -> None:
        """Set ``key`` to ``value`` (None: remove it) and notify its watches."""
        if self._live.get(key) == value:
            return
        if value is None:
            del self._live[key]
            event = KeyEvent("delete", key, None)
        else:
            self._live[key] = value
            event = KeyEvent("put", key, value)
        for watch in tuple(self._watches):
            if watch.primed and key.startswith(watch.prefix):
                watch.deliver(event)

    def list(self, prefix: str) -> dict[str, bytes]:
        """Return the live keys under ``prefix``."""
        return {key: value for key, value in self._live.items() if key.startswith(prefix)}

    def watch(self, prefix: str, on_event: OnKeyEvent) -> PrefixWatch:
        """Create a watch; it is primed on the next turn of the loop."""
        watch = PrefixWatch(self, prefix, on_event)
        self._watches.append(watch)
        asyncio.get_running_loop().call_soon(self._prime, watch)
        return watch

    def open(self) -> None:
        """Prime the watches that waited for the first listing. Idempotent."""
        self._opened = True
        for watch in tuple(self._watches):
            self._prime(watch)

    def forget(self, watch: PrefixWatch) -> None:
        """Remove ``watch``."""
        if watch in self._watches:
            self._watches.remove(watch)

    def close(self) -> None:
        """Close every watch."""
        for watch in tuple(self._watches):
            watch.close()

    def _prime(self, watch: PrefixWatch) -> None:
        if self._opened and not watch.primed and watch in self._watches:
            watch.prime(self.list(watch.prefix))
