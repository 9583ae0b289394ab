"""The reachability of one worker: a circuit breaker that a probe closes again, not a request.

A worker is out of routing while its connection is silent or lost. A silent connection stays open:
the first frame on it ends the outage. After a lost one the worker is connected and pinged again,
with growing pauses; its answer ends the outage. Responses of the worker, errors included, never
count as failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

__all__ = ["OnPeer", "OutageReason", "Peer"]

OutageReason = Literal["silent", "unreachable", "shutting_down", "unhealthy"]
"""Why a worker is out of routing; the label of the metrics."""

OnPeer = Callable[[OutageReason | None, str], None]
"""(reason, description) when an outage begins or gets another reason, (None, "") at its end."""

_FIRST_PAUSE_S = 0.02
_DOUBLINGS = 12
log = logging.getLogger(__name__)


class Peer:
    """The worker at one address, and the clients that follow it.

    ``connect`` opens a connection unless there is one. The pauses between two probes double from
    0.02 s to ``longest_pause_s``; they start small again after that time without a failure.
    """

    def __init__(self, connect: Callable[[], object], longest_pause_s: float) -> None:
        self.reason: OutageReason | None = None
        self.text = ""
        self.listeners: list[OnPeer] = []
        self._connect = connect
        self._longest_pause_s = max(longest_pause_s, _FIRST_PAUSE_S)
        self._failures = 0
        self._answered_s = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def silent(self, text: str) -> None:
        """Take the worker out of routing: its connection is open, but nothing arrives."""
        if self.reason is None:
            self._set("silent", text)

    def lost(self, text: str) -> None:
        """Take the worker out of routing, and probe it after a pause."""
        if self._loop.time() - self._answered_s > self._longest_pause_s and self.reason is None:
            self._failures = 0
        if self.reason != "silent":
            self._set("unreachable", text)
        if self._timer is None:
            pause_s = _FIRST_PAUSE_S * 2 ** min(self._failures, _DOUBLINGS)
            self._failures += 1
            self._timer = self._loop.call_later(min(pause_s, self._longest_pause_s), self._probe)

    def answered(self) -> None:
        """Return the worker to routing: it has sent a frame."""
        self._answered_s = self._loop.time()
        if self.reason is not None:
            self._set(None, "")

    def close(self) -> None:
        """Stop probing; listeners are not called again."""
        self.listeners.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _probe(self) -> None:
        self._timer = None
        if self.reason is not None:
            self._connect()

    def _set(self, reason: OutageReason | None, text: str) -> None:
        if (reason, text) == (self.reason, self.text):
            return
        self.reason, self.text = reason, text
        for listener in tuple(self.listeners):
            try:
                listener(reason, text)
            except Exception:  # the other clients must be notified
                log.exception("a client of a worker failed")
