"""Restarts and reloads beside other operations, and the statefile that the arbiter writes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from statefile_entries import rewrite
from until import until

from dynamo.errors import StatefileError, Unavailable
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.gpus.gpus import Inventory
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import DeploymentPlan, GraphSource, WatcherSpec, pin, place, plan
from dynamo.serve.reload import GraphReload
from dynamo.serve.state import record
from dynamo.serve.state.document import Document, Entry, RecordedProcess
from dynamo.serve.state.events import BoxEventLog, ProcessEvents
from dynamo.serve.state.process_table import ledger_of, reservation
from dynamo.serve.state.record import RecordedComponent, StatefileWriter
from dynamo.serve.state.statefile import FileLock, Statefile
from dynamo.serve.supervision.rolling import LEASE, MODEL, RollingRestart

GRAPH = "A: {run: dynamo.mocker, ServiceArgs: {workers: 3, resources: {gpu: 1}}}"
GPUS = ("0", "1", "2")


def make_plan(text: str = GRAPH) -> DeploymentPlan:
    graph = parse_graph(text, "graph.yaml")
    specs = plan(graph, python="python", working_dir="/", env={}, graceful_timeout_s=1)
    specs = pin(specs, None, {})
    return DeploymentPlan(
        namespace="dynamo",
        specs=place(specs, Inventory(ids=GPUS, source="test")),
        config=graph.config,
        gpu_ids=GPUS,
        endpoint="ipc:///nowhere",
        pubsub_endpoint="ipc:///nowhere",
    )


@dataclass(eq=False)
class Process:
    pid: int
    gpus: Mapping[str, float]
    start_ticks: int = 1

    def is_alive(self) -> bool:
        return True


@dataclass(eq=False)
class Watcher:
    name: str
    arbiter: World
    processes: dict[int, Process]
    stop_stage: int = 1
    given_up: str | None = None
    stopped: bool = False

    def is_stopped(self) -> bool:
        return self.stopped

    async def _start(self) -> None:
        self.arbiter.done.append(f"start {self.name}")


@dataclass(eq=False)
class World:
    """The arbiter, its watchers and what makes them."""

    plan: DeploymentPlan
    statefile: Statefile
    done: list[str] = field(default_factory=list)
    announced: list[str] = field(default_factory=list)
    on_replace: Callable[[str], object] = lambda name: None
    stopping: bool = False

    def __post_init__(self) -> None:
        self.specs = {spec.name: spec for spec in self.plan.specs}
        self.deployment = self
        self.happened = ProcessEvents(BoxEventLog(self.statefile.path.parent))
        self.watchers = [
            Watcher(spec.name, self, {index: Process(index, spec.shares)})
            for index, spec in enumerate(self.plan.specs, start=10)
        ]
        self.writer = StatefileWriter(self.statefile, self.plan, self.components)
        self.writer.create()
        self.writer.write(self.components())

    def components(self) -> list[RecordedComponent]:
        processes = {
            one.name: [
                RecordedProcess(p.pid, p.start_ticks, dict(p.gpus)) for p in one.processes.values()
            ]
            for one in self.watchers
        }
        return [
            RecordedComponent(self.specs[name], found, None) for name, found in processes.items()
        ]

    def document(self) -> Document:
        return self.statefile.read() or Document()

    def entry(self, name: str) -> Entry:
        return self.document().components[name]

    def change(self, name: str, **values: object) -> None:
        self.statefile.update(lambda found: rewrite(found, name, **values))

    def get_watcher(self, name: str) -> Watcher:
        return {one.name.lower(): one for one in self.watchers}[name]

    async def remove(self, watchers: list[Watcher]) -> None:
        for one in watchers:
            self.done.append(f"remove {one.name}")
            self.vanish(one.name)

    def vanish(self, name: str) -> None:
        """A worker that drains has exited: the arbiter removes its watcher."""
        watcher = self.get_watcher(name.lower())
        watcher.stopped = True
        self.watchers.remove(watcher)

    def configure(self, watcher: Watcher, spec: WatcherSpec) -> None:
        self.specs[watcher.name] = spec

    def announce(self, text: str, level: int = logging.INFO) -> None:
        self.announced.append(text)

    def rolling(self) -> RollingRestart:
        world = self

        class Rolling(RollingRestart):
            async def replace(self, watcher: Any, spec: WatcherSpec, *_: Any) -> str:
                world.done.append(f"replace {watcher.name}")
                world.specs[watcher.name] = spec
                world.on_replace(watcher.name)
                return ""

        parts: Any = (self, self.writer, lambda pid: 0, self)
        return Rolling(*parts)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(make_plan(), Statefile(tmp_path, "dynamo"))


def test_a_restart_leaves_out_what_other_operations_change(world: World) -> None:
    world.change("dynamo_A_1", state="draining")
    world.change("dynamo_A_2", reserved_by=reservation("wake").written())
    problem = asyncio.run(world.rolling().restart(cast(Any, world.watchers), False))
    assert world.done == ["replace dynamo_A"]
    drains, wakes = problem.split("; ", 1)
    assert drains == "dynamo_A_1: not replaced: it is being drained and is not started again"
    assert wakes.startswith("dynamo_A_2: not replaced: process ") and "changes it (wake)" in wakes


@pytest.mark.parametrize("text", [None, "{"])
def test_a_statefile_that_is_removed_or_damaged_is_written_again(
    world: World, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nothing changes: else each verb says that no deployment runs."""
    monkeypatch.setattr(record, "_CHECK_S", 0.01)

    def damage() -> None:
        if text is None:
            world.statefile.path.unlink()
        else:
            world.statefile.path.write_text(text)

    async def restored() -> None:
        tasks = Tasks("statefile")
        world.writer.start(tasks)
        damage()
        async with asyncio.timeout(30):
            while text == _read(world.statefile.path):  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)
        await tasks.close()

    before = world.document().components
    asyncio.run(restored())
    assert world.document().components == before


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def test_an_interrupted_sleep_ends_with_the_processes_it_was_for(world: World) -> None:
    """Else a repair would put the worker to sleep that has replaced them."""
    gone = {**reservation("sleep").written(), "start_ticks": 1}
    world.change("dynamo_A", reserved_by=gone)
    world.change("dynamo_A_1", reserved_by=reservation("sleep").written())
    world.writer.write(world.components())
    assert world.entry("dynamo_A").reserved_by is not None  # the engine may go on with it
    for watcher in world.watchers:
        watcher.processes = {pid + 10: Process(pid + 10, {}) for pid in watcher.processes}
    world.writer.write(world.components())
    assert world.entry("dynamo_A").reserved_by is None
    assert world.entry("dynamo_A_1").reserved_by is not None  # its process lives


def test_a_restart_does_not_start_a_worker_that_has_drained(world: World) -> None:
    world.on_replace = lambda name: world.vanish("dynamo_A_2") if name == "dynamo_A" else None
    assert asyncio.run(world.rolling().restart([*cast(Any, world.watchers)], False)) == ""
    assert world.done == ["replace dynamo_A", "replace dynamo_A_1"]


def test_a_restart_of_a_worker_that_is_removed_meanwhile_ends(world: World) -> None:
    """A sleeper whose process has exited is removed while its restart stops it."""
    watcher: Any = world.get_watcher("dynamo_a")

    async def stop() -> None:
        world.watchers.remove(watcher)

    async def roll() -> tuple[str, bool]:
        parts: Any = (world, world.writer, lambda pid: 0, world)
        rolling = RollingRestart(*parts)
        watcher._stop, watcher.rolling = stop, False
        spec = world.specs["dynamo_A"]
        text = await rolling.replace(watcher, spec, stop_first=True)
        watcher.processes.clear()
        return text, await asyncio.wait_for(rolling.serving(watcher, 1), 30)

    text, serves = asyncio.run(roll())
    assert text == "dynamo_A: not replaced: it has exited and is removed"
    assert not serves
    assert world.done == []


@pytest.mark.parametrize("operation", ["sleep", "wake", "load"])
def test_a_worker_that_falls_asleep_or_wakes_is_not_replaced(
    world: World, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it begins after the first look: its new process would have no GPU."""
    world.change("dynamo_A", reserved_by=reservation(operation).written())
    spec, name = world.specs["dynamo_A"], "dynamo_A"

    async def roll() -> str:
        parts: Any = (world, world.writer, lambda pid: 0, world)
        rolling = RollingRestart(*parts)
        replaced: list[str] = []

        async def stop_then_start(*_: Any) -> str:
            replaced.append(name)
            return "done"

        monkeypatch.setattr(rolling, "_stop_then_start", stop_then_start)
        watcher: Any = world.get_watcher(name.lower())
        return await rolling.replace(watcher, spec, stop_first=True)

    text = asyncio.run(roll())
    assert (text == "done") if operation == "load" else ("changes it" in text)
    assert world.entry(name).replacing is None


@pytest.mark.parametrize(
    ("state", "run", "way"),
    [
        (None, "dynamo.mocker", "_start_then_stop"),
        ("asleep", "dynamo.mocker", "_stop_then_start"),
        (None, "dynamo.planner", "_stop_then_start"),
    ],
)
def test_which_processes_run_beside_those_that_replace_them(
    tmp_path: Path, state: str | None, run: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that sleeps, whose GPU others may have, and not the planner, which has a lock."""
    text = GRAPH.replace("workers: 3", "workers: 2").replace("dynamo.mocker", run)
    world = World(make_plan(text), Statefile(tmp_path, "dynamo"))
    world.change("dynamo_A", state=state)
    watcher: Any = world.get_watcher("dynamo_a")
    watcher.env, watcher.get_active_processes = {}, lambda: [*watcher.processes.values()]
    parts: Any = (world, world.writer, lambda pid: MODEL, world)
    rolling, chosen = RollingRestart(*parts), []
    for name in ("_start_then_stop", "_stop_then_start"):

        async def noted(*_: Any, name: str = name) -> str:
            chosen.append(name)
            return ""

        monkeypatch.setattr(rolling, name, noted)
    assert asyncio.run(rolling.replace(watcher, world.specs["dynamo_A"])) == ""
    assert chosen == [way]


def reload_of(world: World, graph: str, tmp_path: Path, **request: Any) -> dict[str, Any]:
    file = tmp_path / "graph.yaml"
    file.write_text(graph)
    parts: Any = (
        *(world, world, world.rolling(), world, GraphSource(label="graph", text=GRAPH)),
        *(lambda source: make_plan(graph), world.writer, lambda found: None),
    )
    return asyncio.run(GraphReload(*parts).run({"graph": str(file), **request}))


def lines_of(world: World, graph: str, tmp_path: Path) -> list[str]:
    """What a reload would change."""
    reply = reload_of(world, graph, tmp_path, dry_run=True)
    assert "status" not in reply, reply
    return [*reply["changes"]]


def test_a_reload_starts_what_never_began_but_not_what_a_person_removed(
    world: World, tmp_path: Path
) -> None:
    names = [*world.specs]
    assert lines_of(world, GRAPH, tmp_path) == []
    for name in names:
        world.vanish(name)
    world.writer.write(world.components())
    assert lines_of(world, GRAPH, tmp_path) == []
    world.specs.clear()
    assert [line.split()[1] for line in lines_of(world, GRAPH, tmp_path)] == names


def test_a_reload_for_which_gpus_are_missing_changes_nothing(world: World, tmp_path: Path) -> None:
    """Something else holds one of them; else the workers before it would start."""
    world.vanish("dynamo_A_2")  # its processes have not exited
    reply = reload_of(world, GRAPH.replace("mocker,", "mocker, speedup-ratio: 2,"), tmp_path)
    assert reply["status"] == "error" and reply["graph_is_wrong"]
    assert "dynamo_A_2 needs 1 GPU, 0 of 3 free" in reply["reason"] and world.done == []


def test_a_worker_whose_owner_names_its_gpus_needs_no_free_one(
    world: World, tmp_path: Path
) -> None:
    args = "{workers: 2, resources: {gpu: 1}, envs: {CUDA_VISIBLE_DEVICES: '0'}}"
    graph = GRAPH.replace("workers: 3", "workers: 2")
    pinned = f"{graph}\nB: {{run: dynamo.mocker, ServiceArgs: {args}}}"
    found = {line.split()[1] for line in lines_of(world, pinned, tmp_path)}
    assert found == {"dynamo_A_2", "dynamo_B", "dynamo_B_1"}


async def test_a_worker_serves_when_its_process_has_registered(world: World) -> None:
    watcher: Any = world.get_watcher("dynamo_a")
    watcher.rolling, levels = False, dict.fromkeys(watcher.processes, LEASE)
    parts: Any = (world, world.writer, levels.__getitem__, world)
    rolling = RollingRestart(*parts)
    serving = asyncio.ensure_future(rolling.serving(watcher, MODEL))
    await asyncio.sleep(0)
    assert not serving.done()
    levels.update(dict.fromkeys(levels, MODEL))
    rolling.changed()
    async with asyncio.timeout(20):
        assert await serving


@pytest.fixture
def adding(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which watchers can be added and removed; ``done`` names those left stopped."""

    async def remove(watchers: list[Watcher]) -> None:
        await World.remove(world, watchers)
        world.writer.write(world.components())

    def make(spec: WatcherSpec) -> Watcher:
        world.specs[spec.name] = spec
        return Watcher(spec.name, world, {})

    def look(watcher: Watcher) -> None:
        if f"start {watcher.name}" not in world.done:
            world.done.append(f"{watcher.name} is stopped")

    def adopt(watcher: Watcher) -> Watcher:
        world.watchers.append(watcher)
        asyncio.get_running_loop().call_soon(look, watcher)
        return watcher

    async def serving(_: Any, watcher: Watcher) -> bool:
        world.done.append(f"serving {watcher.name}")
        return True

    for name, fake in {"remove": remove, "make": make, "adopt": adopt}.items():
        monkeypatch.setattr(world, name, fake, raising=False)
    monkeypatch.setattr(RollingRestart, "serving", serving)
    return world


def test_a_worker_that_needs_the_gpu_of_another_starts_after_it(
    adding: World, tmp_path: Path
) -> None:
    """The plan is checked with what will be free; the start has to wait until it is."""
    graph = GRAPH.replace("workers: 3", "workers: 2")
    graph += "\nB: {run: dynamo.mocker, ServiceArgs: {resources: {gpu: 1}}}"
    reply = reload_of(adding, graph, tmp_path)
    assert "status" not in reply, reply
    assert adding.done == ["remove dynamo_A_2", "start dynamo_B", "serving dynamo_B"]
    assert adding.specs["dynamo_B"].gpus == ("2",)


def test_an_added_worker_is_started_at_once(adding: World, tmp_path: Path) -> None:
    """Between the two others would see a worker that was stopped, and give it up."""
    graph = GRAPH + "\nB: {run: dynamo.mocker}\nC: {run: dynamo.mocker}"
    assert "status" not in reload_of(adding, graph, tmp_path)
    assert adding.done == [
        *("start dynamo_B", "start dynamo_C"),
        *("serving dynamo_B", "serving dynamo_C"),
    ]


def test_a_deployment_that_stops_is_not_reloaded(adding: World, tmp_path: Path) -> None:
    adding.stopping = True
    reply = reload_of(adding, GRAPH + "\nB: {run: dynamo.mocker}", tmp_path)
    assert (reply["status"], reply["reason"]) == ("error", "the deployment is stopping")
    assert not adding.done and not adding.announced


def test_a_stop_during_a_reload_adds_no_worker(
    adding: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def claim(spec: WatcherSpec) -> WatcherSpec:
        adding.stopping = True
        return spec

    monkeypatch.setattr(adding.writer, "claim", claim)
    reply = reload_of(adding, GRAPH + "\nB: {run: dynamo.mocker}", tmp_path)
    assert reply["reason"] == "reloaded in part: the deployment is stopping"
    assert not adding.done and "dynamo_B" not in [one.name for one in adding.watchers]


def test_an_entry_that_was_removed_with_its_worker_is_no_error(world: World) -> None:
    world.vanish("dynamo_A_2")
    world.statefile.update(lambda found: found.components.pop("dynamo_A_2"))
    world.writer.write(world.components())
    assert world.document().components.keys() == {"dynamo_A", "dynamo_A_1"}


@pytest.mark.parametrize("way", ["replaced", "removed"])
def test_a_reload_outlives_the_drain_of_a_worker(world: World, way: str, tmp_path: Path) -> None:
    """The planner removes a worker while the reload waits for the new process of another."""
    changed = GRAPH.replace("workers: 3", "workers: 1") if way == "removed" else GRAPH
    after = make_plan(changed.replace("dynamo.mocker,", "dynamo.mocker, speedup-ratio: 2,"))
    world.on_replace = lambda name: world.vanish("dynamo_A_2") if name == "dynamo_A" else None

    async def reload() -> dict[str, Any]:
        file = tmp_path / "graph.yaml"
        file.write_text(changed)
        parts: Any = (
            *(world, world, world.rolling(), world, GraphSource(label="graph", text=GRAPH)),
            *(lambda source: after, world.writer, lambda found: None),
        )
        return await GraphReload(*parts).run({"graph": str(file)})

    reply = asyncio.run(reload())
    assert "status" not in reply, reply
    last = "replace dynamo_A_1" if way == "replaced" else "remove dynamo_A_1"
    assert world.done == ["replace dynamo_A", last]
    begun, ended = world.announced
    assert begun.startswith("reloading the graph: ")
    assert ended == begun.replace("reloading", "reloaded", 1)


def test_a_process_of_a_worker_that_slept_and_drains_holds_its_gpu(world: World) -> None:
    world.change("dynamo_A", state="draining", holds_gpus=False, processes=[])
    world.get_watcher("dynamo_a").processes.clear()
    asyncio.run(world.writer.claim(world.specs["dynamo_A"]))
    assert ledger_of(world.document()).held["dynamo_A"] == {"0": 1.0}


@pytest.mark.parametrize("operation", ["sleep", "wake", "load"])
def test_the_next_process_does_not_inherit_an_interrupted_sleep(
    world: World, operation: str
) -> None:
    """A repair would put it to sleep."""
    gone = reservation(operation)
    gone.start_ticks += 1
    world.change("dynamo_A", reserved_by=gone.written())
    asyncio.run(world.writer.replace(world.specs["dynamo_A"], beside=False))
    assert (world.entry("dynamo_A").reserved_by is None) == (operation != "load")
    assert ledger_of(world.document()).held["dynamo_A"] == {"0": 1.0}


@pytest.mark.parametrize("between", [True, False])
def test_a_process_that_follows_a_death_does_not_inherit_an_interrupted_sleep(
    world: World, between: bool
) -> None:
    gone = reservation("sleep")
    gone.start_ticks += 1
    world.change("dynamo_A", reserved_by=gone.written())
    processes = world.get_watcher("dynamo_a").processes
    processes.clear()
    if between:
        world.writer.write(world.components())
    assert world.entry("dynamo_A").reserved_by is not None
    processes[99] = Process(99, world.specs["dynamo_A"].shares)
    world.writer.write(world.components())
    assert world.entry("dynamo_A").reserved_by is None


def test_a_gpu_that_others_hold_too_is_not_its_own(world: World) -> None:
    """A command named it that was killed, or that an earlier arbiter should have received."""
    assert world.writer.holds(world.specs["dynamo_A"])
    world.change("dynamo_A_1", resources={"allocated_gpus": [0]})
    assert not world.writer.holds(world.specs["dynamo_A"])


def test_a_worker_that_was_given_up_and_is_loaded_again_asks_for_its_gpu(world: World) -> None:
    """Others have it by now; the operation that starts it has not checked that."""
    spec = world.specs["dynamo_A"]
    given_up = {"watcher": {"status": "given up"}, "reserved_by": reservation("load").written()}
    world.change("dynamo_A", processes=[], **given_up)
    world.watchers.remove(world.get_watcher("dynamo_a"))
    world.change("dynamo_A_1", resources={"allocated_gpus": [0]}, processes=[])
    assert ledger_of(world.document()).holders(["0"]) == ["dynamo_A_1"]
    assert not world.writer.holds(spec)


def test_a_claim_of_a_whole_gpu_is_one_at_once(world: World) -> None:
    """A reload has changed the share of a stopped worker: the old one would leave room."""
    world.change("dynamo_A", gpus_per_worker=0.5, processes=[])
    world.get_watcher("dynamo_a").processes.clear()
    asyncio.run(world.writer.claim(world.specs["dynamo_A"]))
    world.change("dynamo_A_1", resources={}, processes=[])
    assert ledger_of(world.document()).held["dynamo_A"] == {"0": 1.0}


def test_a_statefile_that_cannot_be_written_is_not_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a stopped process that holds the lock: what others wrote stays."""
    world.change("dynamo_A", state="asleep")
    write, calls = Statefile._write, []

    def full_once(statefile: Statefile, document: Document) -> None:
        calls.append(document)
        if len(calls) == 1:
            raise StatefileError("cannot write it: No space left on device")
        write(statefile, document)

    monkeypatch.setattr(Statefile, "_write", full_once)
    with pytest.raises(StatefileError, match="No space left"):
        world.writer.write(world.components())
    assert world.entry("dynamo_A").state == "asleep"


def test_a_failed_write_and_a_kept_entry_are_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No further event comes: neither from the disk, nor from the process of the operation."""
    monkeypatch.setattr("dynamo.serve.state.record._AGAIN_S", 0.01)
    world.change("dynamo_A_2", reserved_by=reservation("sleep").written())
    world.vanish("dynamo_A_2")
    world.statefile.lock_path.unlink()
    world.statefile.lock_path.mkdir()

    async def main() -> None:
        tasks = Tasks("test")
        world.writer.start(tasks)
        world.writer.changed()
        await until(lambda: "cannot write the statefile" in caplog.text)
        world.statefile.lock_path.rmdir()
        await until(lambda: not world.entry("dynamo_A_2").processes)
        world.change("dynamo_A_2", reserved_by=None)
        await until(lambda: "dynamo_A_2" not in world.document().components)
        await tasks.close()

    asyncio.run(main())


def test_a_cancelled_write_is_awaited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older look at the processes must not be written after a newer one."""
    lock = FileLock(world.statefile.lock_path)
    lock.acquire()
    begun = threading.Event()

    async def main() -> None:
        write = world.writer.write

        def noted(*arguments: Any) -> None:
            begun.set()
            write(*arguments)

        monkeypatch.setattr(world.writer, "write", noted)
        replacing = world.writer.replace(world.specs["dynamo_A"], beside=False)
        task = asyncio.create_task(replacing)
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        lock.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(world.writer.replaced("dynamo_A"), 30)
        assert world.entry("dynamo_A").replacing is None

    asyncio.run(main())


def test_nothing_is_written_after_the_close(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart that is in progress when the deployment ends, and a write that has begun."""
    lock = FileLock(world.statefile.lock_path)

    async def main() -> None:
        await world.writer.replace(world.specs["dynamo_A"], beside=False)
        write, begun = world.writer.write, threading.Event()

        def noted(*arguments: Any) -> None:
            begun.set()
            write(*arguments)

        monkeypatch.setattr(world.writer, "write", noted)
        lock.acquire()
        ending = asyncio.create_task(world.writer.replaced("dynamo_A"))
        await asyncio.to_thread(begun.wait)
        closing = asyncio.create_task(world.writer.close())
        await asyncio.sleep(0)
        assert not closing.done()
        lock.release()
        await asyncio.gather(ending, closing)
        world.statefile.remove()
        await world.writer.replaced("dynamo_A")
        with pytest.raises(Unavailable, match="stopping"):
            await world.writer.claim(world.specs["dynamo_A"])
        assert world.statefile.read() is None

    asyncio.run(main())


def test_a_change_during_a_write_is_written_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, changed = world.writer.write, threading.Event()

    async def main() -> None:
        loop, tasks = asyncio.get_running_loop(), Tasks("test")

        def change() -> None:
            world.vanish("dynamo_A_2")
            world.writer.changed()
            changed.set()

        def changes_once(components: Any, *arguments: Any) -> None:
            if not changed.is_set():  # the components were read before
                loop.call_soon_threadsafe(change)
                changed.wait()
            write(components, *arguments)

        monkeypatch.setattr(world.writer, "write", changes_once)
        world.writer.start(tasks)
        world.writer.changed()
        await until(lambda: "dynamo_A_2" not in world.document().components)
        await tasks.close()

    asyncio.run(main())


class Beside:
    """A watcher with one process, beside which no other can be started."""

    name = "dynamo_A"
    rolling = False
    env: Mapping[str, str] = {}

    def __init__(self, arbiter: object = None, is_shared: bool = True) -> None:
        self.arbiter = arbiter
        self.listener = SimpleNamespace(is_shared=is_shared)
        self.processes = {10: None}

    def get_active_processes(self) -> list[object]:
        return [object()]

    def start_beside(self) -> None:
        """The command cannot be started."""

    async def manage_processes(self) -> None:
        """Its process lives."""


def test_the_next_process_after_a_failed_replacement_has_the_old_command(world: World) -> None:
    before = world.specs["dynamo_A"]
    broken = dataclasses.replace(before, argv=("no such program",))
    patched: Any = world
    patched.output = lambda name: SimpleNamespace(last_line=lambda: "")
    watcher: Any = Beside(world)
    problem = asyncio.run(world.rolling()._start_then_stop(watcher, broken, 1))
    assert "the old one continues" in problem
    assert world.specs["dynamo_A"] is before and not watcher.rolling


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_frontends_overlap_only_where_they_share_their_socket(
    tmp_path: Path, is_shared: bool
) -> None:
    world = World(make_plan("F: {run: dynamo.frontend}"), Statefile(tmp_path, "dynamo"))
    (spec,) = world.specs.values()
    watcher: Any = Beside(world, is_shared)
    assert world.rolling()._may_overlap(watcher, spec, LEASE) is is_shared
