"""A deployment without processes: circus, workers and discovery as the connector sees them.

The statefile is the real one, written by the writer of ``dynamo serve``; writes come late and show
the processes of some milliseconds before, as those of its thread do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from dynamo.operations.steps.access import FileRegistrations
from dynamo.operations.steps.circus import (
    STOPPED,
    CircusBusy,
    CircusEndpoint,
    CircusError,
    NoSuchWatcher,
    WatcherOptions,
)
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.gpus.gpus import Inventory
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import (
    DeploymentPlan,
    WatcherSpec,
    graph_facts,
    place,
    plan,
    plan_added,
)
from dynamo.serve.state.document import RecordedProcess
from dynamo.serve.state.record import RecordedComponent, StatefileWriter
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.serve.state.statefile import Statefile

__all__ = ["Faults", "SimulatedDeployment", "SimulatedProcess", "SimulatedWatcher"]

GRACEFUL_S = 10.0


async def no_devices() -> None:
    """The driver is asked in a thread, for which the virtual clock does not wait."""


@dataclass
class Faults:
    """Probabilities and times, in seconds, of what goes wrong."""

    busy: float = 0.0
    lost_reply: float = 0.0
    refused: float = 0.0
    never_serves: float = 0.0
    death_every_s: float = 0.0
    start_s: tuple[float, float] = (0.5, 2.0)
    drain_s: tuple[float, float] = (0.1, 2.0)
    hangs: float = 0.0
    write_delay_s: float = 0.05


@dataclass(eq=False)
class SimulatedProcess:
    """A process; it leads a session, so its pid identifies its leases."""

    pid: int
    watcher: SimulatedWatcher
    gpus: Mapping[str, float]
    start_ticks: int = 1
    lease: int | None = None
    serves: bool = False
    stopping: bool = False
    draining: bool = False
    asleep: bool = False
    alive: bool = True

    def recorded(self) -> RecordedProcess:
        return RecordedProcess(self.pid, self.start_ticks, dict(self.gpus))


@dataclass(eq=False)
class SimulatedWatcher:
    """A watcher of the arbiter."""

    spec: WatcherSpec
    status: str = STOPPED
    numprocesses: int = 1
    deaths: int = 0
    processes: list[SimulatedProcess] = field(default_factory=list)


class SimulatedDeployment(CircusEndpoint, FileRegistrations):
    """The arbiter and the discovery of ``graph``, without processes."""

    def __init__(
        self, directory: Path, graph: str, gpus: int, random: Random, faults: Faults | None = None
    ) -> None:
        parsed = parse_graph(graph, "graph.yaml")
        inventory = Inventory(ids=tuple(map(str, range(gpus))), source="test")
        planned = plan(
            parsed, python="python", working_dir="/", env={}, graceful_timeout_s=GRACEFUL_S
        )
        placed = place(planned, inventory)
        self.plan = DeploymentPlan(
            namespace=parsed.namespace,
            specs=[spec for spec in placed if spec.starts],
            config=parsed.config,
            gpu_ids=inventory.ids,
            endpoint="ipc:///nowhere",
            pubsub_endpoint="ipc:///nowhere-events",
            templates=[spec for spec in placed if not spec.starts],
            services=graph_facts(parsed, "/"),
        )
        self.statefile = Statefile(directory, parsed.namespace)
        self.faults = faults or Faults()
        self.random = random
        self.watchers = {spec.name: SimulatedWatcher(spec) for spec in self.plan.specs}
        self.removed: list[SimulatedWatcher] = []
        self.log: list[str] = []
        self._ids = itertools.count(1000)
        self._busy = ""
        self._tasks = Tasks("arbiter")
        self._change = asyncio.Event()
        self._dirty = asyncio.Event()
        self._writer = StatefileWriter(self.statefile, self.plan, self._components)
        self._writer.create()

    async def __aenter__(self) -> SimulatedDeployment:
        self._tasks.spawn(self._write_changes())
        for watcher in self.watchers.values():
            self._start(watcher)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()

    # The arbiter

    async def statuses(self) -> Mapping[str, str]:
        await self._arrives("")
        return {
            name: watcher.status if watcher.numprocesses or watcher.processes else STOPPED
            for name, watcher in self.watchers.items()
        }

    async def options(self, name: str) -> WatcherOptions:
        await self._arrives("")
        watcher = self._watcher(name)
        return WatcherOptions(
            argv=watcher.spec.argv,
            gpus=watcher.spec.gpus,
            graceful_timeout_s=GRACEFUL_S,
            numprocesses=watcher.numprocesses,
        )

    async def add(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        lost = await self._arrives("")
        if name not in self.watchers:
            spec = plan_added(name, argv, env, (*self.plan.specs, *self.plan.templates))
            self.watchers[name] = SimulatedWatcher(spec)
            self.changed()
        self._reply(lost)

    async def start(self, name: str) -> None:
        lost = await self._arrives("start")
        watcher = self._watcher(name)
        if not self._writer.holds(watcher.spec):  # the arbiter claims them, or gives up
            raise CircusError("other workers may have its GPUs")
        watcher.deaths = 0
        self._start(watcher)
        self._reply(lost)

    async def signal(self, name: str, signum: int) -> None:
        lost = await self._arrives("")
        for process in self._watcher(name).processes:
            self._drain(process)
        self._reply(lost)

    async def decrease(self, name: str) -> None:
        lost = await self._arrives("decr")
        watcher = self._watcher(name)
        watcher.numprocesses = max(watcher.numprocesses - 1, 0)
        extra = watcher.processes[watcher.numprocesses :]
        if extra:
            self._exclusive("decr", extra)
        self._reply(lost)

    async def remove(self, name: str) -> None:
        lost = await self._arrives("rm")
        watcher = self._watcher(name)
        self._forget(watcher)
        self._exclusive("rm", watcher.processes)
        self._reply(lost)

    # Discovery

    def workers(self) -> Mapping[int, RegisteredWorker]:
        return {
            process.pid: RegisteredWorker(
                pid=process.pid,
                leases=(process.lease,),
                worker_id=process.lease if process.serves else None,
                model="tiny" if process.serves else None,
            )
            for process in self.processes()
            if process.lease is not None
        }

    async def revoke(self, lease_id: int) -> None:
        await asyncio.sleep(0)
        for process in self.processes():
            if process.lease == lease_id:
                self._drain(process)

    def next_change(self) -> asyncio.Event:
        return self._change

    # A person with circusctl

    async def stop(self, name: str) -> None:
        await self._arrives("stop")
        watcher = self._watcher(name)
        watcher.status = STOPPED
        self._exclusive("stop", watcher.processes)

    async def incr(self, name: str) -> None:
        await self._arrives("incr")
        watcher = self._watcher(name)
        if watcher.spec.gpus:
            raise CircusError("Singleton watcher has a single process")
        watcher.numprocesses += 1
        self._fill(watcher)

    # What happens

    def processes(self) -> list[SimulatedProcess]:
        """The living processes of all watchers."""
        watchers = [*self.watchers.values(), *self.removed]
        return [process for watcher in watchers for process in watcher.processes]

    def kill(self, process: SimulatedProcess) -> None:
        """The process dies."""
        self._exited(process)

    def changed(self) -> None:
        self._dirty.set()

    def settled(self) -> bool:
        """Whether no command runs and the statefile is written."""
        return not self._busy and not self._dirty.is_set()

    def _components(self) -> list[RecordedComponent]:
        everything = [*self.watchers.values(), *(w for w in self.removed if w.processes)]
        leased = [
            (watcher, next((p.lease for p in watcher.processes if p.lease is not None), None))
            for watcher in everything
        ]
        return [
            RecordedComponent(w.spec, [p.recorded() for p in w.processes], lease)
            for w, lease in leased
        ]

    async def _write_changes(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            components = self._components()
            await asyncio.sleep(self.random.uniform(0, self.faults.write_delay_s))
            self._writer.write(components)
            self._notify()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _arrives(self, command: str) -> bool:
        """A command arrives; return whether its reply is lost. ``command``: an exclusive one."""
        await asyncio.sleep(self.random.uniform(0.0, 0.01))
        chance = self.random.random()
        if chance < self.faults.refused:
            raise CircusError("server error")
        if chance < self.faults.refused + self.faults.busy:
            raise CircusBusy("arbiter is already running another command")
        if command and self._busy:
            raise CircusBusy(f"arbiter is already running {self._busy} command")
        return self.random.random() < self.faults.lost_reply

    def _reply(self, lost: bool) -> None:
        if lost:
            raise CircusBusy("circus did not answer in time")

    def _watcher(self, name: str) -> SimulatedWatcher:
        if name not in self.watchers:
            raise NoSuchWatcher(f"program {name} not found")
        return self.watchers[name]

    def _exclusive(self, command: str, processes: Sequence[SimulatedProcess]) -> None:
        """Stop ``processes``; circus rejects other commands until they have exited."""
        self._busy = command
        self._tasks.spawn(self._end(list(processes)))
        self.changed()

    async def _end(self, processes: Sequence[SimulatedProcess]) -> None:
        try:
            for process in processes:
                process.stopping = True
                self._drain(process)
            deadline_s = asyncio.get_running_loop().time() + GRACEFUL_S
            while any(process.alive for process in processes):
                if asyncio.get_running_loop().time() > deadline_s:
                    for process in processes:
                        self._exited(process)
                await asyncio.sleep(0.05)
        finally:
            self._busy = ""

    def _forget(self, watcher: SimulatedWatcher) -> None:
        self.watchers.pop(watcher.spec.name, None)
        watcher.status = STOPPED
        self.removed = [*(w for w in self.removed if w.processes), watcher]
        self.changed()

    def _start(self, watcher: SimulatedWatcher) -> None:
        watcher.status = "active"
        watcher.numprocesses = max(1, watcher.numprocesses)
        self._fill(watcher)

    def _fill(self, watcher: SimulatedWatcher) -> None:
        kept = self.watchers.get(watcher.spec.name) is watcher and watcher.status != STOPPED
        while kept and len(watcher.processes) < watcher.numprocesses:
            process = SimulatedProcess(next(self._ids), watcher, watcher.spec.shares)
            watcher.processes.append(process)
            self._tasks.spawn(self._live(process))
        self.changed()

    async def _live(self, process: SimulatedProcess) -> None:
        await asyncio.sleep(self.random.uniform(*self.faults.start_s))
        if process.alive and not process.draining:
            process.lease = next(self._ids)
            self._registered()
        await asyncio.sleep(self.random.uniform(0, 0.3))
        if process.lease is not None and self.random.random() >= self.faults.never_serves:
            process.serves = True
            self._registered()
        if self.faults.death_every_s:
            await asyncio.sleep(self.random.expovariate(1 / self.faults.death_every_s))
            self._exited(process)

    def _registered(self) -> None:
        self._notify()
        self.changed()

    def _drain(self, process: SimulatedProcess) -> None:
        if process.draining:
            return
        process.draining = True
        process.lease, process.serves = None, False
        self._registered()
        if self.random.random() >= self.faults.hangs:
            delay_s = self.random.uniform(*self.faults.drain_s)
            asyncio.get_running_loop().call_later(delay_s, self._exited, process)

    def _exited(self, process: SimulatedProcess) -> None:
        """Restart an exited process, unless that was intended, like SupervisedWatcher.ended."""
        if not process.alive:
            return
        watcher = process.watcher
        process.alive, process.lease, process.serves = False, None, False
        watcher.processes.remove(process)
        self._registered()
        kept = self.watchers.get(watcher.spec.name) is watcher
        if not kept or process.stopping or watcher.status == STOPPED:
            return
        if self._writer.is_draining(watcher.spec.name):
            if not watcher.processes:
                self._forget(watcher)
            return
        watcher.deaths += 1
        if watcher.deaths >= 5:
            watcher.status = STOPPED
            self.changed()
            return
        delay_s = 0.5 * watcher.deaths
        asyncio.get_running_loop().call_later(delay_s, self._fill, watcher)
