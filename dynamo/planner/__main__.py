"""``python -m dynamo.planner``: scale the workers of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from dynamo.config.option import load
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.observability.logs import setup_logging
from dynamo.operations.steps.access import read_deployment
from dynamo.operations.steps.limits import ActionLimits
from dynamo.operations.steps.sleeping import RemoteEngines
from dynamo.planner.config_file import with_config_file
from dynamo.planner.live.control import PlannerControl
from dynamo.planner.live.local_connector import LocalConnector, gpu_capacity, open_connector
from dynamo.planner.live.loop import LoopObserver, ScalingLoop
from dynamo.planner.live.seasons import SEASONS_FILE, SeasonStore
from dynamo.planner.live.sources import LiveSources
from dynamo.planner.policies.base import Policy
from dynamo.planner.policies.factory import make_policy, resolve_mode
from dynamo.planner.reports.decisions import DECISIONS_FILE, DecisionLog, DecisionRecord
from dynamo.planner.reports.explain import StateFile, serve_control, serve_explain
from dynamo.planner.reports.metrics import PlannerMetrics
from dynamo.planner.reports.tensorboard import TensorboardLog, default_log_dir
from dynamo.planner.sharing.gpu_sharing import GpuCapacity, GpuSharing, OnDemandRegistry
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery.layout import read_file
from dynamo.runtime.process.os_process import StopSignals
from dynamo.runtime.process.paths import private_dir, run_dir, state_dir, state_path
from dynamo.serve.state.rundir import PLANNER_CONTROL
from dynamo.serve.state.statefile import FileLock, Statefile
from dynamo.status.planner_file import PLANNER_FILE

_REPAIR_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
log = logging.getLogger("dynamo.planner")
_DESCRIPTION = """Add and remove workers of a deployment of `dynamo serve` as their load changes.
In a graph, the service `Planner: {run: dynamo.planner}` has these options as its keys."""
_EPILOG = """examples:
  dynamo planner --namespace dynamo --no-operation
  dynamo planner --adjustment-interval 10 --max-gpu-budget 4
"""


def main(argv: Sequence[str] | None = None, prog: str = "python -m dynamo.planner") -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    groups = [PlannerSettings, RuntimeSettings, LogSettings]
    try:
        words = with_config_file(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{prog}: error: {error.message}", file=sys.stderr)
        return 2
    settings, runtime, logs = load(prog, _DESCRIPTION, groups, words, epilog=_EPILOG)
    setup_logging("planner", logs.level, logs.jsonl)
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
    settings, reason = resolve_mode(settings)
    if reason:
        log.info("--mode auto: %s", reason)
    # Before the runtime, which makes the directories of its namespace.
    document = read_deployment(Statefile(state_path(runtime_settings), runtime_settings.namespace))
    arbiter = document.arbiter
    control = PlannerControl(
        settings,
        state_path(runtime_settings) / runtime_settings.namespace / PLANNER_CONTROL,
        f"{arbiter.pid}/{arbiter.start_ticks}",
    )
    settings = control.settings
    runtime = DistributedRuntime(asyncio.get_running_loop(), runtime_settings)
    try:
        engines = RemoteEngines(runtime, runtime.system.shutdown_timeout_s)
        async with open_connector(runtime_settings, settings, engines) as connector:
            with _only_planner(settings, runtime_settings):
                await _run(runtime, connector, control)
    finally:
        await runtime.close()


class DecisionWriter(LoopObserver):
    """Writes each finished decision to the file of ``dynamo planner explain``."""

    def __init__(self, path: Path) -> None:
        private_dir(path.parent)
        self._log = DecisionLog(path)
        self._failed = False

    def finished(self, record: DecisionRecord) -> None:
        """See :class:`LoopObserver`."""
        try:
            self._log.append(record)
        except OSError as error:
            if not self._failed:
                log.error("cannot write %s: %s", self._log.path, error.strerror)
            self._failed = True


async def _run(
    runtime: DistributedRuntime, connector: LocalConnector, control: PlannerControl
) -> None:
    settings = control.settings
    namespace = runtime.settings.namespace
    statefile = Statefile(state_dir(runtime.settings), namespace)
    sources = LiveSources(runtime, statefile, settings)
    tensorboard = TensorboardLog(Path(settings.log_dir or default_log_dir()))
    state_file = StateFile(run_dir(runtime.settings) / PLANNER_FILE, settings)
    metrics = PlannerMetrics(runtime.metrics, namespace, settings)
    observers = (
        state_file,
        metrics,
        tensorboard,
        DecisionWriter(run_dir(runtime.settings) / DECISIONS_FILE),
    )
    demand = OnDemandRegistry(runtime, time.monotonic)

    def capacity() -> GpuCapacity:
        return gpu_capacity(statefile, ActionLimits.of_planner(control.settings))

    def policies(prefill: bool) -> Policy:
        return make_policy(control.settings, prefill)

    sharing = GpuSharing(settings, namespace, demand, capacity, time.monotonic)
    seasons = SeasonStore(run_dir(runtime.settings) / SEASONS_FILE, not settings.no_operation)
    loop = ScalingLoop(
        connector, sources, settings, policies, observers, sharing=sharing, seasons=seasons
    )
    demand.on_waiting = loop.wake
    control.listeners += [part.configure for part in (connector, sharing, metrics, loop)]
    control.on_pause = state_file.paused
    control.attach(loop)
    stop = asyncio.Event()
    try:
        with _signals(stop, loop):
            await runtime.start()
            await sources.start()
            await demand.start()
            await _repair(connector, settings)
            for serving in (serve_explain(runtime, loop), serve_control(runtime, control)):
                served = runtime.tasks.spawn(serving, name="endpoint")
                served.add_done_callback(lambda _: stop.set())  # the lease is revoked
            work = runtime.tasks.spawn(loop.run(), name="planner")
            work.add_done_callback(lambda _: stop.set())  # it failed
            await stop.wait()
            await loop.stop(runtime.system.shutdown_timeout_s)
            await work
            await _repair(connector, settings)  # what the cancelled changes have left
    finally:
        tensorboard.close()
        state_file.remove()


async def _repair(connector: LocalConnector, settings: PlannerSettings) -> None:
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
    lock = FileLock(run_dir(runtime) / "planner.lock")
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
