"""Models on demand in the planner: its loop over a fake deployment, its real registry."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from planner_kit import FakeConnector, FakeSources, Recorder, Wanted, service
from until import until

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.operations.steps.limits import ActionFailed
from dynamo.planner.connector import STARTING, ScaledWorker
from dynamo.planner.live.gpu_sharing import (
    GpuCapacity,
    GpuSharing,
    ModelDemand,
    OnDemandRegistry,
)
from dynamo.planner.live.loop import ScalingLoop
from dynamo.protocols.codec import encode
from dynamo.protocols.control import ON_DEMAND, OnDemandModel
from dynamo.protocols.kv import ON_DEMAND_STATE, OnDemandState
from dynamo.runtime import DistributedRuntime

FAST = PlannerSettings(
    metric_pulling_interval_s=0.005,
    adjustment_interval_s=0.02,
    max_gpu_budget=4,
    idle_timeout_s=0.05,
    min_residency_s=0.05,
)
LONG_TURNS = replace(FAST, min_residency_s=1000.0)
"""A busy worker keeps its GPU for longer than a test runs."""


class Frontends(OnDemandRegistry):
    """What the frontends report."""

    def __init__(self) -> None:
        self.demands: dict[str, ModelDemand] = {}
        self.announced: Mapping[str, OnDemandModel] = {}

    def demand(self, model: str) -> ModelDemand:
        return self.demands.get(model, ModelDemand())

    async def announce(self, records: Mapping[str, OnDemandModel]) -> None:
        self.announced = records


@contextlib.asynccontextmanager
async def running(
    connector: FakeConnector,
    frontends: Frontends,
    policy: Wanted,
    settings: PlannerSettings = FAST,
    capacity: float = 1,
    sources: FakeSources | None = None,
) -> AsyncIterator[tuple[ScalingLoop, Recorder]]:
    record, loop = Recorder(), asyncio.get_running_loop()
    sharing = GpuSharing(settings, "ns", frontends, lambda: GpuCapacity(capacity), loop.time)
    planner = ScalingLoop(
        connector,
        sources or FakeSources(0.6),
        settings,
        lambda prefill: policy,
        [record],
        clock=loop.time,
        sharing=sharing,
    )
    task = loop.create_task(planner.run())
    try:
        yield planner, record
    finally:
        await planner.stop(1.0)
        await task


def keep() -> Wanted:
    """Return a policy that changes nothing."""
    return Wanted(lambda seen: seen.decode.workers)


async def rules_of(planner: ScalingLoop) -> dict[str, str]:
    """Return what explains the next decision of each model."""
    return {state.model.name: record.pools[0].rule for state, record in await planner.explain()}


def two(first: int, second: int) -> FakeConnector:
    return FakeConnector(
        replace(service("A", first, "a"), minimum=0),
        replace(service("B", second, "b"), minimum=0),
    )


async def test_a_load_in_progress_began_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frontends show from this time on how far the load is."""
    seconds = itertools.count(1000)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    connector = FakeConnector(replace(service("A", 0, "a"), minimum=0), manual=True)
    frontends = Frontends()
    frontends.demands["a"] = ModelDemand(waiting=1, oldest_s=1.0)
    async with running(connector, frontends, Wanted(1)):
        await until(lambda: frontends.announced and frontends.announced["A"].loading_since)
        begun = frontends.announced["A"].loading_since
        announced: list[Mapping[str, OnDemandModel]] = []
        while len(announced) < 5:
            announced.append(frontends.announced)
            await until(lambda: frontends.announced is not announced[-1])
            assert frontends.announced["A"].loading_since == begun
        connector.gates[0].set()
        await until(lambda: frontends.announced["A"].loading_since is None)


async def test_an_idle_model_loses_its_last_worker() -> None:
    connector, frontends = two(1, 0), Frontends()
    async with running(connector, frontends, Wanted(1)) as (_, record):
        await until(lambda: record.decisions)
        assert connector.calls == []
        assert {one.model for one in frontends.announced.values()} == {"a", "b"}
        frontends.demands["a"] = ModelDemand(idle_s=300)
        await until(lambda: connector.calls == ["remove A"])
        await until(lambda: record.records[-1].outcome == "done")
        decided = record.records[-1]
    assert (decided.mode, decided.pools[0].rule) == ("sharing", "no requests for 0.05 s")


async def test_a_model_that_goes_while_frontends_are_read_is_not_started_again() -> None:
    class Slow(FakeSources):
        async def read_frontends(self) -> None:
            await until(lambda: not frontends.demands or not connector.by_name["A"].workers)
            await asyncio.sleep(0.01)  # the loop sees it, too

    connector, frontends = two(1, 0), Frontends()
    policy = Wanted(1, blocking=False, interval_s=0.001)
    settings = replace(FAST, idle_timeout_s=0)  # it goes in the next round
    async with running(connector, frontends, policy, settings, sources=Slow(0.6)) as (_, record):
        await until(lambda: record.decisions)
        frontends.demands["a"] = ModelDemand(idle_s=300)
        await until(lambda: connector.calls)
        counted = len(record.pools)
        await until(lambda: len(record.pools) > counted + 20)
    assert connector.calls == ["remove A"]
    assert all(one.decode.workers for one in policy.seen)


def one_group(first: int, second: int) -> FakeConnector:
    return FakeConnector(
        replace(service("A", first, "a"), minimum=0, groups=("g",)),
        replace(service("B", second, "b"), minimum=0, groups=("g",)),
        manual=True,
    )


WAITS = ModelDemand(waiting=1, oldest_s=1, idle_s=0)


async def test_a_load_whose_clients_have_left_gives_way_and_may_begin_again() -> None:
    connector, frontends = one_group(0, 0), Frontends()
    async with running(connector, frontends, Wanted(1), capacity=4) as (_, record):
        frontends.demands["a"] = WAITS
        await until(lambda: connector.calls == ["add A"])
        counted = len(record.pools)
        frontends.demands["b"] = WAITS
        await until(lambda: len(record.pools) > counted + 20)
        assert connector.calls == ["add A"]  # its client waits
        frontends.demands["a"] = ModelDemand(idle_s=0)
        await until(lambda: connector.calls == ["add A", "give up A", "add B"])
        frontends.demands |= {"a": WAITS, "b": ModelDemand(idle_s=0)}
        # At once, in both directions: what was given up is no failure.
        await until(lambda: connector.calls[3:] == ["give up B", "add A"])
        connector.gates[-1].set()
        await until(lambda: connector.count("A") == 1)
        errors = [one.pools[0].error for one in record.records if one.pools[0].error]
    assert errors[0] == "given up: requests of b wait, which is of the same group"
    assert all(not one.problem or "given up" in one.problem for one in record.actions)


@pytest.mark.parametrize("kind", ["asked", "its own", "unknown"])
async def test_a_load_of_an_operator_is_not_given_up(kind: str) -> None:
    """One that he began; one that he joined; and nothing is known without reports."""
    connector, frontends = one_group(0, 0), Frontends()
    starting = ScaledWorker(name="A_9", state=STARTING)
    if kind == "its own":
        connector.by_name["A"] = replace(connector.by_name["A"], workers=(starting,))
    async with running(connector, frontends, Wanted(1), capacity=4) as (_, record):
        if kind != "its own":
            frontends.demands["a"] = WAITS
            await until(lambda: connector.calls)
        if kind == "asked":
            joined = replace(connector.by_name["A"], asked_at=time.time() + 1)
            connector.by_name["A"] = joined
        frontends.demands["a"] = ModelDemand(idle_s=None if kind == "unknown" else 5)
        frontends.demands["b"] = WAITS
        counted = len(record.pools)
        await until(lambda: len(record.pools) > counted + 20)
    assert {"give up A", "add B"}.isdisjoint(connector.calls)


async def test_the_idle_clock_begins_with_each_wish_of_an_operator() -> None:
    """When a worker begins to serve, and at a load of a model that is served already."""
    connector, frontends = two(0, 0), Frontends()
    settings = replace(FAST, idle_timeout_s=0.4)
    loop = asyncio.get_running_loop()
    async with running(connector, frontends, Wanted(1), settings, capacity=4) as (_, record):
        frontends.demands["a"] = ModelDemand(idle_s=9000)
        await until(lambda: record.pools)
        began_s = loop.time()
        served = replace(service("A", 1, "a"), minimum=0)
        connector.by_name["A"] = served
        await until(lambda: connector.calls)
        assert loop.time() - began_s >= 0.4
        await until(lambda: not connector.by_name["A"].workers)
        del connector.calls[:]
        served_s = loop.time()
        # A wish of 0.3 s later, written at once: no pause of the machine comes between.
        connector.by_name["A"] = replace(served, asked_at=time.time() + 0.3)
        await until(lambda: connector.calls)
        assert loop.time() - served_s >= 0.65


async def test_a_cold_model_is_left_alone_until_requests_wait() -> None:
    connector, frontends, policy = two(0, 0), Frontends(), Wanted(3)
    async with running(connector, frontends, policy) as (_, record):
        await until(lambda: len(record.pools) > 20)
        assert connector.calls == [] and policy.seen == []
        frontends.demands["b"] = ModelDemand(waiting=2, oldest_s=1, idle_s=0)
        await until(lambda: connector.count("B") == 1)
    assert connector.calls[0] == "add B"
    assert connector.most_gpus == 1


async def test_explain_says_that_a_cold_model_waits_for_requests() -> None:
    connector, frontends = two(0, 0), Frontends()
    async with running(connector, frontends, Wanted(3)) as (planner, _):
        await until(lambda: frontends.announced)
        rules = await rules_of(planner)
    rule = "no worker and no requests; the first request starts one"
    assert rules == {"a": rule, "b": rule}


async def test_a_wait_for_the_budget_is_explained_to_the_operator_and_to_clients() -> None:
    """One worker of another model, which is busy, holds all of the budget."""
    connector, frontends = two(1, 0), Frontends()
    frontends.demands["a"] = ModelDemand(idle_s=0)
    frontends.demands["b"] = ModelDemand(waiting=2, oldest_s=0.1, idle_s=0)
    async with running(connector, frontends, keep(), LONG_TURNS) as (planner, _):
        await until(lambda: any(one.waits_for for one in frontends.announced.values()))
        rules = await rules_of(planner)
    text = "2 requests wait for a first worker, which needs 1 GPU, and other models hold"
    assert rules["b"].startswith(text)
    assert {one.model: bool(one.waits_for) for one in frontends.announced.values()} == {
        "a": False,
        "b": True,
    }


async def test_models_that_take_turns_do_not_blame_the_budget() -> None:
    connector, frontends = two(1, 0), Frontends()
    for name in ("A", "B"):
        connector.by_name[name] = replace(connector.by_name[name], groups=("chat",))
    frontends.demands["a"] = ModelDemand(idle_s=0)
    frontends.demands["b"] = ModelDemand(waiting=1, oldest_s=0.1, idle_s=0)
    async with running(connector, frontends, keep(), LONG_TURNS) as (planner, _):
        await until(lambda: any(one.waits_for for one in frontends.announced.values()))
        rules = await rules_of(planner)
    assert "models of its group take turns: a is served" in rules["b"]
    assert "budget" not in rules["b"]


async def test_a_model_that_an_operator_stopped_is_not_started() -> None:
    connector, frontends = two(0, 0), Frontends()
    connector.by_name["A"] = replace(connector.by_name["A"], stopped="ns_A")
    frontends.demands["a"] = ModelDemand(waiting=1, oldest_s=0.1, idle_s=0)
    async with running(connector, frontends, keep(), LONG_TURNS) as (planner, _):
        await until(lambda: any(one.stopped for one in frontends.announced.values()))
        rules = await rules_of(planner)
        frontends.demands["b"] = ModelDemand(waiting=1, oldest_s=0.1, idle_s=0)
        await until(lambda: connector.count("B") == 1)
    assert "ns_A was stopped by a command; start it again with: dynamo load a" in rules["a"]
    assert connector.calls == ["add B"]
    assert {one.model: one.stopped for one in frontends.announced.values()} == {
        "a": True,
        "b": False,
    }


async def test_observers_receive_what_requests_wait_for() -> None:
    connector, frontends = two(1, 0), Frontends()
    frontends.demands["a"] = ModelDemand(idle_s=0)
    frontends.demands["b"] = ModelDemand(waiting=1, oldest_s=0.1, idle_s=0)
    async with running(connector, frontends, keep(), LONG_TURNS) as (_, record):
        await until(lambda: record.waits_for.get("b"))
        assert record.waits_for["a"] == ""
        assert "1 request waits for a first worker" in record.waits_for["b"]
        frontends.demands["b"] = ModelDemand()
        await until(lambda: not record.waits_for["b"])


async def test_the_policy_does_not_remove_the_last_worker() -> None:
    connector, frontends = two(1, 0), Frontends()
    policy = Wanted(lambda seen: seen.decode.minimum)
    async with running(connector, frontends, policy):
        await until(lambda: len(policy.seen) > 3)
    assert connector.calls == []
    assert {seen.max_gpus for seen in policy.seen} == {1}


async def test_a_worker_that_a_person_removes_does_not_come_back_at_once() -> None:
    connector, frontends = FakeConnector(service("A", 2, "a")), Frontends()
    policy = keep()
    async with running(connector, frontends, policy, capacity=4) as (_, record):
        frontends.demands["a"] = ModelDemand(idle_s=0)
        await until(lambda: record.decisions)
        worker = next(iter((await connector.services())["A"].workers))
        connector._drop("A", worker.name)
        await until(lambda: policy.seen and policy.seen[-1].decode.workers == 1)
    assert connector.calls == []


async def test_two_models_swap_their_gpu() -> None:
    connector, frontends = two(1, 0), Frontends()
    async with running(connector, frontends, Wanted(1)):
        await until(lambda: frontends.announced)
        frontends.demands["a"] = ModelDemand(idle_s=0)
        frontends.demands["b"] = ModelDemand(waiting=1, idle_s=0)
        await until(lambda: connector.count("B") == 1)
        assert connector.count("A") == 0
    assert connector.calls == ["remove A", "add B"]
    assert connector.most_gpus == 1


async def test_a_model_that_cannot_start_leaves_the_gpu_to_others() -> None:
    connector, frontends = two(0, 0), Frontends()
    connector.failure = ActionFailed("it exits at once")
    async with running(connector, frontends, Wanted(1)):
        await until(lambda: frontends.announced)
        frontends.demands["a"] = ModelDemand(waiting=1, oldest_s=9, idle_s=0)
        await until(lambda: connector.calls == ["add A"])
        connector.failure = None
        frontends.demands["b"] = ModelDemand(waiting=1, idle_s=0)
        await until(lambda: connector.count("B") == 1)
        assert connector.calls == ["add A", "add B"]
        frontends.demands["b"] = ModelDemand(idle_s=9)
        await until(lambda: connector.count("A") == 1)  # after two seconds it is tried again


@pytest.mark.parametrize(("minimum", "prefill"), [(None, 0), (1, 1)])
async def test_prefill_workers_follow_decode_workers_to_zero_and_back(
    minimum: int | None, prefill: int
) -> None:
    """Decode workers answer; prefill workers with a default minimum do not keep the model up."""
    decode = replace(service("D", 0, "m"), minimum=0)
    other = replace(service("P", 1, "m", pool="prefill"), minimum=minimum)
    connector, frontends = FakeConnector(decode, other), Frontends()
    policy = keep()
    async with running(connector, frontends, policy, capacity=2):
        await until(lambda: frontends.announced)
        frontends.demands["m"] = ModelDemand(waiting=1, idle_s=0)
        await until(lambda: connector.count("D") == 1)
        frontends.demands["m"] = ModelDemand(idle_s=300)
        await until(lambda: connector.count("D") == 0 and connector.count("P") == prefill)
        frontends.demands["m"] = ModelDemand(waiting=1, idle_s=0)
        await until(lambda: connector.count("D") == connector.count("P") == 1)


async def test_a_policy_gets_the_gpu_of_an_idle_model() -> None:
    connector, frontends = two(1, 1), Frontends()
    policy = Wanted(lambda seen: int(seen.max_gpus))
    async with running(connector, frontends, policy, capacity=2):
        await until(lambda: frontends.announced)
        frontends.demands["a"] = ModelDemand(idle_s=0)
        frontends.demands["b"] = ModelDemand(idle_s=9)
        await until(lambda: connector.count("A") == 2)
    assert connector.most_gpus == 2
    assert connector.calls[:2] == ["remove B", "add A"]


async def test_no_operation_announces_and_changes_nothing() -> None:
    connector, frontends = two(0, 0), Frontends()
    settings = replace(FAST, no_operation=True)
    async with running(connector, frontends, Wanted(1), settings) as (_, record):
        frontends.demands["a"] = ModelDemand(waiting=1, idle_s=0)
        await until(lambda: record.records)
        assert frontends.announced == {}
    assert connector.calls == []
    assert record.records[0].outcome == "no-operation"


@contextlib.asynccontextmanager
async def runtime(tmp_path: Path) -> AsyncIterator[DistributedRuntime]:
    made = DistributedRuntime(None, RuntimeSettings(state_dir=str(tmp_path), namespace="ns"))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_records_come_and_go_with_the_planner(tmp_path: Path) -> None:
    async with runtime(tmp_path) as reader:
        async with runtime(tmp_path) as planner:
            registry = OnDemandRegistry(planner, asyncio.get_running_loop().time)
            await registry.start()
            records = {"A": OnDemandModel("ns", "a"), "B": OnDemandModel("ns", "b")}
            await registry.announce(records)
            found = await reader.discovery.list(ON_DEMAND)
            assert {msgspec.json.decode(one)["model"] for one in found.values()} == {"a", "b"}
            await registry.announce({"B": OnDemandModel("ns", "b")})
            found = await reader.discovery.list(ON_DEMAND)
            assert list(found) == [f"v1/on_demand/ns/B/{planner.instance_id:x}"]
        assert await reader.discovery.list(ON_DEMAND) == {}


async def test_the_reports_of_all_frontends_count(tmp_path: Path) -> None:
    now_s = 0.0
    waits: list[str] = []
    async with runtime(tmp_path) as planner, runtime(tmp_path) as first:
        registry = OnDemandRegistry(planner, lambda: now_s)
        registry.on_waiting = lambda: waits.append("waits")
        await registry.start()
        await registry.announce({"A": OnDemandModel("ns", "a")})
        assert registry.demand("a") == ModelDemand()
        async with runtime(tmp_path) as second:
            publishers = [
                await one.publisher("ns", "planner", ON_DEMAND_STATE) for one in (first, second)
            ]

            def report(index: int, *state: object) -> None:
                publishers[index].publish(encode(OnDemandState("a", *state)))  # type: ignore[arg-type]

            async def seen(wanted: ModelDemand) -> None:
                await until(lambda: registry.demand("a") == wanted)

            async with asyncio.timeout(10):  # until both publishers are connected
                while registry.demand("a").idle_s != 7:
                    report(0, 0, 0.0, 9.0)
                    report(1, 0, 0.0, 7.0)
                    await asyncio.sleep(0.01)
            report(1, 3, 2.5, 0.0)
            await seen(ModelDemand(waiting=3, oldest_s=2.5, idle_s=0.0))
            assert waits == ["waits"]
            report(0, 1, 0.5, 0.0)
            await seen(ModelDemand(waiting=4, oldest_s=2.5, idle_s=0.0))
            publishers[0].publish(b"\xff")
        await seen(ModelDemand(waiting=1, oldest_s=0.5, idle_s=0.0))
        now_s = 4.0
        assert registry.demand("a") == ModelDemand()


async def test_a_report_that_arrives_after_its_frontend_has_left_does_not_count() -> None:
    calls: list[Any] = []

    async def start() -> None:
        pass

    settings = SimpleNamespace(namespace="ns")
    planner: Any = SimpleNamespace(
        settings=settings, start=start, subscribe=lambda *args: calls.extend(args)
    )
    registry = OnDemandRegistry(planner, lambda: 0.0)
    registry._announced["A"] = OnDemandModel("ns", "a")
    await registry.start()
    _, _, _, on_report, _, on_frontend = calls
    waiting = encode(OnDemandState("a", 1, 2.0, 0.0))
    on_frontend(7, True)
    on_report(7, 0, waiting)
    assert registry.demand("a").waiting == 1
    on_frontend(7, False)
    on_report(7, 1, waiting)
    assert registry.demand("a") == ModelDemand()


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_model_with_a_minimum_is_not_announced(workers: int) -> None:
    connector = FakeConnector(replace(service("A", workers, "a"), minimum=1))
    frontends = Frontends()
    async with running(connector, frontends, Wanted(1)) as (_, record):
        await until(lambda: record.decisions)
    assert frontends.announced == {}


async def test_models_are_announced_while_a_repair_lasts() -> None:
    """A frontend that starts during the repair must let requests wait; nothing is changed yet."""
    connector, frontends = two(0, 0), Frontends()
    frontends.demands["a"] = ModelDemand(waiting=1, oldest_s=0.1, idle_s=0)
    sources = FakeSources(0.6)
    async with running(connector, frontends, keep(), LONG_TURNS, sources=sources) as (planner, _):
        with planner.repairing():
            await until(lambda: frontends.announced.keys() == {"A", "B"})
            pulls = sources.pulls
            await until(lambda: sources.pulls > pulls + 10)
            assert connector.calls == []
        await until(lambda: connector.count("A") == 1)
