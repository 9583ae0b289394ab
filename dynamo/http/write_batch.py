"""The end of a loop turn: one callback that writes everything the turn brought.

Several tokens of one stream that arrived in one read become one event, and whatever was written to
a connection leaves in one system call, which costs more than all the rest of a token.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

__all__ = ["Flushable", "WriteBatch"]


class Flushable(Protocol):
    """Has something to write."""

    def flush(self) -> None:
        """Write it now. Never raises."""


class WriteBatch:
    """Who has news this turn (``defer``: flushed first, they fill sockets), and which sockets have
    unwritten bytes (``flush_later``). Neither may be added twice before it was flushed."""

    __slots__ = ("_news", "_scheduled", "_unwritten")

    def __init__(self) -> None:
        self._news: list[Flushable] = []
        self._unwritten: list[Flushable] = []
        self._scheduled = False

    def defer(self, one: Flushable) -> None:
        """Let ``one`` write its news at the end of this turn."""
        self._news.append(one)
        if not self._scheduled:
            self._schedule()

    def flush_later(self, one: Flushable) -> None:
        """Empty the buffer of ``one`` at the end of this turn."""
        self._unwritten.append(one)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        news, self._news = self._news, []
        for one in news:
            one.flush()
        self._scheduled = False
        unwritten, self._unwritten = self._unwritten, []
        for one in unwritten:
            one.flush()
