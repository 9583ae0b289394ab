"""The statefile: schema, atomic writes, locks, crashes and foreign contents."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from serving_documents import document

from dynamo.errors import StatefileError
from dynamo.serve.gpus.gpus import Inventory
from dynamo.serve.graph.facts import FrontendAddress, ServiceFacts
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import DeploymentPlan, graph_facts, place, plan
from dynamo.serve.state.document import Document
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.record import StatefileWriter, document_of
from dynamo.serve.state.statefile import FileLock, Statefile

DIRECTORY = Path(__file__).resolve().parents[3] / "statefiles"
SCHEMA = json.loads((DIRECTORY / "statefile.schema.json").read_text())
EXAMPLES = sorted(p for p in DIRECTORY.glob("*.json") if p.name != "statefile.schema.json")
GRAPH = """
namespace: ns
Frontend: {run: dynamo.frontend}
Worker:
  run: dynamo.mocker
  ServiceArgs: {workers: 2, resources: {gpu: 1}, envs: {API_KEY: hunter2}}
"""


def make_plan() -> DeploymentPlan:
    graph = parse_graph(GRAPH, "g.yaml")
    inventory = Inventory(ids=("0", "GPU-abc"), source="test")
    specs = plan(graph, python="py", working_dir="/", env={"X": "y"}, graceful_timeout_s=1)
    return DeploymentPlan(
        namespace="ns",
        specs=place(specs, inventory),
        config=graph.config,
        gpu_ids=inventory.ids,
        endpoint="ipc:///run/a b/circus.sock",
        pubsub_endpoint="ipc:///run/events.sock",
    )


@pytest.fixture
def statefile(tmp_path: Path) -> Statefile:
    return Statefile(tmp_path, "ns")


def test_the_code_follows_the_schema() -> None:
    document = document_of(make_plan()).written()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA)
    assert list(document["components"]) == ["ns_Frontend", "ns_Worker", "ns_Worker_1"]
    # Without a process it does not run; readers of the version before take none as that.
    assert "running" not in {entry.get("state") for entry in document["components"].values()}
    assert Document.of(document).components["ns_Worker"].state == "running"
    assert document["components"]["ns_Worker"]["resources"] == {"allocated_gpus": [0]}
    assert document["components"]["ns_Worker_1"]["resources"] == {"allocated_gpus": ["GPU-abc"]}
    assert document["components"]["ns_Frontend"]["resources"] == {}
    assert document["environment"]["SYSTEM_RESOURCES"]["total_gpus"] == 2
    assert json.loads(document["environment"]["DYNAMO_SERVICE_CONFIG"])["namespace"] == "ns"


def test_the_facts_of_services_are_those_of_the_plan(tmp_path: Path) -> None:
    """Readers in other directories, and with other variables, cannot find them out."""
    (tmp_path / "models/tiny").mkdir(parents=True)
    text = """
Frontend: {run: dynamo.frontend, tls-cert-path: c.pem, ServiceArgs: {envs: {DYN_HTTP_PORT: 1234}}}
W: {run: dynamo.mocker, model-path: models/tiny, ServiceArgs: {workers: 0, idle_timeout: never}}
P: {run: dynamo.vllm, model: a/b, disaggregation-mode: prefill, gpu-memory-utilization: 0.5,
    enable-lora: true, ServiceArgs: {max: 3, priority: 2, resources: {gpu: 0.5}}}
Own: {run: [python, own.py]}
"""
    graph = parse_graph(text, "g.yaml", namespace="ns")
    here = str(tmp_path)
    specs = plan(graph, python="py", working_dir=here, env={}, graceful_timeout_s=1)
    services = graph_facts(graph, here)
    planned = replace(make_plan(), specs=specs, config=graph.config, services=services)
    written = json.loads(json.dumps(document_of(planned).written()))
    jsonschema.validate(written, SCHEMA)
    document = Document.of(written)
    listens = document.components["ns_Frontend"].listens
    assert listens is not None and listens.address == FrontendAddress("127.0.0.1", 1234, tls=True)
    assert listens.tls_cert_path == str(tmp_path / "c.pem")
    document.environment.service_config = "{}"  # the facts suffice
    assert list(document.services) == ["Frontend", "W", "P", "Own"]
    found = read_services(document)
    assert list(found) == ["W", "P"]
    worker, prefill = found["W"].facts, found["P"].facts
    assert (worker.model, worker.pool, worker.workers, worker.minimum) == ("tiny", "decode", 0, 0)
    assert worker.model_args.idle_timeout == math.inf and not worker.further_models
    assert (prefill.model, prefill.pool, prefill.memory_share) == ("a/b", "prefill", 0.5)
    assert (prefill.maximum, prefill.priority, prefill.gpus) == (3, 2, 0.5)
    assert prefill.further_models


def test_a_reload_replaces_the_facts(statefile: Statefile) -> None:
    writer = StatefileWriter(statefile, replace(make_plan(), services={"A": ServiceFacts()}), list)
    writer.create()
    writer.plan(replace(make_plan(), services={"B": ServiceFacts(model="b")}))
    writer.write([])
    document = statefile.read()
    assert document is not None and document.services == {"B": ServiceFacts(model="b")}


def test_no_environment_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_TEST_SECRET", "hunter3")
    text = json.dumps(document_of(make_plan()).written())
    assert "hunter2" not in text and "hunter3" not in text and "API_KEY" not in text


def with_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a statefile with what our writer adds to those of others."""
    resources = {"total_gpus": 0, "gpu_info": []}
    document["environment"].setdefault("SYSTEM_RESOURCES", resources)
    for entry in document["components"].values():
        entry.setdefault("argv", shlex.split(entry["cmd"]))
        defaults: dict[str, Any] = {
            **({"state": "running"} if entry.get("processes") else {}),
            "processes": [],
            "lease": None,
            "resources": {},
        }
        entry |= {**defaults, **entry}
    return {"version": 1, **document}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_valid_and_readable(path: Path, tmp_path: Path) -> None:
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    (tmp_path / "dynamo.json").write_bytes(path.read_bytes())
    found = Statefile(tmp_path, "dynamo").read()
    assert found is not None
    written = found.written()
    jsonschema.validate(written, SCHEMA)
    assert written == with_defaults(document)
    assert path.name in (DIRECTORY / "README.md").read_text()


def test_the_schema_rejects_what_the_reader_rejects(statefile: Statefile) -> None:
    good = document_of(make_plan()).written()
    for key in ("namespace", "circus_endpoint", "components", "environment"):
        bad = {name: value for name, value in good.items() if name != key}
        statefile.path.write_text(json.dumps(bad))
        assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(bad)
        with pytest.raises(StatefileError, match=f"has no '{key}'"):
            statefile.read()


def test_round_trip_and_modes(statefile: Statefile) -> None:
    assert statefile.read() is None
    statefile.create(document_of(make_plan()))
    assert statefile.path.stat().st_mode & 0o777 == 0o600
    statefile.update(lambda doc: doc.components.pop("ns_Worker_1"))
    found = statefile.read()
    assert found is not None and list(found.components) == ["ns_Frontend", "ns_Worker"]
    statefile.remove()
    statefile.remove()
    assert not list(statefile.path.parent.iterdir())


def test_unknown_keys_are_kept(statefile: Statefile) -> None:
    """At every depth, and values of other types, too."""
    document = {**document_of(make_plan()).written(), "theirs": {"a": [1]}}
    entry = document["components"]["ns_Worker"]
    entry |= {"theirs": 1, "lease": "7", "processes": [{"pid": 8, "start_ticks": 1, "theirs": 2}]}
    entry["reserved_by"] = {"pid": 8, "start_ticks": 1, "host": "h", "theirs": 3}
    document["arbiter"]["theirs"] = document["environment"]["THEIRS"] = 4
    statefile.path.write_text(json.dumps(document))
    statefile.update(lambda doc: setattr(doc.components["ns_Worker"], "state", "draining"))
    entry["state"] = "draining"
    assert json.loads(statefile.path.read_text()) == document


VALUES: list[Any] = [
    None, True, 0, -1, 2.0, 1.5, 2**70, "", "x", "a 'b", [], [1], ["a"], [[1]], [{"pid": 1}],
    [{"pid": 1, "theirs": 2}], {}, {"a": 1}, {"pid": 3}, {"unknown": 3}, {"0": "x"},
]  # fmt: skip


def edits(written: dict[str, Any]) -> Iterator[bytes]:
    """The statefile with each value replaced by others or removed, and with a key more."""

    def visit(part: Any) -> Iterator[bytes]:
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        for key in keys:
            kept = part[key]
            for part[key] in VALUES:
                yield json.dumps(written).encode()
            part[key] = kept
            if isinstance(part, dict):
                del part[key]
                yield json.dumps(written).encode()
                part[key] = kept
            if isinstance(kept, dict | list):
                yield from visit(kept)
        if isinstance(part, dict):
            for key in ("theirs", "unknown", "argv", "pid"):
                if key not in part:
                    part[key] = 1
                    yield json.dumps(written).encode()
                    del part[key]

    yield from visit(written)


def test_a_statefile_decoded_at_once_is_the_same() -> None:
    """Wherever a value is wrong, missing or not ours, both ways to read agree, or one declines."""
    written = json.loads((DIRECTORY / "draining.json").read_text())
    entry = next(iter(written["components"].values()))
    entry["resources"] = {"allocated_gpus": [0, "GPU-abc"]}
    entry["processes"] = [{"pid": 3, "start_ticks": 4, "gpus": {"0": 0.5}}]
    entry["reserved_by"] = {"pid": 3, "start_ticks": 4, "host": "h", "operation": "drain"}
    entry["replacing"] = {"since": 3.0, "gpus": {"0": 1}}
    decoded = 0
    for text in edits(written):
        document = Document.decoded(text)
        if document is not None:
            decoded += 1
            assert document == Document.of(json.loads(text)), text
    assert decoded > 50
    assert Document.decoded(json.dumps(written).encode()) is not None


def test_a_statefile_without_version_has_version_1(statefile: Statefile) -> None:
    document = document_of(make_plan()).written()
    assert document.pop("version") == 1
    statefile.path.write_text(json.dumps(document))
    found = statefile.read()
    assert found is not None and found.version == 1


def test_a_statefile_of_a_newer_version_is_refused(statefile: Statefile) -> None:
    """Also by an update: this version would write back what it does not understand."""
    newer = json.dumps({**document_of(make_plan()).written(), "version": 2})
    statefile.path.write_text(newer)
    with pytest.raises(StatefileError, match="has version 2; this dynamo reads 1"):
        statefile.read()
    with pytest.raises(StatefileError, match="has version 2"):
        statefile.update(lambda doc: None)
    assert statefile.path.read_text() == newer


def test_a_statefile_is_on_the_disk_before_it_replaces_the_old_one(
    statefile: Statefile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss after the rename leaves an empty statefile, and the old one is gone."""
    statefile.create(document_of(make_plan()))
    before, synced = statefile.path.read_bytes(), []

    def fsync(descriptor: int) -> None:
        written = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        synced.append((written, statefile.path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    statefile.update(lambda doc: doc.components.clear())
    assert synced == [(statefile.path.read_bytes(), before)]


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"namespace": "ns"}', "\0\0\0"])
def test_a_damaged_or_foreign_file_is_an_error(statefile: Statefile, text: str) -> None:
    statefile.path.write_text(text)
    with pytest.raises(StatefileError, match=r"ns\.json .*`dynamo serve` replaces it"):
        statefile.read()
    with pytest.raises(StatefileError):
        statefile.update(lambda doc: None)
    assert statefile.path.read_text() == text


def test_another_namespace_is_an_error(statefile: Statefile) -> None:
    statefile.path.write_text(json.dumps(document("other").written()))
    with pytest.raises(StatefileError, match="belongs to namespace 'other'"):
        statefile.read()


def test_a_failed_change_writes_nothing(statefile: Statefile) -> None:
    statefile.create(document_of(make_plan()))
    before = statefile.path.read_bytes()

    def fail(document: Document) -> None:
        document.components.clear()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        statefile.update(fail)
    assert statefile.path.read_bytes() == before
    statefile.update(lambda doc: None)  # and the lock is free


def test_an_update_after_the_end_leaves_no_lock(statefile: Statefile) -> None:
    """As by a verb that works while the deployment stops."""
    with pytest.raises(StatefileError, match="no statefile"):
        statefile.update(lambda document: None)
    assert not statefile.lock_path.exists()


def test_a_directory_that_is_not_writable_is_an_error(tmp_path: Path) -> None:
    gone = Statefile(tmp_path, "ns")
    (tmp_path / f".ns.json.{os.getpid()}").mkdir()  # in the place of the temporary file
    with pytest.raises(StatefileError, match=r"cannot write .*ns\.json: Is a directory"):
        gone.create(document_of(make_plan()))


def add_one(directory: Path, times: int) -> None:
    def change(document: Document) -> None:
        document.unknown["count"] = document.unknown.get("count", 0) + 1

    for _ in range(times):
        Statefile(directory, "ns").update(change)


def test_no_update_is_lost(statefile: Statefile) -> None:
    statefile.create(document_of(make_plan()))
    context = multiprocessing.get_context("spawn")
    args = (statefile.path.parent, 40)
    others = [context.Process(target=add_one, args=args) for _ in range(3)]
    for process in others:
        process.start()
    readings = 0
    while any(process.is_alive() for process in others):
        assert statefile.read() is not None  # never partial, never missing
        readings += 1
    for process in others:
        process.join()
        assert process.exitcode == 0
    found = statefile.read()
    assert found is not None and found.unknown["count"] == 120 and readings > 0


def test_a_lock_is_freed_by_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = (
        "import sys, pathlib; from dynamo.serve.state.statefile import FileLock\n"
        "lock = FileLock(pathlib.Path(sys.argv[1])); lock.acquire(); lock.note('held')\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        lock = FileLock(path)
        assert not lock.try_acquire() and path.read_text() == "held"
        with pytest.raises(StatefileError, match=r"another process has held .* for 0\.05 s"):
            lock.acquire(timeout_s=0.05)
        holder.kill()
    lock.acquire(timeout_s=5)
    lock.release(remove=True)
    lock.release()
    assert not path.exists()


def test_a_lock_that_others_hold_costs_no_descriptor(tmp_path: Path) -> None:
    """And little of the CPU: it is tried now and then."""
    holder, waiting = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    holder.acquire()
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(20):
        assert not waiting.try_acquire()
    tries, tried = 0, waiting.try_acquire

    def counted() -> bool:
        nonlocal tries
        tries += 1
        return tried()

    waiting.try_acquire = counted  # type: ignore[method-assign]
    with pytest.raises(StatefileError, match="another process has held"):
        waiting.acquire(timeout_s=0.1)
    assert tries < 100
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    holder.release(remove=True)


def test_a_removed_lock_is_detected(tmp_path: Path) -> None:
    """Threads that lock, remove and lock again never hold the lock at the same time."""
    path, inside, worst = tmp_path / "lock", [0], [0]
    before = len([*Path("/proc/self/fd").iterdir()])

    def work() -> None:
        for _ in range(200):
            lock = FileLock(path)
            lock.acquire()
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
            inside[0] -= 1
            lock.release(remove=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst[0] == 1
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_failed_removal_releases_its_lock(tmp_path: Path) -> None:
    statefile = Statefile(tmp_path, "ns")
    statefile.path.mkdir()
    with pytest.raises(OSError):
        statefile.remove()
    statefile.path.rmdir()
    statefile.create(document("ns"))  # which takes the lock
    statefile.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ns.lock").mkdir()
    with pytest.raises(StatefileError, match=r"cannot write .*ns\.lock: Is a directory"):
        Statefile(tmp_path, "ns").create(document("ns"))
    lock = FileLock(tmp_path / "other.lock")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert lock.try_acquire()
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(StatefileError, match=r"cannot write .*other\.lock: No space left"):
        lock.note("1")
    lock.release(remove=True)


def test_a_removal_takes_the_gpu_lock_of_a_killed_process_and_no_other(tmp_path: Path) -> None:
    statefile, lock = Statefile(tmp_path, "ns"), FileLock(tmp_path / ".gpus.lock")
    lock.path.touch()
    statefile.remove()
    assert list(tmp_path.iterdir()) == []
    lock.acquire()
    statefile.remove()
    assert list(tmp_path.iterdir()) == [lock.path]
    lock.release(remove=True)
