"""Notices that a process of the engine or server is stopped: by SIGSTOP, a debugger, a terminal.

The worker's own process still answers pings, so clients cannot notice it. A process that is stopped
makes no progress, so this is never mistaken for a long step.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from dynamo.errors import DynamoError
from dynamo.worker.tree_guard import Process, descendants, process_state

__all__ = ["ProcessWatch"]

_POLL_S = 0.5
_STOPPED = ("T", "t")  # by a signal, by a tracer; proc(5)
log = logging.getLogger(__name__)


class ProcessWatch:
    """Watches the processes that this one had started when :meth:`run` began.

    ``report`` gets what is wrong, or "" when all run again. A profiler that stops a process for
    less than half a second is not reported.
    """

    def __init__(self, report: Callable[[str], Awaitable[None]], poll_s: float = _POLL_S) -> None:
        self.problem = ""
        self._report = report
        self._poll_s = poll_s
        self._processes: list[Process] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        self._processes = await asyncio.to_thread(descendants, os.getpid())
        before: set[Process] = set()
        while True:
            await asyncio.sleep(self._poll_s)
            stopped = {each for each in self._processes if process_state(each) in _STOPPED}
            still, before = stopped & before, stopped
            if bool(still) != bool(self.problem) and (still or not stopped):
                await self._change(still)

    async def _change(self, stopped: set[Process]) -> None:
        pids = ", ".join(str(pid) for pid, _ in sorted(stopped))
        problem = f"the engine's process {pids} is stopped" if pids else ""
        try:
            await self._report(problem)
        except DynamoError as error:  # it is reported with the next poll
            log.warning("the state of the engine's processes cannot be reported: %s", error)
            return
        self.problem = problem
        if problem:
            log.error("%s: no requests until it continues", problem)
        else:
            log.info("the engine's processes run again")
