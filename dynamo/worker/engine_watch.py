"""Finds an engine that hangs: a stopped process, or a wait that does not end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from dynamo.errors import DynamoError
from dynamo.runtime.process.tasks import Tasks
from dynamo.worker.tree_guard import Process, cpu_ticks, descendants, process_state

_IDLE_POLLS = 3
_IDLE_TICKS = 2
"""CPU time of a poll, in units of 10 ms, that an idle engine may use: 4 % of a core."""
_POLL_S = 0.5
_STALLED_POLLS = 4  # the silence of a worker is waited for as long
_STOPPED = ("T", "t")  # by a signal, by a tracer; proc(5)
log = logging.getLogger(__name__)


class ProcessWatch:
    """Watches the processes that this one had started when :meth:`run` began.

    ``report`` receives the problem, or "" when all run again, and whether that has lasted so long
    that requests should move. A profiler that stops a process for less than half a second is not
    reported. ``stall`` finds an engine that waits for ever.

    The worker's own process still answers pings, so clients cannot notice a stopped engine. A
    process that is stopped makes no progress, so this is never mistaken for a long step.
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


class StallWatch:
    """Decides at each :meth:`check` whether an engine has stopped computing.

    ``progress`` returns the number of requests in the engine, and that of its messages so far.
    ``ask`` asks it a question that it answers between two steps.

    It has stopped if it holds requests, sends nothing, does not answer a question, and its
    processes use no CPU time in three polls. It has resumed with its next message or answer.

    A long step looks the same from outside: no output for seconds. Two things tell them apart. An
    engine answers a question between two steps, and during a step its processes use the CPU, also
    while they wait for a GPU, which they do by polling. An engine that does neither has stopped.
    """

    def __init__(
        self, progress: Callable[[], tuple[int, int]], ask: Callable[[], Awaitable[object]]
    ) -> None:
        self.problem = ""
        self._progress = progress
        self._ask_engine = ask
        self._tasks = Tasks("stall watch")
        self._question: asyncio.Task[None] | None = None
        self._answers = 0
        self._seen = (0, 0)
        self._ticks = 0
        self._idle_polls = 0

    async def check(self) -> str:
        """Return why the engine counts as stopped, or "". Call it about twice a second."""
        requests, messages = self._progress()
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
            await self._ask_engine()
            self._answers += 1
        finally:
            self._question = None
