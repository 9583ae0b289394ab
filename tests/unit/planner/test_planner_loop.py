"""The planner's loop: when it decides, what it carries out, and what it never does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_kit import FakeConnector, FakeSources, Recorder, Wanted, service
from until import until

from dynamo.config.planner import PlannerSettings
from dynamo.errors import StatefileError
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.connector import DRAINING, READY, STARTING, ScaledService
from dynamo.planner.live.actions import WorkerActions
from dynamo.planner.live.gpu_sharing import (
    GpuCapacity,
    GpuSharing,
    ModelDemand,
    OnDemandRegistry,
)
from dynamo.planner.live.loop import ScalingLoop
from dynamo.planner.live.model_state import ModelState, models_of
from dynamo.planner.policies.factory import make_policy
from dynamo.planner.policies.load import LoadFallback
from dynamo.planner.reports.explain import StateFile
from dynamo.protocols.control import OnDemandModel

FAST = PlannerSettings(
    mode="load", metric_pulling_interval_s=0.005, adjustment_interval_s=0.02, max_gpu_budget=4
)


class NoDemand(OnDemandRegistry):
    """No frontend reports requests."""

    def __init__(self) -> None:
        pass

    def demand(self, model: str) -> ModelDemand:
        return ModelDemand()

    async def announce(self, records: Mapping[str, OnDemandModel]) -> None:
        pass


@contextlib.asynccontextmanager
async def running(
    connector: FakeConnector,
    policy: Wanted | None,
    settings: PlannerSettings = FAST,
    sources: FakeSources | None = None,
) -> AsyncIterator[tuple[ScalingLoop, Recorder]]:
    """Run a loop for the block; ``policy`` None: those of the settings."""
    record = Recorder()
    loop = ScalingLoop(
        connector,
        sources or FakeSources(),
        settings,
        lambda prefill: make_policy(settings, prefill) if policy is None else policy,
        [record],
    )
    task = asyncio.get_running_loop().create_task(loop.run())
    try:
        yield loop, record
    finally:
        await loop.stop(1.0)
        await task


async def test_the_load_policy_adds_and_removes_workers() -> None:
    connector, sources = FakeConnector(service("Worker")), FakeSources(0.95)
    async with running(connector, None, sources=sources) as (_, record):
        await until(lambda: connector.count("Worker") == 4)
        sources.usage = 0.1
        await until(lambda: connector.count("Worker") == 1)
    assert connector.most_gpus == 4
    changes = [one for one in record.records if one.changes]
    assert [one.pools[0].wanted for one in changes] == [2, 3, 4, 3, 2, 1]
    assert {one.outcome for one in changes} == {"done"}
    assert [one.pools[0].after for one in changes] == [2, 3, 4, 3, 2, 1]


async def test_a_paused_planner_observes_and_begins_a_new_interval_at_the_end() -> None:
    connector, sources, policy = FakeConnector(service("Worker")), FakeSources(), Wanted(2)
    async with running(connector, policy, sources=sources) as (loop, record):
        loop.pause()
        await until(lambda: sources.pulls > 20)
        assert policy.seen == []
        assert record.counts[-1]["decode"].ready == 1
        assert connector.calls == []
        explained = await loop.explain()  # what it would decide now
        assert [one.pools[0].wanted for _, one in explained] == [2]
        loop.resume()
        await until(lambda: connector.count("Worker") == 2)
        assert len(policy.seen[0].pulls) < 10  # of the new interval alone
    assert not loop.paused


async def test_a_blocking_policy_waits_for_the_worker() -> None:
    connector, sources = FakeConnector(service("Worker"), manual=True), FakeSources()
    policy = Wanted(2)
    async with running(connector, policy, sources=sources) as (_, record):
        await until(lambda: connector.gates)
        pulls, decisions = sources.pulls, len(policy.seen)
        counted = len(record.counts)
        await until(lambda: len(record.counts) > counted + 20)
        assert (sources.pulls, len(policy.seen)) == (pulls, decisions)
        assert record.counts[-1]["decode"].starting == 1
        connector.gates[0].set()
        await until(lambda: len(policy.seen) > decisions)
        assert not policy.seen[-1].changed  # the interval began when the worker served
        assert policy.seen[-1].decode.ready == 2


async def test_cold_starts_of_a_policy_that_does_not_block_overlap() -> None:
    connector, policy = FakeConnector(service("Worker"), manual=True), Wanted(2, blocking=False)
    async with running(connector, policy):
        await until(lambda: connector.count("Worker", STARTING) == 1)
        decisions = len(policy.seen)
        policy.decode = 4
        await until(lambda: connector.count("Worker", STARTING) == 3)
        assert len(policy.seen) > decisions
        assert policy.seen[-1].decode.workers in (2, 4)
        for gate in connector.gates:
            gate.set()
        await until(lambda: connector.count("Worker") == 4)
    assert connector.calls == ["add Worker"] * 3


async def test_a_pool_is_never_changed_in_two_directions() -> None:
    connector, policy = FakeConnector(service("Worker"), manual=True), Wanted(2, blocking=False)
    async with running(connector, policy) as (_, record):
        await until(lambda: connector.gates)
        policy.decode = 1
        await until(lambda: record.records and record.records[-1].outcome == "failed")
        assert "still being added" in record.records[-1].pools[0].error
        assert connector.calls == ["add Worker"]
        connector.gates[0].set()
        await until(lambda: connector.count("Worker", DRAINING) == 1)
        policy.decode = 3
        before = len(record.records)
        await until(lambda: len(record.records) > before + 1)
        assert connector.calls == ["add Worker", "remove Worker"]
        assert "still being removed" in record.records[-1].pools[0].error


async def test_the_budget_holds_over_all_models() -> None:
    names = [("A", "a"), ("B", "b"), ("C", "c")]
    connector = FakeConnector(*(service(name, model=model) for name, model in names))
    policies: list[Wanted] = []

    def greedy(prefill: bool) -> Wanted:
        policies.append(Wanted(9, blocking=False))
        return policies[-1]

    record = Recorder()
    loop = ScalingLoop(connector, FakeSources(), FAST, greedy, [record])
    task = asyncio.get_running_loop().create_task(loop.run())
    await until(lambda: len(record.records) > 20)
    await loop.stop(1.0)
    await task
    assert connector.most_gpus == 4
    assert min(connector.count(name) for name, _ in names) == 1
    assert all(policies[-1].seen[-1].max_gpus <= 2 for _ in policies)
    assert any("--max-gpu-budget 4" in action.problem for action in record.actions)


async def test_a_failed_action_is_reported_and_the_loop_goes_on() -> None:
    connector, policy = FakeConnector(service("Worker")), Wanted(2)
    for failure in (ActionFailed("no GPU is free"), RuntimeError("boom")):
        connector.failure = failure
        async with running(connector, policy) as (_, record):
            await until(lambda: len(record.records) >= 2)
            assert {one.outcome for one in record.records} == {"failed"}
            connector.failure = None
            await until(lambda: connector.count("Worker") == 2)
        assert policy.failures[0] == ("decode",)
        connector.by_name["Worker"] = service("Worker")


async def test_a_failed_start_is_not_repeated_at_once() -> None:
    connector, policy, frontends = FakeConnector(service("Worker")), Wanted(2), NoDemand()
    connector.failure = ActionFailed("it exits at once")
    record, loop = Recorder(), asyncio.get_running_loop()
    sharing = GpuSharing(FAST, "ns", frontends, lambda: GpuCapacity(4), loop.time)
    made = ScalingLoop(
        connector, FakeSources(), FAST, lambda _: policy, [record], loop.time, sharing=sharing
    )
    task = loop.create_task(made.run())
    await until(lambda: len(record.records) > 3)
    assert connector.calls == ["add Worker"]
    assert "may begin in 2 s" in record.records[-1].pools[0].error
    policy.decode = 1  # the load is over
    connector.failure = None
    (state,) = made._models.values()
    state.retry_s = loop.time()  # and so is the pause
    decisions = len(policy.seen)
    await until(lambda: len(policy.seen) > decisions + 2)
    await made.stop(1.0)
    await task
    assert connector.calls == ["add Worker"]


async def test_a_worker_that_is_lost_is_not_added_by_the_decision_before() -> None:
    connector, policy, frontends = FakeConnector(service("Worker", 2)), Wanted(3), NoDemand()
    record, loop = Recorder(), asyncio.get_running_loop()
    sharing = GpuSharing(FAST, "ns", frontends, lambda: GpuCapacity(4), loop.time)
    made = ScalingLoop(
        connector, FakeSources(), FAST, lambda _: policy, [record], loop.time, sharing=sharing
    )
    task = loop.create_task(made.run())
    await until(lambda: connector.count("Worker") == 3)
    policy.decode = lambda seen: seen.decode.workers
    for worker in connector.by_name["Worker"].workers[:2]:  # as after a reload
        connector._drop("Worker", worker.name)
    counted = len(record.counts)
    await until(lambda: len(record.counts) > counted + 20)
    await made.stop(1.0)
    await task
    assert connector.calls == ["add Worker"]


async def test_a_policy_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(seen: object) -> int:
        raise ZeroDivisionError

    connector, policy = FakeConnector(service("Worker")), Wanted(fail)
    async with running(connector, policy):
        await until(lambda: len(policy.seen) >= 3)
    assert connector.calls == []
    assert "policy wanted failed" in caplog.text


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("x"), "wrong", asyncio.Event()]
)
async def test_a_policy_that_fails_again_and_again_is_switched_off(
    error: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The thresholds decide instead, and each decision says so."""

    def fail(seen: object) -> Any:
        if isinstance(error, BaseException):
            raise error
        return error

    connector, policy = FakeConnector(service("Worker")), Wanted(fail)
    state_file = StateFile(tmp_path / "planner.json", FAST)
    async with running(connector, policy, sources=FakeSources(0.95)) as (loop, record):
        loop._observers = (*loop._observers, state_file)
        await until(lambda: record.records)
        ((_, explained),) = await loop.explain()
        await until(lambda: connector.count("Worker") == 2)
    assert len(policy.seen) == 3
    report = json.loads((tmp_path / "planner.json").read_bytes())
    assert "switched off: wanted failed 3 times" in report["models"][0]["problem"]  # as ps shows it
    failed = record.records[:3]
    assert [one.mode for one in failed[:2]] == ["wanted"] * 2
    assert all(one.pools[0].rule.startswith("policy wanted failed: ") for one in failed)
    assert "policy wanted failed: " in explained.pools[0].rule or explained.mode == "load"
    changed = next(one for one in record.records if one.changes)
    reason = "the policy is switched off: wanted failed 3 times in a row, at last: "
    assert changed.mode == "load" and reason in changed.pools[0].rule
    assert caplog.text.count("load decides instead until the planner is restarted") == 1


async def test_a_policy_that_fails_now_and_then_stays() -> None:
    def fail(seen: Any) -> int:
        if len(policy.seen) % 3:
            raise RuntimeError("now and then")
        return 1

    connector, policy = FakeConnector(service("Worker")), Wanted(fail)
    async with running(connector, policy):
        await until(lambda: len(policy.seen) >= 10)
    assert connector.calls == []


async def test_other_code_of_a_policy_that_fails() -> None:
    """Its constructor, what it learns of changes, and its copy for `dynamo planner explain`."""

    class Odd(Wanted):
        def applied(self, decision: Any, failed: Any) -> None:
            raise SystemExit

        def __deepcopy__(self, memo: object) -> Odd:
            raise TypeError("a lock")

    connector = FakeConnector(service("Worker"))
    async with running(connector, Odd(1)) as (loop, record):
        await until(lambda: record.records)
        ((_, explained),) = await loop.explain()
        assert "it cannot be asked without an effect on it" in explained.pools[0].rule
        await until(lambda: record.records[-1].mode == "load")

    def refuse(prefill: bool) -> Any:
        raise SystemExit("no licence")

    record = Recorder()
    made = ScalingLoop(connector, FakeSources(), FAST, refuse, [record])
    task = asyncio.get_running_loop().create_task(made.run())
    await until(lambda: record.records)
    await made.stop(1.0)
    await task
    assert (
        "switched off: it cannot be made: SystemExit: no licence" in record.records[0].pools[0].rule
    )


async def test_no_operation_decides_only() -> None:
    settings = PlannerSettings(
        metric_pulling_interval_s=0.005, adjustment_interval_s=0.02, no_operation=True
    )
    connector, policy = FakeConnector(service("Worker")), Wanted(3)
    async with running(connector, policy, settings) as (_, record):
        await until(lambda: len(record.records) >= 2)
    assert connector.calls == []
    assert {one.outcome for one in record.records} == {"no-operation"}
    assert policy.failures[0] == ("decode",)  # it must not count on the new workers


async def test_nothing_is_changed_while_the_services_are_unknown() -> None:
    connector, policy = FakeConnector(service("Worker")), Wanted(1)
    async with running(connector, policy):
        await until(lambda: policy.seen)
        connector.unknown = StatefileError("it is damaged")
        decisions = len(policy.seen)
        policy.decode = 2
        await asyncio.sleep(0.1)
        assert len(policy.seen) <= decisions + 1
        connector.unknown = None
        await until(lambda: connector.count("Worker") == 2)


async def test_a_stop_undoes_starts_and_finishes_removals() -> None:
    for wanted, calls in ((2, ["add Worker", "undo Worker"]), (0, ["remove Worker"])):
        connector = FakeConnector(service("Worker"), manual=True)
        async with running(connector, Wanted(wanted)) as (loop, record):
            await until(lambda gates=connector.gates: gates)  # type: ignore[misc]
            stopping = asyncio.get_running_loop().create_task(loop.stop(5.0))
            await asyncio.sleep(0.02)
            connector.gates[0].set()
            await stopping
        assert connector.calls == calls
        assert connector.count("Worker", DRAINING) == 0
        assert record.records[-1].outcome == ("failed" if wanted else "done")


async def test_a_stop_cancels_removals_that_take_too_long() -> None:
    connector = FakeConnector(service("Worker"), manual=True)
    async with running(connector, Wanted(0)) as (loop, _):
        await until(lambda: connector.gates)
        async with asyncio.timeout(20):
            await loop.stop(0.02)
    assert connector.count("Worker", DRAINING) == 1  # the next start finishes it


async def test_an_explanation_changes_nothing() -> None:
    connector, policy = FakeConnector(service("Worker")), Wanted(1)
    async with running(connector, policy) as (loop, _):
        await until(lambda: policy.seen)
        policy.decode = 1
        [(state, record)] = await loop.explain()
        assert record.pools[0].rule == "test"
        assert state.due_s - asyncio.get_running_loop().time() <= policy.interval_s
    assert connector.calls == []


async def test_a_slow_policy_holds_nothing_else_up() -> None:
    """It decides in a thread; what it decides is not carried out after a pause in between."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(_: object) -> int:
        asked.set()
        assert go_on.wait(5)  # never set, if it held the event loop
        return 3

    connector, policy = FakeConnector(service("Worker")), Wanted(slow)
    async with running(connector, policy) as (loop, record):
        await until(asked.is_set)
        loop.pause()
        go_on.set()
        await loop.explain()  # after the decision
        assert connector.calls == [] and record.records == []
        loop.resume()
        await until(lambda: connector.count("Worker") == 3)
    assert policy.failures[0] == ("decode",)  # the decision of the pause


async def test_a_model_whose_services_are_removed_is_forgotten() -> None:
    connector = FakeConnector(service("A", model="a"), service("B", model="b"))
    async with running(connector, Wanted(1)) as (loop, record):
        await until(lambda: len(loop.models()) == 2)
        del connector.by_name["A"]
        await until(lambda: record.models_forgotten == ["a"])
        assert loop.models() == ["b"]


async def test_one_service_of_a_model_is_scaled() -> None:
    settings = PlannerSettings(metric_pulling_interval_s=0.005, served_model_name="b")
    connector = FakeConnector(service("A", model="a"), service("B", model="b"))
    async with running(connector, Wanted(2), settings):
        await until(lambda: connector.count("B") == 2)
    assert connector.count("A") == 1


async def test_a_worker_counts_once_when_the_connector_lists_it() -> None:
    connector = FakeConnector(service("Worker"), manual=True)
    actions = WorkerActions(connector, ActionLimits(), lambda gpus, pool: 1, lambda action: None)
    work = asyncio.get_running_loop().create_task(actions.begin(connector.by_name["Worker"], 2))
    assert actions.pool(connector.by_name["Worker"]).workers == 3  # before anything has begun
    await until(lambda: len(connector.gates) == 2)
    assert connector.count("Worker", STARTING) == 2
    assert actions.pool(connector.by_name["Worker"]).workers == 3
    connector.gates[0].set()
    await until(lambda: connector.count("Worker", READY) == 2)
    pool = actions.pool(connector.by_name["Worker"])
    assert (pool.ready, pool.starting) == (2, 1)
    connector.gates[1].set()
    assert await work == ""


async def test_a_policy_of_the_traffic_is_not_asked_without_it() -> None:
    settings = replace(FAST, mode="sla")
    connector, policy, sources = FakeConnector(service("Worker")), Wanted(2), FakeSources(0.7)
    sources.known = False  # and the load is between the thresholds of the fallback
    async with running(connector, policy, settings, sources) as (_, record):
        await until(lambda: len(record.records) >= 2)
        assert policy.seen == [] and connector.calls == []
        assert "a frontend does not answer" in record.records[-1].pools[0].rule
        sources.known = True
        await until(lambda: connector.count("Worker") == 2)


async def test_without_the_traffic_load_alone_adds_workers_and_removes_none() -> None:
    settings = replace(FAST, mode="sla")
    connector, policy, sources = FakeConnector(service("Worker")), Wanted(1), FakeSources(0.95)
    sources.known = False
    async with running(connector, policy, settings, sources) as (_, record):
        await until(lambda: connector.count("Worker") == 3)
        rules = [one.pools[0].rule for one in record.records if one.changes]
        assert "s; by load: KV load 0.95 > 0.9" in rules[0]
        sources.usage = 0.0
        decided = len(record.records)
        await until(lambda: len(record.records) > decided + 5)
        assert not any(call.startswith("remove") for call in connector.calls)
        assert policy.seen == []
        sources.known = True
        await until(lambda: connector.count("Worker") == 1)


def test_the_fallback_waits_for_frontends_and_for_workers_that_start() -> None:
    fallback = LoadFallback(PlannerSettings(), patience_s=20.0)
    full = Pull(at_s=0, decode=(WorkerLoad(worker_id=1, kv_used_blocks=95, kv_total_blocks=100),))

    def wanted(now_s: float, starting: int = 0) -> int:
        seen = Observation(
            now_s=now_s,
            interval_s=5.0,
            decode=Pool(ready=1, starting=starting),
            traffic=Traffic(duration_s=5.0, known=False),
            pulls=(full,),
        )
        return fallback.decide(seen).pools[0].wanted

    assert [wanted(now_s) for now_s in (5.0, 10.0, 15.0, 20.0)] == [1, 1, 1, 2]
    assert wanted(25.0, starting=1) == 2  # the load of now does not show what that one will take
    fallback.known()
    assert wanted(40.0) == 1  # another outage


def test_only_a_start_ends_the_pause_after_failed_ones() -> None:
    connector = FakeConnector(service("Worker"))
    (model,) = models_of(connector.by_name.values(), None).values()
    state, pauses = ModelState(model, Wanted(2)), []
    for _ in range(8):
        state.changed(failed=True, adds=True, now_s=100.0)
        pauses.append(state.retry_s - 100.0)
        state.changed(failed=False, adds=False, now_s=100.0)  # a worker was removed
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    state.changed(failed=False, adds=True, now_s=100.0)
    assert state.retry_s < 100.0
    state.changed(failed=True, adds=True, now_s=100.0)
    assert state.retry_s == 102.0


async def test_a_service_that_is_left_out_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    other = service("Another")
    connector = FakeConnector(service("Worker"), other)
    async with running(connector, Wanted(1)) as (_, record):
        await until(lambda: len(record.records) > 3)
    problems = [one.message for one in caplog.records if "is not scaled" in one.message]
    assert len(problems) == 1
    assert problems[0].startswith("service Worker is not scaled: of the decode workers of model")
    assert "only Another is" in problems[0]


async def test_wake_ups_do_not_put_off_the_next_pull() -> None:
    connector, sources = FakeConnector(service("Worker")), FakeSources()
    settings = replace(FAST, metric_pulling_interval_s=0.5, adjustment_interval_s=1.0)

    async def pulled_again() -> None:
        pulls = sources.pulls
        await until(lambda: sources.pulls > pulls, 0)

    async with running(connector, Wanted(1), settings, sources) as (loop, _):
        for _ in range(200):
            loop.wake()
            await pulled_again()
        await pulled_again()  # in half a second, not 200 of them


async def test_a_wake_up_during_a_tick_is_not_lost() -> None:
    connector, sources = FakeConnector(service("Worker")), FakeSources()
    settings = replace(FAST, metric_pulling_interval_s=1000.0, adjustment_interval_s=1000.0)
    listed = connector.services

    async def services() -> Mapping[str, ScaledService]:
        if not sources.pulls:
            loop.wake()
        return await listed()

    connector.services = services  # type: ignore[method-assign]
    async with running(connector, Wanted(1), settings, sources) as (loop, _):
        await until(lambda: sources.pulls == 2)
