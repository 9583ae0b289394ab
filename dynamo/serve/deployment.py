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

    Make it and use it on one event loop, which must start with the stop signals blocked. Raises
    StatefileError, ConfigError if the statefile cannot be written.
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
        self._run_directory = run_directory
        self._announcer = announcer
        self._stop = asyncio.Event()
        self._tasks = Tasks("deployment")
        self.happened = ProcessEvents(BoxEventLog(run_directory.path))
        logs = run_directory.logs
        logs.mkdir(mode=0o700, exist_ok=True)
        self._record = StatefileWriter(run_directory.statefile, plan, self._components)
        # Reserves the GPUs: the watchers below are made of the plan that this returns.
        self._plan = self._record.create()
        self._factory = WatcherFactory(self._plan, settings, logs, announcer)
        self._leases = Leases(run_directory.store, self.changed)
        self._arbiter = self._make_arbiter()
        self._rolling = RollingRestart(self._factory, self._record, self._registered, announcer)
        self._reload = GraphReload(
            self._arbiter,
            self._factory,
            self._rolling,
            announcer,
            source,
            make_plan,
            self._record,
            self._planned,
        )
        self._startup = self._make_startup()
        self._reporting: asyncio.Task[None] | None = None
        if source.file.name:
            remove_unfinished(source.file.resolve())

    async def run(self) -> int:
        """Serve; return the exit status: 0 after a requested stop, 1 if a service failed."""
        starts = counted(len(self._plan.specs), "process starts", "processes start")
        self.happened.add("start", self._plan.namespace, starts)
        try:
            self._handle_signals()
            await self._start()
            self._record.start(self._tasks)
            if self._reporting is None:  # else a reload came during the start
                self._report_startup()
            await self._stop.wait()
        finally:
            await self._end()
        return 1 if any(watcher.given_up for watcher in self._arbiter.watchers) else 0

    def _make_startup(self) -> StartupReport:
        return StartupReport(
            self._factory.plan,
            self._run_directory.logs,
            self._announcer,
            self.last_line,
            self._arbiter,
            self._leases,
        )

    def _report_startup(self) -> None:
        self._reporting = self._tasks.spawn(self._startup.run(), name="readiness")

    async def _start(self) -> None:
        try:
            await self._arbiter.start()
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self._plan.endpoint}: {error}") from None

    def changed(self) -> None:
        """See :class:`DeploymentHooks`."""
        # Before served() reads them: the kernel may give the number of an ended process away.
        self._leases.keep(self._arbiter.pids)
        self.happened.served(self._leases)
        self._record.changed()
        self._startup.changed()
        self._rolling.changed()

    def added(self) -> None:
        """See :class:`DeploymentHooks`."""
        self.happened.forget(self._factory.forget(self._arbiter.alive()))
        self.changed()

    async def restart(self, watchers: Sequence[SupervisedWatcher], stop_first: bool) -> str:
        """See :class:`DeploymentHooks`."""
        return await self._rolling.restart(watchers, stop_first)

    async def reload(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`DeploymentHooks`."""
        return await self._reload.run(request)

    def _planned(self, plan: DeploymentPlan) -> None:
        """Apply the ``plan`` of a changed graph to what follows the plan."""
        self._factory.plan = plan
        self._record.plan(plan)
        if self._reporting is not None:
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
        alive = self._arbiter.alive()
        watchers = {watcher.name: watcher for watcher in self._arbiter.watchers}
        commands = {name: tuple(watcher.command_words()) for name, watcher in watchers.items()}
        return [
            RecordedComponent(
                replace(
                    self._factory.specs[name],
                    # `circusctl set` may have changed the command since.
                    argv=commands.get(name, self._factory.specs[name].argv),
                ),
                [RecordedProcess(p.pid, p.start_ticks, dict(p.gpus)) for p in processes],
                next((leases[p.pid] for p in processes if p.pid in leases), None),
                watchers[name].supervision if name in watchers else Supervision(STOPPED),
            )
            for name, processes in alive.items()
        ]

    def is_draining(self, watcher: SupervisedWatcher, or_asleep: bool) -> bool:
        """See :class:`DeploymentHooks`."""
        return self._record.is_draining(watcher.name, or_asleep)

    async def conflict(self, watcher: SupervisedWatcher) -> str:
        """See :class:`DeploymentHooks`."""
        spec = self._factory.specs[watcher.name]
        if self._record.holds(spec):
            return ""  # at once: a client that reads the status now must see that it starts
        try:
            claimed = await self._record.claim(spec)
        except (ConfigError, StatefileError, Unavailable) as error:
            return error.message
        if claimed.gpus != spec.gpus:
            gpus = ", ".join(claimed.gpus)
            self._announcer.announce(f"{watcher.name}: starting it on GPU {gpus}; others have its")
            self._factory.configure(watcher, claimed)
        return ""

    def has_served(self, watcher: SupervisedWatcher, pid: int) -> bool:
        """See :class:`DeploymentHooks`."""
        return not self._factory.specs[watcher.name].registers_model or pid in self._leases.served

    def exited(self, pid: int) -> None:
        """See :class:`DeploymentHooks`."""
        self.happened.exited(pid)
        self.changed()

    def last_line(self, name: str) -> str:
        """See :class:`DeploymentHooks`."""
        return self._factory.output(name).last_line()

    def refusal(self, name: str) -> str:
        """See :class:`DeploymentHooks`."""
        return self._factory.output(name).refusal()

    def quit_requested(self) -> None:
        """See :class:`DeploymentHooks`."""
        self._stop.set()

    def stopping(self, stage: int) -> None:
        """See :class:`DeploymentHooks`."""
        write_stop_stage(self._run_directory.path, workers=stage > 0)

    def gave_up(self, watcher: SupervisedWatcher, reason: str) -> None:
        """See :class:`DeploymentHooks`."""
        tail = "\n".join(self._factory.output(watcher.name).tail())
        what = watcher.name if watcher.given_up else f"a process of {watcher.name}"
        lines = [f"gave up {what}: {reason}"]
        self.happened.add("failed", watcher.name, f"gave up: {reason}")
        if tail:
            lines += [f"last output (all: {self._run_directory.logs / watcher.name}.log):", tail]
        lines.append(f"command: {shlex.join(watcher.command_words())}")
        self._announcer.announce("\n  ".join("\n".join(lines).splitlines()), logging.ERROR)
        # Its other processes live: the watcher goes on with these.
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
        # Blocked until now: circus's constructor replaces the signal handlers and restores them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS | {signal.SIGCHLD, KILL_NOW})

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
        return SupervisingArbiter(
            watchers,
            self._plan.endpoint,
            self._plan.pubsub_endpoint,
            tasks=self._tasks,
            deployment=self,
            announcer=self._announcer,
            make_watcher=self._factory.make_added,
        )

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
