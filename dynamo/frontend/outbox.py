"""Writes what one loop turn brought, once for each request.

Several tokens of one stream that arrived in one read become one event; the events of one turn
leave in one system call for each socket. One callback a turn, however many requests have news.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

__all__ = ["Outbox", "Pending"]


class Pending(Protocol):
    """Has something to write."""

    def flush(self) -> None:
        """Write it now. Never raises."""


class Outbox:
    """Collects who has news, and flushes them at the end of the loop turn, in order."""

    __slots__ = ("_loop", "_pending", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[Pending] = []
        self._scheduled = False

    def add(self, one: Pending) -> None:
        """Flush ``one`` this turn; it must not be added again before."""
        self._pending.append(one)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        pending, self._pending = self._pending, []
        for one in pending:
            one.flush()
