"""Detects that a process of the engine or server is stopped: by SIGSTOP, a debugger, a terminal.

The worker's own process still answers pings, so clients cannot detect it. A process that is stopped
makes no progress, so this is never mistaken for a long step. ``stall_watch`` finds an engine whose
processes run, but wait for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from dynamo.errors import DynamoError
from dynamo.worker.engine_watch import StallWatch
from dynamo.worker.tree_guard import Process, descendants, process_state

__all__ = ["ProcessWatch"]

_POLL_S = 0.5
_STALLED_POLLS = 4  # the silence of a worker is waited for as long
_STOPPED = ("T", "t")  # by a signal, by a tracer; proc(5)
log = logging.getLogger(__name__)


class ProcessWatch:
    """Watches the processes that this one had started when :meth:`run` began.

    ``report`` receives the problem, or "" when all run again, and whether that has lasted so long
    that requests should move. A profiler that stops a process for less than half a second is not
    reported. ``stall`` finds an engine that waits for ever.
    """

    def __init__(
        self,
        report: Callable[[str, bool], Awaitable[None]],
        stall: StallWatch | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        self._report = report
        self._stall = stall
        self._poll_s = poll_s
        self._processes: list[Process] = []
        self._reported = (False, False)

    async def run(self) -> None:
        """Watch until cancelled."""
        self._processes = await asyncio.to_thread(descendants, os.getpid())
        before: set[Process] = set()
        polls = 0
        try:
            while True:
                await asyncio.sleep(self._poll_s)
                stopped = {each for each in self._processes if process_state(each) in _STOPPED}
                still, before = stopped & before, stopped
                polls = polls + 1 if still else 0
                if still:
                    await self._change(_stopped(still), polls >= _STALLED_POLLS)
                elif not stopped:
                    problem = "" if self._stall is None else await self._stall.check()
                    await self._change(problem, bool(problem))
        finally:
            if self._stall is not None:
                await self._stall.close()

    async def _change(self, problem: str, stalled: bool) -> None:
        if self._reported == (bool(problem), stalled):
            return
        try:
            await self._report(problem, stalled)
        except DynamoError as error:  # it is reported with the next poll
            log.warning("the state of the engine's processes cannot be reported: %s", error)
            return
        if not problem:
            log.info("the engine runs again")
        elif stalled:
            log.error("%s: its requests move to other workers", problem)
        else:
            log.error("%s: no requests until it continues", problem)
        self._reported = bool(problem), stalled


def _stopped(processes: set[Process]) -> str:
    pids = ", ".join(str(pid) for pid, _ in sorted(processes))
    return f"the engine's process {pids} is stopped"
