"""The collector of a serving process, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc
from dynamo.runtime.process.os_process import freeze_heap
kept = [[] for _ in range(100_000)]
freeze_heap()
assert gc.get_freeze_count() > 100_000
assert gc.get_threshold()[0] >= 10_000 and gc.isenabled()
loop = []
loop.append(loop)
del loop
assert gc.collect() >= 1, "what comes later is still collected"
assert not gc.is_tracked(0) and len(gc.get_objects()) < 50_000
"""


def test_freeze_heap() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=30)


AT_EXIT = """
import atexit, gc, sys
@atexit.register
def show():
    print(sum(one["collections"] for one in gc.get_stats()), gc.isenabled(), file=sys.stderr)
"""
PROGRAMS = ("frontend", "mocker", "planner", "router", "attach")


@pytest.mark.parametrize(
    "command",
    [
        *(("-m", f"dynamo.{name}", "--help") for name in PROGRAMS),
        ("-m", "dynamo", "serve", "--help"),
    ],
    ids=" ".join,
)
def test_imports_of_a_program_are_hardly_collected(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """What they create is kept; with the interpreter's threshold they cause hundreds."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=60
    )
    count, is_enabled = done.stderr.split()
    assert done.returncode == 0 and is_enabled == "True"
    assert int(count) < 20


def test_a_program_that_imports_the_package_keeps_its_collector() -> None:
    script = "import gc; before = gc.get_threshold(); import dynamo.runtime, sys\n"
    script += "sys.exit(gc.get_threshold() != before)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
