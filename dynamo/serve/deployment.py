"""One deployment from start to stop; runs in the process of the arbiter."""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import zmq

from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, StatefileError, Unavailable
from dynamo.observability.logs import counted
from dynamo.runtime.process.paths import remove_unfinished
from dynamo.runtime.process.stop_order import write_stop_stage
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.graph.watchers import DeploymentPlan, GraphSource, MakePlan
from dynamo.serve.reload import GraphReload
from dynamo.serve.startup import StartupReport
from dynamo.serve.state.document import STOPPED, RecordedProcess, Supervision
from dynamo.serve.state.events import BoxEventLog, ProcessEvents
from dynamo.serve.state.process_table import end_descendants
from dynamo.serve.state.record import RecordedComponent, StatefileWriter
from dynamo.serve.state.registered import Leases
from dynamo.serve.state.rundir import RunDirectory
from dynamo.serve.supervision.arbiter import SupervisingArbiter
from dynamo.serve.supervision.guard import KILL_NOW, STOP_SIGNALS
from dynamo.serve.supervision.output import Announcer
from dynamo.serve.supervision.rolling import LEASE, MODEL, UNKNOWN, RollingRestart
from dynamo.serve.supervision.supervised import SupervisedWatcher
from dynamo.serve.supervision.watcher_factory import WatcherFactory

_SWEEP_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


class Deployment:
    """Runs a plan until a stop is requested, or until no frontend or no worker is left.

    Every method runs on the loop of :meth:`run`, which must start with the stop signals blocked.
    """

    def __init__(
        self,
        plan: DeploymentPlan,
        settings: ServeSettings,
        run_directory: RunDirectory,
        announcer: Announcer,
        source: GraphSource,
        make_plan: MakePlan,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._run_directory = run_directory
        self._announcer = announcer
        self._source = source
        self._make_plan = make_plan
        self._stop = asyncio.Event()
        self.happened = ProcessEvents(BoxEventLog(run_directory.path))

    async def run(self) -> int:
        """Serve; return the exit status: 0 after a requested stop, 1 if a service failed."""
        self._tasks = Tasks("deployment")
        self._handle_signals()
        logs = self._run_directory.logs
        logs.mkdir(mode=0o700, exist_ok=True)
        self._record = StatefileWriter(self._run_directory.statefile, self._plan, self._components)
        self._plan = self._record.create()
        self._factory = WatcherFactory(self._plan, self._settings, logs, self._announcer)
        self._arbiter = self._make_arbiter()
        self._rolling = RollingRestart(
            self._factory, self._record, self._registered, self._announcer
        )
        if self._source.file.name:
            remove_unfinished(self._source.file.resolve())
        self._leases = Leases(self._run_directory.store, self.changed)
        self._reload = self._make_reload()
        self._startup = self._make_startup()
        starts = counted(len(self._plan.specs), "process starts", "processes start")
        self.happened.add("start", self._plan.namespace, starts)
        try:
            await self._start()
            self._record.start(self._tasks)
            self._report_startup()
            await self._stop.wait()
        finally:
            await self._end()
        return 1 if any(watcher.given_up for watcher in self._arbiter.watchers) else 0

    def _make_startup(self) -> StartupReport:
        logs = self._run_directory.logs
        return StartupReport(self._factory.plan, logs, self._announcer, self.last_line)

    def _report_startup(self) -> None:
        report = self._startup.run(self._arbiter, self._leases)
        self._reporting = self._tasks.spawn(report, name="readiness")

    def _make_reload(self) -> GraphReload:
        return GraphReload(
            self._arbiter,
            self._factory,
            self._rolling,
            self._announcer,
            self._source,
            self._make_plan,
            self._record,
            self._planned,
        )

    async def _start(self) -> None:
        try:
            await self._arbiter.start()
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self._plan.endpoint}: {error}") from None

    def changed(self) -> None:
        """Write the statefile again: a process, a watcher or a lease appeared or disappeared."""
        self._leases.keep(self._arbiter.pids)
        self.happened.served(self._leases)
        self._record.changed()
        self._startup.changed()
        self._rolling.changed()

    def added(self) -> None:
        """Handle a new watcher; forget those that were removed long ago."""
        self.happened.forget(self._factory.forget(self._arbiter.alive()))
        self.changed()

    async def restart(self, watchers: Sequence[SupervisedWatcher], stop_first: bool) -> str:
        """Replace the processes of ``watchers``; return "" or what failed."""
        return await self._rolling.restart(watchers, stop_first)

    async def reload(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a changed graph; return the reply."""
        return await self._reload.run(request)

    def _planned(self, plan: DeploymentPlan) -> None:
        """Apply the ``plan`` of a changed graph to what follows the plan."""
        self._factory.plan = plan
        self._record.plan(plan)
        self._reporting.cancel()
        self._startup = self._make_startup()
        self._report_startup()

    def _registered(self, pid: int) -> int:
        """Return what the process ``pid`` has registered: UNKNOWN, LEASE or MODEL."""
        if pid in self._leases.with_model():
            return MODEL
        return LEASE if pid in self._leases.by_session() else UNKNOWN

    def _components(self) -> list[RecordedComponent]:
        leases = self._leases.by_session()
        held = self._arbiter.alive()
        watchers = {watcher.name: watcher for watcher in self._arbiter.watchers}
        commands = {name: tuple(watcher.command_words()) for name, watcher in watchers.items()}
        return [
            RecordedComponent(
                replace(
                    self._factory.specs[name],
                    argv=commands.get(name, self._factory.specs[name].argv),
                ),
                [RecordedProcess(p.pid, p.start_ticks, dict(p.gpus)) for p in processes],
                next((leases[p.pid] for p in processes if p.pid in leases), None),
                watchers[name].supervision if name in watchers else Supervision(STOPPED),
            )
            for name, processes in held.items()
        ]

    def is_draining(self, watcher: SupervisedWatcher, or_asleep: bool) -> bool:
        """Whether this watcher is marked as draining in the statefile (scale-down)."""
        return self._record.is_draining(watcher.name, or_asleep)

    async def conflict(self, watcher: SupervisedWatcher) -> str:
        """Assign free GPUs if it holds none; return "", or which others have them."""
        spec = self._factory.specs[watcher.name]
        if self._record.holds(spec):
            return ""  # at once: a client that reads the status now must see that it starts
        try:
            found = await self._record.claim(spec)
        except (ConfigError, StatefileError, Unavailable) as error:
            return error.message
        if found.gpus != spec.gpus:
            gpus = ", ".join(found.gpus)
            self._announcer.announce(f"{watcher.name}: starting it on GPU {gpus}; others have its")
            self._factory.configure(watcher, found)
        return ""

    def has_served(self, watcher: SupervisedWatcher, pid: int) -> bool:
        """Whether the process ``pid`` registered a model, or is of a program that need not."""
        return not self._factory.specs[watcher.name].registers_model or pid in self._leases.served

    def exited(self, pid: int) -> None:
        """Forget a process that has been reaped: its number may become another's."""
        self.happened.exited(pid)
        self.changed()

    def last_line(self, name: str) -> str:
        """Return the last line that the watcher ``name`` wrote, shortened; "" without one."""
        return self._factory.output(name).last_line()

    def refusal(self, name: str) -> str:
        """Return the error with which the program of ``name`` refused to start; "" without one."""
        return self._factory.output(name).refusal()

    def quit_requested(self) -> None:
        """Stop, on ``circusctl quit``."""
        self._stop.set()

    def stopping(self, stage: int) -> None:
        """Publish the stop stage, by which a signalled worker waits for the frontends."""
        write_stop_stage(self._run_directory.path, workers=stage > 0)

    def gave_up(self, watcher: SupervisedWatcher, reason: str) -> None:
        """Report a failed watcher with its last output; stop if no frontend or worker is left."""
        tail = "\n".join(self._factory.output(watcher.name).tail())
        what = watcher.name if watcher.given_up else f"a process of {watcher.name}"
        lines = [f"gave up {what}: {reason}"]
        self.happened.add("failed", watcher.name, f"gave up: {reason}")
        if tail:
            lines += [f"last output (all: {self._run_directory.logs / watcher.name}.log):", tail]
        lines.append(f"command: {shlex.join(watcher.command_words())}")
        self._announcer.announce("\n  ".join("\n".join(lines).splitlines()), logging.ERROR)
        if not watcher.given_up:
            self._announcer.announce(
                f"{watcher.name}: {watcher.numprocesses} still running", logging.WARNING
            )
        elif watcher.rolling:
            self._announcer.announce(f"{watcher.name}: starting its last command again")
        elif dead := self._reason_to_stop():
            self._announcer.announce(f"{dead}; stopping", logging.ERROR)
            self._stop.set()
        else:
            self._announcer.announce("the other services continue", logging.WARNING)

    def _reason_to_stop(self) -> str:
        """Return why no request can be answered any more, else an empty text."""
        for frontends, what in ((True, "no frontend is left"), (False, "no worker is left")):
            watchers = self._arbiter.watchers
            group = [w for w in watchers if self._factory.is_frontend(w.name) is frontends]
            if group and all(watcher.given_up for watcher in group):
                return what
        return ""

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, self._on_stop_signal)
        loop.add_signal_handler(KILL_NOW, self._on_kill_now)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)

    def _on_stop_signal(self) -> None:
        # Not counted: a signal to the whole tree arrives twice, directly and through the guard.
        self._arbiter.start_nothing()
        # First of all: workers that got the signal too read the stage, and wait for theirs.
        if not self._stop.is_set():
            self.stopping(min((w.stop_stage for w in self._arbiter.watchers), default=1))
        self._stop.set()

    def _on_kill_now(self) -> None:
        self._announcer.announce("killing the remaining processes", logging.WARNING)
        self._arbiter.kill_all()
        self._stop.set()

    def _on_child(self) -> None:
        self._arbiter.reap_processes()

    def _make_arbiter(self) -> SupervisingArbiter:
        watchers = [self._factory.make(spec) for spec in self._plan.specs]
        # circus's constructor replaces the signal handlers and restores them. Ours are installed
        # before it, and the signals stay blocked until the arbiter exists to act on them.
        arbiter = SupervisingArbiter(
            watchers,
            self._plan.endpoint,
            self._plan.pubsub_endpoint,
            tasks=self._tasks,
            events=self,
            announcer=self._announcer,
            make_watcher=self._factory.make_added,
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS | {signal.SIGCHLD, KILL_NOW})
        return arbiter

    async def _end(self) -> None:
        if not self._arbiter.killing:
            self._announcer.announce("stopping; requests in flight may finish (Ctrl-C again: kill)")
        self.happened.add("stop", self._plan.namespace, "the deployment stops")
        # The order matters: files are removed only after every process that uses them has exited.
        await self._arbiter.end()
        self._arbiter.close()
        await self._tasks.close()
        await in_file_thread(end_descendants, _SWEEP_TIMEOUT_S)
        self._factory.close()
        self._leases.close()
        await self._record.close()  # a restart in progress may still write the end of its part
        self._run_directory.clear()
        self._announcer.announce("stopped")
