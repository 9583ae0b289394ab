"""``python -m dynamo.planner``: scale the workers of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from dynamo.config.option import load
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings
from dynamo.errors import ConfigError, DynamoError, StatefileError, WorkerUnavailable
from dynamo.observability.logs import setup_logging
from dynamo.operations.steps.access import read_deployment
from dynamo.operations.steps.limits import ActionLimits
from dynamo.operations.steps.sleeping import RemoteEngines
from dynamo.planner.capacity.season import SEASONS_FILE, SeasonStore
from dynamo.planner.config_file import with_config_file
from dynamo.planner.connector import Connector
from dynamo.planner.live.control import PlannerControl
from dynamo.planner.live.decisions import DECISIONS_FILE, DecisionLog, DecisionRecord
from dynamo.planner.live.gpu_sharing import GpuCapacity, GpuSharing, OnDemandRegistry
from dynamo.planner.live.local_connector import gpu_capacity, open_connector
from dynamo.planner.live.loop import LoopObserver, ScalingLoop
from dynamo.planner.live.sources import Frontends, LiveSources, frontends_of
from dynamo.planner.policies.base import Policy
from dynamo.planner.policies.factory import make_policy, resolve_targets
from dynamo.planner.reports.explain import StateFile, serve_control, serve_explain
from dynamo.planner.reports.metrics import PlannerMetrics, TensorboardLog, default_log_dir
from dynamo.protocols.control import PLANNER, PLANNER_PAUSE
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery.layout import read_file
from dynamo.runtime.distributed.runtime import import_extra
from dynamo.runtime.process.os_process import StopSignals
from dynamo.runtime.process.paths import private_dir, run_dir, state_path
from dynamo.serve.state.events import BoxEventLog
from dynamo.serve.state.rundir import PLANNER_CONTROL, PLANNER_FILE, PLANNER_LOCK
from dynamo.serve.state.statefile import FileLock, Statefile

_REPAIR_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
log = logging.getLogger("dynamo.planner")
_DESCRIPTION = """Add and remove workers of a deployment as their load changes.
In a graph, the service `Planner: {run: dynamo.planner}` has these options as its keys."""
_EPILOG = """examples:
  dynamo planner --namespace dynamo --no-operation
  dynamo planner --adjustment-interval 10 --max-gpu-budget 4
  dynamo planner --mode auto
  dynamo planner --environment kubernetes --graph-deployment my-graph
"""


def main(argv: Sequence[str] | None = None, prog: str = "python -m dynamo.planner") -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    groups = [PlannerSettings, RuntimeSettings, LogSettings]
    try:
        words, note = with_config_file(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{prog}: error: {error.message}", file=sys.stderr)
        return 2
    settings, runtime, logs = load(prog, _DESCRIPTION, groups, words, epilog=_EPILOG)
    setup_logging("planner", logs.level, logs.jsonl)
    if note:
        log.warning("%s", note)
    try:
        uvloop.run(run_planner(settings, runtime))
    except DynamoError as error:
        log.error("%s", error.message)
        return 1
    return 0


async def run_planner(settings: PlannerSettings, runtime_settings: RuntimeSettings) -> None:
    """Scale the deployment of the namespace until SIGTERM or SIGINT.

    Raises ConfigError without a deployment, or if another planner scales it.
    """
    settings, reason = resolve_targets(settings)
    if reason:
        level = logging.INFO if settings.mode == "auto" else logging.WARNING
        log.log(level, "--mode %s: %s", settings.mode, reason)
    scale = _scale_cluster if settings.environment == "kubernetes" else _scale_local
    await scale(settings, runtime_settings)


async def _scale_local(settings: PlannerSettings, runtime_settings: RuntimeSettings) -> None:
    """Scale what ``dynamo serve`` has started on this machine."""
    # Before the runtime, which makes the directories of its namespace.
    statefile = Statefile(state_path(runtime_settings), runtime_settings.namespace)
    arbiter = read_deployment(statefile).arbiter
    control = _control(settings, runtime_settings, f"{arbiter.pid}/{arbiter.start_ticks}")
    runtime = DistributedRuntime(asyncio.get_running_loop(), runtime_settings)
    try:
        engines = RemoteEngines(runtime, runtime.system.shutdown_timeout_s)
        demand = OnDemandRegistry(runtime, time.monotonic)

        def capacity() -> GpuCapacity:
            return gpu_capacity(statefile, ActionLimits.of_planner(control.settings))

        namespace = runtime_settings.namespace
        sharing = GpuSharing(control.settings, namespace, demand, capacity, time.monotonic)
        async with open_connector(runtime_settings, control.settings, engines) as connector:
            with _only_planner(control.settings, runtime_settings):
                backend = Backend(
                    connector,
                    frontends_of(statefile),
                    sharing,
                    demand,
                    connector.finish_interrupted,
                )
                await _run(runtime, backend, control)
    finally:
        await runtime.close()


async def _scale_cluster(settings: PlannerSettings, runtime_settings: RuntimeSettings) -> None:
    """Scale a DynamoGraphDeployment."""
    cluster = import_extra("kubernetes", "dynamo.planner.kubernetes.connector")
    runtime = DistributedRuntime(asyncio.get_running_loop(), runtime_settings)
    try:
        async with cluster.open_connector(runtime, settings) as connector:
            control = _control(settings, runtime_settings, connector.uid)
            await _run(runtime, Backend(connector, connector.frontends), control)
    finally:
        await runtime.close()


def _control(
    settings: PlannerSettings, runtime: RuntimeSettings, deployment: str
) -> PlannerControl:
    path = state_path(runtime) / runtime.namespace / PLANNER_CONTROL
    return PlannerControl(settings, path, deployment)


class Backend(NamedTuple):
    """The system that is scaled, and its frontends.

    Only on one machine are GPUs shared among models, and models started on demand.
    """

    connector: Connector
    frontends: Frontends
    sharing: GpuSharing | None = None
    demand: OnDemandRegistry | None = None
    finish_interrupted: Callable[[], Awaitable[list[str]]] | None = None


class DecisionWriter(LoopObserver):
    """Writes each finished decision to the file of ``dynamo planner explain``, and the changes of
    workers to the events of the deployment."""

    def __init__(self, path: Path, events: BoxEventLog) -> None:
        private_dir(path.parent)
        self._log = DecisionLog(path)
        self._events = events
        self._failed = False
        self._postponed: dict[str, tuple[tuple[str, int, int], ...]] = {}

    def finished(self, record: DecisionRecord) -> None:
        """See :class:`LoopObserver`."""
        if record.outcome != "no-operation":
            self._add_event(record)
        try:
            self._log.append(record)
        except OSError as error:
            if not self._failed:
                log.error("cannot write %s: %s", self._log.path, error.strerror)
            self._failed = True

    def _add_event(self, record: DecisionRecord) -> None:
        """Add an event of what was changed; once, if each decision tries the same in vain."""
        changed = [pool for pool in record.pools if pool.delta]
        steps = tuple((pool.pool, pool.before, pool.wanted) for pool in changed)
        postponed = self._postponed.pop(record.model, ())
        if record.outcome == "failed":
            self._postponed[record.model] = steps
        if changed and (record.outcome != "failed" or steps != postponed):
            text = "; ".join(pool.text(with_figures=False) for pool in changed)
            self._events.add("scaled", record.model, text, model=record.model, by="planner")


async def _run(runtime: DistributedRuntime, backend: Backend, control: PlannerControl) -> None:
    settings = control.settings
    directory = run_dir(runtime.settings)
    connector, sharing = backend.connector, backend.sharing
    sources = LiveSources(runtime, backend.frontends, settings)
    tensorboard = TensorboardLog(Path(settings.log_dir or default_log_dir()))
    state_file = StateFile(directory / PLANNER_FILE, settings)
    metrics = PlannerMetrics(runtime.metrics, runtime.settings.namespace, settings)
    observers = (
        state_file,
        metrics,
        tensorboard,
        DecisionWriter(directory / DECISIONS_FILE, BoxEventLog(directory)),
    )

    def policies(prefill: bool) -> Policy:
        return make_policy(control.settings, prefill)

    seasons = SeasonStore(directory / SEASONS_FILE, not settings.no_operation)
    loop = ScalingLoop(
        connector, sources, settings, policies, observers, sharing=sharing, seasons=seasons
    )
    configurable = (connector, metrics, loop, *(() if sharing is None else (sharing,)))
    control.listeners += [part.configure for part in configurable]
    control.on_pause = state_file.paused
    control.attach(loop)
    stop = asyncio.Event()
    try:
        with _signals(stop, loop):
            await runtime.start()
            # In a cluster, where no lock of a file can exclude a second planner.
            if sharing is None and not settings.no_operation:
                await _check_alone(runtime)
            await sources.start()
            if backend.demand is not None:
                backend.demand.on_waiting = loop.wake
                await backend.demand.start()
            for serving in (serve_explain(runtime, loop), serve_control(runtime, control)):
                served = runtime.tasks.spawn(_until_revoked(serving), name="endpoint")
                served.add_done_callback(lambda _: stop.set())  # the lease is revoked
            # The loop runs beside the repair: frontends hold requests of announced models only.
            with loop.repairing():
                work = runtime.tasks.spawn(loop.run(), name="planner")
                work.add_done_callback(lambda _: stop.set())  # it failed
                await _repair(connector, settings)
            if backend.finish_interrupted is not None and not settings.no_operation:
                finishing = _finish_interrupted(backend.finish_interrupted, loop, settings)
                runtime.tasks.spawn(finishing, name="interrupted commands")
            await stop.wait()
            await loop.stop(runtime.system.shutdown_timeout_s)
            await work
            await _repair(connector, settings)  # what the cancelled changes have left
    finally:
        tensorboard.close()
        state_file.remove()


async def _until_revoked(serving: Awaitable[object]) -> None:
    """Serve an endpoint until the lease is revoked, which may be while it is registered."""
    try:
        await serving
    except WorkerUnavailable as error:
        log.warning("%s: the planner stops", error.message)


async def _check_alone(runtime: DistributedRuntime) -> None:
    """Raise ConfigError if a planner of this namespace runs, on whatever machine."""
    path = f"{runtime.settings.namespace}.{PLANNER}.{PLANNER_PAUSE}"
    client = await runtime.endpoint(path).client()
    others = client.instance_ids()
    if others:
        raise ConfigError(
            f"planner {others[0]:x} already scales namespace {runtime.settings.namespace!r}; stop "
            "it first, or use --no-operation, which only observes"
        )


async def _repair(connector: Connector, settings: PlannerSettings) -> None:
    """Repair what a crash, or a change that was cancelled, has left."""
    if settings.no_operation:
        return
    try:
        async with asyncio.timeout(_REPAIR_S):
            await connector.reconcile()
    except TimeoutError:
        log.warning("not repaired in %g s; the next start goes on with it", _REPAIR_S)
    except DynamoError as error:
        log.warning("%s", error.message)


async def _finish_interrupted(
    finish: Callable[[], Awaitable[list[str]]], loop: ScalingLoop, settings: PlannerSettings
) -> None:
    """Finish the sleeps and wakes of commands that were interrupted, as long as ``loop`` runs."""
    while True:
        await asyncio.sleep(settings.metric_pulling_interval_s)
        if loop.paused:
            continue
        with contextlib.suppress(StatefileError):  # the loop reports it
            if await finish():
                loop.wake()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, planner: ScalingLoop) -> Iterator[None]:
    """Stop gracefully at SIGTERM or SIGINT, at once at a second SIGINT."""
    loop = asyncio.get_running_loop()
    requests = StopSignals()

    def on_signal(number: int) -> None:
        count = requests.received(number, loop.time())
        if count:
            log.info(
                "%s: %s", signal.Signals(number).name, "stopping" if count == 1 else "aborting"
            )
            stop.set()
        if count > 1:
            planner.abort()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _only_planner(settings: PlannerSettings, runtime: RuntimeSettings) -> Iterator[None]:
    """Hold the lock of the namespace's planner, except with --no-operation.

    The kernel frees it when the process dies. Raises ConfigError if another planner has it.
    """
    if settings.no_operation:
        yield
        return
    lock = FileLock(run_dir(runtime) / PLANNER_LOCK)
    if not lock.try_acquire():
        pid = (read_file(lock.path) or b"?").decode(errors="replace").strip()
        raise ConfigError(
            f"process {pid} already scales namespace {runtime.namespace!r}; stop it first, or use "
            "--no-operation, which only observes"
        )
    try:
        lock.note(f"{os.getpid()}\n")
        yield
    finally:
        lock.release(remove=True)


if __name__ == "__main__":
    sys.exit(main())
