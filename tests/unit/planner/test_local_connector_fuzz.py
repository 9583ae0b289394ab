"""The local connector under random faults, in virtual time. A failing seed repeats exactly."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from simulated_deployment import Faults, SimulatedDeployment, SimulatedProcess, no_devices
from virtual_time import run_virtual

from dynamo.errors import DynamoError
from dynamo.operations.steps.access import LocalAccess
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.operations.steps.sleeping import RemoteEngines
from dynamo.planner.live.local_connector import LocalConnector
from dynamo.serve.state.document import Document
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.process_table import ledger_of

ROOT = Path(__file__).resolve().parents[3]
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((ROOT / "statefiles/statefile.schema.json").read_text())
)
GRAPH = """
Frontend: {run: dynamo.frontend}
Decode: {run: dynamo.mocker, model-path: tiny, ServiceArgs: {resources: {gpu: 1}}}
Prefill:
  run: dynamo.mocker
  model-path: tiny
  disaggregation-mode: prefill
  ServiceArgs: {resources: {gpu: 2}}
Share: {run: dynamo.mocker, model-path: tiny, ServiceArgs: {workers: 2, resources: {gpu: 0.5}}}
Other: {run: dynamo.mocker, model-path: tiny}
"""
SERVICES = ("Decode", "Prefill", "Share", "Other")
FAULTS = Faults(
    busy=0.1,
    lost_reply=0.03,
    refused=0.02,
    never_serves=0.05,
    death_every_s=200,
    start_s=(0.1, 12.0),
    drain_s=(0.05, 8.0),
    hangs=0.03,
    write_delay_s=0.2,
)
GPUS, BUDGET = 8, 7
LIMITS = ActionLimits(start_timeout_s=15, max_gpus=BUDGET)


def bookings(document: dict[str, Any]) -> Counter[str]:
    """The halves of each GPU that a valid statefile assigns, within the budget and once only."""
    VALIDATOR.validate(document)
    booked: Counter[str] = Counter()
    for gpus in ledger_of(Document.of(document)).held.values():
        for gpu, share in gpus.items():
            booked[gpu] += round(2 * share)
    assert all(halves <= 2 for halves in booked.values()), booked
    assert sum(booked.values()) / 2 <= BUDGET
    return booked


class FuzzEngines(RemoteEngines):
    """The engines of the service Decode sleep and wake, mostly."""

    def __init__(self, world: SimulatedDeployment, random: Random) -> None:
        self.world = world
        self.random = random

    async def can_sleep(self, lease: int) -> bool:
        found = self.process(lease)
        return found is not None and found.watcher.spec.service == "Decode"

    async def is_sleeping(self, lease: int) -> bool | None:
        found = self.process(lease)
        return None if found is None else found.asleep

    async def sleep(self, lease: int) -> None:
        await self.set_asleep(lease, True)

    async def wake(self, lease: int, timeout_s: float) -> None:
        await self.set_asleep(lease, False)

    async def set_asleep(self, lease: int, asleep: bool) -> None:
        await asyncio.sleep(self.random.uniform(0, 3))
        found = self.process(lease)
        if found is None or self.random.random() < 0.1:
            raise DynamoError("the engine does not answer")
        found.asleep = asleep
        await asyncio.sleep(self.random.uniform(0, 1))

    def process(self, lease: int) -> SimulatedProcess | None:
        return next((one for one in self.world.processes() if one.lease == lease), None)


class Fuzz:
    """A planner that acts at random, crashes at random, and a person with circusctl."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        self.world = SimulatedDeployment(directory, GRAPH, GPUS, Random(seed + 1), FAULTS)
        self.counts: Counter[str] = Counter()
        self.text = b""
        self.booked: Counter[str] = Counter()

    def planner(self) -> LocalConnector:
        self.access = LocalAccess(
            limits=LIMITS,
            statefile=self.world.statefile,
            circus=self.world,
            registrations=self.world,
            logs=Path("/nonexistent"),
            devices=no_devices,
        )
        return LocalConnector(self.access, FuzzEngines(self.world, self.random), most_asleep=2)

    def check(self) -> None:
        """The invariants that hold at every moment."""
        text = self.world.statefile.path.read_bytes()
        if text != self.text:
            self.text, self.booked = text, bookings(json.loads(text))
        used: Counter[str] = Counter()
        for process in self.world.processes():
            for gpu in () if process.asleep else process.gpus:
                used[gpu] += 2 if process.watcher.spec.gpu >= 1 else 1
        assert all(halves <= 2 for halves in used.values()), used
        assert all(self.booked[gpu] >= used[gpu] for gpu in used), (self.booked, used)

    async def checks(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(0.05)

    async def planners(self) -> None:
        while True:
            connector = self.planner()
            try:
                async with asyncio.timeout(self.random.expovariate(1 / 40)):
                    await self.attempt("reconcile", connector.reconcile())
                    async with asyncio.TaskGroup() as group:
                        for _ in range(3):
                            group.create_task(self.act(connector))
            except TimeoutError:
                self.counts["crashes"] += 1  # at whatever step each action has reached

    async def act(self, connector: LocalConnector) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0, 4))
            await self.attempt("services", connector.services())
            service = self.random.choice(SERVICES)
            verb = self.random.choice(("add", "remove"))
            await self.attempt(verb, getattr(connector, verb)(service))

    async def attempt(self, verb: str, action: Coroutine[Any, Any, object]) -> None:
        try:
            await action
        except ActionFailed:
            self.counts[f"{verb} failed"] += 1
        else:
            self.counts[verb] += 1

    async def person(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(1 / 10))
            name = self.random.choice([*self.world.watchers, "dynamo_Decode"])
            verb = self.random.choice(
                ("stop", "start", "start", "remove", "incr", "decrease", "add")
            )
            try:
                if verb == "add":  # circusctl add --start
                    name = f"dynamo_Other_{self.random.randint(1, 9)}"
                    argv = self.world.plan.specs[-1].argv
                    await self.world.add(name, argv, {})
                    verb = "start"
                await getattr(self.world, verb)(name)
            except DynamoError:
                continue
            self.counts[f"circusctl {verb}"] += 1

    async def run(self, duration_s: float) -> None:
        async with self.world:
            try:
                async with asyncio.timeout(duration_s), asyncio.TaskGroup() as group:
                    for work in (self.checks(), self.planners(), self.person()):
                        group.create_task(work)
            except TimeoutError:
                pass
            await self.settle()

    async def settle(self) -> None:
        """Without further faults, one repair leaves nothing that is held without a process."""
        self.world.faults = Faults()
        await asyncio.sleep(60)
        connector = self.planner()
        await connector.reconcile()
        await asyncio.sleep(5)
        self.check()
        assert await connector.reconcile() == []
        document = self.world.statefile.read()
        assert document is not None
        for service in read_services(document).values():
            for entry in service.entries:
                watcher = self.world.watchers.get(entry.name)
                assert not entry.draining and entry.reserved_by is None
                assert watcher is not None or (entry is service.template and not entry.gpus)
                assert entry.gpus == (watcher.spec.gpus if watcher else ())
        for name in SERVICES:
            while (await connector.services())[name].workers:
                await connector.remove(name)


@pytest.mark.parametrize("seed", [5, 12, 17, 29])
def test_minutes_of_faults(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budget kept, statefile valid, no GPU leaked or booked twice, whatever fails when."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of writes

    async def fuzz() -> Counter[str]:
        fuzz = Fuzz(tmp_path, seed)
        await fuzz.run(450)
        return fuzz.counts

    counts = run_virtual(fuzz())
    assert counts["add"] > 20 and counts["remove"] > 20 and counts["crashes"] > 3, counts
