"""Workers that sleep: woken first, removed for memory; a simulated deployment in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simulated_deployment import Faults, SimulatedDeployment
from virtual_time import run_virtual

from dynamo.box.actions.access import LocalAccess
from dynamo.box.actions.gpu_room import crowded_gpus, reserved_share
from dynamo.box.actions.ports import ActionFailed
from dynamo.config.planner import PlannerSettings
from dynamo.errors import EngineFailure
from dynamo.planner.local.connector import LocalConnector
from dynamo.serve.gpu_holders import held_gpus
from dynamo.serve.gpus import Gpu

GRAPH = """
A: {run: dynamo.vllm, model: a, ServiceArgs: {workers: 1, resources: {gpu: 1}}}
B: {run: dynamo.vllm, model: b, ServiceArgs: {workers: 0, resources: {gpu: 1}}}
"""
GIB = 1 << 30


class Engines:
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
            settings=PlannerSettings(start_timeout_s=15),
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
        found = self.access.document()["components"].items()
        return {name: entry["state"] for name, entry in found if entry["processes"]}

    def held(self) -> dict[str, tuple[str, ...]]:
        return {name: gpus for name, (gpus, _) in held_gpus(self.access.document()).items()}

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


def test_one_worker_of_a_service_sleeps_and_goes_last(run: Any) -> None:
    async def work(site: Site) -> None:
        await site.connector.add("A")
        await site.connector.remove("A")
        assert site.states() == {"dynamo_A": "running", "dynamo_A_1": "asleep"}
        await site.connector.remove("A")  # the other one exits
        assert site.states() == {"dynamo_A_1": "asleep"}
        await site.connector.remove("A")
        assert site.states() == {}

    run(work, 2)


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
        with pytest.raises(ActionFailed, match="cannot be woken: no memory"):
            await site.connector.add("A")
        assert (site.states(), site.held()) == ({}, {})
        assert await site.connector.add("A") == "dynamo_A_1"

    run(work)


def test_the_state_is_corrected_after_a_crash(run: Any) -> None:
    async def work(site: Site) -> None:
        lease = site.access.document()["components"]["dynamo_A"]["lease"]
        site.engines.asleep.add(lease)  # the planner died before it wrote the state
        assert await site.connector.reconcile() == ["dynamo_A: its state is asleep"]
        assert await site.counts("A") == ["asleep"]
        site.engines.asleep.clear()
        assert await site.connector.reconcile() == ["dynamo_A: its state is running"]

    run(work)


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
