"""Random histories of workers and operations: no GPU is held twice, and none is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.errors import ConfigError, Unavailable
from dynamo.operations.steps.limits import ActionFailed, reserve
from dynamo.operations.steps.sleeping import _fall_asleep, _reserve_sleeper, _set_state
from dynamo.serve.gpus.gpus import Inventory
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import (
    DeploymentPlan,
    WatcherSpec,
    place,
    plan,
    plan_added,
    with_gpus,
)
from dynamo.serve.state.document import (
    ASLEEP,
    DRAIN,
    DRAINING,
    LOAD,
    RUNNING,
    SLEEP,
    Document,
    Entry,
    RecordedProcess,
    Supervision,
)
from dynamo.serve.state.entries import next_name, read_services, release
from dynamo.serve.state.process_table import is_reserved, ledger_of, reclaim, reservation
from dynamo.serve.state.record import RecordedComponent, StatefileWriter
from dynamo.serve.state.statefile import Statefile

GPUS = ("0", "1", "2", "3")
GRAPH = """
A: {run: dynamo.mocker, ServiceArgs: {resources: {gpu: 1}}}
Half: {run: dynamo.mocker, ServiceArgs: {workers: 2, resources: {gpu: 0.5}}}
Two: {run: dynamo.mocker, ServiceArgs: {workers: 0, resources: {gpu: 2}}}
"""
SERVICES = ("A", "Half", "Two")


@dataclass(eq=False)
class Process:
    pid: int
    gpus: Mapping[str, float]
    start_ticks: int = 1
    asleep: bool = False


@dataclass(eq=False)
class Watcher:
    spec: WatcherSpec
    status: str = "stopped"
    processes: list[Process] = field(default_factory=list)


@dataclass(eq=False)
class Operation:
    """An operation of the process ``pid`` on a worker; ``steps`` are those that are left."""

    name: str
    pid: int
    steps: list[Callable[[], None]]


class Histories(RuleBasedStateMachine):
    """One rule is one step: a process may be killed between any two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        graph = parse_graph(GRAPH, "graph.yaml")
        specs = plan(graph, python="python", working_dir="/", env={}, graceful_timeout_s=1)
        placed = place(specs, Inventory(ids=GPUS, source="test"))
        self.plan = DeploymentPlan(
            namespace="dynamo",
            specs=[one for one in placed if one.starts],
            config=graph.config,
            gpu_ids=GPUS,
            endpoint="ipc:///nowhere",
            pubsub_endpoint="ipc:///nowhere",
            templates=[one for one in placed if not one.starts],
        )
        self.pids = itertools.count(10)
        self.dead: set[int] = set()
        self.patches: list[Any] = [
            patch(
                "dynamo.serve.state.process_table.same_process", lambda pid, _: pid not in self.dead
            ),
            patch.object(os, "fsync", lambda descriptor: None),
        ]
        for one in self.patches:
            one.start()
        self.statefile = Statefile(Path(self.directory.name), "dynamo")
        self.watchers = {spec.name: Watcher(spec) for spec in self.plan.specs}
        self.removed: list[Watcher] = []
        self.operations: list[Operation] = []
        self.restarting: dict[str, list[Callable[[], None]]] = {}
        self.writer = StatefileWriter(self.statefile, self.plan, self.components)
        self.writer.create()
        for name in self.watchers:
            self.start_watcher(name)

    def teardown(self) -> None:
        for one in self.patches:
            one.stop()
        self.directory.cleanup()

    def components(self) -> list[RecordedComponent]:
        everything = [*self.watchers.values(), *(one for one in self.removed if one.processes)]
        return [
            RecordedComponent(
                one.spec,
                [RecordedProcess(p.pid, p.start_ticks, dict(p.gpus)) for p in one.processes],
                None,
                Supervision(one.status),
            )
            for one in everything
        ]

    def entry(self, name: str) -> Entry | None:
        return self.document().components.get(name)

    def state(self, name: str) -> str:
        entry = self.entry(name)
        return "" if entry is None else entry.state

    def document(self) -> Document:
        return self.statefile.read() or Document()

    def start_watcher(self, name: str) -> None:
        """Start a process if the ledger gives the watcher GPUs; else give it up."""
        watcher = self.watchers.get(name)
        if watcher is None or watcher.processes or name in self.restarting:
            return
        watcher.status = "active"
        if not self.writer.holds(watcher.spec):
            try:
                watcher.spec = asyncio.run(self.writer.claim(watcher.spec))
            except ConfigError:
                watcher.status = "given up"
                return
        watcher.processes.append(Process(next(self.pids), watcher.spec.shares))

    def begin(self, name: str, change: Callable[[Document], object], *steps: Any) -> None:
        """Begin an operation of another process, if it is allowed now."""
        pid = next(self.pids)

        def reserved(document: Document) -> None:
            change(document)
            owner = document.components[name].reserved_by
            assert owner is not None
            owner.pid = pid

        try:
            self.statefile.update(reserved)
        except (ActionFailed, ConfigError):
            return
        self.operations.append(Operation(name, pid, list(steps)))

    # What other processes do

    @rule(service=st.sampled_from(SERVICES))
    def load(self, service: str) -> None:
        name = next_name(self.document(), service, self.watchers)

        def change(document: Document) -> None:
            found = read_services(document)[service]
            gpus = ledger_of(document).assign(name, found.gpus)
            entry = found.new_entry(name, found.template.argv, gpus)
            entry.reserved_by = reservation(LOAD)
            document.components[name] = entry

        def add() -> None:
            gpus = ",".join(self.document().components[name].gpus)
            base = self.plan.specs[0].argv
            env = {"CUDA_VISIBLE_DEVICES": gpus}
            spec = plan_added(name, base, env, (*self.plan.specs, *self.plan.templates))
            self.watchers.setdefault(name, Watcher(spec))
            self.write()  # a moment later: from then on the entry is not void

        start = partial(self.start_watcher, name)
        confirm = partial(self.statefile.update, partial(release, name=name))
        self.begin(name, change, add, start, confirm)

    @rule(data=st.data())
    def load_again(self, data: st.DataObject) -> None:
        """A watcher that was stopped or given up: others may have its GPUs by now."""
        ended = ("stopped", "given up")
        names = sorted(name for name, one in self.watchers.items() if one.status in ended)
        if not names or self.watchers[name := data.draw(st.sampled_from(names))].processes:
            return
        if self.state(name) == RUNNING:
            start = partial(self.start_watcher, name)
            confirm = partial(self.statefile.update, partial(release, name=name))
            self.begin(name, partial(reserve, name=name, operation=LOAD), start, confirm)

    @rule(data=st.data())
    def put_to_sleep(self, data: st.DataObject) -> None:
        name, process = self.worker(data)
        if process is None or process.asleep or self.state(name) != RUNNING:
            return

        def fall_asleep(document: Document) -> None:
            entry = document.components.get(name, Entry())
            owner = entry.reserved_by
            _fall_asleep(document, name)
            if owner is not None:  # of the process of this operation, not of this one
                entry.reserved_by = owner

        self.begin(
            name,
            partial(reserve, name=name, operation=SLEEP),
            lambda: setattr(process, "asleep", True),
            lambda: self.statefile.update(fall_asleep),
            lambda: self.end(name),
        )

    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        name, process = self.worker(data)
        if process is not None and process.asleep:
            change = partial(_reserve_sleeper, name=name)
            awake = partial(setattr, process, "asleep", False)
            self.begin(name, change, awake, lambda: self.end(name))

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name, process = self.worker(data)

        def change(document: Document) -> None:
            reserve(document, name, DRAIN)
            entry = document.components[name]
            entry.holds_gpus = not entry.asleep
            entry.state = DRAINING

        if process is not None and self.entry(name):
            self.begin(name, change, lambda: self.exits(name))

    @precondition(lambda self: self.operations)
    @rule(data=st.data(), killed=st.integers(0, 5))
    def go_on(self, data: st.DataObject, killed: int) -> None:
        """One step of an operation, or the end of its process."""
        operation = data.draw(st.sampled_from(self.operations))
        if not killed:
            self.dead.add(operation.pid)
            self.operations.remove(operation)
            return
        operation.steps.pop(0)()
        if not operation.steps:
            self.operations.remove(operation)

    # What the arbiter and a person with circusctl do

    @rule()
    def write(self) -> None:
        asyncio.run(self.writer._change(lambda document: None))

    @rule(data=st.data(), status=st.sampled_from(["stopped", "given up"]))
    def stop(self, data: st.DataObject, status: str) -> None:
        name, process = self.worker(data)
        if process is not None and name not in self.restarting and not process.asleep:
            self.watchers[name].status = status
            self.watchers[name].processes.clear()

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.watchers) or [""]))
        self.start_watcher(name)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Beside the old process if there are GPUs, else after its exit."""
        name, old = self.worker(data)
        if old is None or name in self.restarting or self.state(name) != RUNNING:
            return
        watcher, spec = self.watchers[name], self.watchers[name].spec
        refusal = self.writer.refusal(name)
        try:
            spec = asyncio.run(self.writer.replace(spec, beside=True))
            assert not refusal
        except Unavailable as error:
            assert error.message == refusal
            return
        except ConfigError:
            spec = asyncio.run(self.writer.replace(spec, beside=False))
            exited = [partial(watcher.processes.remove, old)]
            after = []
        else:
            exited, after = [], [partial(watcher.processes.remove, old)]

        def configure() -> None:
            watcher.spec = spec
            watcher.processes.append(Process(next(self.pids), spec.shares))

        def replaced() -> None:
            del self.restarting[name]
            asyncio.run(self.writer.replaced(name))

        self.restarting[name] = [*exited, configure, *after, replaced]

    @precondition(lambda self: self.restarting)
    @rule(data=st.data())
    def go_on_restarting(self, data: st.DataObject) -> None:
        self.restarting[data.draw(st.sampled_from(sorted(self.restarting)))].pop(0)()

    @rule(data=st.data(), gpus=st.integers(1, 3))
    def reload_stopped(self, data: st.DataObject, gpus: int) -> None:
        """The changed graph has another number of GPUs, and its fresh plan the lowest ids."""
        stopped = sorted(name for name, one in self.watchers.items() if one.status == "stopped")
        if stopped and not self.watchers[name := data.draw(st.sampled_from(stopped))].processes:
            spec = with_gpus(replace(self.watchers[name].spec, gpu=float(gpus)), GPUS[:gpus])
            try:
                self.watchers[name].spec = asyncio.run(self.writer.claim(spec))
            except ConfigError:
                return

    # A repair

    @rule()
    def repair(self) -> None:
        """Finish or undo what processes that have exited began, as reconcile does."""
        self.write()
        self.statefile.update(reclaim)
        for entry in self.document().components.values():
            if entry.reserved_by is None or is_reserved(entry, ()):
                continue
            watcher = self.watchers.get(entry.name)
            if entry.draining:
                self.exits(entry.name)
            elif watcher is not None and watcher.processes:
                self.end(entry.name)
            elif watcher is not None and not entry.asleep:  # added, and never started
                self.removed.append(self.watchers.pop(entry.name))
                self.statefile.update(partial(release, name=entry.name))
        self.write()

    @rule()
    def settle(self) -> None:
        """Everything ends; then each GPU is free, or has a watcher that is kept."""
        while self.restarting:
            self.restarting[min(self.restarting)].pop(0)()
        self.dead |= {one.pid for one in self.operations}
        self.operations.clear()
        self.repair()
        for name in self.ledger():
            assert name in self.watchers, (name, self.entry(name))
            assert self.watchers[name].status != "given up" or self.watchers[name].processes

    def worker(self, data: st.DataObject) -> tuple[str, Process | None]:
        living = sorted(name for name, one in self.watchers.items() if len(one.processes) == 1)
        if not living:
            return "", None
        name = data.draw(st.sampled_from(living))
        return name, self.watchers[name].processes[0]

    def end(self, name: str) -> None:
        """End an operation: the state is that of the engine."""
        asleep = any(one.asleep for one in self.watchers[name].processes) if self.has(name) else 0
        state = ASLEEP if asleep else RUNNING
        self.statefile.update(partial(_set_state, name=name, state=state))

    def has(self, name: str) -> bool:
        return name in self.watchers

    def exits(self, name: str) -> None:
        """The processes of a draining worker exit, and the arbiter removes its watcher."""
        if self.has(name) and name not in self.restarting:
            watcher = self.watchers.pop(name)
            watcher.processes.clear()
            self.removed.append(watcher)

    def ledger(self) -> Mapping[str, Mapping[str, float]]:
        return ledger_of(self.document()).held

    @invariant()
    def no_gpu_is_held_twice(self) -> None:
        held = self.ledger()
        total: Counter[str] = Counter()
        for shares in held.values():
            total.update(shares)
        assert all(share <= 1.0001 for share in total.values()), held
        for name, watcher in self.watchers.items():
            used: Counter[str] = Counter()
            for process in watcher.processes:
                used.update({} if process.asleep else process.gpus)
            mine = held.get(name, {})
            assert all(mine.get(gpu, 0) >= share for gpu, share in used.items()), (name, held)


TestHistories = Histories.TestCase
if settings().max_examples <= settings.get_profile("suite").max_examples:
    # Each step writes a file.
    TestHistories.settings = settings(max_examples=20, stateful_step_count=40)
