"""Starts the programs of a deployment as simulated processes, and connects them to the machine.

:func:`connect` replaces, in the modules of ``dynamo``, what has no simulated system call below it:
ZeroMQ, the start of a process, the files of /proc, log handlers.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import decisions
import event_threads
import fake_os
import leftovers
import planes
import seams
import shell
import threads
from attempts import received
from fake_os import Launched
from logprobs import with_logprobs
from lower_tiers import recovered
from machine import Process
from ordered import order_sets
from process_end import ProcessKilled
from records import written

__all__ = ["connect", "program"]

HOST = "simulated-boot/pid:[1]"
_LEVEL = logging.INFO
_LEFT_OPEN = 12
"""inotify instances, of which the kernel lets a user have few."""
_OPEN_TRIES, _OPEN_RETRY_US = 1200, 50_000


def connect() -> None:
    """Import the programs and connect them. After :func:`fake_os.install`."""
    import uvloop
    import zmq
    import zmq.asyncio

    uvloop.run = fake_os.run_main
    zmq.Context = planes.BlockingContext  # type: ignore[misc, assignment]
    zmq.asyncio.Context = planes.SimulatedContext  # type: ignore[misc, assignment]
    _connect_proc()
    _connect_inotify()
    _connect_figures()
    import circus.controller

    from dynamo.runtime.events import channels

    circus.controller.zmqstream = SimpleNamespace(ZMQStream=planes.SimulatedStream)
    _patch(
        channels,
        ZmqPublisher=planes.SimulatedPublisher,
        ZmqSubscriber=planes.simulated_subscriber(),
    )
    event_threads.connect_event_threads()
    importlib.import_module("dynamo.cli.state")  # here once, not in the operators of each run
    _connect_supervision()
    _connect_programs()
    _compute_once()
    seams.connect_shells()
    shell.connect_streams()
    root = logging.getLogger()
    root.handlers[:] = [HistoryHandler()]
    root.setLevel(_LEVEL)
    for noisy in ("circus", "tornado", "asyncio", "dynamo.router.explanations"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _patch(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


class HistoryHandler(logging.Handler):
    """Appends log records to the history of the machine."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line; an error with its traceback is a failure."""
        text = f"{record.levelname} {record.name}: {record.getMessage()}"
        machine = fake_os.machine()
        machine.note(text)
        seams.log_line(machine.current, record)
        if record.levelno >= logging.WARNING:
            machine.on_warning(text)
        if record.exc_info and record.exc_info[1] is not None:
            for line in logging.Formatter().formatException(record.exc_info).splitlines():
                machine.note("    " + line)
            error = record.exc_info[1]
            no_space = "No space left on device" in str(error)  # it exits, and is started again
            refused = no_space and machine.is_disk_full()
            ended = (asyncio.CancelledError, GeneratorExit, ProcessKilled)
            if not refused and not isinstance(error, ended):
                machine.failures.append(f"traceback in a log: {text}: {error!r}")


def _connect_proc() -> None:
    from dynamo.runtime.process import os_process

    os_process.host_id = lambda: HOST
    os_process.start_ticks = lambda pid: p.start_ticks if (p := _process(pid)) else None
    from dynamo.serve.state import process_table

    def stat(pid: int) -> process_table.ProcessStat | None:
        process = _process(pid)
        if process is None:
            return None
        parent = process.parent.pid if process.parent is not None else 1
        return process_table.ProcessStat(pid, process.state, parent, pid, pid, process.start_ticks)

    process_table.stat = stat
    process_table.snapshot = lambda: [
        one for pid in list(fake_os.machine().processes) if (one := stat(pid)) is not None
    ]
    process_table.environment = lambda pid: dict(p.env) if (p := _process(pid)) else {}


def _connect_inotify() -> None:
    """Close the instances of a process that ends, and wait for one where others have them all."""
    from dynamo.runtime.process import inotify

    opened = inotify.InotifyInstance.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for _ in range(_OPEN_TRIES):  # the limit counts all processes of a user, other tests too
            try:
                opened(self, *args, **kwargs)
                break
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
            while left_open:
                closed(left_open.pop())
            libc.usleep(_OPEN_RETRY_US)  # real time: nothing of the run depends on it
        else:
            opened(self, *args, **kwargs)
        machine = fake_os.machine()
        machine.files.pop(self.fd, None)  # the number of a file that was closed
        if machine.current is not None:
            machine.current.held.append(self)
            holders[id(self)] = machine.current

    def close(self: Any) -> None:
        holder = holders.pop(id(self), None)
        if holder is not None and self in holder.held:
            holder.held.remove(self)
        if len(left_open) < _LEFT_OPEN:
            left_open.append(self)  # close(2) waits 8 ms, the end of the run does so beside others
        else:
            closed(self)

    libc = ctypes.CDLL(None)
    holders: dict[int, Process] = {}
    left_open: list[Any] = []
    closed = inotify.InotifyInstance.close
    inotify.InotifyInstance.__init__ = init  # type: ignore[method-assign]
    inotify.InotifyInstance.close = close  # type: ignore[method-assign]


def _connect_figures() -> None:
    """Give figures of the machine that decisions depend on, and none of its ports."""
    from dynamo.planner.live import local_connector

    ram = SimpleNamespace(total=64 << 30, available=48 << 30)
    _patch(
        local_connector,
        psutil=SimpleNamespace(virtual_memory=lambda: ram),
        memory_of=lambda pids: sum(_process(pid) is not None for pid in pids) << 30,
    )


def _process(pid: int) -> Process | None:
    return fake_os.machine().processes.get(pid)


# -- supervision


class NoOutput:
    """The output of a process goes to the history, not through a pipe."""

    def close(self) -> None:
        """Nothing is open."""


def _connect_supervision() -> None:
    from network import Network

    from dynamo.serve import deployment
    from dynamo.serve.supervision import supervised_process

    def spawn(self: Any) -> None:
        machine = fake_os.machine()
        self.started = time.time()
        self.exited = asyncio.Event()
        made = machine.spawn(
            self.watcher.name, dict(self.env), program(self.format_args()), machine.current
        )
        self.output = seams.output_of(made, self.watcher.on_line) or NoOutput()
        self._popen = SimpleNamespace(pid=made.pid, returncode=None)
        self._worker = SimpleNamespace(pid=made.pid)
        self.start_ticks = made.start_ticks

    def is_listening(self: Any, port: int) -> bool:
        listeners = Network.of(fake_os.machine()).listeners.values()
        return any(
            one.loop.process.pid == self.pid and one.address[1] == port
            for one in listeners
            if isinstance(one.address, tuple)
        )

    supervised_process.SupervisedProcess.spawn = spawn  # type: ignore[method-assign]
    supervised_process.SupervisedProcess.is_listening = is_listening  # type: ignore[method-assign]
    supervised_process._bind = lambda address: None

    def end_descendants(timeout_s: float, *rest: Any) -> list[int]:
        machine = fake_os.machine()
        assert machine.current is not None
        for child in list(machine.current.children.values()):
            if child.alive:
                machine.kill(child.pid, signal.SIGKILL)
            machine.reap(machine.current, child.pid)
        return []

    _patch(deployment, end_descendants=end_descendants)


def _connect_programs() -> None:
    frontend = importlib.import_module("dynamo.frontend.__main__")
    mocker = importlib.import_module("dynamo.mocker.__main__")
    planner = importlib.import_module("dynamo.planner.__main__")
    attach = importlib.import_module("dynamo.attach.__main__")
    attach.allow_open_files = lambda *args: None  # type: ignore[attr-defined]
    for module in (frontend, mocker, planner, attach):
        module.setup_logging = seams.own_format  # type: ignore[attr-defined]
    frontend.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    frontend.freeze_heap = lambda: None  # type: ignore[attr-defined]
    frontend.end_without_threads = lambda *args: None  # type: ignore[attr-defined]
    from dynamo.planner.live.loop import LoopObserver

    class NoTensorboard(LoopObserver):
        def __init__(self, path: Any) -> None:
            pass

        def close(self) -> None:
            pass

    planner.TensorboardLog = NoTensorboard  # type: ignore[attr-defined]
    from dynamo.frontend.requests.engine_request import EngineRequest
    from dynamo.mocker import engine, worker
    from dynamo.router.caches import indexer
    from dynamo.router.load.active_load import ActiveLoad
    from dynamo.router.modes.kv import KvPicker
    from dynamo.runtime.distributed import runtime as distributed
    from dynamo.runtime.endpoints import health
    from dynamo.runtime.requests.admission import AdmissionQueue
    from dynamo.serve.state.statefile import Statefile

    _patch(AdmissionQueue, submit=_watched(AdmissionQueue.submit))
    _patch(engine.Responder, __init__=with_logprobs(engine.Responder.__init__))
    _patch(engine.EngineRank, _report=_reported(engine.EngineRank._report))
    _patch(ActiveLoad, free=_counted(ActiveLoad.free))
    _patch(EngineRequest, release=_received(EngineRequest.release))
    _patch(KvPicker, remove_worker=_left(KvPicker.remove_worker))
    _patch(Statefile, _write=written(Statefile._write))
    _patch(indexer.Indexer, recovery_steps=recovered(indexer.Indexer.recovery_steps))
    _patch(worker.MockerService, handle=received(worker.MockerService.handle))
    _watch_routers()
    order_sets()
    _patch(worker.SimulatedEngine, __setattr__=_set_and_check)
    engine.TimerFd = Timer  # type: ignore[misc, assignment]
    for kind in (
        health.Canary,
        worker.MockerWorker,
        worker.SimulatedEngine,
        indexer.Indexer,
        distributed.DistributedRuntime,
        *leftovers.classes(),
    ):
        _keep(kind)


def _watch_routers() -> None:
    """Check each choice of a router, and that none of its requests waits without a reason."""
    from dynamo.router.eligibility.eligibility_filter import BusyWatch
    from dynamo.router.load.active_load import ActiveLoad
    from dynamo.router.modes.kv import KvPicker
    from dynamo.router.modes.picker import InflightPicker
    from dynamo.router.queue.request_queue import RequestQueue
    from dynamo.router.queue.waiting import WaitingQueue
    from dynamo.router.worker_pool import WorkerPool

    for kind in (KvPicker, InflightPicker):
        pick, free = vars(kind)["pick"], vars(kind)["free"]
        _patch(kind, pick=decisions.picked(pick), free=decisions.freed(free))
    _patch(BusyWatch, report=decisions.reported(BusyWatch.report))
    _patch(RequestQueue, submit=decisions.submitted(RequestQueue.submit))
    _patch(RequestQueue, _route=decisions.dequeued(RequestQueue._route))
    for owner, name in (
        (ActiveLoad, "free"),
        (ActiveLoad, "mark_prefill_complete"),
        (WaitingQueue, "remove"),
        (BusyWatch, "recovered"),
        (WorkerPool, "_update_eligible"),
    ):
        _patch(owner, **{name: decisions.woken(vars(owner)[name])})


def _counted(free: Any) -> Any:
    """Add up the output tokens that a router counts for each request, over its migrations."""

    def freed(self: Any, request_id: str, output_tokens: int = 0) -> Any:
        reservation = free(self, request_id, output_tokens)
        machine = fake_os.machine()
        process = machine.current
        assert process is not None
        own = process.program == "dynamo.frontend"  # not a router in a worker
        if reservation is not None and not reservation.remote and own:
            before = machine.routed_tokens.get(request_id, 0)
            machine.routed_tokens[request_id] = before + reservation.output_tokens
            shown = machine.routed[process.pid]
            shown["requests_total"] += 1
            shown["output_sequence_tokens_sum"] += reservation.output_tokens
            if reservation.first_token_at_s is not None:
                gaps = max(reservation.output_tokens - 1, 0)
                shown["time_to_first_token_seconds_count"] += 1
                shown["inter_token_latency_seconds_count"] += gaps
        return reservation

    return freed


def _left(remove_worker: Any) -> Any:
    """Note the requests of a worker that a router removes: it counts no tokens of them later."""

    def removed(self: Any, worker_id: int) -> None:
        slots = set(self.worker_pool.slots_of(worker_id))
        fake_os.machine().uncounted |= set(self.active.booked_on(slots))
        remove_worker(self, worker_id)

    return removed


def _received(release: Any) -> Any:
    """Note the output tokens that workers sent for each request of an engine."""

    def released(self: Any) -> None:
        if not self.released:
            known = fake_os.machine().received_tokens
            tokens, migrations = known.get(self.id, (0, 0))
            known[self.id] = tokens + self.tokens, migrations + self.retries.migrations
            fake_os.machine().attempts.released_s[self.id] = fake_os.machine().now_s
        release(self)

    return released


def _watched(submit: Any) -> Any:
    """Record rejections, and check that the engine never has more requests than its limit."""
    from dynamo.errors import WorkerAtCapacity

    def submitted(self: Any, start: Callable[[], None]) -> None:
        machine = fake_os.machine()
        process = machine.current
        assert process is not None
        ranks = [rank for part in process.parts for rank in getattr(part, "ranks", ())]
        load = sum(rank.load for rank in ranks)
        if load > self._limit:
            machine.failures.append(
                f"{process} computes {load} requests, its limit is {self._limit}"
            )
        try:
            submit(self, start)
        except WorkerAtCapacity:
            machine.rejections.append((machine.now_s, process))
            raise

    return submitted


def _reported(report: Any) -> Any:
    """Record what the ranks of workers report."""

    def reported(self: Any, now: float) -> None:
        report(self, now)
        machine = fake_os.machine()
        if machine.records_load and machine.current is not None:
            machine.reports.append((machine.now_s, machine.current, self.pool.used))

    return reported


def _set_and_check(engine: Any, name: str, value: Any) -> None:
    object.__setattr__(engine, name, value)
    if name == "_asleep":
        machine = fake_os.machine()
        load = sum(rank.load for rank in engine._ranks)
        if value and load:
            machine.failures.append(f"{machine.current} sleeps with {load} requests")
        machine.on_gpu_use()
        if machine.current is not None:
            machine.sleeps.append((machine.now_s, machine.current, value))


class Timer:
    """The engine's timerfd(2), on the loop."""

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    async def sleep_until(self, due_s: float) -> None:
        """Sleep until ``time.monotonic()`` reaches ``due_s``."""
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def _keep(kind: type) -> None:
    """Let the checks find the objects of this class in their process."""
    made = vars(kind)["__init__"]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        current = fake_os.machine().current
        if current is not None:
            current.parts.append(self)

    _patch(kind, __init__=init)


def _compute_once() -> None:
    """Keep what every process of every run computes from the same input."""
    from dynamo.config import option
    from dynamo.frontend.prompt import preprocessor
    from dynamo.frontend.ui import source
    from dynamo.llm import model_source
    from dynamo.llm.model_directory import ModelDirectory

    _patch(ModelDirectory, require_worker_files=cache(ModelDirectory.require_worker_files))
    for owner, name in (
        (model_source, "ModelDirectory"),
        (option, "_parser"),
        (preprocessor, "ModelDirectory"),
        (preprocessor, "load_template"),
        (preprocessor, "load_tokenizer"),
    ):
        _patch(owner, **{name: _remembered(getattr(owner, name))})
    _patch(source, _UNSEEN_S=30.0, _IDLE_S=30.0)  # no page is open


def _remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    def remembered(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, kwargs))
        if key not in known:
            known[key] = call(*args, **kwargs)
        return known[key]

    return remembered


# -- programs


def program(words: Sequence[str]) -> Callable[[Process], Coroutine[Any, Any, int]]:
    """Return the main coroutine of ``python -m module args``."""
    at = list(words).index("-m")
    name, arguments = words[at + 1], list(words[at + 2 :])

    async def main(process: Process) -> int:
        from dynamo.errors import DynamoError

        process.program = name
        process.machine.on_gpu_use()
        own = name.startswith("dynamo.")  # else it is a module of the simulation
        module = importlib.import_module(f"{name}.__main__" if own else name)
        try:
            return int(module.main(arguments))
        except Launched as launched:
            work = launched.coroutine
        try:
            await work
        except DynamoError as error:
            fake_os.machine().note(f"{name} failed: {error.message}")
            return 1
        except BaseExceptionGroup as errors:
            fake_os.machine().note(f"{name} failed: {errors!r} {errors.exceptions!r}")
            return 1
        return 0

    return main


def arbiter(
    graph: str, overrides: Sequence[str] = (), gpus: int = 2
) -> Callable[[Process], Coroutine[Any, Any, int]]:
    """Return the main coroutine of ``dynamo serve``, without its guard."""

    async def main(process: Process) -> int:
        from dynamo.cli import serve
        from dynamo.config import from_env
        from dynamo.config.runtime import RuntimeSettings
        from dynamo.config.serve import ServeSettings
        from dynamo.runtime.process.paths import run_dir, state_dir, store_dir
        from dynamo.serve.deployment import Deployment
        from dynamo.serve.graph.overrides import split_overrides
        from dynamo.serve.state.rundir import RunDirectory
        from dynamo.serve.state.statefile import Statefile
        from dynamo.setup.graph_plan import prepare

        own = split_overrides(overrides)[1]
        settings = from_env(ServeSettings, graph=graph, gpus=gpus, quiet=True)
        source = serve.graph_source(settings, own)
        read = serve.parsed(source, None)
        runtime = from_env(RuntimeSettings, namespace=read.namespace)
        planned = prepare(read, settings, runtime)
        directory = RunDirectory(
            run_dir(runtime), store_dir(runtime), Statefile(state_dir(runtime), read.namespace)
        )
        directory.acquire()
        for note in directory.reconcile():
            fake_os.machine().note(note)
        make_plan = serve.plan_maker(settings, runtime)
        deployment = Deployment(planned, settings, directory, Announcer(), source, make_plan)
        try:
            if threads.is_threaded():
                directory.make_key()
            with seams.watched(runtime):
                return await deployment.run()
        finally:
            directory.clear()
            directory.release()

    return main


class Announcer:
    """What ``dynamo serve`` prints goes to the history."""

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Add it."""
        for line in text.splitlines():
            fake_os.machine().note("serve: " + line)

    def output(self, watcher: str, line: bytes) -> None:
        """There is none."""
