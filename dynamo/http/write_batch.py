"""Write the output of a loop turn at its end, in one callback.

Tokens of one stream that arrived in one read become one event, and everything written to a
connection leaves in one system call, which costs more than all the rest of a token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)
_FAILED = "writing output failed"


class WriteBatch:
    """Collects what flushes producers (:meth:`defer`) and connections (:meth:`flush_later`).

    Producers are flushed first, because they write to connections. Nothing may be added a second
    time before it was flushed.
    """

    __slots__ = ("_connections", "_producers", "_scheduled")

    def __init__(self) -> None:
        self._producers: list[Callable[[], None]] = []
        self._connections: list[Callable[[], None]] = []
        self._scheduled = False

    def defer(self, flush: Callable[[], None]) -> None:
        """Call ``flush`` of a producer at the end of this turn."""
        self._producers.append(flush)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Call ``flush`` of a connection at the end of this turn, after the producers."""
        self._connections.append(flush)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Flush each; an exception of one must not keep back the output of the others."""
        producers, self._producers = self._producers, []
        for flush in producers:
            try:
                flush()
            except Exception:
                log.exception(_FAILED)
        # Reset between the loops: a write of a producer needs no other callback, a write of the
        # next turn does.
        self._scheduled = False
        connections, self._connections = self._connections, []
        for flush in connections:
            try:
                flush()
            except Exception:
                log.exception(_FAILED)
