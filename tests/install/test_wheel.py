"""The wheel builds, installs into an empty environment and serves from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

import pytest
from deployment import free_port

ROOT = Path(__file__).resolve().parents[2]
TREE = ("dynamo", "examples", "README.md", "LICENSE", "pyproject.toml", "setup.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_runs_without_a_checkout(tmp_path: Path) -> None:
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
    # Unoptimised extensions compile in a third of the time; scripts/test builds the others.
    _run([*build, str(source)], tmp_path, DYNAMO_BUILD="debug")
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
    assert _serves([dynamo, "serve", graph], tmp_path) == ["tiny"]


def _serves(command: list[str], cwd: Path) -> list[str]:
    """Serve until the ready message, request the models, send Ctrl-C."""
    port = free_port()
    serve = subprocess.Popen(
        [*command, f"--Frontend.http-port={port}"],
        cwd=cwd,
        env={**_environment(), "DYN_LOCAL_STATE_DIR": str(cwd / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert serve.stdout is not None
    try:
        seen = []
        for line in serve.stdout:
            seen.append(line)
            if "ready:" in line:
                break
        assert "ready:" in seen[-1], "".join(seen)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            models = json.load(answer)["data"]
    finally:
        serve.send_signal(signal.SIGINT)
        serve.stdout.read()
        serve.stdout.close()
        assert serve.wait(timeout=60) == 0
    assert not (cwd / "state/dynamo.json").exists()
    return [model["id"] for model in models]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "PYTHONPATH"))}


def _run(command: list[str], cwd: Path, **env: str) -> str:
    env = {**_environment(), **env}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout
