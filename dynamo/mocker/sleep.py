"""The sleep of a simulated engine: it has no memory to free, but takes time to wake up.

A module of its own, because the engine itself knows nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo.mocker.engine import EngineRank

__all__ = ["SimulatedSleep"]


class SimulatedSleep:
    """A :class:`SleepingEngine` over the ranks of a worker; waking takes ``wake_s`` seconds."""

    def __init__(self, ranks: Sequence[EngineRank], wake_s: float) -> None:
        self._ranks = ranks
        self._wake_s = wake_s
        self._asleep = False

    async def sleep(self, level: int = 1) -> None:
        """Wait until no rank has a request."""
        for rank in self._ranks:
            if rank.load:
                await rank.idle.wait()
        self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the time of loading the weights from CPU memory."""
        if self._asleep:
            await asyncio.sleep(self._wake_s)
        self._asleep = False

    async def reload_weights(self) -> None:
        """Do nothing: there are no weights."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self._asleep
