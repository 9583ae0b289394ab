"""Tells the event plane how long a prefill queue is. Topic ``prefill_queue``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo.protocols.codec import encode
from dynamo.protocols.load import PrefillQueueState
from dynamo.router.queue.prefill import PrefillQueue

__all__ = ["INTERVAL_S", "REPEAT_S", "QueueStatePublisher"]

INTERVAL_S = 0.1
REPEAT_S = 1.0


class QueueStatePublisher:
    """Publishes the state of ``line``: at once when it becomes empty or ceases to be, else at most
    every ``INTERVAL_S``, and every ``REPEAT_S`` unchanged for those who come later."""

    def __init__(
        self, model: str, line: PrefillQueue[Any], publish: Callable[[bytes], object]
    ) -> None:
        self._model = model
        self._line = line
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._told = PrefillQueueState(model)
        self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._tell()

    def look(self) -> None:
        """The line may have changed."""
        if self._timer is None:
            return  # closed
        if bool(self._line) != bool(self._told.size):
            self._tell()
        elif self._due_s > self._told_s + INTERVAL_S and self._state() != self._told:
            self._arm(max(self._told_s + INTERVAL_S, self._loop.time()))

    def close(self) -> None:
        """Publish nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _state(self) -> PrefillQueueState:
        line = self._line
        return PrefillQueueState(self._model, len(line), line.running, len(line.workers))

    def _tell(self) -> None:
        self._told, self._told_s = self._state(), self._loop.time()
        self._publish(encode(self._told))
        self._arm(self._told_s + REPEAT_S)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._tell)
