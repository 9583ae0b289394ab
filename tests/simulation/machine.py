"""A simulated machine: virtual time, processes that run on loops, signals, and what a death does.

Everything that a run decides comes from one seeded generator, so a seed replays exactly. Processes
interleave between callbacks of their loops; within one process callbacks run in the order in which
they were added, as asyncio promises. Time passes while no process has work, and a little with each
callback.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import itertools
import logging
import os
import random
import select
import signal
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from disk import Disk
from overlap import Overlap
from process_end import ProcessKilled

__all__ = ["FIRST_PID", "START_S", "Livelock", "Machine", "Process"]

START_S = 1_700_000_000.0
"""The Unix time at which every run begins."""
FIRST_PID = 1000
CALLBACK_S = 5e-6
_TURNS = 1.03
"""Of so many turns of the processes one goes to the files and the clock."""
_LIVELOCK = 400_000
"""So many callbacks within one second of virtual time mean that they wait for nothing."""
_BEGIN_AGAIN_S = 0.05
"""How often a process that was stopped before its first instruction is looked at."""


class Livelock(Exception):
    """The processes run without end at one moment."""


class Process:
    """A simulated process: its identity, its loop, and what the kernel keeps for it."""

    def __init__(
        self, machine: Machine, pid: int, parent: Process | None, name: str, env: dict[str, str]
    ) -> None:
        from process_loop import ProcessLoop

        self.machine = machine
        self.pid = pid
        self.parent = parent
        self.name = name
        self.env = env
        self.started_s = machine.now_s
        self.ended_s = 0.0
        self.start_ticks = int(machine.now_s * 100)
        self.state = "R"
        self.resting = 0
        """How many of its callbacks rest in the middle: 0 or 1."""
        self.status = 0
        self.handlers: dict[int, Callable[[], None]] = {}
        self.held: list[Any] = []
        """Objects with ``close()`` that the kernel closes at the end: sockets, watches."""
        self.children: dict[int, Process] = {}
        self.on_death: dict[Callable[[], None], None] = {}
        self.loop = ProcessLoop(machine, self)
        self.main: asyncio.Task[int] | None = None
        self.program = ""
        """The module that it runs."""
        self.printed: dict[str, list[str]] | None = None
        """What a verb has written to its standard streams."""
        self.output = -1
        """The pipe in which its log ends, if its arbiter reads it."""
        self.formatter: logging.Formatter | None = None
        self.repeats: Any = None
        """The filter of its log."""
        self.parts: list[Any] = []
        """Objects of the program that the checks look at."""

    @property
    def alive(self) -> bool:
        """Whether it has neither exited nor been killed."""
        return self.state in "RT"

    def __repr__(self) -> str:
        return f"{self.name}[{self.pid}]"


class Machine:
    """Runs processes in virtual time. ``history`` are the lines that a failed run prints."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = START_S
        self.clock_off_s = 0.0
        self.processes: dict[int, Process] = {}
        self.stop_signals_s: dict[int, float] = {}
        """When each process got its first SIGTERM or SIGINT."""
        self.second_signals_s: dict[int, float] = {}
        """When each that drained got one more: it ends its requests."""
        self.lived: list[Process] = []
        """Every process so far."""
        self.current: Process | None = None
        self.history: deque[str] = deque(maxlen=20_000)
        self.failures: list[str] = []
        self.file_faults: Callable[[Process, Any, bool], None] | None = None
        """Called before each change of a file by a process."""
        self.on_state: Callable[[Process], None] = lambda process: None
        """Called when a process has been stopped, continued or has ended."""
        self.on_gpu_use: Callable[[], None] = lambda: None
        """Called when a program has begun or its engine has fallen asleep or woken."""
        self.is_disk_full: Callable[[], bool] = lambda: False
        self.records: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])
        """By process and kind: the number of log records, and the number that its log reports."""
        self.lacks_inodes = False
        """Whether a full disk has bytes left, and no inodes."""
        self.last_asked_s: Callable[[str], float] = lambda model: 0.0
        """When a request of a model was open last."""
        self.on_warning: Callable[[str], None] = lambda text: None
        """Called with each warning and error in a log."""
        self.on_file: Callable[[Any, bool], None] = lambda path, exists: None
        """Called when a file has got its name, or lost it."""
        self.disk: Disk | None = None
        """Set if this run has a loss of power."""
        self.routed_tokens: dict[str, int] = {}
        """The output tokens that routers counted for each request of an engine."""
        self.routed: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """What the page of each router has to show."""
        self.received_tokens: dict[str, tuple[int, int]] = {}
        """The output tokens of each request of an engine, and how often it migrated."""
        self.attempts: Any = None
        """The requests that workers received: see :mod:`attempts`."""
        self.uncounted: set[str] = set()
        """The requests of workers that a router removed while they ran."""
        self.rejections: list[tuple[float, Process]] = []
        self.adapter_changes: list[tuple[float, bool]] = []
        """When the adapter that comes and goes was loaded (True) or unloaded."""
        """When workers rejected requests at their capacity."""
        self.reports: list[tuple[float, Process, int]] = []
        """The KV blocks in use that workers reported, if the run needs them."""
        self.records_load = False
        self.steps = 0
        self.overlap: Overlap | None = None
        """Set if callbacks of several processes may overlap in this run."""
        self.in_job = False
        """Whether the current callback is a job of an executor."""
        self.has_threads = False
        """Whether threads of processes may wait. See :mod:`threads`."""
        self.logged: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        """When each process of a name wrote each line, if it has a log."""
        self.sleeps: list[tuple[float, Process, bool]] = []
        """When each engine fell asleep, or woke up."""
        self._until: Callable[[], bool] | None = None
        self._limit_s = 0.0
        self.graveyard: list[Any] = []
        self.epoll = select.epoll()
        self.files_changed = True
        """Whether the kernel may have something to say of ``readers`` since it was asked last."""
        self.readers: dict[int, tuple[Any, Callable[[], None]]] = {}
        self.files: dict[int, Process] = {}
        """The process that has each descriptor of os.open(), pidfd_open() open."""
        self.process_ends: dict[int, tuple[Process, list[int]]] = {}
        self._pids = itertools.count(FIRST_PID)
        self._order = itertools.count()
        self._runnable: list[Any] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._moment_s = self.now_s
        self._moment_steps = 0

    # -- time

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at ``when_s``, outside of any process."""
        heapq.heappush(self._events, (when_s, next(self._order), call, args))

    @property
    def unix_s(self) -> float:
        """What the machine's clock says, which someone may have set."""
        return self.now_s + self.clock_off_s

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` in ``delay_s``."""
        self.at(self.now_s + delay_s, call, *args)

    def note(self, text: str) -> None:
        """Add a line to the history."""
        name = self.current.name if self.current is not None else "-"
        self.history.append(f"{self.now_s - START_S:10.4f}  {name:<22}  {text}")

    # -- running

    def ready(self, loop: Any) -> None:
        """The loop has callbacks to run."""
        self._runnable.append(loop)

    def run(self, until: Callable[[], bool] | None, limit_s: float) -> bool:
        """Run until the condition holds (True), or until virtual time reaches ``limit_s``."""
        self._until, self._limit_s = until, limit_s
        return self._drive() if self.overlap is None else self.overlap.run(self._drive)

    def _drive(self) -> bool:
        """See :meth:`run`. Its end may change while a callback in it rests."""
        choose, runnable, events = self.random.random, self._runnable, self._events
        while self._until is None or not self._until():
            waiting = len(runnable)
            at = int(choose() * waiting * _TURNS)
            if at < waiting:
                loop = runnable[at]
                runnable[at] = runnable[-1]
                runnable.pop()
                self._run_some(loop, 1 + int(choose() * 4))
                continue
            if self.files_changed:
                self._poll()
            self._due()
            if runnable:
                continue
            if not events or events[0][0] > self._limit_s:
                return False
            self.now_s = max(self.now_s, events[0][0])
            self._due()
        return True

    def _due(self) -> None:
        events = self._events
        while events and events[0][0] <= self.now_s:
            _, _, call, args = heapq.heappop(events)
            call(*args)

    def _run_some(self, loop: Any, count: int) -> None:
        process = loop.process
        loop.is_queued = False
        if process.resting:  # what has come is done when its callback has ended
            return
        ready = loop.ready_callbacks
        self.enter(process)
        try:
            while count and ready and process.state == "R" and not process.resting:
                count -= 1
                handle = ready.popleft()
                self.now_s += CALLBACK_S
                self.steps += 1
                if handle._cancelled:
                    continue
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio does
                    loop.callback_failed(error, handle)
        finally:
            self.current = None
        if ready and process.state == "R" and not loop.is_queued and not process.resting:
            loop.is_queued = True
            self._runnable.append(loop)
        if self.now_s - self._moment_s > 1.0:
            self._moment_s, self._moment_steps = self.now_s, self.steps
        elif self.steps - self._moment_steps > _LIVELOCK:
            raise Livelock(f"{_LIVELOCK} callbacks within a second")

    def enter(self, process: Process) -> None:
        """Make ``process`` the current one."""
        self.current = process
        os.environ = process.env  # type: ignore[assignment]  # noqa: B003
        asyncio._set_running_loop(process.loop)

    def _poll(self) -> None:
        """Pass on what the kernel says of real descriptors: file events, ends of processes."""
        self.files_changed = False
        readable = {fd for fd, _ in self.epoll.poll(0)}
        # Not in the order of their numbers, which depend on what else this process has open.
        for fd in [one for one in self.readers if one in readable]:
            loop, call = self.readers[fd]
            if loop.process.state == "R":
                loop.call_soon_once(fd, call)

    # -- processes

    def spawn(
        self,
        name: str,
        env: dict[str, str],
        main: Callable[[Process], Coroutine[Any, Any, int]],
        parent: Process | None = None,
    ) -> Process:
        """Start a process whose main coroutine is ``main(process)``."""
        process = Process(self, next(self._pids), parent, name, env)
        self.processes[process.pid] = process
        self.lived.append(process)
        if parent is not None:
            parent.children[process.pid] = process
        self.note(f"starts {process}")

        def begin() -> None:
            if process.state == "T":  # stopped before its first instruction
                self.after(_BEGIN_AGAIN_S, begin)
            if process.state != "R":
                return
            before = self.current
            self.enter(process)
            try:
                process.main = process.loop.create_task(main(process), name="main")
                process.main.add_done_callback(lambda task: self._returned(process, task))
            finally:
                self.current = None
                if before is not None:
                    self.enter(before)

        self.after(self.random.uniform(0.002, 0.05), begin)
        return process

    def _returned(self, process: Process, task: asyncio.Task[int]) -> None:
        if task.cancelled():
            self.exit(process, 1)
            return
        error = task.exception()
        if isinstance(error, SystemExit):
            self.exit(process, error.code if isinstance(error.code, int) else 1)
        elif error is not None:
            self.note(f"main failed: {error!r}")
            self.exit(process, 1)
        else:
            self.exit(process, task.result() or 0)

    def exit(self, process: Process, status: int) -> None:
        """End ``process`` with an exit status."""
        self._end(process, (status & 0xFF) << 8)

    def kill(self, pid: int, signum: int) -> None:
        """Send a signal to a process. Raises ProcessLookupError."""
        process = self.processes.get(pid)
        if process is None:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        if signum == 0 or not process.alive:
            return
        self.note(f"signal {signum} to {process}")
        stops = signum in (signal.SIGTERM, signal.SIGINT)
        if stops and self.stop_signals_s.setdefault(pid, self.now_s) != self.now_s:
            self.second_signals_s.setdefault(pid, self.now_s)
        if signum == signal.SIGKILL:
            self._end(process, signum)
        elif signum == signal.SIGSTOP:
            process.state = "T"
            self.on_state(process)
        elif signum == signal.SIGCONT:
            self._continue(process)
        elif signum in process.handlers:
            process.loop.call_soon_threadsafe(process.handlers[signum])
        elif signum not in (signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG):
            self._end(process, signum)

    def _continue(self, process: Process) -> None:
        if process.state != "T":
            return
        process.state = "R"
        self.on_state(process)
        if process.loop.ready_callbacks and not process.loop.is_queued:
            process.loop.is_queued = True
            self._runnable.append(process.loop)
        self.files_changed = True  # what came while it was stopped

    def _end(self, process: Process, status: int) -> None:
        if not process.alive:
            return
        process.state, process.status = "Z", status
        process.ended_s = self.now_s
        self.note(f"{process} ends with status {status}")
        self.on_state(process)
        self.graveyard.append((process.loop, list(process.loop.ready_callbacks)))
        process.loop.ready_callbacks.clear()
        current, self.current = self.current, None  # the kernel cleans up, not the process
        self._clean_up(process)
        self.current = current
        if process is current:
            raise ProcessKilled

    def _clean_up(self, process: Process) -> None:
        for call in list(process.on_death):
            call()
        for fd in [fd for fd, (loop, _) in self.readers.items() if loop is process.loop]:
            self.forget_reader(fd)
        self._close_files(process)
        for child in list(process.children.values()):
            child.parent = None
            if child.alive:
                self._end(child, signal.SIGKILL)  # PR_SET_PDEATHSIG
            self.processes.pop(child.pid, None)
        for fd, (watched, ends) in self.process_ends.items():
            if watched is process and not ends:
                ends.append(fd)
                self.files_changed = True
                with suppress(OSError):
                    os.eventfd_write(fd, 1)
        parent = process.parent
        if parent is None or not parent.alive:
            self.processes.pop(process.pid, None)
        elif signal.SIGCHLD in parent.handlers:
            parent.loop.call_soon_threadsafe(parent.handlers[signal.SIGCHLD])

    def _close_files(self, process: Process) -> None:
        for held in process.held:
            with suppress(OSError):
                held.close()
        process.held.clear()
        for fd in [fd for fd, owner in self.files.items() if owner is process]:
            del self.files[fd]
            self.process_ends.pop(fd, None)
            with suppress(OSError):
                os.close(fd)

    def reap(self, parent: Process, pid: int) -> tuple[int, int] | None:
        """Remove a zombie child (any for 0 or -1); None: none has ended. ChildProcessError."""
        children = parent.children
        chosen = [pid] if pid > 0 else list(children)
        if not children or (pid > 0 and pid not in children):
            raise ChildProcessError(errno.ECHILD, "No child processes")
        for one in chosen:
            if children[one].state == "Z":
                child = children.pop(one)
                self.processes.pop(one, None)
                return one, child.status
        return None

    # -- descriptors

    def add_reader(self, loop: Any, fd: int, call: Callable[[], None]) -> None:
        """Call ``call`` on ``loop`` when the real descriptor is readable."""
        if fd in self.readers:
            self.epoll.unregister(fd)
        self.readers[fd] = (loop, call)
        self.files_changed = True
        self.epoll.register(fd, select.EPOLLIN)

    def forget_reader(self, fd: int) -> bool:
        """Undo :meth:`add_reader`."""
        if self.readers.pop(fd, None) is None:
            return False
        with suppress(OSError):
            self.epoll.unregister(fd)
        return True
