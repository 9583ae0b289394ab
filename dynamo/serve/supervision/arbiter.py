"""The circus Arbiter of a deployment: one reaper, no orphans, stop by stages, rolling commands."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from circus.arbiter import Arbiter
from circus.commands.base import Command
from circus.exc import MessageError
from circus.util import synchronized
from tornado.ioloop import IOLoop

from dynamo.runtime.process.paths import owner_only
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.state.events import ProcessEvents
from dynamo.serve.state.process_table import children, environment
from dynamo.serve.supervision.output import Announcer
from dynamo.serve.supervision.supervised import SupervisedWatcher
from dynamo.serve.supervision.supervised_process import SupervisedProcess, describe_exit

_CHECK_DELAY_S = 1.0
_ANSWER_S = 2.0
_WATCHER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
log = logging.getLogger(__name__)
RELOAD_GRAPH = "reload_graph"


class ReloadGraph(Command):  # type: ignore[misc]
    """Apply a changed graph, or show what would change. The class registers itself with circus.

    Properties: ``graph``, the absolute path of the file, and ``overrides``, words of a command
    line; without both, those of the last start or reload. ``add`` (YAML of a service by its name)
    and ``remove`` (names) change that graph and its file; then the reply does not wait for models
    to load. ``dry_run``: change nothing. The reply has ``changes``, ``summary``, the ``file``,
    ``warnings`` and the names ``added``.
    """

    name = RELOAD_GRAPH

    def message(self, *args: str, **options: Any) -> Any:
        """Return the message; the client is ``dynamo reload``."""
        return self.make_message(**options)

    def execute(self, arbiter: Any, properties: Mapping[str, Any]) -> Any:
        """Start it; the reply follows at its end."""
        return arbiter.reload_graph(properties)


class RollWatchers(Command):  # type: ignore[misc]
    """Replace the processes of the watchers in ``names``. Unlike circus's ``restart``, the reply
    says what failed. The class registers itself with circus."""

    name = "roll_watchers"
    properties = ("names",)

    def message(self, *args: str, **options: Any) -> Any:
        """Return the message; the client is ``dynamo restart``."""
        return self.make_message(names=args, **options)

    def execute(self, arbiter: Any, properties: Mapping[str, Any]) -> Any:
        """Start it; the reply follows at its end."""
        return arbiter.roll_named([self._get_watcher(arbiter, n) for n in properties["names"]])


def error_reply(reason: str) -> dict[str, str]:
    """Return the reply of a command that ran and failed."""
    return {"status": "error", "reason": reason}


class DeploymentHooks(Protocol):
    """What the arbiter and its watchers need of the deployment, which owns them.

    See :class:`~dynamo.serve.deployment.Deployment`.
    """

    @property
    def happened(self) -> ProcessEvents:
        """The log of events."""

    def changed(self) -> None:
        """Note that a process, a watcher or a lease appeared or disappeared."""

    def added(self) -> None:
        """Note a new watcher."""

    def exited(self, pid: int) -> None:
        """Forget a process that has been reaped: its number may become another's."""

    def stopping(self, stage: int) -> None:
        """Publish the stop stage, by which a signalled worker waits for the frontends."""

    def quit_requested(self) -> None:
        """Stop, on ``circusctl quit``."""

    def gave_up(self, watcher: SupervisedWatcher, reason: str) -> None:
        """Report a failed watcher; stop if no frontend or worker is left."""

    def last_line(self, name: str) -> str:
        """Return the last line that the watcher wrote, shortened; "" without one."""

    def refusal(self, name: str) -> str:
        """Return the error with which a program refused to start; "" without one."""

    def has_served(self, watcher: SupervisedWatcher, pid: int) -> bool:
        """Whether a process registered a model, or is of a program that need not."""

    def is_draining(self, watcher: SupervisedWatcher, or_asleep: bool) -> bool:
        """Whether a watcher drains, as the statefile says, or sleeps."""

    async def conflict(self, watcher: SupervisedWatcher) -> str:
        """Assign free GPUs if it holds none; return "", or which others have them."""

    async def restart(self, watchers: Sequence[SupervisedWatcher], stop_first: bool) -> str:
        """Replace the processes of ``watchers``; return "" or what failed."""

    async def reload(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a changed graph; return the reply."""


class RollingArbiter(Arbiter):  # type: ignore[misc]
    """An arbiter whose restarts and reloads keep requests served."""

    deployment: DeploymentHooks
    _tasks: Tasks
    _command: asyncio.Task[Any] | None = None
    """The last command; circus runs one at a time."""

    def _run(self, command: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        self._command = self._tasks.spawn(command, name=name)
        return self._command

    async def answer(self) -> None:
        """Let a running command report to its client. All processes have ended, so it ends soon."""
        if self._command is not None and not self._command.done():
            await asyncio.wait([self._command], timeout=_ANSWER_S)
            self.ctrl.stream.flush()
            await asyncio.sleep(0)  # or the stream warns that it is closed

    @synchronized("arbiter_restart")  # type: ignore[untyped-decorator]
    def restart(self, inside_circusd: bool = False, watcher_iter_func: Any = None) -> Any:
        """Handle ``circusctl restart``: replace the processes of the chosen watchers, or of all.

        Without a name, circus would end the arbiter and expect circusd to start a new one.
        """
        chosen = (watcher_iter_func or self.iter_watchers)()
        return self._run(self.roll(chosen, False), "restart")

    @synchronized("arbiter_roll")  # type: ignore[untyped-decorator]
    def roll_named(self, watchers: Sequence[SupervisedWatcher]) -> Any:
        """Handle ``dynamo restart``."""
        return self._run(self.roll(watchers, False), "restart")

    @synchronized("arbiter_reload")  # type: ignore[untyped-decorator]
    def reload(self, graceful: bool = True, sequential: bool = False) -> Any:
        """Handle ``circusctl reload`` without a name."""
        return self._run(self._reload_all(graceful, sequential), "reload")

    async def _reload_all(self, graceful: bool, sequential: bool) -> dict[str, str] | None:
        if graceful:
            return await self.roll(self.iter_watchers(), sequential)
        await self._stop_watchers()
        await self._start_watchers()
        return None

    async def roll(
        self, watchers: Sequence[SupervisedWatcher], stop_first: bool
    ) -> dict[str, str] | None:
        """Replace the processes of ``watchers``; return the reply to a client that waits."""
        problem = await self.deployment.restart(watchers, stop_first)
        return error_reply(problem) if problem else None

    def reload_from_config(self, config_file: object = None, inside_circusd: bool = False) -> Any:
        """Handle ``circusctl reloadconfig``: read the graph again."""
        return self.reload_graph({})

    @synchronized("arbiter_reload_graph")  # type: ignore[untyped-decorator]
    def reload_graph(self, request: Mapping[str, Any]) -> Any:
        """Handle ``dynamo reload``: apply the graph that ``request`` names."""
        return self._run(self.deployment.reload(request), "reload the graph")


class SupervisingArbiter(RollingArbiter):
    """The arbiter of one deployment, on the running asyncio loop. It handles no signals."""

    def __init__(
        self,
        watchers: list[SupervisedWatcher],
        endpoint: str,
        pubsub_endpoint: str,
        *,
        tasks: Tasks,
        deployment: DeploymentHooks,
        announcer: Announcer,
        make_watcher: Callable[..., SupervisedWatcher],
    ) -> None:
        super().__init__(
            watchers,
            endpoint,
            pubsub_endpoint,
            check_delay=_CHECK_DELAY_S,
            loop=IOLoop.current(),
            proc_name="dynamo-arbiter",
        )
        # circus installs signal handlers in its constructor; Deployment has its own.
        self.ctrl.sys_hdl.stop()
        # Binds the control socket. A client of that socket runs commands as this user.
        self.ctrl.initialize = owner_only()(self.ctrl.initialize)
        self.killing = False
        self._tasks = tasks
        self.deployment = deployment
        self._announcer = announcer
        self._make_watcher = make_watcher
        self._alive: dict[int, tuple[SupervisedWatcher, SupervisedProcess]] = {}

    @property
    def stopping(self) -> bool:
        """Whether the arbiter no longer starts processes."""
        return bool(self._stopping)

    @property
    def pids(self) -> Collection[int]:
        """The processes that are not reaped yet."""
        return self._alive.keys()

    def alive(self) -> dict[str, list[SupervisedProcess]]:
        """Return the processes that are not reaped yet, by watcher."""
        by_watcher: dict[str, list[SupervisedProcess]] = {w.name: [] for w in self.watchers}
        for watcher, process in self._alive.values():
            by_watcher.setdefault(watcher.name, []).append(process)
        return by_watcher

    def start_nothing(self) -> None:
        """Stop starting processes: from now on an exited process is not replaced."""
        self._stopping = True

    async def end(self) -> None:
        """Stop all watchers, stage by stage.

        This is no circus command: circus runs one command at a time, and a running one would delay
        the stop.
        """
        self.start_nothing()
        await self._by_stage(self.watchers, SupervisedWatcher.end, self.deployment.stopping)
        # `circusctl rm --nostop` may have removed watchers whose processes still run.
        for watcher, process in list(self._alive.values()):
            await watcher.kill_process(process)
        await self.answer()

    def initialize(self) -> None:
        """Bind the event socket with mode 0700, like the control socket."""
        with owner_only():
            super().initialize()

    def close(self) -> None:
        """Close the control sockets if they were opened."""
        if self.evpub_socket is not None and self.ctrl.started:
            self.stop_controller_and_close_sockets()

    def kill_all(self) -> None:
        """Kill every process now."""
        self.killing = True
        for _, process in list(self._alive.values()):
            process.kill_session()

    def stop(self) -> None:
        """Handle ``circusctl quit``."""
        self.deployment.quit_requested()

    def add_watcher(self, name: str, cmd: str, **options: Any) -> Any:
        """Handle ``circusctl add``: add a supervised watcher. Its name also names its log file."""
        if not _WATCHER_NAME.fullmatch(name):
            raise MessageError(
                f"a watcher's name must be at most 200 letters, digits, '_', '-' or '.', "
                f"got {name[:200]!r}"
            )
        watchers = {w.name: w for w in self.watchers}
        if name in watchers:
            return super().add_watcher(name, cmd, **options)  # raises: the name is taken
        return self.adopt(self._make_watcher(name, cmd, **options))

    def adopt(self, watcher: SupervisedWatcher) -> SupervisedWatcher:
        """Add ``watcher``, not started yet."""
        watcher.initialize(self.evpub_socket, self.sockets, self)
        self.watchers.append(watcher)
        self._watchers_names[watcher.name.lower()] = watcher
        watcher.notify_event("add", {})
        self.deployment.added()
        return watcher

    async def remove(self, watchers: Sequence[SupervisedWatcher]) -> None:
        """Remove ``watchers``, and stop their processes stage by stage."""
        for watcher in [watcher for watcher in watchers if watcher in self.watchers]:
            # Out of the lists before the stop: the exit of a removed watcher's process is no death.
            self._watchers_names.pop(watcher.name.lower(), None)
            self.watchers.remove(watcher)
            watcher.notify_event("remove", {"time": time.time()})
        await self._by_stage(watchers, SupervisedWatcher.end)
        self.deployment.changed()

    def rm_watcher(self, name: str, nostop: bool = False) -> Any:
        """Handle ``circusctl rm``: remove a watcher; stop its processes unless ``nostop``."""
        removed = super().rm_watcher(name, nostop)
        self.deployment.changed()
        return removed

    async def _stop_watchers(
        self, close_output_streams: bool = False, watcher_iter_func: Any = None
    ) -> None:
        await self._by_stage((watcher_iter_func or self.iter_watchers)(), SupervisedWatcher._stop)

    async def _by_stage(
        self,
        watchers: Sequence[SupervisedWatcher],
        stop: Callable[[SupervisedWatcher], Awaitable[None]],
        on_stage: Callable[[int], None] = lambda stage: None,
    ) -> None:
        """Stop ``watchers`` stage by stage: frontends finish before workers stop."""
        for stage in sorted({watcher.stop_stage for watcher in watchers}):
            chosen = [watcher for watcher in watchers if watcher.stop_stage == stage]
            on_stage(stage)
            async with asyncio.TaskGroup() as group:
                for watcher in chosen:
                    group.create_task(_wait_for(stop(watcher)))

    async def _start_watchers(self, watcher_iter_func: Any = None) -> None:
        listed: Sequence[SupervisedWatcher] = (watcher_iter_func or self.iter_watchers)()
        chosen = [watcher for watcher in listed if watcher.autostart]
        for watcher in chosen:
            # For all before the first start: one that waits for its turn does not count as stopped.
            watcher.starting = watcher.is_stopped()
        for watcher in chosen:
            if not self._stopping:
                await watcher._start()

    def manage_watchers(self) -> Any:
        """Run circus's periodic check of the watchers, but not while a command changes them.

        Nor if there is nothing to do: circus refuses each command that comes during a check.
        """
        if self._exclusive_running_command is None and not self._restarting:
            self.reap_processes()
            if any(watcher.has_work() for watcher in self.watchers):
                return super().manage_watchers()
        return None

    def spawned(self, watcher: SupervisedWatcher, process: SupervisedProcess) -> None:
        """Record a started process of ``watcher``."""
        self._alive[process.pid] = (watcher, process)
        self.deployment.happened.started(watcher.name, process.pid)
        self.deployment.changed()

    def reap_processes(self) -> None:
        """Reap every child that has exited, and kill the rest of its group and descendants."""
        reaped = False
        while True:
            try:
                # WNOWAIT keeps the zombie, and with it the pid, until _reap has killed its group.
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if child is None:
                break
            reaped = True
            self._reap(child.si_pid)
        if reaped:
            self._end_orphans()

    def _reap(self, pid: int) -> None:
        watcher, process = self._alive.pop(pid, (None, None))
        if process is not None:
            process.kill_session()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if process is None or watcher is None:
            return  # an adopted orphan
        process.reaped(status)
        watcher.ended(process, status)
        self.deployment.exited(pid)

    def _end_orphans(self) -> None:
        """Kill adopted orphans of processes that exited; spare the daemons of living ones.

        An orphan belongs to a living process of its watcher if it started after that process.
        """
        since: dict[str, int] = {}
        for watcher, process in self._alive.values():
            since[watcher.name] = min(since.get(watcher.name, sys.maxsize), process.start_ticks)
        for child in children(self.pid):
            if child.pid in self._alive or child.state == "Z" or child.session in self._alive:
                continue
            name = environment(child.pid).get("DYN_WATCHER_NAME", "")
            if child.start_ticks < since.get(name, sys.maxsize):
                os.kill(child.pid, signal.SIGKILL)

    def respawn_in(self, delay_s: float, watcher: SupervisedWatcher) -> None:
        """Start the missing processes of ``watcher`` after ``delay_s``; needs no circus command."""
        asyncio.get_running_loop().call_later(delay_s, self._respawn, watcher)

    def _respawn(self, watcher: SupervisedWatcher) -> None:
        if not self._stopping:
            self._tasks.spawn(watcher.manage_processes(), name=f"respawn {watcher.name}")

    def died(self, watcher: SupervisedWatcher, process: SupervisedProcess, delay_s: float) -> None:
        """Report a process that exited by itself and is going to be restarted."""
        when = f"in {delay_s:g} s" if delay_s else "now"
        ended = describe_exit(process.exit_status)
        last = self.deployment.last_line(watcher.name)
        hint = "; the kernel does that when memory runs out, see: journalctl -k"
        self.deployment.happened.died(watcher.name, process.pid, f"{ended}; restarting it {when}")
        self._announcer.announce(
            f"{watcher.name} (pid {process.pid}) {ended}; restarting it {when}"
            + (hint if process.exit_status == -signal.SIGKILL else "")
            + (f"; last output: {last}" if last else ""),
            logging.WARNING,
        )

    def gave_up(self, watcher: SupervisedWatcher, reason: str) -> None:
        """Handle a watcher that is not restarted any more; the others continue."""
        self.deployment.gave_up(watcher, reason)
        self.deployment.changed()
        if not watcher.processes and not self._stopping and not watcher.rolling:
            self._tasks.spawn(watcher.end(), name=f"end {watcher.name}")

    def overdue(self, watcher: SupervisedWatcher, process: SupervisedProcess) -> None:
        """Report a process that did not exit in time, before it is killed."""
        if not self.killing:
            self._announcer.announce(
                f"{watcher.name} (pid {process.pid}) did not exit within "
                f"{watcher.graceful_timeout:g} s; killing it",
                logging.WARNING,
            )

    def drained(self, watcher: SupervisedWatcher, stopped: bool) -> bool:
        """Whether an exit, with any status, ends a scale-down; the last one ends its watcher.

        ``stopped``: by a command. One that drains is removed then, too; one that sleeps stays.
        """
        draining = self.deployment.is_draining(watcher, or_asleep=not stopped)
        if draining and not watcher.processes:
            self.deployment.happened.add("drained", watcher.name, "all its requests have ended")
            self._tasks.spawn(self.remove([watcher]), name=f"remove {watcher.name}")
        return draining


async def _wait_for(stop: Awaitable[None]) -> None:
    await stop  # circus returns tornado futures, which a task group does not accept
