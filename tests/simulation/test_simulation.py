"""The simulation keeps its promises: replays, finds defects, agrees with the system at the seams.

`scripts/simulate` runs more seeds.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from broken_module import replaced
from contracts import CONTRACTS
from defects import DEFECTS

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


FEW_INSTANCES = ("unshare", "-Ur", "sh", "-c",
                 'echo 16 > /proc/sys/user/max_inotify_instances && exec "$@"', "sh")  # fmt: skip


def simulate(*options: str, below: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*below, sys.executable, str(HERE / "simulate.py"), "--jobs", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_seeds_keep_every_promise() -> None:
    done = simulate("--seeds", "15")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_replays_exactly() -> None:
    """The same history twice, for seeds of several profiles, with faults in them."""
    done = simulate("--first", "1001", "--seeds", "4", "--replay", "--json")
    report = json.loads(done.stdout)
    assert report["failed"] == []
    assert report["faults"] > 0


def test_a_run_is_the_same_where_others_use_inotify() -> None:
    """The kernel counts the instances of a user; without one a process looks once a second."""
    if subprocess.run([*FEW_INSTANCES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no user namespace")
    many, few = (
        simulate("--seeds", "3", "--json", below=below).stdout for below in ((), FEW_INSTANCES)
    )
    assert many == few
    assert json.loads(many)["failed"] == []


def test_a_defect_is_found_and_shrunk() -> None:
    done = simulate("--seed", "1", "--keep", "11,12", "--defect", "unknown-after-restart")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "404 Model not found" in done.stdout
    assert "shrunk to" in done.stdout
    assert "again: scripts/simulate --seed" in done.stdout


def test_an_unknown_defect_is_refused() -> None:
    done = simulate("--defect", "nonsense")
    assert done.returncode == 2
    assert "unknown-after-restart" in done.stderr


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.name)
def test_a_defect_still_applies(defect: Any) -> None:
    spec = importlib.util.find_spec(defect.module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    compile(replaced(source, defect.fixed, defect.broken), spec.origin, "exec")


def contract_results(kind: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "contracts.py"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_seams_are_as_the_systems() -> None:
    """Streams, timers, events and ends of processes behave in both as programs expect."""
    real = contract_results("real")
    assert contract_results("simulated") == real
    assert real.keys() == CONTRACTS.keys()
    assert real["bytes_in_order"] == [True, "eof lost", "lost"]
    assert real["back_pressure"] == [0, 1, 1]
    assert real["events_in_order"] == [True, [], True, False]
    assert real["events_on_threads"] == [[0], [], [["stored", "ok"]]]
