"""The state of each model, from its workers and the frontends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from status_documents import MOCKER, document, entry, seen

from dynamo.protocols.status import (
    FrontendStatus,
    ModelFigures,
    ModelStatus,
    PlannedModel,
    PlannerReport,
    WorkerFigures,
)
from dynamo.serve.state.document import ABSENT
from dynamo.status.models import BoxView, FrontendView, model_statuses
from dynamo.status.workers import worker_statuses

FAILED = {"status": "given up", "reason": "5 deaths within 60 s"}


def model(found: BoxView) -> ModelStatus:
    (status,) = model_statuses(found, worker_statuses(found))
    return status


def planner(state: str = "running", on_demand: tuple[str, ...] = ("tiny",)) -> PlannerReport:
    wish = PlannedModel(model="tiny", at_s=1.0, text="x", wanted={"decode": 4})
    return PlannerReport(
        pid=1,
        start_ticks=1,
        state=state,
        mode="load",
        idle_timeout_s=300.0,
        on_demand=on_demand,
        models=(wish,),
    )


def frontend(**figures: Any) -> FrontendView:
    status = FrontendStatus(models=(ModelFigures(model="tiny", **figures),))
    return FrontendView(name="d_F", url="", state="ready", status=status)


def test_ready_and_wanted() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, 12))
    found = model(seen(document(*entries, W=3), 11))
    assert (found.state, found.ready, found.wanted) == ("ready", 1, 3)
    assert found.workers == ("d_W", "d_W_1") and not found.cause


def test_workers_that_were_added_are_wanted() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, 12))
    assert model(seen(document(*entries, W=1), 11, 12)).wanted == 2


def test_the_planner_says_what_is_wanted() -> None:
    found = document(entry("d_W", MOCKER, 11), W=1)
    for state, wanted in (("running", 4), ("paused", 4), ("observing", 1)):
        assert model(seen(found, 11, planner=planner(state))).wanted == wanted


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([("d_W", 11, {}), ("d_W_1", 0, {"watcher": FAILED})], "ready"),
        ([("d_W", 12, {}), ("d_W_1", 0, {"watcher": FAILED})], "loading"),
        ([("d_W", 0, {"watcher": FAILED})], "failed"),
        ([("d_W", 11, {"state": "asleep"})], "asleep"),
        ([("d_W", 11, {"state": "draining"})], "draining"),
        ([("d_W", 0, {"watcher": {"status": "absent"}})], "zero"),
    ],
)
def test_the_state_that_says_most(entries: list[tuple[str, int, Any]], state: str) -> None:
    made = [entry(name, MOCKER, pid, **more) for name, pid, more in entries]
    assert model(seen(document(*made, W=0), 11)).state == state


def test_a_failed_worker_shows_although_another_serves() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, watcher=FAILED))
    found = model(seen(document(*entries, W=2), 11))
    assert found.state == "ready" and found.cause == "5 deaths within 60 s"
    assert found.remedy == "dynamo restart d_W_1"


def test_a_worker_that_sleeps_holds_no_gpu() -> None:
    def with_gpu(name: str, pid: int, gpu: int, state: str) -> dict[str, Any]:
        return entry(name, MOCKER, pid, resources={"allocated_gpus": [gpu]}, state=state)

    one, other = with_gpu("d_W", 11, 0, "running"), with_gpu("d_W_1", 12, 1, "asleep")
    assert model(seen(document(one, other), 11, 12)).gpus == ("0",)


def test_progress_is_that_of_the_slowest() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, 12))
    lines = {"d_W": "loading 40 %", "d_W_1": "loading 20 %"}
    assert model(seen(document(*entries), last_output=lines.__getitem__)).progress == 0.2


def test_figures_are_summed_over_the_frontends() -> None:
    found = document(entry("d_W", MOCKER, 11))
    slow = frontend(in_flight=2, queued=1, output_tokens_per_s=10, ttft_p99_s=0.5, idle_s=9.0)
    fast = frontend(in_flight=1, output_tokens_per_s=5, requests_per_s=2, hit_rate=0.4, idle_s=3.0)
    figures = model(seen(found, 11, frontends=(slow, fast))).figures
    assert figures is not None
    assert (figures.in_flight, figures.queued, figures.output_tokens_per_s) == (3, 1, 15)
    assert (figures.ttft_p99_s, figures.hit_rate, figures.idle_s) == (0.5, 0.4, 3.0)


def test_an_adapter_is_a_model_of_the_same_workers() -> None:
    adapter = ModelFigures(model="lora", workers=(WorkerFigures(worker="b", in_flight=3),))
    unknown = ModelFigures(model="other", workers=(WorkerFigures(worker="ff"),))
    status = FrontendStatus(models=(adapter, unknown))
    sighting = FrontendView(name="d_F", url="", state="ready", status=status)
    found = seen(document(entry("d_W", MOCKER, 11)), 11, frontends=(sighting,))
    base, lora = model_statuses(found, worker_statuses(found))
    assert (base.model, lora.model) == ("tiny", "lora")
    assert (lora.state, lora.ready, lora.wanted, lora.workers) == ("ready", 1, 1, ("d_W",))


def test_figures_are_missing_while_no_frontend_answers() -> None:
    down = FrontendView(name="d_F", url="", state="down", problem="x")
    assert model(seen(document(entry("d_W", MOCKER, 11)), 11, frontends=(down,))).figures is None


def test_idle_until() -> None:
    found = document(entry("d_W", MOCKER, 11))

    def left_s(sighting: FrontendView, **more: Any) -> float | None:
        return model(seen(found, 11, frontends=(sighting,), **more)).idle_until_s

    idle, busy = frontend(idle_s=100.0), frontend(idle_s=0.0, in_flight=1)
    assert left_s(idle, planner=planner()) == 200
    assert left_s(busy, planner=planner()) is None
    component = found["components"]["d_W"]
    for asked_s, expected_s in ((30.0, 270), (500.0, 200), (-5.0, 300)):  # an operator's load
        component["asked_at"] = seen(found).at_s - asked_s
        assert left_s(idle, planner=planner()) == expected_s
    del component["asked_at"]
    own = {"ServiceArgs": {"idle_timeout": "15m"}}
    for time, left in (("15m", 800), ("never", None)):
        own["ServiceArgs"]["idle_timeout"] = time
        found["environment"]["DYNAMO_SERVICE_CONFIG"] = json.dumps({"W": own})
        assert left_s(idle, planner=planner()) == left
    found["environment"]["DYNAMO_SERVICE_CONFIG"] = json.dumps({"W": {}})
    assert left_s(idle, planner=planner("paused")) is None
    assert left_s(idle, planner=planner(on_demand=())) is None
    assert left_s(idle) is None
    found["components"]["d_W"]["state"] = "asleep"
    assert left_s(idle, planner=planner()) is None  # it holds no GPU


def test_a_model_that_was_drained_has_a_remedy() -> None:
    drained = document(entry("d_W", MOCKER, watcher={"status": ABSENT}), W=1)
    found = model(seen(drained))
    assert (found.state, found.cause) == ("zero", "no worker runs")
    assert found.remedy == "dynamo load tiny"
    on_demand = document(entry("d_W", MOCKER, watcher={"status": ABSENT}), W=0)
    assert model(seen(on_demand)).remedy == ""


def test_prefill_workers_alone_are_not_ready() -> None:
    prefill = entry("d_P", [*MOCKER, "--disaggregation-mode", "prefill"], 11)
    template = entry("d_W", MOCKER, watcher={"status": ABSENT})
    found = model(seen(document(prefill, template, P=1, W=0), 11))
    assert (found.state, found.ready, found.wanted) == ("zero", 1, 1)


def test_a_model_whose_requests_wait_has_the_cause() -> None:
    found = document(entry("d_W", MOCKER, 0, watcher={"status": ABSENT}), W=0)
    wish = PlannedModel(model="tiny", at_s=1.0, text="x", waits_for="2 requests wait for …")
    report = PlannerReport(pid=1, start_ticks=1, state="running", mode="load", models=(wish,))
    status = model(seen(found, planner=report))
    assert (status.state, status.cause) == ("zero", "2 requests wait for …")
    assert status.remedy == "dynamo planner explain"
