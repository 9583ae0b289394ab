"""What a changed graph means for the watchers that run, and for their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo.serve.graph.changes import (
    GraphChanges,
    added_workers,
    changed_settings,
    compare,
    follow,
    without_awakening,
    without_removed,
)
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import WatcherSpec, drain_env, plan, plan_added, with_gpus

TEXT = """
A: {run: m, x: 1, ServiceArgs: {workers: 2, resources: {gpu: 1}}}
B: {run: [python, b.py]}
"""


def specs(text: str) -> list[WatcherSpec]:
    """The watchers of a graph, the n-th with a GPU on GPU n."""
    found = plan(
        parse_graph(text, "g.yaml"), python="py", working_dir="/", env={}, graceful_timeout_s=30
    )
    return [with_gpus(s, [str(n)]) if s.gpu else s for n, s in enumerate(found)]


def changes(before: str, after: str) -> GraphChanges:
    running = specs(before)
    return compare({s.name: s for s in running}, specs(after), {s.name for s in running})


def names(found: list[WatcherSpec]) -> list[str]:
    return [spec.name for spec in found]


def test_nothing_changes() -> None:
    found = changes(TEXT, TEXT)
    assert found.lines() == [] and len(found.kept) == 3
    assert found.summary() == "0 added, 0 restarted, 0 removed, 3 unchanged"


def test_settings_that_change_no_process_are_named() -> None:
    before = {
        "namespace": "d",
        "A": {"run": "m", "model-name": "a", "ServiceArgs": {"workers": 0}},
        "B": {"run": "m", "x": 1},
        "Gone": {"run": "m", "ServiceArgs": {"workers": 0}},
    }
    after = {
        "namespace": "d",
        "A": {"run": "m", "model-name": "b", "ServiceArgs": {"workers": 0, "max": 1}},
        "B": {"run": "m", "x": 2},
        "New": {"run": "m", "ServiceArgs": {"workers": 0}},
    }
    assert changed_settings(before, before, ()) == []
    assert changed_settings(before, after, ["B"]) == [
        "set      A   changed: ServiceArgs, model-name",
        "set      Gone   removed",
        "set      New   without workers",
    ]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("x: 1", "x: 2", "command"),
        ("resources: {gpu: 1}", "resources: {gpu: 2}", "GPUs"),
        ("resources: {gpu: 1}", "resources: {gpu: 1}, envs: {K: v}", "environment"),
        ("resources: {gpu: 1}", "resources: {gpu: 1}, graceful_timeout: 5", "environment"),
        ("gpu: 1}", "gpu: 0}", "GPUs"),
    ],
)
def test_only_a_changed_service_is_restarted(old: str, new: str, why: str) -> None:
    found = changes(TEXT, TEXT.replace(old, new))
    assert names([*found.changed]) == ["dynamo_A", "dynamo_A_1"] == list(found.why)
    assert set(found.why.values()) == {why}
    assert names([*found.kept]) == ["dynamo_B"]
    assert "v" not in found.lines()[0].partition("changed")[2].replace("environment", "")


def test_a_running_worker_keeps_its_gpus() -> None:
    """The new graph alone would place A on GPU 1, behind C."""
    found = changes(TEXT, "C: {run: m, ServiceArgs: {resources: {gpu: 1}}}" + TEXT)
    assert [spec.gpus for spec in found.kept] == [("0",), ("1",), ()]
    assert names([*found.added]) == ["dynamo_C"]
    moved = changes(TEXT, TEXT.replace("x: 1", "x: 2"))
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in moved.changed] == ["0", "1"]


def test_a_watcher_added_by_command_stays_until_the_graph_names_it() -> None:
    running = {spec.name: spec for spec in specs(TEXT)}
    planned = set(running)
    a = running["dynamo_A"]
    added = plan_added("dynamo_A_2", a.argv, {"CUDA_VISIBLE_DEVICES": "5"}, running.values())
    running[added.name] = added
    assert compare(running, specs(TEXT), planned).lines() == []
    three = compare(running, specs(TEXT.replace("workers: 2", "workers: 3")), planned)
    assert three.lines() == [] and three.kept[2].gpus == ("5",)
    none = compare(running, specs("B: {run: [python, b.py]}"), planned)
    assert none.removed == ["dynamo_A", "dynamo_A_1"]


def test_an_added_worker_of_no_service_has_what_all_have_in_common() -> None:
    text = "A: {run: dynamo.mocker, ServiceArgs: {envs: {X: '1', Y: '2'}}}\n"
    text += "B: {run: dynamo.mocker, ServiceArgs: {envs: {X: '1', Y: '3'}}}\n"
    argv = ("python", "-m", "dynamo.mocker")
    added = plan_added("dynamo_Z", argv, {"CUDA_VISIBLE_DEVICES": "4,5"}, specs(text))
    assert (added.service, added.gpus, added.gpu) == ("dynamo_Z", ("4", "5"), 2.0)
    assert added.env["X"] == "1" and "Y" not in added.env
    assert (added.options, added.pinned, added.declares_model) == ({}, False, False)


MODELS = "M: {run: dynamo.mocker, x: 1, ServiceArgs: {workers: 2}}\nB: {run: [python, b.py]}\n"


@pytest.mark.parametrize(
    ("running", "more", "wanted"),
    [
        ("dynamo_M dynamo_B", "", "dynamo_M dynamo_M_1 dynamo_B"),
        ("dynamo_M_7 dynamo_B", "", "dynamo_M dynamo_M_1 dynamo_B"),  # one was added by command
        ("dynamo_B", "", "dynamo_B"),
        ("", "N: {run: dynamo.mocker}", "dynamo_B dynamo_N"),
        ("dynamo_M dynamo_B", "P: {run: dynamo.planner}", "dynamo_M dynamo_B dynamo_P"),
    ],
)
def test_removed_workers_stay_removed(running: str, more: str, wanted: str) -> None:
    """Those of a service without workers; with a planner all."""
    started = specs(MODELS)
    present = {n: replace(started[0 if "M" in n else 2], name=n) for n in running.split()}
    assert names(without_removed(specs(MODELS + more), started, present)) == wanted.split()


def test_a_worker_that_sleeps_or_drains_is_not_started() -> None:
    found = changes(MODELS, MODELS.replace("x: 1", "x: 2"))
    spared = without_awakening(found, ["dynamo_M"], ["dynamo_M_1"])
    assert spared.lines() == ["remove   dynamo_M"]
    assert names([*spared.kept]) == ["dynamo_B", "dynamo_M_1"]
    assert without_awakening(found, [], []) == found
    same = changes(MODELS, MODELS)
    assert without_awakening(same, ["dynamo_M"], []) == same


def test_the_status_servers_of_a_service_have_successive_ports() -> None:
    """Whether the graph names a worker, the planner adds it, or a reload replaces it."""
    text = "A: {run: m, ServiceArgs: {workers: 2, envs: {DYN_SYSTEM_PORT: '9100'}}}"
    planned = specs(text)
    running = {spec.name: spec for spec in planned}
    running["dynamo_A_3"] = plan_added("dynamo_A_3", planned[0].argv, {}, planned)
    assert [one.env["DYN_SYSTEM_PORT"] for one in running.values()] == ["9100", "9101", "9103"]
    wanted = specs(text.replace("9100", "9200"))
    followed = follow(added_workers(running, planned), wanted)
    assert followed[0].env["DYN_SYSTEM_PORT"] == "9203"
    free = specs(text.replace("9100", "0"))
    assert [one.env["DYN_SYSTEM_PORT"] for one in free] == ["0", "0"]


@pytest.mark.parametrize(("graceful", "drain"), [(30, "25"), (10, "8"), (0, "0"), (600, "595")])
def test_a_drain_ends_before_the_kill(graceful: float, drain: str) -> None:
    assert set(drain_env(graceful).values()) == {drain}


def test_an_added_worker_follows_its_service() -> None:
    """Replaced and removed with it, on its own GPUs; not one that has another command."""
    running = {spec.name: spec for spec in specs(TEXT)}
    planned = list(running.values())
    for name, argv in (("dynamo_A_4", running["dynamo_A"].argv), ("dynamo_A_7", ("other",))):
        running[name] = plan_added(name, argv, {"CUDA_VISIBLE_DEVICES": "5"}, planned)
    added = added_workers(running, planned)
    assert added == {"dynamo_A_4": "dynamo_A"}

    def after(text: str) -> GraphChanges:
        wanted = specs(text)
        followed = [*wanted, *follow(added, wanted)]
        return compare(running, followed, {*added, *(spec.name for spec in planned)})

    assert after(TEXT).lines() == []
    changed = after(TEXT.replace("x: 1", "x: 2"))
    assert names([*changed.changed]) == ["dynamo_A", "dynamo_A_1", "dynamo_A_4"]
    worker = changed.changed[2]
    assert (worker.gpus, worker.index, worker.env["DYN_WATCHER_NAME"]) == (("5",), 4, worker.name)
    assert worker.argv == changed.changed[0].argv and changed.removed == []
    gone = after("B: {run: [python, b.py]}")
    assert gone.removed == ["dynamo_A", "dynamo_A_1", "dynamo_A_4"]
    five = after(TEXT.replace("workers: 2", "workers: 5"))
    assert names([*five.added]) == ["dynamo_A_2", "dynamo_A_3"]
