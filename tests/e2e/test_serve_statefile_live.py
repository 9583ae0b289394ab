"""The statefile of a running deployment: added and removed watchers, their GPUs and leases."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import psutil
from circus.client import CircusClient
from serving import QUICKSTART, ROOT, Serving
from statefile_entries import rewrite

from dynamo.serve.state.document import Entry
from dynamo.serve.state.statefile import Statefile

SCHEMA = json.loads((ROOT / "statefiles/statefile.schema.json").read_text())
GPUS = "W: {run: SLEEPER, ServiceArgs: {workers: 2, resources: {gpu: 1}, envs: {MINE: '1'}}}\n"


def components(serving: Serving) -> dict[str, Any]:
    """The components, without the namespace in their names."""
    document = serving.document()
    jsonschema.validate(document, SCHEMA)
    cut = len(serving.namespace) + 1
    return {name[cut:]: entry for name, entry in document["components"].items()}


def until(serving: Serving, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Wait until the components satisfy ``holds``, and return them."""
    found: dict[str, Any] = {}

    def holds_now() -> Any:
        found.clear()
        found.update(components(serving))
        return holds(found)

    serving.until(holds_now)
    return found


def add(serving: Serving, name: str, cmd: str, args: list[str], **env: str) -> None:
    """`add` with GPUs in the environment, as the planner does."""
    client = CircusClient(endpoint=serving.endpoint, timeout=20)
    properties = {
        "name": f"{serving.namespace}_{name}",
        "cmd": cmd,
        "args": args,
        "start": True,
        "options": {"copy_env": True, "graceful_timeout": 5, "singleton": True, "env": env},
    }
    try:
        answer = client.call({"command": "add", "properties": properties})
    finally:
        client.stop()
    assert answer["status"] == "ok", answer


def remove(serving: Serving, name: str) -> None:
    """`rm`, again while the arbiter is busy with another command."""
    words = ("rm", f"{serving.namespace}_{name}", "--waiting")
    deadline_s = time.monotonic() + 20
    while (answer := serving.circusctl(*words)) != "ok":
        assert "already running" in answer and time.monotonic() < deadline_s, answer


def test_circusctl_adds_and_removes_a_watcher(serving: Serving) -> None:
    serving.start("B: {run: SLEEPER}\n")
    base = components(serving)["B"]
    name = f"{serving.namespace}_B_1"
    assert serving.circusctl("add", "--start", name, base["cmd"]).endswith("ok")
    entry = until(serving, lambda found: found.get("B_1", {}).get("processes"))["B_1"]
    assert (entry["watcher_name"], entry["service"]) == (name, "B")
    assert (entry["argv"], entry["cmd"]) == (base["argv"], base["cmd"])
    assert (entry["resources"], entry["state"]) == ({}, "running")
    (pid,) = [process["pid"] for process in entry["processes"]]
    assert psutil.Process(pid).environ()["DYN_WATCHER_NAME"] == name
    remove(serving, "B_1")
    assert list(until(serving, lambda found: "B_1" not in found)) == ["B"]
    remove(serving, "B")  # its entry stays: others are started from its command
    entry = until(serving, lambda found: not found["B"]["processes"])["B"]
    assert entry["argv"] == base["argv"] and entry["lease"] is None
    assert serving.circusctl("add", "--start", f"{serving.namespace}_B", base["cmd"]) == "ok"
    until(serving, lambda found: found["B"]["processes"])
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_watcher_without_a_start_and_one_of_no_service(serving: Serving) -> None:
    serving.start("B: {run: SLEEPER}\n")
    name = f"{serving.namespace}_Other"
    assert serving.circusctl("add", name, "sleep 1000") == "ok"
    entry = until(serving, lambda found: "Other" in found)["Other"]
    assert (entry["service"], entry["processes"]) == (name, [])
    assert serving.circusctl("set", name, "cmd", "sleep 2000") == "ok"
    assert serving.circusctl("start", name, "--waiting").endswith("ok")
    assert until(serving, lambda found: found["Other"]["processes"])["Other"]["argv"] == [
        *("sleep", "2000")
    ]
    assert serving.circusctl("set", name, "cmd", "sleep '2000") == "ok"
    serving.wait_for(f"gave up {name}: cannot start it: No closing quotation")
    assert until(serving, lambda found: not found["Other"]["processes"])["Other"]["argv"] == [
        "sleep '2000"
    ]
    remove(serving, "Other")
    until(serving, lambda found: "Other" not in found)
    assert serving.stop() == 0
    serving.assert_clean()


def test_gpus_of_added_and_removed_watchers(serving: Serving) -> None:
    serving.start(GPUS, "--gpus", "4")
    base = components(serving)["W"]
    assert base["resources"] == {"allocated_gpus": [0]}
    program, *args = base["argv"]
    add(serving, "W_2", program, args, CUDA_VISIBLE_DEVICES="2")
    entry = until(serving, lambda found: found.get("W_2", {}).get("processes"))["W_2"]
    assert entry["resources"] == {"allocated_gpus": [2]}
    process = psutil.Process(entry["processes"][0]["pid"])
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == "2"
    assert process.environ()["MINE"] == "1"  # from its service; the statefile does not contain it
    assert process.cwd() == str(serving.tmp_path)
    for name in ("W_2", "W_1"):
        remove(serving, name)
        until(serving, lambda found, gone=name: gone not in found)  # type: ignore[misc]
    remove(serving, "W")
    assert until(serving, lambda found: not found["W"]["processes"])["W"]["resources"] == {}
    add(serving, "W_1", program, args, CUDA_VISIBLE_DEVICES="0")
    entry = until(serving, lambda found: found.get("W_1", {}).get("processes"))["W_1"]
    assert entry["resources"] == {"allocated_gpus": [0]}
    assert serving.stop() == 0
    serving.assert_clean()


def test_entries_of_the_planner_are_kept(serving: Serving) -> None:
    """A planner may write the entry before it adds the watcher, to reserve the GPU."""
    serving.start(GPUS, "--gpus", "4")
    base = components(serving)["W"]
    name = f"{serving.namespace}_W_2"
    entry = {**base, "watcher_name": name, "resources": {"allocated_gpus": ["2"]}, "theirs": 1}
    entry["processes"] = []
    entry.pop("state", None)  # W may run already; an entry without a process has none
    statefile = Statefile(serving.state_dir, serving.namespace)
    statefile.update(lambda document: document.components.update({name: Entry.of(entry)}))
    (old,) = serving.wait_for_pids("W")
    os.kill(old, signal.SIGKILL)  # causes another write
    until(serving, lambda found: found["W"]["processes"] not in ([], base["processes"]))
    assert components(serving)["W_2"] == entry
    program, *args = base["argv"]
    add(serving, "W_2", program, args, CUDA_VISIBLE_DEVICES="2")
    found = until(serving, lambda found: found["W_2"]["processes"])["W_2"]
    assert found["resources"] == {"allocated_gpus": ["2"]} and found["theirs"] == 1
    assert serving.stop() == 0


def test_the_lease_of_a_worker(serving: Serving) -> None:
    """Scale-down as in the seed: revoke the lease in the statefile; the worker exits."""
    model = QUICKSTART.parent / "model"
    serving.start(f"W: {{run: dynamo.mocker, model-path: {model}}}\nA: {{run: SLEEPER}}\n")
    found = until(serving, lambda found: found["W"]["lease"])
    assert found["A"]["lease"] is None
    leases = serving.state_dir / serving.namespace / "store/leases"
    record = json.loads((leases / f"{found['W']['lease']:x}").read_text())
    assert record["pid"] == found["W"]["processes"][0]["pid"]
    os.kill(record["pid"], signal.SIGKILL)
    again = until(serving, lambda now: now["W"]["lease"] not in (None, found["W"]["lease"]))
    statefile = Statefile(serving.state_dir, serving.namespace)
    name = f"{serving.namespace}_W"
    statefile.update(lambda document: rewrite(document, name, state="draining"))
    (leases / f"{again['W']['lease']:x}").unlink()
    last = until(serving, lambda now: not now["W"]["processes"])["W"]
    assert (last["lease"], "state" in last, last["argv"]) == (None, False, found["W"]["argv"])
    assert name.lower() not in serving.circusctl("list")
    assert serving.stop() == 0
    serving.assert_clean()
