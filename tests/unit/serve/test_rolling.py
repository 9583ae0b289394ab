"""Replacing processes: in which order, what happens if the new one fails, when one serves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import WatcherSpec, plan
from dynamo.serve.supervision import rolling
from dynamo.serve.supervision.rolling import LEASE, MODEL, UNKNOWN, RollingRestart

NAME = "ns_A"


def spec_of(flag: str) -> WatcherSpec:
    graph = parse_graph(f"A: {{run: dynamo.mocker, flag: {flag}}}", "graph.yaml")
    (found,) = plan(graph, python="python", working_dir="/", env={}, graceful_timeout_s=1)
    return replace(found, name=NAME)


OLD, NEW = spec_of("old"), spec_of("new")


class Process:
    """A process that lives until a test ends it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.alive = pid, True
        self.stopping = self.on_trial = False
        self.exit_status = 1

    def is_alive(self) -> bool:
        return self.alive


class Watcher:
    """A watcher with one process, which records what is done to it."""

    name = NAME
    given_up, stop_stage = None, 1

    def __init__(self) -> None:
        self.done: list[str] = []
        self.processes = {1: Process(1)}
        self.env: dict[str, str] = {}
        self.rolling = self.stopped = False
        self.cannot_start = False
        self.arbiter = SimpleNamespace(watchers=[self], stopping=False)
        self.spec = OLD
        self._pids = iter(range(2, 9))

    def is_stopped(self) -> bool:
        return self.stopped

    def get_active_processes(self) -> list[Process]:
        return [*self.processes.values()]

    def start_beside(self) -> Process | None:
        self.done.append(f"start {self.spec.argv[-1]} beside")
        return None if self.cannot_start else self._add()

    async def kill_process(self, process: Process) -> None:
        self.done.append(f"kill {process.pid}")
        del self.processes[process.pid]

    async def manage_processes(self) -> None:
        self.done.append("manage")

    async def _start(self) -> None:
        self.done.append(f"start {self.spec.argv[-1]}")
        self._add()

    async def _stop(self) -> None:
        self.done.append("stop")
        self.processes.clear()

    async def end(self) -> None:
        self.done.append("end")
        self.processes.clear()

    def _add(self) -> Process:
        pid = next(self._pids)
        return self.processes.setdefault(pid, Process(pid))


class Bench:
    """One watcher and what replaces its processes; ``levels`` is what they have registered."""

    def __init__(self, level: int = MODEL) -> None:
        self.watcher: Any = Watcher()
        self.levels = {1: level}
        self.specs = {NAME: OLD}
        output = SimpleNamespace(last_line=lambda: "boom")
        factory = SimpleNamespace(
            specs=self.specs, configure=self.configure, output=lambda name: output
        )
        record = SimpleNamespace(
            refusal=lambda name: "", states=dict, replace=self.reserve, replaced=self.released
        )
        parts: Any = (factory, record, lambda pid: self.levels.get(pid, UNKNOWN), self)
        self.rolling = RollingRestart(*parts)
        self.said: list[str] = []

    def configure(self, watcher: Watcher, spec: WatcherSpec) -> None:
        self.specs[NAME] = watcher.spec = spec

    async def reserve(self, spec: WatcherSpec, beside: bool) -> WatcherSpec:
        return spec

    async def released(self, name: str) -> None:
        """The GPUs of the old process are free."""

    def announce(self, text: str, level: int = 0) -> None:
        self.said.append(text)

    async def replaced(self, *, stop_first: bool = False) -> asyncio.Task[str]:
        """Begin to replace the process, and let it come as far as it can."""
        task = asyncio.ensure_future(self.rolling.replace(self.watcher, NEW, stop_first))
        for _ in range(10):
            await asyncio.sleep(0)
        return task

    def registers(self, pid: int) -> None:
        self.levels[pid] = MODEL
        self.rolling.changed()

    def exits(self, pid: int) -> None:
        self.watcher.processes.pop(pid).alive = False
        self.rolling.changed()


async def test_a_new_process_serves_before_the_old_one_stops() -> None:
    bench = Bench()
    task = await bench.replaced()
    (_, new) = bench.watcher.processes.values()
    bench.levels[2] = LEASE
    bench.rolling.changed()
    await asyncio.sleep(0)
    assert bench.watcher.done == ["start new beside"] and bench.watcher.rolling
    new.on_trial = True
    bench.registers(2)
    assert await task == ""
    assert bench.watcher.done == ["start new beside", "kill 1"]
    assert not new.on_trial and not bench.watcher.rolling and bench.specs[NAME] is NEW


@pytest.mark.parametrize("started", [True, False])
async def test_the_old_process_continues_when_the_new_one_fails(started: bool) -> None:
    bench = Bench()
    bench.watcher.cannot_start = not started
    task = await bench.replaced()
    if started:
        bench.exits(2)
    text = await task
    assert ("before it served; the old one continues" in text) and text.endswith(": boom")
    assert ("could not be started" in text) != started and bench.said == [text]
    assert bench.watcher.done == ["start new beside", "manage"]
    assert bench.specs[NAME] is OLD and not bench.watcher.rolling


@pytest.mark.parametrize("stops", [False, True])
async def test_the_old_command_runs_again_when_the_new_one_fails(stops: bool) -> None:
    """Not when the deployment stops: then nothing has failed."""
    bench = Bench()
    task = await bench.replaced(stop_first=True)
    assert bench.watcher.done == ["stop", "start new"] and bench.watcher.processes[2].on_trial
    bench.watcher.arbiter.stopping = stops
    bench.exits(2)
    if stops:
        assert await task == "" and bench.watcher.done == ["stop", "start new"]
        return
    for _ in range(10):
        await asyncio.sleep(0)
    assert bench.watcher.done == ["stop", "start new", "end", "start old"]
    bench.registers(3)
    assert "exited before it served; the old command runs again; last output: boom" in await task
    assert bench.specs[NAME] is OLD


async def test_a_process_on_trial_has_passed_when_it_serves() -> None:
    bench = Bench()
    task = await bench.replaced(stop_first=True)
    bench.registers(2)
    assert await task == "" and not bench.watcher.processes[2].on_trial
    assert not bench.watcher.rolling


@pytest.mark.parametrize(
    ("level", "env", "overlaps"),
    [
        (MODEL, {}, True),
        (MODEL, {"DYN_SYSTEM_PORT": "0"}, True),
        (MODEL, {"DYN_SYSTEM_PORT": "8081"}, False),
        (MODEL, {"DYN_TCP_RPC_PORT": "9000"}, False),
        (UNKNOWN, {}, False),
    ],
)
async def test_two_processes_need_different_ports_and_what_shows_that_one_serves(
    level: int, env: dict[str, str], overlaps: bool
) -> None:
    bench = Bench(level)
    bench.watcher.env = env
    task = await bench.replaced()
    assert bench.watcher.done[0] == ("start new beside" if overlaps else "stop")
    task.cancel()
    await asyncio.wait([task])


async def test_without_a_process_there_is_nothing_to_run_beside() -> None:
    bench = Bench()
    bench.watcher.processes.clear()
    task = await bench.replaced()
    assert bench.watcher.done == ["stop", "start new"]
    task.cancel()
    await asyncio.wait([task])


async def test_a_restart_starts_what_is_stopped() -> None:
    bench = Bench()
    bench.watcher.stopped = True
    assert await bench.rolling.restart([bench.watcher], False) == ""
    assert bench.watcher.done == ["start old"]


async def test_a_program_of_others_need_not_register() -> None:
    """Of ours the first process shows its lease; others may never have one."""
    bench = Bench()
    bench.watcher.processes.clear()
    ours = ("python", "-m", "dynamo.planner")
    for argv, levels in ((ours, LEASE), (("python", "other.py"), UNKNOWN)):
        found: list[int] = []

        async def serving(_: object, level: int | None = None, found: list[int] = found) -> bool:
            found.append(UNKNOWN if level is None else level)
            return True

        bench.rolling.serving = serving  # type: ignore[assignment]
        spec = replace(OLD, argv=argv, env={"DYN_DISCOVERY_BACKEND": "file"}, options={})
        assert await bench.rolling.replace(bench.watcher, spec, stop_first=True) == ""
        assert found == [levels]
        bench.watcher.processes.clear()


@pytest.mark.parametrize("survives", [True, False])
async def test_a_process_that_registers_nothing_serves_once_it_has_lived_for_a_moment(
    survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling, "_SURVIVES_S", 0.01 if survives else 3600.0)
    bench = Bench(UNKNOWN)
    task = asyncio.ensure_future(bench.rolling.serving(bench.watcher, UNKNOWN))
    if not survives:
        await asyncio.sleep(0)
        bench.exits(1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()  # until another one is started
        bench.watcher.stopped = True
        bench.rolling.changed()
    async with asyncio.timeout(20):
        assert await task is survives
