"""The state of each process, from the statefile and what was seen."""

from __future__ import annotations

from typing import Any

import pytest
from status_documents import MOCKER, PYTHON, document, entry, seen

from dynamo.protocols.status import (
    FrontendStatus,
    GpuHolder,
    GpuStatus,
    ModelFigures,
    WorkerFigures,
    WorkerStatus,
)
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.status.models import BoxView, FrontendView
from dynamo.status.workers import worker_statuses

FRONTEND = [*PYTHON, "dynamo.frontend"]


def one(found: BoxView) -> WorkerStatus:
    (status,) = worker_statuses(found)
    return status


def last(text: str) -> Any:
    return lambda name: text


def test_a_worker_is_ready_once_its_model_is_registered() -> None:
    found = document(entry("d_W", MOCKER, 11))
    loading = one(seen(found, last_output=last("loading weights: 43 % of 8 GB")))
    assert (loading.state, loading.progress, loading.model) == ("loading", 0.43, "tiny")
    assert "loading weights" in loading.cause
    ready = one(seen(found, 11))
    assert (ready.state, ready.worker, ready.pids, ready.uptime_s) == ("ready", "b", (11,), 5.0)
    assert not ready.cause and ready.progress is None


def test_a_lease_alone_is_not_enough() -> None:
    registered = {11: RegisteredWorker(pid=11, leases=(11,))}
    found = seen(document(entry("d_W", MOCKER, 11)), registered=registered)
    assert one(found).state == "loading"


def test_a_process_that_does_not_renew_its_lease() -> None:
    for model, state in (("tiny", "failed"), (None, "loading")):
        mine = RegisteredWorker(pid=11, leases=(11,), model=model, silent=True)
        found = one(seen(document(entry("d_W", MOCKER, 11)), registered={11: mine}))
        assert found.state == state
    planner = document(entry("d_P", [*PYTHON, "dynamo.planner"], 11))
    mine = RegisteredWorker(pid=11, leases=(11,), silent=True)
    found = one(seen(planner, registered={11: mine}))
    assert (found.state, found.remedy) == ("failed", "dynamo restart d_P")
    assert "stopped, or hangs" in found.cause


@pytest.mark.parametrize(
    ("can_sleep", "pids", "shown"),
    [(False, [11], False), (True, [11], True), (True, [11, 12], False)],
)
def test_whether_a_worker_can_sleep(can_sleep: bool, pids: list[int], shown: bool) -> None:
    mine = RegisteredWorker(pid=11, leases=(11,), worker_id=11, model="tiny", can_sleep=can_sleep)
    processes = [{"pid": pid, "start_ticks": 1} for pid in pids]
    found = document(entry("d_W", MOCKER, processes=processes))
    assert one(seen(found, registered={11: mine})).can_sleep is shown
    asleep = document(entry("d_W", MOCKER, 11, state="asleep"))
    assert not one(seen(asleep, registered={11: mine})).can_sleep  # it does already


def test_a_worker_that_is_restarted() -> None:
    watcher = {"status": "active", "restarts": 2, "last_exit": "was killed by SIGKILL"}
    status = one(seen(document(entry("d_W", MOCKER, watcher=watcher)), last_output=last("x")))
    assert (status.state, status.restarts) == ("loading", 2)
    assert status.cause == "was killed by SIGKILL, restarting; last output: x"
    assert status.remedy == "dynamo logs d_W"
    again = one(seen(document(entry("d_W", MOCKER, 11, watcher=watcher)), last_output=last("x")))
    assert again.cause == "was killed by SIGKILL, started again; last output: x"
    watcher |= {"last_exit": "exited with status 1", "last_words": "ValueError: no memory"}
    failed = one(seen(document(entry("d_W", MOCKER, 11, watcher=watcher)), last_output=last("x")))
    assert failed.cause == (
        "exited with status 1 (ValueError: no memory), started again; last output: x"
    )


def test_a_worker_that_was_given_up() -> None:
    watcher = {
        "status": "given up",
        "reason": "5 deaths within 60 s",
        "restarts": 5,
        "last_exit": "exited with status 1",
    }
    found = document(entry("d_W", MOCKER, watcher=watcher))
    status = one(seen(found, last_output=last("CUDA out of memory")))
    assert status.state == "failed" and status.remedy == "dynamo restart d_W"
    assert status.cause == (
        "5 deaths within 60 s; exited with status 1; last output: CUDA out of memory"
    )


@pytest.mark.parametrize(
    ("change", "reserved", "state"),
    [
        ({"state": "draining"}, [], "draining"),
        ({"state": "draining"}, ["d_W"], "draining"),
        ({"state": "asleep"}, [], "asleep"),
        ({"state": "asleep"}, ["d_W"], "loading"),
        ({"watcher": {"status": "stopped"}}, [], "draining"),
    ],
)
def test_states_of_a_living_worker(change: dict[str, Any], reserved: list[str], state: str) -> None:
    status = one(seen(document(entry("d_W", MOCKER, 11, **change)), 11, reserved=reserved))
    assert status.state == state


@pytest.mark.parametrize("state", ["running", "asleep"])
def test_a_worker_that_falls_asleep(state: str) -> None:
    """Its model stays registered; at the end its entry says asleep while that is not sure yet."""
    mark = {"pid": 1, "start_ticks": 1, "host": "h", "operation": "sleep"}
    found = document(entry("d_W", MOCKER, 11, state=state, reserved_by=mark))
    status = one(seen(found, 11, reserved=["d_W"]))
    assert (status.state, status.cause) == ("draining", "it finishes its requests, then sleeps")


def test_states_without_a_process() -> None:
    assert one(seen(document(entry("d_W", MOCKER, watcher={"status": "stopped"})))).state == (
        "stopped"
    )
    found = document(entry("d_W", MOCKER, watcher={"status": "stopped"}))
    assert one(seen(found)).remedy == "dynamo restart d_W"
    ending = one(seen(found, stopping=True))
    assert (ending.cause, ending.remedy) == ("the deployment stops", "")
    absent = document(entry("d_W", MOCKER, watcher={"status": "absent"}))
    assert worker_statuses(seen(absent)) == ()
    assert one(seen(absent, reserved=["d_W"])).state == "loading"
    dead = seen(document(entry("d_W", MOCKER, 11)), uptimes={})
    assert one(dead).state == "loading" and one(dead).pids == ()


def test_a_file_of_another_writer_has_no_watcher() -> None:
    old = entry("d_W", MOCKER, 11)
    del old["watcher"]
    assert one(seen(document(old), 11)).state == "ready"


def test_a_frontend_is_as_it_answers() -> None:
    found = document(entry("d_F", FRONTEND, 11))
    for state, leased, expected in (
        ("ready", True, "ready"),
        ("draining", True, "draining"),
        ("down", False, "loading"),
        ("down", True, "failed"),
    ):
        frontend = FrontendView(name="d_F", url="http://x", state=state)
        status = one(seen(found, *([11] if leased else []), frontends=(frontend,)))
        assert status.state == expected, (state, leased)
    assert "does not answer" in status.cause and status.remedy == "dynamo restart d_F"


def test_a_registered_worker_that_the_frontend_rejects() -> None:
    status = FrontendStatus(rejected={"b": "its template is broken"})
    frontend = FrontendView(name="d_F", url="http://x", state="ready", status=status)
    found = one(seen(document(entry("d_W", MOCKER, 11)), 11, frontends=(frontend,)))
    assert found.state == "failed" and found.remedy == "dynamo restart d_W"
    assert found.cause == "the frontend gives it no requests: its template is broken"


def test_workers_with_different_models_of_one_name() -> None:
    """A restart helps if the files of a service have changed; not if the graph is wrong."""
    status = FrontendStatus(rejected={"b": "others have another checksum"})
    frontend = FrontendView(name="d_F", url="http://x", state="ready", status=status)

    def remedies(second: str, *serving: int) -> list[str]:
        found = document(entry("d_A", MOCKER, 11), entry(second, MOCKER, 12))
        return [s.remedy for s in worker_statuses(seen(found, *serving, frontends=(frontend,)))]

    assert remedies("d_B", 11, 12) == [
        "dynamo reload GRAPH  # with another served-model-name of A",
        "",
    ]
    prefill = entry("d_P", [*MOCKER, "--disaggregation-mode", "prefill"], 11)
    found = document(prefill, entry("d_B", MOCKER, 12))
    first, _ = worker_statuses(seen(found, 11, 12, frontends=(frontend,)))
    assert first.remedy == "dynamo reload GRAPH  # with the model and flags of the decode workers"
    changed = entry("d_A_1", MOCKER, 12)
    found = document(entry("d_A", MOCKER, 11), changed)
    first, _ = worker_statuses(seen(found, 11, 12, frontends=(frontend,)))
    assert first.remedy == "dynamo restart A  # the others read the changed files, too"
    assert remedies("d_B", 11)[0] == "dynamo restart d_A"  # no other one: its own files are wrong


def test_figures_and_gpu_memory_of_a_worker() -> None:
    def frontend(in_flight: int, kv_use: float | None) -> FrontendView:
        figures = WorkerFigures(worker="b", in_flight=in_flight, kv_use=kv_use)
        model = ModelFigures(model="tiny", workers=(figures,))
        return FrontendView(
            name="d_F", url="", state="ready", status=FrontendStatus(models=(model,))
        )

    holders = (
        GpuHolder(pid=12, used_bytes=7, worker="d_W"),
        GpuHolder(pid=99, used_bytes=1),
    )
    gpus = tuple(GpuStatus(gpu=gpu, holders=holders) for gpu in "01")
    frontends = (frontend(2, 0.5), frontend(3, None))
    status = one(seen(document(entry("d_W", MOCKER, 11)), 11, frontends=frontends, gpus=gpus))
    assert (status.in_flight, status.kv_use, status.vram_bytes) == (5, 0.5, 14)


def test_without_file_discovery_the_frontend_knows() -> None:
    found = document(entry("d_W", MOCKER, 11))
    assert one(seen(found, uses_files=False)).state == "ready"  # no frontend says otherwise
    model = ModelFigures(model="tiny")
    for workers, state in (((), "loading"), ((WorkerFigures(worker="b"),), "ready")):
        figures = FrontendStatus(models=(ModelFigures(model="tiny", workers=workers),))
        frontend = FrontendView(name="d_F", url="", state="ready", status=figures)
        assert one(seen(found, uses_files=False, frontends=(frontend,))).state == state
    assert model.workers == ()


def test_a_program_without_a_model_is_ready_while_it_runs() -> None:
    assert one(seen(document(entry("d_W", ["sleep", "9"], 11)))).state == "ready"


@pytest.mark.parametrize(
    ("change", "state", "cause"),
    [
        ({"operation": "sleep"}, "failed", "its sleep was interrupted"),
        ({"operation": "drain", "state": "draining"}, "draining", "its drain was interrupted"),
        ({"operation": "wake", "state": "asleep"}, "asleep", "its wake was interrupted"),
        ({"operation": "load"}, "ready", ""),  # the arbiter goes on
        ({"operation": "load", "watcher": None, "processes": []}, "failed", "its load was"),
        (
            {"operation": "load", "watcher": {"status": "stopped"}, "processes": []},
            "failed",
            "its load was",
        ),
    ],
)
def test_an_operation_whose_process_has_exited(
    change: dict[str, Any], state: str, cause: str
) -> None:
    mark = {"pid": 1, "start_ticks": 1, "host": "h", "operation": change.pop("operation")}
    found = document(entry("d_W", MOCKER, 7, reserved_by=mark, **change))
    [worker] = worker_statuses(seen(found, 7))
    assert worker.state == state
    assert worker.cause.startswith(cause)
    assert worker.remedy == ("dynamo state repair" if cause else "")
    [worker] = worker_statuses(seen(found, 7, reserved=["d_W"]))
    assert "interrupted" not in worker.cause


def test_the_second_worker_comes_before_the_tenth() -> None:
    names = ["d_W", "d_W_10", "d_P", "d_W_9", "d_W_2", "d_P_11", "d_P_3"]
    entries = [entry(name, MOCKER, 20 + at) for at, name in enumerate(names)]
    found = [one.name for one in worker_statuses(seen(document(*entries)))]
    assert found == ["d_W", "d_W_2", "d_W_9", "d_W_10", "d_P", "d_P_3", "d_P_11"]
