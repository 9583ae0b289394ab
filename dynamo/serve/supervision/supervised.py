"""The circus Watcher of a deployment.

Differences of watcher and process from circus, and why:

* a command is a list of words that is never formatted and never passed to a shell;
* every process leads its own session and dies with the arbiter (PR_SET_PDEATHSIG);
* an exit is an event (SIGCHLD, one reaper in the arbiter), not a poll every 0.1 s, and the rest of
  the process group is killed with its leader;
* a dead process is restarted at once, outside circus's one-at-a-time commands, so that a draining
  sibling does not delay it;
* restarts back off, and end after a burst of deaths;
* ``restart`` and ``reload`` replace the processes one by one, see
  :mod:`dynamo.serve.supervision.rolling`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from circus.exc import MessageError
from circus.process import DEAD_OR_ZOMBIE, UNEXISTING
from circus.watcher import Watcher

from dynamo.observability.logs import counted
from dynamo.serve.graph.watchers import WatcherSpec
from dynamo.serve.state.document import ACTIVE, GIVEN_UP, STOPPED, Supervision
from dynamo.serve.supervision.supervised_process import (
    FrontendListener,
    SupervisedProcess,
    command_words,
    describe_exit,
    quote_program,
)

if TYPE_CHECKING:
    from dynamo.serve.supervision.arbiter import SupervisingArbiter

USAGE_STATUS = 2
"""Exit status of a program that rejects its command line (argparse, getopt)."""
_USAGE_WITHIN_S = 30.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_MOST_DOUBLINGS = 10
# Errors of engines that the same settings meet again, and those of memory that may be freed soon.
_LASTING = re.compile(
    r"to serve at least one request|no available memory for the cache|desired CPU memory|"
    r"requested memory for kv|not supported|unsupported|unrecognized argument|unknown argument|"
    r"invalid argument|NotImplementedError|validation error",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out of ?memory|free memory on device", re.IGNORECASE)


@dataclass(frozen=True)
class RestartPolicy:
    """Give up after ``burst`` deaths within ``window_s`` seconds.

    ``unreachable_starts`` is the number of starts in a row that fail to download the model for the
    same reason, after which one that never served is given up; 0: never.
    """

    burst: int = 5
    window_s: float = 60.0
    unreachable_starts: int = 0


class Restarts:
    """The deaths of one watcher's processes: when to restart a dead one, and when to give up.

    The first death in a window restarts at once; further ones wait 0.5, 1, 2, 4 … seconds. It ends
    after a burst of deaths within the window, after as many starts in a row that never served a
    model (loading one may take longer than the window), or if a command rejects its own flags.
    One that never served is not started again after an engine's error that the same settings meet
    again; a lack of memory counts as one the second time, because memory may just be freed.

    The exit status says why a process ended. With 75 (EX_TEMPFAIL) a later start may succeed, as
    when a model cannot be downloaded now: the start is repeated for ever. Programs of this package
    exit with 2 only if a start with the same settings cannot succeed; from others it means that
    soon after their start. Pure: times are arguments.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque(maxlen=policy.burst)
        self._unserved = 0
        self._refused = 0
        self._reason = ""
        self._has_served = False

    @property
    def count(self) -> int:
        """The deaths that are remembered, at most a burst."""
        return len(self._deaths)

    def died(
        self,
        now_s: float,
        lived_s: float,
        status: int,
        *,
        served: bool = True,
        is_ours: bool = False,
        cause: str = "",
    ) -> float | str:
        """Record a death; return the delay of the restart in seconds, or why to give up.

        ``served`` is False for a process that should have registered a model and never did.
        ``is_ours``: the program is one of this package. ``cause`` is the error that it reported.
        """
        before, self._reason = self._reason, cause
        self._has_served = self._has_served or served
        if status == USAGE_STATUS and (is_ours or lived_s < _USAGE_WITHIN_S):
            what = "it refused to start" if is_ours else "its command line was rejected"
            return f"{what} (exit status {status})"
        if status == os.EX_TEMPFAIL:
            self._refused = self._refused + 1 if cause == before or not self._refused else 1
            if self._refused == self._policy.unreachable_starts and not self._has_served:
                return f"{cause or 'the model cannot be downloaded'} ({self._refused} starts)"
            return _delay_s(self._refused + 1)
        self._refused = 0
        if not self._has_served and _cannot_pass(cause, before):
            return "a start with the same settings cannot succeed"
        self._deaths.append(now_s)
        # A model that loads for longer than the window would otherwise be loaded for ever.
        self._unserved = 0 if served else self._unserved + 1
        recent = sum(now_s - death <= self._policy.window_s for death in self._deaths)
        if recent >= self._policy.burst:
            return f"{counted(recent, 'death')} within {self._policy.window_s:g} s"
        if self._unserved >= self._policy.burst:
            starts = counted(self._unserved, "start")
            return f"{starts} in a row ended before the model was served"
        return _delay_s(max(recent, self._unserved))

    def forget(self) -> None:
        """Forget all deaths, after a manual start."""
        self._deaths.clear()
        self._unserved = self._refused = 0
        self._reason = ""


def _cannot_pass(cause: str, before: str) -> bool:
    """Whether a start would meet ``cause`` again; ``before`` is that of the exit before it."""
    short_again = _MEMORY.search(cause) and _MEMORY.search(before)
    return bool(_LASTING.search(cause) or short_again)


def _delay_s(count: int) -> float:
    """Return the delay before the restart after the ``count``-th death."""
    if count == 1:
        return 0.0
    # Bounded: refused starts are repeated for ever, and the power would overflow.
    delay_s: float = _FIRST_DELAY_S * 2 ** min(count - 2, _MOST_DOUBLINGS)
    return min(delay_s, _MAX_DELAY_S)


_ONE_FRONTEND = (
    "{} listens on an HTTP port, which a second process cannot share. Add a service with another "
    "http-port to the graph: see docs/routing/replicas.md and examples/replicas.yaml"
)
_ONE_OF_ITS_GPUS = (
    "Singleton {}: a second process would use the same GPUs. For more workers raise `workers` of "
    "its service in the graph, and run dynamo reload"
)


def single_because(spec: WatcherSpec) -> str | None:
    """Return why a watcher has one process at most; None if it may have more.

    Not circus's ``singleton``, which refuses `circusctl decr`, too.
    """
    if spec.is_frontend:
        return _ONE_FRONTEND.format(spec.name)
    return _ONE_OF_ITS_GPUS.format(spec.name) if spec.gpus and not spec.pinned else None


class SupervisedWatcher(Watcher):  # type: ignore[misc]
    """One watcher. ``on_line`` gets its output; ``single_because``: why it has one process only."""

    arbiter: SupervisingArbiter
    numprocesses: int
    gpus: Mapping[str, float] = {}
    """Its share of each GPU that is assigned to it, for the processes that start next."""
    starting = False
    """Whether a start is about to begin, or looks for GPUs: then it does not count as stopped."""

    def __init__(
        self,
        name: str,
        cmd: str,
        *,
        env: dict[str, str],
        policy: RestartPolicy,
        on_line: Callable[[bytes], None],
        stop_stage: int = 1,
        single_because: str | None = None,
        listener: FrontendListener | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, cmd, **options)
        # Set here and not by circus, which would also load PYTHONPATH into this process.
        self.env = env
        self.on_line = on_line
        self.stop_stage = stop_stage
        self._single_because = single_because
        self._check_number(self.numprocesses)
        self.given_up: str | None = None
        self.restarts = 0
        self.last_exit = self.last_words = ""
        self.rolling = False
        self.listener = listener or FrontendListener(None)
        self._restarts = Restarts(policy)
        self._not_before_s = 0.0
        self._drained = False
        self._emptied = False  # `circusctl decr` left no process

    @property
    def _process_class(self) -> type[SupervisedProcess]:
        return SupervisedProcess

    async def _start(self) -> None:
        self.numprocesses = max(1, self.numprocesses)  # `circusctl decr` may have left none
        if not self.is_stopped() and len(self.processes) >= self.numprocesses:
            self.starting = False
            return  # one that sleeps must not claim its GPUs: its engine would sleep on
        self.given_up = None
        self._restarts.forget()
        self._not_before_s = 0.0
        self._drained = self._emptied = False
        self.starting = True
        try:
            if conflict := await self.arbiter.deployment.conflict(self):
                self._give_up(conflict)
            elif self.starting:  # no stop has come
                await super()._start()
        finally:
            self.starting = False

    async def _stop(self, close_output_streams: bool = False) -> None:
        self.starting = False
        self.listener.close()  # first, so that no client waits for a process that does not come
        stopping = super()._stop(close_output_streams)  # it begins here: the status is set
        self.arbiter.deployment.changed()
        await stopping
        self.arbiter.deployment.changed()

    async def _restart(self) -> None:
        await self.arbiter.roll([self], False)

    async def _reload(self, graceful: bool = True, sequential: bool = False) -> None:
        # An option of circus: the process reloads itself at SIGHUP.
        if self.is_active() and graceful and self.send_hup:
            await super()._reload(graceful=graceful)
        elif graceful:
            await self.arbiter.roll([self], sequential)
        else:
            await self.stop_then_start()

    async def stop_then_start(self) -> None:
        """Stop all processes, then start new ones."""
        await self._stop()
        await self._start()

    def start_beside(self) -> SupervisedProcess | None:
        """Start one process more, on trial; None if the command cannot be started."""
        before = set(self.processes)
        if self.spawn_process() is False:
            return None
        process = next((p for pid, p in self.processes.items() if pid not in before), None)
        if process is not None:
            process.on_trial = True
        return process

    def configure(self, before: WatcherSpec, after: WatcherSpec) -> None:
        """Use for the next start what differs in ``after``; keep what ``circusctl set`` changed."""
        if after.argv != before.argv:
            self.cmd, self.args = quote_program(after.argv), list(after.argv[1:])
        if after.working_dir != before.working_dir:
            self.working_dir = after.working_dir
        if after.graceful_timeout_s != before.graceful_timeout_s:
            self.graceful_timeout = after.graceful_timeout_s
        # Drop what only the old spec set; a variable that neither has is of `circusctl set`.
        kept = {k: v for k, v in self.env.items() if k in after.env or k not in before.env}
        self.env = {**kept, **after.env}
        self._single_because = single_because(after)
        self.gpus = after.shares

    def incr(self, nb: int = 1) -> Any:
        """Handle ``circusctl incr``. Raises MessageError, the reply, beyond a limit of one."""
        self._check_number(self.numprocesses + nb)
        return super().incr(nb)

    def set_opt(self, key: str, val: Any) -> Any:
        """Handle ``circusctl set``. Raises MessageError, which becomes the reply."""
        if key == "numprocesses":
            self._check_number(int(val))
        return super().set_opt(key, val)

    def _check_number(self, numprocesses: int) -> None:
        if numprocesses > 1 and self._single_because is not None:
            raise MessageError(self._single_because)

    def is_stopped(self) -> bool:
        """Whether it starts no process: by ``circusctl stop``, or ``decr`` to none."""
        return bool(super().is_stopped()) or not (self.numprocesses or self.processes)

    def status(self) -> str:
        """Return what ``circusctl status`` shows."""
        if self.is_stopped():
            return "starting" if self.starting else "stopped"
        return str(super().status()) if self.numprocesses else "stopping"

    def has_work(self) -> bool:
        """Whether :meth:`manage_processes` would start, stop or forget a process."""
        if self.is_stopped():
            return False
        processes = self.processes.values()
        wrong = len(processes) != self.numprocesses or bool(self.max_age)
        return wrong or any(process.status in (DEAD_OR_ZOMBIE, UNEXISTING) for process in processes)

    async def manage_processes(self) -> None:
        """Bring the number of processes to what it should be, unless we wait or are stopping."""
        waiting = asyncio.get_running_loop().time() < self._not_before_s
        busy = self.rolling or self.is_stopping() or self.arbiter.stopping
        if waiting or busy or self._drained:
            return
        lacks = len(self.processes) < self.numprocesses and not self.is_stopped()
        if lacks and self._emptied:
            await self._start()  # others may have its GPUs by now
        elif lacks and self.arbiter.drained(self, False):
            self._drained = True  # a drain began while its restart waited
        else:
            self._emptied = not self.numprocesses
            await super().manage_processes()

    def spawn_processes(self) -> asyncio.Future[None]:
        """Start the missing processes; return when it is done.

        No process can exit before circus sees it: it would take the watcher for one that starts
        none, and stop it. Nor can a concurrent call start the same ones.
        """
        while len(self.processes) < self.numprocesses and self._may_start():
            if self.spawn_process() is False:
                break
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def spawn_process(self, recovery_wid: object = None) -> float | bool:
        """Start one process; return False if the command cannot be started."""
        if not self._may_start():
            return True
        try:
            process = SupervisedProcess(
                self.name,
                self._nextwid,
                self.cmd,
                args=self.args,
                working_dir=self.working_dir,
                env=self.env,
                watcher=self,
            )
        except (OSError, ValueError) as error:
            self._give_up(f"cannot start it: {error}")
            return False
        process.gpus = self.gpus
        self.processes[process.pid] = process
        self.arbiter.spawned(self, process)
        self.notify_event("spawn", {"process_pid": process.pid, "time": process.started})
        return float(process.started)

    def _may_start(self) -> bool:
        ends = self._drained or self.is_stopped() or self.is_stopping()
        return not (ends or self.arbiter.stopping)

    async def kill_process(
        self,
        process: SupervisedProcess,
        stop_signal: int | None = None,
        graceful_timeout: float | None = None,
    ) -> bool:
        """Signal ``process``, kill its group after the timeout, return when it has exited.

        Returns False: True would make circus forget the process, which the reaper has done already.
        """
        if not process.stopping:
            process.stopping = True  # before the signal: its exit is then no death
            process.send_signal(self.stop_signal if stop_signal is None else stop_signal)
            self.notify_event("kill", {"process_pid": process.pid, "time": time.time()})
        timeout_s = self.graceful_timeout if graceful_timeout is None else graceful_timeout
        try:
            async with asyncio.timeout(0 if self.arbiter.killing else timeout_s):
                await process.exited.wait()
        except TimeoutError:
            self.arbiter.overdue(self, process)
            process.kill_session()
            await process.exited.wait()
        return False

    def reap_processes(self) -> None:
        """Reap through the arbiter, which reaps for all watchers."""
        self.arbiter.reap_processes()

    def ended(self, process: SupervisedProcess, status: int) -> None:
        """Handle the exit of ``process``: restart it, now or later, or give up."""
        self.processes.pop(process.pid, None)
        message = {"process_pid": process.pid, "time": time.time(), "exit_code": status}
        self.notify_event("reap", message)
        if process.on_trial:
            return  # another one still serves
        if self not in self.arbiter.watchers or self.arbiter.stopping:
            return
        stopped = self.is_stopping() or self.is_stopped()
        if self.arbiter.drained(self, stopped):
            self._drained = True  # circus's periodic check may come before the removal
            return
        if stopped:
            return
        if process.stopping:  # by circusctl kill; its periodic check waits for a running command
            if not self.rolling:
                self.arbiter.respawn_in(0.0, self)
            return
        loop = asyncio.get_running_loop()
        lived_s = time.time() - process.started
        served = self.arbiter.deployment.has_served(self, process.pid)
        self.last_exit = describe_exit(status)
        self.last_words = self.arbiter.deployment.last_line(self.name) if status > 0 else ""
        self.restarts += 1
        refused = status in (USAGE_STATUS, os.EX_TEMPFAIL)
        cause = self.arbiter.deployment.refusal(self.name) if refused else self.last_words
        verdict = self._restarts.died(
            loop.time(), lived_s, status, served=served, is_ours=self._is_ours, cause=cause
        )
        if isinstance(verdict, str):
            usage = status == USAGE_STATUS and cause
            self._give_up(f"{cause} (exit status {status})" if usage else verdict)
            return
        self._not_before_s = loop.time() + verdict
        self.arbiter.died(self, process, verdict)
        self.arbiter.respawn_in(verdict, self)

    def _give_up(self, reason: str) -> None:
        living = [process for process in self.processes.values() if not process.stopping]
        if living:  # continue with these, and count their deaths from zero
            self.numprocesses = len(living)
            self._restarts.forget()
        else:
            self.given_up = reason
        self.arbiter.gave_up(self, reason)

    @property
    def _is_ours(self) -> bool:
        """Whether the program is one of this package."""
        return "".join(self.command_words()[1:3]).startswith("-mdynamo.")

    @property
    def supervision(self) -> Supervision:
        """What the statefile says about this watcher."""
        stopped = self.is_stopped() or self.is_stopping() or not self.numprocesses
        status = STOPPED if stopped and not self.starting else ACTIVE
        if self.given_up is not None:
            status = GIVEN_UP
        given_up = self.given_up or ""
        return Supervision(status, given_up, self.restarts, self.last_exit, self.last_words)

    @property
    def deaths(self) -> int:
        """The number of recent exits that were not intended."""
        return self._restarts.count

    def command_words(self) -> list[str]:
        """Return the words of the next start; one word if the command has an open quote."""
        try:
            return command_words(self.cmd, self.args)
        except ValueError:
            return [self.cmd]

    async def end(self) -> None:
        """Stop for good, also while circus runs a command."""
        await self._stop(True)
