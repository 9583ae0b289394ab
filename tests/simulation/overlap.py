"""Lets processes overlap: a callback rests in the middle, at a file or in a sleep, others go on.

A resting callback keeps its stack, so it has a thread. One thread runs at a time, and virtual time
decides which: when the rest of a callback is over, the thread that drives the machine waits, and
that of the callback goes on, with its callback and then as the driver. So a seed replays exactly.
"""

from __future__ import annotations

import _thread
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from process_end import ProcessKilled

if TYPE_CHECKING:
    from machine import Machine, Process

__all__ = ["Overlap"]

_SHORT_S, _LONG_S = 0.002, 0.03
_LONG_SHARE = 0.1
_STOPPED_S = 0.05
"""How often a resting process that is stopped is looked at."""


class Overlap:
    """Rests a callback with the probability ``share`` at each change of a file."""

    def __init__(self, machine: Machine, seed: int, share: float) -> None:
        self._machine = machine
        self._dice = random.Random(f"overlap {seed}")
        self._share = share
        self.on_thread: Callable[[], None] = lambda: None
        """Called at the begin of each thread."""
        self._idle: list[Any] = []
        """Locks of threads that wait to drive."""
        self._main = _thread.allocate_lock()
        self._main.acquire()
        self._found = False
        self._failed: BaseException | None = None

    def run(self, drive: Callable[[], bool]) -> bool:
        """Drive the machine in another thread until ``drive`` returns; return its result."""
        self._drive = drive
        self._hand_over()
        self._main.acquire()
        if self._failed is not None:
            raise self._failed
        return self._found

    def at_file(self) -> None:
        """The current process is about to use a file."""
        if self._dice.random() < self._share:
            long = self._dice.random() < _LONG_SHARE
            self.rest(self._dice.random() * (_LONG_S if long else _SHORT_S))

    def rest(self, seconds: float) -> None:
        """Let other processes run for ``seconds``; a job of an executor also its own process.

        Raises ProcessKilled if the process has ended in that time.
        """
        machine, process = self._machine, self._machine.current
        lock = self._locked()
        machine.after(seconds, self._over, lock, process)
        self._rest(lock)

    def pause(self, arm: Callable[[Callable[[], None]], None]) -> None:
        """Rest until someone calls what ``arm`` is given, as :meth:`rest` does for a time."""
        machine, process = self._machine, self._machine.current
        assert process is not None
        lock, resumed = self._locked(), False

        def resume() -> None:
            nonlocal resumed
            if not resumed:
                machine.after(0.0, self._over, lock, process)
            resumed = True

        process.on_death[resume] = None
        arm(resume)
        if machine.in_job and process.loop.ready_callbacks and not process.loop.is_queued:
            process.loop.is_queued = True
            machine.ready(process.loop)
        try:
            self._rest(lock)
        finally:
            process.on_death.pop(resume, None)

    def _rest(self, lock: Any) -> None:
        """Let others run until the lock is released."""
        machine, process = self._machine, self._machine.current
        assert process is not None
        is_job = machine.in_job
        process.resting += not is_job
        machine.current, machine.in_job = None, False
        self._hand_over()
        lock.acquire()
        process.resting -= not is_job
        machine.enter(process)
        machine.in_job = is_job
        if not process.alive:
            raise ProcessKilled

    @staticmethod
    def _locked() -> Any:
        lock = _thread.allocate_lock()
        lock.acquire()
        return lock

    def _over(self, lock: Any, process: Process) -> None:
        """In the thread that drives: the rest is over. It waits to drive again."""
        if process.state == "T":
            self._machine.after(_STOPPED_S, self._over, lock, process)
            return
        mine = _thread.allocate_lock()
        mine.acquire()
        self._idle.append(mine)
        lock.release()
        mine.acquire()

    def _hand_over(self) -> None:
        """Let a thread that waits drive, or a new one."""
        if self._idle:
            self._idle.pop().release()
        else:
            _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        self.on_thread()
        while True:
            try:
                self._found = self._drive()
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                self._failed = error
            mine = _thread.allocate_lock()
            mine.acquire()
            self._idle.append(mine)
            self._main.release()
            mine.acquire()
