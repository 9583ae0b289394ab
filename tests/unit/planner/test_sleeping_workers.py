"""Workers that sleep: woken first, removed for memory; a simulated deployment in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from simulated_deployment import Faults, SimulatedDeployment
from statefile_entries import rewrite
from virtual_time import run_virtual

from dynamo.config.planner import PlannerSettings
from dynamo.errors import EngineFailure, StatefileError, StreamIncomplete
from dynamo.operations.loading import ModelLoad, follow
from dynamo.operations.reconcile import reconcile
from dynamo.operations.steps.access import LocalAccess, complete_all
from dynamo.operations.steps.circus import CircusError
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.operations.steps.removal import finish_removal, mark_draining
from dynamo.operations.steps.sleeping import (
    RemoteEngines,
    check_sleepers,
    check_wakeable,
    is_woken,
    sleep_worker,
    wake_worker,
)
from dynamo.planner.live import local_connector
from dynamo.planner.live.local_connector import LocalConnector
from dynamo.planner.live.model_state import InFlight, pool_of
from dynamo.protocols.control import EngineCommand
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.graph.command import service_facts
from dynamo.serve.state.document import GIVEN_UP, Document, OperationOwner, Supervision
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.process_table import ledger_of, reservation, stat
from dynamo.serve.state.room import crowded_gpus
from dynamo.serve.state.statefile import Statefile

GRAPH = """
A: {run: dynamo.vllm, model: a, ServiceArgs: {workers: 1, resources: {gpu: 1}}}
B: {run: dynamo.vllm, model: b, ServiceArgs: {workers: 0, resources: {gpu: 1}}}
"""
GIB = 1 << 30


class Engines(RemoteEngines):
    """Engines with a sleep mode; one may refuse to sleep or to wake."""

    def __init__(self) -> None:
        self.asleep: set[int] = set()
        self.calls: list[str] = []
        self.refuses = ""
        self.has_sleep_mode = True

    async def can_sleep(self, lease: int) -> bool:
        return self.has_sleep_mode

    async def is_sleeping(self, lease: int) -> bool | None:
        return lease in self.asleep

    async def sleep(self, lease: int) -> None:
        await self._do("sleep")
        self.asleep.add(lease)

    async def wake(self, lease: int, timeout_s: float) -> None:
        await self._do("wake")
        self.asleep.discard(lease)

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0.2)
        if self.refuses == call:
            raise EngineFailure("no memory")


class Site:
    """A deployment of two services on ``gpus`` GPUs, and a connector to it."""

    def __init__(self, directory: Path, gpus: int = 1) -> None:
        self.world = SimulatedDeployment(directory, GRAPH, gpus, Random(1), Faults())
        self.engines = Engines()
        self.devices: list[Gpu] | None = None
        self.access = LocalAccess(
            limits=ActionLimits(start_timeout_s=15),
            statefile=self.world.statefile,
            circus=self.world,
            registrations=self.world,
            logs=Path("/nonexistent"),
            devices=self._devices,
        )
        self.connector = LocalConnector(self.access, self.engines)

    async def _devices(self) -> list[Gpu] | None:
        return self.devices

    def states(self) -> dict[str, str]:
        found = self.access.document().components.items()
        return {name: entry.state for name, entry in found if entry.processes}

    def held(self) -> dict[str, tuple[str, ...]]:
        held = ledger_of(self.access.document()).held
        return {name: tuple(gpus) for name, gpus in held.items()}

    async def counts(self, service: str) -> list[str]:
        return [one.state for one in (await self.connector.services())[service].workers]

    async def ready(self) -> None:
        while await self.counts("A") != ["ready"]:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(work: Callable[[Site], Awaitable[None]], gpus: int = 1) -> None:
        async def main() -> None:
            site = Site(tmp_path, gpus)
            async with site.world:
                await site.ready()
                await work(site)

        run_virtual(main())

    return run


def device(free_gib: int, index: int = 0) -> Gpu:
    return Gpu(index=index, memory_bytes=80 * GIB, used_bytes=(80 - free_gib) * GIB)


def test_a_removed_worker_sleeps_and_is_woken_first(run: Any) -> None:
    async def work(site: Site) -> None:
        assert await site.connector.remove("A") == "dynamo_A"
        assert await site.counts("A") == ["asleep"]
        assert site.held() == {}
        before = site.world.watchers["dynamo_A"].processes[0].pid
        assert await site.connector.add("A") == "dynamo_A"
        assert await site.counts("A") == ["ready"]
        assert site.held() == {"dynamo_A": ("0",)}
        assert site.world.watchers["dynamo_A"].processes[0].pid == before
        assert site.engines.calls == ["sleep", "wake"]

    run(work)


def test_another_model_gets_the_gpu_of_a_sleeping_one(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        assert await site.connector.add("B") == "dynamo_B_1"
        assert site.held() == {"dynamo_B_1": ("0",)}
        with pytest.raises(ActionFailed, match="0 of 1 free"):
            await site.connector.add("A")  # it can neither be woken nor started
        await site.connector.remove("B")
        assert site.states() == {"dynamo_A": "asleep", "dynamo_B_1": "asleep"}
        await site.connector.add("A")
        assert site.held() == {"dynamo_A": ("0",)}

    run(work)


def test_an_engine_that_was_restarted_while_it_fell_asleep_is_awake(run: Any) -> None:
    """Its GPU is its own."""

    async def work(site: Site) -> None:
        async def sleep(lease: int) -> None:
            await asyncio.sleep(0.2)  # the next process of the worker answers

        site.engines.sleep = sleep  # type: ignore[method-assign]
        entry = site.access.document().components["dynamo_A"]
        with pytest.raises(ActionFailed, match="was restarted while it fell asleep"):
            await sleep_worker(site.access, site.engines, entry)
        assert site.states() == {"dynamo_A": "running"}
        assert site.held() == {"dynamo_A": ("0",)}

    run(work)


def test_a_sleeper_that_drains_takes_no_gpu_from_another(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        await site.connector.add("B")
        mark_draining(site.access, ["dynamo_A"])
        assert site.held() == {"dynamo_B_1": ("0",)}

    run(work)


def test_one_worker_of_a_service_sleeps_and_goes_last(run: Any) -> None:
    async def work(site: Site) -> None:
        site.connector.configure(PlannerSettings(max_sleeping_workers=1))
        await site.connector.add("A")
        await site.connector.remove("A")
        assert site.states() == {"dynamo_A": "running", "dynamo_A_1": "asleep"}
        await site.connector.remove("A")  # the other one exits
        assert site.states() == {"dynamo_A_1": "asleep"}
        await site.connector.remove("A")
        assert site.states() == {}

    run(work, 2)


class Ram(NamedTuple):
    total: int
    available: int


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Set the available GiB of a box of 100 GiB, and what a sleeping worker holds."""

    def ram(available_gib: int, each_gib: int) -> None:
        found = Ram(100 * GIB, available_gib * GIB)
        monkeypatch.setattr("psutil.virtual_memory", lambda: found)
        monkeypatch.setattr(local_connector, "memory_of", lambda pids: each_gib * GIB)

    return ram


def test_as_many_sleep_as_the_ram_holds(run: Any, ram: Callable[[int, int], None]) -> None:
    async def work(site: Site) -> None:
        for _ in range(3):
            await site.connector.add("A")
        ram(50, 20)
        await site.connector.remove("A")  # the first one sleeps: what it takes is unknown
        await site.connector.remove("A")
        restarted = LocalConnector(site.access, site.engines)
        ram(29, 20)  # 9 GiB would be left, and a tenth of 100 stays available
        await restarted.remove("A")
        assert site.states() == {
            "dynamo_A": "running",
            "dynamo_A_2": "asleep",
            "dynamo_A_3": "asleep",
        }
        assert await restarted.add("A") == "dynamo_A_2"
        ram(29, 0)  # its processes cannot be read
        await LocalConnector(site.access, site.engines).remove("A")
        assert "dynamo_A_2" not in site.states()

    run(work, 4)


def test_no_worker_sleeps_if_the_owner_says_so(run: Any) -> None:
    async def work(site: Site) -> None:
        site.connector.configure(PlannerSettings(max_sleeping_workers=0))
        await site.connector.remove("A")
        assert (site.states(), site.engines.calls) == ({}, [])

    run(work)


def test_several_removed_at_once_stay_within_the_limit(run: Any) -> None:
    async def work(site: Site) -> None:
        site.connector.configure(PlannerSettings(max_sleeping_workers=2))
        for _ in range(2):
            await site.connector.add("A")
        await asyncio.gather(*(site.connector.remove("A") for _ in range(3)))
        assert sorted(site.states().values()) == ["asleep", "asleep"]

    run(work, 3)


def test_a_sleeping_worker_whose_gpu_is_taken_is_not_woken(run: Any) -> None:
    async def work(site: Site) -> None:
        site.connector.configure(PlannerSettings(max_sleeping_workers=2))
        await site.connector.add("A")
        for _ in range(2):
            await site.connector.remove("A")
        await site.connector.add("B")
        assert site.held() == {"dynamo_B_1": ("2",)}  # where none sleeps
        await site.connector.add("B")
        assert site.held()["dynamo_B_2"] == ("0",)  # where the oldest one sleeps
        service = (await site.connector.services())["A"]
        assert pool_of(service, 0, InFlight()).asleep == 1
        assert await site.connector.add("A") == "dynamo_A_1"
        service = (await site.connector.services())["A"]
        assert pool_of(service, 0, InFlight()).asleep == 0
        with pytest.raises(ActionFailed, match="0 of 3 free"):  # none can be woken: one starts
            await site.connector.add("A")

    run(work, 3)


@pytest.mark.parametrize("mode", [True, False])
def test_a_worker_that_does_not_sleep_is_removed(run: Any, mode: bool) -> None:
    async def work(site: Site) -> None:
        site.engines.has_sleep_mode, site.engines.refuses = mode, "sleep"
        await site.connector.remove("A")
        assert (site.states(), site.held()) == ({}, {})

    run(work)


def test_a_worker_that_cannot_be_woken_is_removed(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        site.engines.refuses = "wake"
        adding = asyncio.ensure_future(site.connector.add("A"))
        while site.states() != {"dynamo_A": "draining"}:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        assert site.held() == {"dynamo_A": ("0",)}  # its engine may have taken their memory
        with pytest.raises(ActionFailed, match="cannot be woken: no memory"):
            await adding
        assert (site.states(), site.held()) == ({}, {})
        assert await site.connector.add("A") == "dynamo_A_1"

    run(work)


def test_a_sleeper_beyond_the_budget_is_not_woken(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        site.access.limits = ActionLimits(start_timeout_s=15, max_gpus=1)
        await site.connector.add("B")
        with pytest.raises(ActionFailed, match=r"A: 1 GPU is in use .* --max-gpu-budget 1$"):
            await site.connector.add("A")
        assert site.states() == {"dynamo_A": "asleep", "dynamo_B_1": "running"}

    run(work, 2)


def test_the_state_is_corrected_after_a_crash(run: Any) -> None:
    async def work(site: Site) -> None:
        lease = site.access.document().components["dynamo_A"].lease
        assert lease is not None
        site.engines.asleep.add(lease)  # the planner died before it wrote the state
        assert await site.connector.reconcile() == ["dynamo_A: its state is asleep"]
        assert await site.counts("A") == ["asleep"]
        site.engines.asleep.clear()
        assert await site.connector.reconcile() == ["dynamo_A: its state is running"]

    run(work)


def test_the_sleep_of_a_process_that_is_replaced_is_not_that_of_the_next(run: Any) -> None:
    """Its sleep was interrupted; a restart starts an awake process beside it, on another GPU."""

    async def work(site: Site) -> None:
        lease = site.access.document().components["dynamo_A"].lease
        assert lease is not None
        site.engines.asleep.add(lease)
        replacing = {"since": 1.0, "gpus": {"0": 1.0, "1": 1.0}}
        site.access.statefile.update(lambda found: rewrite(found, "dynamo_A", replacing=replacing))
        assert await check_sleepers(site.access, site.engines) == []
        assert site.states() == {"dynamo_A": "running"}
        assert site.held() == {"dynamo_A": ("0", "1")}

    run(work, 2)


def test_a_worker_that_was_replaced_during_a_look_keeps_its_state(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        look = site.engines.is_sleeping

        async def is_sleeping(lease: int) -> bool | None:
            site.engines.asleep.clear()
            pids = [{"pid": 4_000_000, "start_ticks": 1}]
            site.access.statefile.update(lambda found: rewrite(found, "dynamo_A", processes=pids))
            return await look(lease)

        site.engines.is_sleeping = is_sleeping  # type: ignore[method-assign]
        await check_sleepers(site.access, site.engines)
        assert site.access.document().components["dynamo_A"].asleep

    run(work)


class LossyEngines(RemoteEngines):
    """An engine to which the first ``lost`` connections break after the command was sent."""

    def __init__(self, lost: int) -> None:
        self.lost = lost

    async def _record(self, lease: int) -> Any:
        return "of its endpoint"

    async def _send(self, lease: int, command: EngineCommand, timeout_s: float) -> dict[str, Any]:
        if self.lost:
            self.lost -= 1
            raise StreamIncomplete("Connection reset by peer")
        return {"is_sleeping": True}


@pytest.mark.parametrize(("lost", "answer"), [(0, True), (1, True), (2, None)])
def test_a_command_is_sent_again_after_the_loss_of_its_connection(
    lost: int, answer: bool | None
) -> None:
    """Else a worker that fell asleep would count as awake."""
    assert asyncio.run(LossyEngines(lost).is_sleeping(1)) is answer


def test_a_sleeping_worker_is_removed_for_its_memory(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")

        async def freed() -> list[Gpu] | None:
            return [device(60 if "dynamo_A" in site.states() else 79)]

        site.access.devices = freed
        assert await site.connector.add("B") == "dynamo_B_1"
        assert site.states() == {"dynamo_B_1": "running"}

    run(work)


def test_a_gpu_that_others_use_is_avoided(run: Any) -> None:
    async def work(site: Site) -> None:
        site.devices = [device(79, 0), device(10, 1), device(79, 2)]
        await site.connector.add("B")
        assert site.held()["dynamo_B_1"] == ("2",)
        with pytest.raises(ActionFailed, match="GPU 1: too little free memory"):
            await site.connector.add("B")

    run(work, 3)


def test_what_an_engine_reserves() -> None:
    def reserved_share(argv: tuple[str, ...]) -> float:
        return service_facts(argv, {}, Path()).memory_share

    vllm = ("python", "-m", "dynamo.vllm", "--model", "x")
    assert reserved_share(vllm) == 0.9
    assert reserved_share((*vllm, "--gpu-memory-utilization", "0.5")) == 0.5
    assert reserved_share((*vllm, "--gpu-memory-utilization=0.25")) == 0.25
    assert reserved_share((*vllm, "--kv-cache-memory-bytes", "1000")) == 0
    assert reserved_share((*vllm, "--gpu-memory-utilization", "much")) == 0
    assert reserved_share(("python", "-m", "dynamo.mocker")) == 0


def test_crowded_gpus() -> None:
    devices = [device(72, 0), device(71, 1), Gpu(index=2), Gpu(index=3, uuid="GPU-3")]
    assert crowded_gpus(["0", "1", "2", "GPU-3"], 0.9, devices) == {
        "1": "GPU 1: 71.0 of 80.0 GiB are free, and a worker reserves 90%"
    }
    begun = [dataclasses.replace(device(71, 4), uuid="GPU-4a5b-6c7d")]
    assert list(crowded_gpus(["GPU-4a5b"], 0.9, begun)) == ["GPU-4a5b"]  # as CUDA reads it


def others_mark(operation: str) -> OperationOwner:
    """The reservation of another process, which lives."""
    parent = stat(os.getppid())
    assert parent is not None
    theirs = reservation(operation)
    theirs.pid, theirs.start_ticks = parent.pid, parent.start_ticks
    return theirs


def test_a_worker_that_sleeps_by_now_does_not_take_its_gpu_again(run: Any) -> None:
    """Two processes look; one puts it to sleep, and what it freed is taken by another worker."""

    async def work(site: Site) -> None:
        [entry] = read_services(site.access.document())["A"].entries
        await sleep_worker(site.access, site.engines, entry)
        assert await site.connector.add("B")
        holders = site.held()
        written = site.world.statefile.path.read_bytes()
        await sleep_worker(site.access, site.engines, entry)
        assert site.engines.calls == ["sleep"]
        assert site.held() == holders and len(holders) == 1
        assert site.world.statefile.path.read_bytes() == written

    run(work)


def test_a_wake_during_a_wake_names_the_process(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        theirs = others_mark("wake").written()
        site.access.statefile.update(lambda found: rewrite(found, "dynamo_A", reserved_by=theirs))
        text = rf"^dynamo_A: process {os.getppid()} changes it \(wake\); wait for its end$"
        with pytest.raises(ActionFailed, match=text):
            check_wakeable(site.access.document(), "dynamo_A")

    run(work)


@pytest.mark.parametrize("operation", ["sleep", "wake"])
@pytest.mark.parametrize("refuses", ["", "sleep", "wake"])
def test_an_interrupted_operation_is_finished_or_undone(
    run: Any, operation: str, refuses: str
) -> None:
    async def work(site: Site) -> None:
        site.engines.refuses = refuses if operation == "sleep" else ""
        if operation == "wake":
            await site.connector.remove("A")
            site.engines.refuses = refuses
        services = read_services(site.access.document())
        entry = services["A"].entries[0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):  # while the engine works: Ctrl-C
                if operation == "sleep":
                    await sleep_worker(site.access, site.engines, entry)
                else:
                    await wake_worker(site.access, site.engines, services["A"], entry)
        assert site.held() == {"dynamo_A": ("0",)}  # it may be awake
        [sentence] = await site.connector.reconcile()
        record = site.access.document().components["dynamo_A"]
        assert record.reserved_by is None
        if refuses == operation == "wake":
            assert "undid its wake: dynamo_A: cannot be woken: no memory; it is removed" in sentence
            assert (site.states(), site.held()) == ({}, {})
        elif refuses == operation:
            assert "undid its sleep: dynamo_A: does not sleep: no memory" in sentence
            assert record.state == "running"
        else:
            assert sentence == f"dynamo_A: finished its {operation}"
            assert record.state == ("asleep" if operation == "sleep" else "running")
            assert site.held() == ({} if operation == "sleep" else {"dynamo_A": ("0",)})
        assert await site.connector.reconcile() == []

    run(work)


@pytest.mark.parametrize("operation", ["load", "drain"])
def test_what_a_living_process_does_is_not_repaired(run: Any, operation: str) -> None:
    async def work(site: Site) -> None:
        theirs = others_mark(operation).written()
        site.access.statefile.update(lambda found: rewrite(found, "dynamo_A", reserved_by=theirs))
        before = site.world.statefile.path.read_bytes()
        assert await reconcile(site.access) == []
        assert site.world.statefile.path.read_bytes() == before

    run(work)


def test_a_dry_run_of_a_repair_changes_nothing(run: Any) -> None:
    async def work(site: Site) -> None:
        gone = OperationOwner(pid=2**22 + 1, start_ticks=1, operation="load").written()
        site.access.statefile.update(lambda found: rewrite(found, "dynamo_A", reserved_by=gone))
        before = site.world.statefile.path.read_bytes()
        found = await reconcile(site.access, True)
        assert found == ["dynamo_A: kept; the process of its load has exited"]
        assert site.world.statefile.path.read_bytes() == before
        assert await reconcile(site.access) == found
        assert site.access.document().components["dynamo_A"].reserved_by is None

    run(work)


def test_a_wake_reverts_an_interrupted_sleep(run: Any) -> None:
    """Its engine goes on to fall asleep: to say that the worker does not sleep would be wrong."""

    async def work(site: Site) -> None:
        service = read_services(site.access.document())["A"]
        (entry,) = service.entries
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await sleep_worker(site.access, site.engines, entry)
        await wake_worker(site.access, site.engines, service, entry)
        assert site.engines.calls == ["sleep", "wake"]
        assert site.access.document().components["dynamo_A"].reserved_by is None
        assert (site.states(), site.held()) == ({"dynamo_A": "running"}, {"dynamo_A": ("0",)})

    run(work)


async def load_b(site: Site) -> list[str]:
    """Load model b to its end; return what it says at first."""
    services = [read_services(site.access.document())["B"]]
    loads = await ModelLoad(site.access, site.engines, services).prepare()
    await complete_all(one.work() for one in loads)
    return [one.text for one in loads]


def test_of_several_loads_one_starts_a_worker_and_the_others_wait_for_it(run: Any) -> None:
    async def work(site: Site) -> None:
        found = await asyncio.gather(*(load_b(site) for _ in range(4)))
        waiting = ["dynamo_B_1 is starting, waiting for it"]
        assert found == [["starting dynamo_B_1"], *[waiting] * 3]
        assert site.states()["dynamo_B_1"] == "running"
        before_s = time.time()
        with pytest.raises(ActionFailed, match="it is served already, by dynamo_B_1; workers of"):
            await load_b(site)
        assert site.access.document().components["dynamo_B_1"].asked_at >= before_s

    run(work, 4)


async def begun_load(site: Site) -> asyncio.Task[list[str]]:
    """Begin to load model b; return when the worker has a process."""
    load = asyncio.ensure_future(load_b(site))
    while "dynamo_B_1" not in site.states():  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.1)
    return load


async def interrupt(load: asyncio.Task[Any]) -> None:
    """As Ctrl-C and kill do: its process carries on no more."""
    load.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await load


def test_a_load_follows_one_whose_command_was_killed(run: Any) -> None:
    async def work(site: Site) -> None:
        first = await begun_load(site)
        second = asyncio.ensure_future(load_b(site))
        await asyncio.sleep(0.1)
        await interrupt(first)
        assert await second == ["dynamo_B_1 is starting, waiting for it"]
        entry = site.access.document().components["dynamo_B_1"]
        assert (entry.state, entry.reserved_by) == ("running", None)
        assert len(site.states()) == 2

    run(work, 4)


def test_a_load_fails_with_the_worker_that_it_follows(run: Any) -> None:
    async def work(site: Site) -> None:
        first = await begun_load(site)
        second = asyncio.ensure_future(load_b(site))
        await asyncio.sleep(0.1)
        await site.world.stop("dynamo_B_1")
        for load in (first, second):
            with pytest.raises(ActionFailed, match=r"dynamo_B_1.* given up"):
                await load
        assert list(site.states()) == ["dynamo_A"]

    run(work, 4)


def test_a_load_ends_when_the_worker_that_it_follows_is_drained(run: Any) -> None:
    async def work(site: Site) -> None:
        await interrupt(await begun_load(site))
        second = asyncio.ensure_future(load_b(site))
        await asyncio.sleep(0.1)
        mark_draining(site.access, ["dynamo_B_1"])
        with pytest.raises(ActionFailed, match="dynamo_B_1 was drained before it served"):
            await second

    run(work, 4)


def test_a_load_does_not_wait_for_a_worker_without_processes(run: Any) -> None:
    def give_up(document: Document) -> None:
        document.components["dynamo_A"].watcher = Supervision(GIVEN_UP, "5 deaths within 60 s")

    async def work(site: Site) -> None:
        await site.connector.add("A")
        await site.access.circus.decrease("dynamo_A")
        service = read_services(site.access.document())["A"]
        with pytest.raises(ActionFailed, match="dynamo_A does not serve: it was stopped, or given"):
            await follow(site.access, site.engines, service, "dynamo_A")
        site.access.statefile.update(give_up)
        with pytest.raises(ActionFailed, match="it was given up: 5 deaths within 60 s"):
            await follow(site.access, site.engines, service, "dynamo_A")

    run(work, 2)


@pytest.mark.parametrize("ends", ["well", "killed", "refused", "drained"])
def test_a_wake_waits_for_the_wake_of_another_command(run: Any, ends: str) -> None:
    async def work(site: Site) -> None:
        await site.connector.remove("A")
        service = read_services(site.access.document())["A"]
        site.engines.refuses = "wake" if ends == "refused" else ""
        first = asyncio.ensure_future(
            wake_worker(site.access, site.engines, service, service.entries[0])
        )
        await asyncio.sleep(0.1)
        entry = site.access.document().components["dynamo_A"]
        assert is_woken(entry, site.access.active)
        second = asyncio.ensure_future(follow(site.access, site.engines, service, "dynamo_A"))
        await asyncio.sleep(0)
        if ends in ("killed", "drained"):
            await interrupt(first)
        if ends == "drained":
            mark_draining(site.access, ["dynamo_A"])
        if ends in ("well", "killed"):
            await second
            entry = site.access.document().components["dynamo_A"]
            assert (entry.state, entry.reserved_by) == ("running", None)
            assert site.engines.calls.count("wake") == (2 if ends == "killed" else 1)
        else:
            with pytest.raises(ActionFailed, match="dynamo_A was drained before it served"):
                await second
        await asyncio.gather(first, return_exceptions=True)

    run(work)


def test_workers_drain_together_or_not_at_all(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.add("A")
        theirs = others_mark("sleep").written()
        site.access.statefile.update(lambda found: rewrite(found, "dynamo_A_1", reserved_by=theirs))
        with pytest.raises(ActionFailed, match=r"dynamo_A_1: process \d+ changes it \(sleep\)"):
            mark_draining(site.access, ["dynamo_A", "dynamo_A_1"])
        assert site.states() == {"dynamo_A": "running", "dynamo_A_1": "running"}
        assert site.access.document().components["dynamo_A"].reserved_by is None

    run(work, 2)


@pytest.mark.parametrize("operation", ["sleep", "wake"])
def test_a_full_disk_during_an_operation_loses_no_worker(
    run: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has done it, and the statefile cannot say so: the next action corrects it."""

    async def work(site: Site) -> None:
        if operation == "wake":
            await site.connector.remove("A")
        services = read_services(site.access.document())
        entry = services["A"].entries[0]
        with monkeypatch.context() as disk:
            do, write = site.engines._do, Statefile._write

            def full(statefile: Statefile, document: Document) -> None:
                if document.components["dynamo_A"].reserved_by:
                    return write(statefile, document)
                raise StatefileError("No space left on device")

            async def done(call: str) -> None:
                await do(call)
                disk.setattr(Statefile, "_write", full)

            disk.setattr(site.engines, "_do", done)
            with pytest.raises(StatefileError):
                if operation == "sleep":
                    await sleep_worker(site.access, site.engines, entry)
                else:
                    await wake_worker(site.access, site.engines, services["A"], entry)
        assert site.access.needs_repair
        assert site.held() == {"dynamo_A": ("0",)}
        await site.connector.reconcile()
        state = "asleep" if operation == "sleep" else "running"
        assert site.states() == {"dynamo_A": state}
        assert site.access.document().components["dynamo_A"].reserved_by is None

    run(work)


def test_a_removal_that_failed_can_be_finished_by_others(run: Any) -> None:
    async def work(site: Site) -> None:
        async def busy(name: str) -> None:
            raise CircusError("circus refused rm")

        [entry] = read_services(site.access.document())["A"].entries
        mark_draining(site.access, ["dynamo_A"])
        site.world.remove = busy  # type: ignore[method-assign]
        site.world.faults.hangs = 1.0  # it never exits
        with pytest.raises(CircusError):
            await finish_removal(site.access, entry, False)
        record = site.access.document().components["dynamo_A"]
        assert record.state == "draining" and record.processes
        assert record.reserved_by is None

    run(work)
