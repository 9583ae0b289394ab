"""What scripts/_venv.sh says and does before it builds: other Pythons, no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("bash", "basename", "cat", "cut", "dirname", "find", "flock", "mkdir", "sed", "sha256sum",
         "sort", "tail", "xargs")  # fmt: skip
PYTHON = """#!/usr/bin/env bash
version={version}
case "$*" in
-V) echo "Python $version" ;;
*version_info*) [ "${{version#3.1}}" -ge 1 ] && echo new || echo old ;;
*compileall*) ;;
*importlib*) printf '%s\\n' fake-c++ {headers} True ;;
*venv*) echo "$*" >>"$LOG"; mkdir -p "${{!#}}/bin"; cat "$0" >"${{!#}}/bin/python"
        chmod +x "${{!#}}/bin/python"; : >"${{!#}}/bin/activate" ;;
*require-hashes*) echo "locked $version" >>"$LOG"; [ -z "${{LOCK_FAILS:-}}" ] ;;
*tomllib*" build") echo build-requirement ;;
*tomllib*) echo dependency-of-extra ;;
*build-requirement*) echo "build $version" >>"$LOG" ;;
*dependency-of-extra*) echo "extra $version" >>"$LOG"; [ -z "${{PACKAGES_FAIL:-}}" ] ;;
*pip*) echo "pip $version" >>"$LOG"; [ -z "${{BUILD_FAILS:-}}" ] ;;
esac
"""


class Machine:
    """A copy of the script, and a PATH of nothing but fakes and a few tools."""

    def __init__(self, directory: Path) -> None:
        self.root, self.path, self.log = directory / "tree", directory / "bin", directory / "log"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "dynamo/_fast").mkdir(parents=True)
        (self.root / "lab").mkdir()
        shutil.copy(ROOT / "scripts/_venv.sh", self.root / "scripts")
        for name in ("pyproject.toml", "setup.py", "requirements.lock", "lab/pyproject.toml"):
            (self.root / name).touch()
        self.path.mkdir()
        for tool in (*TOOLS, "chmod", "env"):
            found = shutil.which(tool)
            assert found is not None
            (self.path / tool).symlink_to(found)
        self.log.touch()

    def program(self, name: str, text: str = "#!/bin/sh\n") -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def python(self, name: str, version: str, headers: bool = True) -> None:
        self.program(name, PYTHON.format(version=version, headers=headers))

    def run(self, extra: str = "", **env: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euc", f". scripts/_venv.sh; venv_ready {extra}", "scripts/serve"],
            cwd=self.root,
            env={"PATH": str(self.path), "LOG": str(self.log), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stderr

    def done(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_old_python_is_named_before_anything_is_made(machine: Machine) -> None:
    machine.python("python3", "3.10")
    machine.program("apt-get")
    status, text = machine.run()
    assert status and text.splitlines() == [
        "scripts: Python 3.11 or newer is needed; python3 is Python 3.10",
        "  sudo apt-get install -y python3.11 python3.11-venv python3.11-dev",
        "  PYTHON=python3.11 scripts/serve",
    ]
    assert machine.done() == [] and not (machine.root / ".venv/bin").exists()


def test_a_newer_python_beside_it_is_used_and_a_wrong_environment_made_again(
    machine: Machine,
) -> None:
    for name, version in (("python3", "3.10"), ("python3.12", "3.12"), ("python3.11", "3.11")):
        machine.python(name, version)
    machine.program("fake-c++")
    (machine.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(machine.path / "python3", machine.root / ".venv/bin/python")
    status, text = machine.run(PYTHON="python3.11")
    assert not status, text
    assert "not of Python 3.11 or newer: making it again" in text
    assert "compiling costs 75 s of CPU time, once" in text
    made = f"-m venv --clear {machine.root}/.venv"
    assert machine.done() == [made, "locked 3.11", "pip 3.11"]
    assert machine.run() == (0, ""), "installed already"
    (machine.root / "setup.py").write_text("changed")
    assert machine.run()[0] == 0
    assert machine.done()[3:] == ["locked 3.11", "pip 3.11"], "the environment is kept"
    shutil.rmtree(machine.root / ".venv")
    assert machine.run()[0] == 0
    assert machine.done()[-1] == "pip 3.12", "the first that is new enough"


def test_a_lock_that_does_not_fit_is_named_and_left_out(machine: Machine) -> None:
    machine.python("python3", "3.12")
    machine.program("fake-c++")
    status, text = machine.run(LOCK_FAILS="1")
    assert not status, text
    assert "requirements.lock has no packages for this Python and machine" in text
    assert machine.done()[1:3] == ["locked 3.12", "build 3.12"]
    assert sorted(machine.done()[3:]) == ["extra 3.12", "pip 3.12"], "at the same time"


def test_an_interrupted_creation_is_repeated(machine: Machine) -> None:
    """Ctrl-C while venv installs pip: there is a Python, which has no pip."""
    machine.python("python3", "3.12")
    machine.program("fake-c++")
    (machine.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(machine.path / "python3", machine.root / ".venv/bin/python")
    status, text = machine.run()
    assert not status and ".venv is incomplete" in text
    made = f"-m venv --clear {machine.root}/.venv"
    assert machine.done() == [made, "locked 3.12", "pip 3.12"]


def test_a_missing_compiler_is_named_before_the_build(machine: Machine) -> None:
    machine.python("python3", "3.12", headers=False)
    status, text = machine.run()
    assert status and text.splitlines()[-3:] == [
        "scripts: missing: the C++ compiler fake-c++, Python.h",
        "  install what Debian has as: g++ python3-dev",
        "  scripts/serve",
    ]
    assert machine.done() == []
    assert os.listdir(machine.root / ".venv") == []  # noqa: PTH208


def test_what_is_missing_is_installed_where_that_needs_no_password(machine: Machine) -> None:
    machine.python("python3", "3.12")
    machine.program("id", "#!/bin/sh\necho 0\n")
    compiler = machine.path / "fake-c++"
    installs = f'#!/bin/sh\necho "$*" >>"$LOG"\n: >{compiler}; chmod +x {compiler}\n'
    machine.program("apt-get", installs)
    status, text = machine.run()
    assert not status, text
    assert "scripts: installing g++" in text
    assert machine.done()[0] == "install -qq -y g++"
    assert machine.done()[-1] == "pip 3.12"


def test_a_package_that_does_not_help_is_installed_once(machine: Machine) -> None:
    machine.python("python3", "3.12")
    machine.program("id", "#!/bin/sh\necho 0\n")
    machine.program("apt-get", '#!/bin/sh\necho "$*" >>"$LOG"\n')
    status, text = machine.run()
    assert status and "scripts: missing: the C++ compiler fake-c++" in text
    assert "  sudo apt-get install -y g++" in text
    assert machine.done() == ["install -qq -y g++"]


def test_the_tests_use_the_build_of_serve(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.python("python3", "3.12")
    machine.program("fake-c++")
    for extra in ("", "test", "", "test"):
        status, output = machine.run(extra)
        assert status == 0, output
    lines = machine.log.read_text().splitlines()
    assert lines[-3:] == ["locked 3.12", "pip 3.12", "extra 3.12"]


@pytest.mark.parametrize("failure", ["PACKAGES_FAIL", "BUILD_FAILS"])
def test_half_an_installation_is_repeated(machine: Machine, failure: str) -> None:
    """The build and the packages run beside each other."""
    machine.python("python3", "3.12")
    machine.program("fake-c++")
    assert machine.run("test", **{failure: "1"})[0]
    before = len(machine.done())
    assert machine.run("test")[0] == 0
    assert sorted(machine.done()[before:]) == ["build 3.12", "extra 3.12", "pip 3.12"]
    assert machine.run("test") == (0, "")


def test_the_packages_of_an_extra_are_those_of_the_project(tmp_path: Path) -> None:
    """With the project itself and a real Python: what is installed after the package is built."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    done = subprocess.run(
        ["bash", "-euc", '. scripts/_venv.sh; _venv_packages "$1" test', "scripts/test", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = done.stdout.splitlines()
    inner = [name for name in extras if set(extras[name]) <= set(found) and name != "test"]
    own = [one for one in extras["test"] if not one.startswith("dynamo-appliance")]
    assert sorted(inner) == ["etcd", "kubernetes", "nats", "otel", "planner"]
    assert sorted(found) == sorted([*own, *(one for name in inner for one in extras[name])])
