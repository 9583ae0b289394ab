"""Entries of the planner in the statefile that the arbiter writes."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simulated_deployment import SimulatedDeployment
from statefile_entries import rewrite
from virtual_time import run_virtual

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.operations.steps.limits import ActionFailed, reserve
from dynamo.operations.targets import find_model, find_processes, find_workers
from dynamo.serve.state.document import Document, Replacement
from dynamo.serve.state.entries import next_name, read_services
from dynamo.serve.state.process_table import ledger_of, reservation, stat
from dynamo.serve.state.record import StatefileWriter
from dynamo.serve.state.statefile import Statefile

GRAPH = """
A: {run: dynamo.mocker, model-path: tiny, ServiceArgs: {workers: 2, resources: {gpu: 2}}}
Half: {run: dynamo.mocker, model-path: half, ServiceArgs: {workers: 3, resources: {gpu: 0.5}}}
B: {run: [sleep, '9']}
Own: {run: [python, engine.py, --model-name, own], ServiceArgs: {max: 4, workers: 0, min: 0}}
"""


def document(tmp_path: Path, gpus: int = 12) -> Document:
    async def written() -> Document:
        world = SimulatedDeployment(tmp_path, GRAPH, gpus, Random(0))
        return world.statefile.read() or Document()

    return run_virtual(written())


def test_services_and_their_workers(tmp_path: Path) -> None:
    found = read_services(document(tmp_path))
    assert {name: one.gpus for name, one in found.items()} == {"A": 2, "Half": 0.5, "Own": 0}
    own = found["Own"]  # it says so with a key about scaling; B does not
    assert (own.model, own.facts.maximum, own.template.argv[:2]) == (
        "own",
        4,
        ("python", "engine.py"),
    )
    assert [entry.name for entry in found["A"].entries] == ["dynamo_A", "dynamo_A_1"]
    assert [entry.gpus for entry in found["Half"].entries] == [("4",), ("4",), ("5",)]
    assert found["Half"].model == "half" and found["A"].template.name == "dynamo_A"


def test_free_gpus_are_the_lowest(tmp_path: Path) -> None:
    """Numbers in numeric order, whatever type a writer has used; shares fill a GPU first."""
    found = document(tmp_path)
    ledger = ledger_of(found)
    assert ledger.assign("x", 1) == ("6",)
    assert ledger.assign("x", 5) == ("6", "7", "8", "9", "10")
    assert ledger.assign("x", 0.5) == ("5",)
    rewrite(found, "dynamo_A_1", resources={"allocated_gpus": ["6", 7]})
    ledger = ledger_of(found)
    assert ledger.assign("x", 3) == ("2", "3", "8")
    with pytest.raises(ConfigError, match="x needs 9 GPUs, 6 of 12 free"):
        ledger.assign("x", 9)


def test_a_worker_that_another_process_changes_is_left_alone(tmp_path: Path) -> None:
    """A person and the planner act at the same time: the second one is refused."""
    found = document(tmp_path)
    reserve(found, "dynamo_A", "drain")
    mine = found.components["dynamo_A"].reserved_by
    assert mine is not None and (mine.pid, mine.operation) == (os.getpid(), "drain")
    reserve(
        found, "dynamo_A", "drain"
    )  # its own mark is no obstacle: `active` has what it does now
    parent = stat(os.getppid())
    assert parent is not None
    theirs = reservation("wake")
    theirs.pid, theirs.start_ticks = parent.pid, parent.start_ticks
    found.components["dynamo_A"].reserved_by = theirs
    with pytest.raises(ActionFailed, match=rf"process {parent.pid} changes it \(wake\); wait"):
        reserve(found, "dynamo_A", "sleep")
    assert found.components["dynamo_A"].reserved_by == theirs
    theirs.start_ticks += 1  # that process has exited
    reserve(found, "dynamo_A", "sleep")
    mine = found.components["dynamo_A"].reserved_by
    assert mine is not None and mine.operation == "sleep"
    found.components["dynamo_A_1"].replacing = Replacement(since=1.0)
    with pytest.raises(ActionFailed, match="dynamo_A_1: the deployment replaces its process"):
        reserve(found, "dynamo_A_1", "sleep")
    with pytest.raises(ActionFailed, match="dynamo_C: removed by another command"):
        reserve(found, "dynamo_C", "drain")


def test_names_of_workers_and_models(tmp_path: Path) -> None:
    found = document(tmp_path)
    watchers = [name for name in found.components if name != "dynamo_Half_2"]
    assert [one.name for one in find_processes(found, "A", watchers)] == ["dynamo_A", "dynamo_A_1"]
    assert [one.name for one in find_processes(found, "A_1", watchers)] == ["dynamo_A_1"]
    assert [one.name for one in find_processes(found, "Half", watchers)] == [
        *("dynamo_Half", "dynamo_Half_1")  # the third has neither a watcher nor a process
    ]
    with pytest.raises(InvalidArgument, match=r"no service or worker 'C' in .* A \(dynamo_A, dyn"):
        find_processes(found, "C", watchers)
    with pytest.raises(InvalidArgument, match="start one with: dynamo load half"):
        find_processes(found, "dynamo_Half_2", watchers)
    with pytest.raises(InvalidArgument, match=r"only dynamo restart .*; the workers are A \("):
        find_workers(found, "B", watchers, lambda entry: None)
    [(service, worker)] = find_workers(found, "B", watchers, lambda entry: "own")
    assert (service.name, service.model, worker.name) == ("B", "own", "dynamo_B")
    assert [one.name for one in find_model(found, "half", lambda entry: None)] == ["Half"]
    [named] = find_model(found, "x", lambda entry: "x" if entry.name == "dynamo_A" else None)
    assert named.name == "A"
    with pytest.raises(InvalidArgument, match="name a model in namespace 'dynamo': half, own, t"):
        find_model(found, "", lambda entry: None)
    with pytest.raises(InvalidArgument, match=r"mine is served by B, .*max or priority to B\.Serv"):
        find_model(found, "mine", lambda entry: "mine" if entry.name == "dynamo_B" else None)
    with pytest.raises(
        InvalidArgument, match=r"sql is an adapter, .* of A, .*: change A in the gra"
    ):
        find_model(found, "sql", lambda entry: None, lambda entry: {"sql"})


def test_the_next_name_is_the_highest_number_plus_one(tmp_path: Path) -> None:
    found = document(tmp_path)
    assert next_name(found, "A", ()) == "dynamo_A_2"
    assert next_name(found, "A", ["dynamo_a_7", "other_A_9"]) == "dynamo_A_8"
    del found.components["dynamo_A_1"]
    assert next_name(found, "A", ()) == "dynamo_A_1"


def test_the_arbiter_spares_what_a_planner_reserved(tmp_path: Path) -> None:
    """A watcher that a person removed while it was being added leaves no process behind."""

    async def written() -> tuple[Statefile, StatefileWriter, list[Any]]:
        world = SimulatedDeployment(tmp_path, GRAPH, 12, Random(0))
        return world.statefile, world._writer, world._components()

    statefile, writer, components = run_virtual(written())
    process = {"pid": 7, "start_ticks": 1}
    reserved = {"processes": [process], "reserved_by": reservation("load").written()}
    statefile.update(lambda found: rewrite(found, "dynamo_A_1", **reserved))
    draining = {**reserved, "state": "draining"}
    statefile.update(lambda found: rewrite(found, "dynamo_Half_1", **draining))
    names = ("dynamo_A_1", "dynamo_Half_1", "dynamo_Half_2", "dynamo_A")
    writer.write([one for one in components if one.spec.name not in names])
    after = (statefile.read() or Document()).components
    assert sorted(after) == ["dynamo_A", "dynamo_A_1", "dynamo_B", "dynamo_Half", "dynamo_Own"]
    assert after["dynamo_A_1"].processes == ()
    assert after["dynamo_A_1"].gpus == ("2", "3")
    assert after["dynamo_A"].gpus == () and after["dynamo_A"].argv
