"""Detects an engine that waits for ever: for a lock, a dead driver, a hanging file system.

A long step looks the same from outside: no output for seconds. Two signs distinguish them. An
engine answers a question between two steps. During a step its processes use the CPU, even while
they wait for a GPU, because they poll. An engine that does neither has stopped.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from dynamo.runtime.process.tasks import Tasks
from dynamo.worker.tree_guard import cpu_ticks

__all__ = ["StallWatch", "WatchedEngine"]

_IDLE_POLLS = 3
_IDLE_TICKS = 2
"""CPU time of a poll, in units of 10 ms, that an idle engine may use: 4 % of a core."""


class WatchedEngine(Protocol):
    """The engine that a :class:`StallWatch` checks."""

    def progress(self) -> tuple[int, int]:
        """Return the number of requests in the engine, and that of its messages so far."""

    async def is_sleeping(self) -> bool:
        """Ask the engine a question that it answers between two steps."""


class StallWatch:
    """Decides at each :meth:`check` whether ``engine`` has stopped computing.

    It has stopped if it holds requests, sends nothing, does not answer a question, and its
    processes use no CPU time in three polls. It has resumed with its next message or answer.
    """

    def __init__(self, engine: WatchedEngine) -> None:
        self.problem = ""
        self._engine = engine
        self._tasks = Tasks("stall watch")
        self._question: asyncio.Task[None] | None = None
        self._answers = 0
        self._seen = (0, 0)
        self._ticks = 0
        self._idle_polls = 0

    async def check(self) -> str:
        """Return why the engine counts as stopped, or "". Call it about twice a second."""
        requests, messages = self._engine.progress()
        seen, self._seen = self._seen, (messages, self._answers)
        if self._seen != seen or not (requests or self.problem):
            self.problem = ""
            self._idle_polls = -1  # the next poll measures from here
            return ""
        if self._question is None:
            self._question = self._tasks.spawn(self._ask(), name="question")
        ticks, runnable = await asyncio.to_thread(cpu_ticks, os.getpid())
        idle = 0 <= ticks - self._ticks <= _IDLE_TICKS and not runnable
        self._ticks = ticks
        if not self.problem:
            self._idle_polls = self._idle_polls + 1 if idle or self._idle_polls < 0 else 0
            if self._idle_polls >= _IDLE_POLLS:
                self.problem = f"the engine has stopped computing; requests in it: {requests}"
        return self.problem

    async def close(self) -> None:
        """Forget the open question."""
        await self._tasks.close()

    async def _ask(self) -> None:
        try:
            await self._engine.is_sleeping()
            self._answers += 1
        finally:
            self._question = None
