"""Write the output of a loop turn at its end, in one callback.

Tokens of one stream that arrived in one read become one event, and everything written to a
connection leaves in one system call, which costs more than all the rest of a token.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)
_FAILED = "writing output failed"


class Flushable(Protocol):
    """An object with unwritten output."""

    def flush(self) -> None:
        """Write the output now. Never raises."""


class WriteBatch:
    """Collects the producers (:meth:`defer`) and the connections (:meth:`flush_later`) to flush.

    Producers are flushed first, because they write to connections. Nothing may be added a second
    time before it was flushed.
    """

    __slots__ = ("_connections", "_producers", "_scheduled")

    def __init__(self) -> None:
        self._producers: list[Flushable] = []
        self._connections: list[Flushable] = []
        self._scheduled = False

    def defer(self, producer: Flushable) -> None:
        """Flush ``producer`` at the end of this turn."""
        self._producers.append(producer)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def flush_later(self, connection: Flushable) -> None:
        """Flush ``connection`` at the end of this turn, after the producers."""
        self._connections.append(connection)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Flush each; an exception of one must not keep back the output of the others."""
        producers, self._producers = self._producers, []
        for producer in producers:
            try:
                producer.flush()
            except Exception:
                log.exception(_FAILED)
        # Reset between the loops: a write of a producer needs no other callback, a write of the
        # next turn does.
        self._scheduled = False
        connections, self._connections = self._connections, []
        for connection in connections:
            try:
                connection.flush()
            except Exception:
                log.exception(_FAILED)
