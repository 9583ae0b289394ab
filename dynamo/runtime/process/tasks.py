"""Tasks started from synchronous callbacks, with a parent that cancels them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Tasks:
    """The parent of tasks started outside a TaskGroup; a failure is logged, never lost.

    ``spawn`` needs a running loop. After ``close`` no task may be started.
    """

    def __init__(self, owner: str = "tasks") -> None:
        self.owner = owner
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run ``work`` until it ends or :meth:`close` cancels it. RuntimeError when closed."""
        if self._closed:
            work.close()
            raise RuntimeError(f"{self.owner} is closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancel every task and wait for all. Idempotent; one of the tasks may call it."""
        self._closed = True
        current = asyncio.current_task()
        # Again and again: a task that is being cancelled may spawn others until it ends.
        while waiting := [task for task in self._running if task is not current]:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("%s: task %s failed", self.owner, task.get_name(), exc_info=error)


def raise_if_cancelled() -> None:
    """Raise CancelledError if this task is being cancelled, in a loop that continues after errors.

    A library may swallow the only CancelledError: gRPC does while it prepares a call, which then
    fails. Without this the loop would never end, nor would a wait for its end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
