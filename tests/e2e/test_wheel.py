"""The wheel builds, installs into an empty environment and serves from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = ("dynamo", "examples", "README.md", "LICENSE", "pyproject.toml", "setup.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_runs_where_there_is_no_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in TREE:
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.cpp")
            shutil.copytree(origin, source / name, ignore=ignored)
        else:
            shutil.copy(origin, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    _run([*build, str(source)], tmp_path)
    (wheel,) = tmp_path.glob("dynamo_appliance-*.whl")

    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    _run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], tmp_path)
    shutil.rmtree(source / "dynamo")

    where = _run([str(python), "-c", "import dynamo; print(dynamo.__file__)"], tmp_path)
    assert str(tmp_path / "env") in where
    dynamo = str(tmp_path / "env/bin/dynamo")
    assert "0." in _run([dynamo, "--version"], tmp_path)
    graph = str(source / "examples/quickstart.yaml")
    assert "dynamo_Frontend" in _run([dynamo, "serve", graph, "--dry-run"], tmp_path)


def _run(command: list[str], cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "PYTHONPATH"))}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout
