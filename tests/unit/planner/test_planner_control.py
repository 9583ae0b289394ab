"""Changes of a running planner: applied as a whole, kept over a restart, refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_arena import profile
from planner_kit import FakeConnector, FakeSources, service
from test_planner_combined import seen
from test_planner_loop import FAST, running
from until import until

from dynamo.config.planner import PlannerSettings
from dynamo.errors import DynamoError, InvalidArgument
from dynamo.operations.steps.limits import ActionLimits
from dynamo.planner.capacity.interpolation import write_profile
from dynamo.planner.capacity.observation import Pool
from dynamo.planner.live.actions import WorkerActions
from dynamo.planner.live.control import PlannerControl
from dynamo.planner.live.loop import ScalingLoop
from dynamo.planner.policies.combined import CombinedPolicy
from dynamo.planner.policies.sla import SlaPolicy
from dynamo.protocols.control import PlannerChange
from dynamo_lab.simulation.service_model import service_model

TARGETED = replace(FAST, mode="load+sla", ttft_ms=2000.0)


def control(
    tmp_path: Path, settings: PlannerSettings = FAST, deployment: str = "7/1"
) -> PlannerControl:
    return PlannerControl(settings, tmp_path / "planner-control.json", deployment)


def attached(made: PlannerControl, loop: ScalingLoop) -> PlannerControl:
    made.listeners.append(loop.configure)
    made.attach(loop)
    return made


async def test_a_minimum_and_a_budget_take_effect_at_once(tmp_path: Path) -> None:
    connector, sources = FakeConnector(service("Worker")), FakeSources(0.6)  # between thresholds
    async with running(connector, None, sources=sources) as (loop, _):
        planner = attached(control(tmp_path), loop)
        await until(lambda: loop.services)
        state = planner.change(PlannerChange(minima={"Worker": 3}))
        assert state.minima == {"Worker": 3}
        await until(lambda: connector.count("Worker") == 3)
        planner.change(PlannerChange(max_gpu_budget=3, minima={"Worker": None}))
        sources.usage = 0.95
        pulls = sources.pulls
        await until(lambda: sources.pulls > pulls + 40)
        assert connector.most_gpus == 3  # it was 4
        sources.usage = 0.1
        await until(lambda: connector.count("Worker") == 1)  # the graph's minimum again
        assert planner.change(PlannerChange()).minima == {"Worker": 1}


async def test_a_restarted_planner_goes_on_with_the_changes(tmp_path: Path) -> None:
    connector = FakeConnector(service("Worker"))
    async with running(connector, None) as (loop, _):
        planner = attached(control(tmp_path, TARGETED), loop)
        await until(lambda: loop.services)
        planner.change(PlannerChange(ttft_ms=900.0, paused=True))
        planner.change(PlannerChange(max_gpu_budget=2, minima={"Worker": 2}))
    async with running(connector, None) as (loop, _):
        pauses: list[bool] = []
        again = control(tmp_path, TARGETED)
        again.on_pause = pauses.append
        attached(again, loop)
        await until(lambda: loop.services)
        state = again.change(PlannerChange())
        assert (state.paused, state.ttft_ms, state.itl_ms) == (True, 900.0, 50.0)
        assert (state.max_gpu_budget, state.minima) == (2, {"Worker": 2})
        assert pauses == [True]
        assert not again.change(PlannerChange(paused=False, min_gpu_budget=0)).paused
    async with running(connector, None) as (loop, _):
        last = attached(control(tmp_path, replace(TARGETED, min_gpu_budget=1)), loop)
        assert not last.change(PlannerChange()).paused
        assert last.settings.min_gpu_budget == 0
    assert control(tmp_path, TARGETED, "8/1").settings == TARGETED  # another deployment
    assert control(tmp_path, TARGETED).settings.ttft_ms == 900.0


@pytest.mark.parametrize("content", [b"{", b'{"deployment": "7/1", "change": {"later": 1}}', b""])
def test_a_damaged_file_changes_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "planner-control.json").write_bytes(content)
    assert control(tmp_path).settings == FAST


def test_saved_changes_that_contradict_new_options_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '{"deployment": "7/1", "change": {"max_gpu_budget": 2}}'
    (tmp_path / "planner-control.json").write_text(text)
    settings = replace(FAST, min_gpu_budget=3)
    assert control(tmp_path, settings).settings == settings
    assert "--min-gpu-budget 3 is above --max-gpu-budget 2" in caplog.text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (PlannerChange(max_gpu_budget=0), "--min-gpu-budget 1 is above --max-gpu-budget 0"),
        (PlannerChange(min_gpu_budget=-1), "min_gpu_budget must be between 0 and"),
        (PlannerChange(ttft_ms=0.0), "ttft_ms must be above 0"),
        (PlannerChange(itl_ms=float("nan")), "itl_ms must be above 0"),
        (PlannerChange(minima={"Other": 1}), "no service 'Other' is scaled; there are: Worker"),
        (PlannerChange(minima={"Worker": -1}), "Worker must be between 0 and"),
    ],
)
async def test_a_bad_change_is_refused_as_a_whole(
    change: PlannerChange, text: str, tmp_path: Path
) -> None:
    async with running(FakeConnector(service("Worker")), None) as (loop, _):
        planner = attached(control(tmp_path, TARGETED), loop)
        await until(lambda: loop.services)
        before = planner.change(PlannerChange())
        change.paused = True
        with pytest.raises(InvalidArgument) as refused:
            planner.change(change)
        assert text in refused.value.message
        assert planner.change(PlannerChange()) == before
        assert not (tmp_path / "planner-control.json").exists()


async def test_zero_workers_are_for_boxes_that_start_them_on_demand(tmp_path: Path) -> None:
    async with running(FakeConnector(service("Worker")), None) as (loop, _):
        await until(lambda: loop.services)
        planner = attached(control(tmp_path), loop)
        assert planner.change(PlannerChange(minima={"Worker": 0})).minima["Worker"] == 0
        cluster = replace(FAST, environment="kubernetes", graph_deployment="g")
        planner = attached(control(tmp_path, cluster), loop)
        with pytest.raises(InvalidArgument, match="Worker must be between 1 and"):
            planner.change(PlannerChange(minima={"Worker": 0}))


async def test_mode_load_has_no_targets(tmp_path: Path) -> None:
    async with running(FakeConnector(service("Worker")), None) as (loop, _):
        planner = attached(control(tmp_path), loop)
        with pytest.raises(InvalidArgument, match="mode load has thresholds and no targets"):
            planner.change(PlannerChange(itl_ms=20.0))
        assert planner.change(PlannerChange()).itl_ms is None


async def test_a_change_that_cannot_be_saved_is_not_applied(tmp_path: Path) -> None:
    async with running(FakeConnector(service("Worker")), None) as (loop, _):
        planner = attached(control(tmp_path / "gone", TARGETED), loop)
        with pytest.raises(DynamoError, match=r"cannot write .*planner-control\.json"):
            planner.change(PlannerChange(ttft_ms=700.0, paused=True))
        assert planner.settings.ttft_ms == 2000.0 and not loop.paused


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("make", [SlaPolicy, CombinedPolicy])
def test_policies_keep_what_they_learned_under_new_targets(
    make: type[SlaPolicy | CombinedPolicy], prefill: bool, tmp_path: Path
) -> None:
    settings = TARGETED
    if prefill and make is SlaPolicy:
        write_profile(tmp_path, profile(service_model("qwen3-8b-h100")))
        settings = replace(TARGETED, profile_results_dir=str(tmp_path))
    policies = [
        make(replace(settings, ttft_ms=ttft_ms, itl_ms=itl_ms), prefill)
        for ttft_ms, itl_ms in ((20_000.0, 500.0), (20_000.0, 500.0), (300.0, 9.0))
    ]
    for number in range(1, 21):
        if number == 20:
            policies[1].aim(300.0, 9.0)
        queued = 30 if number == 20 else 0  # how many are too many depends on the target
        found = seen(number, rate=4.0 + number % 7, queued=queued)
        found = replace(found, prefill=Pool(ready=2) if prefill else None)
        wide, aimed, narrow = (policy.decide(found).forecast for policy in policies)
    for name in (name for name in narrow if name.startswith("predicted_")):
        assert aimed[name] == narrow[name]
    assert aimed["predicted_num_decode_replicas"] > wide["predicted_num_decode_replicas"]


@pytest.mark.parametrize(
    ("given", "gpus_per_worker", "least"),
    [
        ({"min_gpu_budget": 2}, 2.0, 1),
        ({"min_gpu_budget": 3}, 2.0, 2),
        ({"min_gpu_budget": 2}, 1.0, 2),
        ({"min_gpu_budget": 1}, 0.5, 1),
        ({"min_gpu_budget": 2}, 0.0, 2),
        ({"min_gpu_budget": 0}, 4.0, 0),
        ({"min_gpu_budget": 4, "min_endpoint": 3}, 4.0, 3),
    ],
)
def test_the_minimum_counts_gpus(given: dict[str, Any], gpus_per_worker: float, least: int) -> None:
    settings = replace(FAST, **given)
    worker = replace(service("Worker"), gpus_per_worker=gpus_per_worker)
    actions = WorkerActions(FakeConnector(worker), ActionLimits(), settings.least_workers, print)
    assert actions.pool(worker).minimum == least
