"""Which deployment a command means: the named one, the default, the only one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dynamo.errors import ConfigError
from dynamo.runtime.process.os_process import host_id
from dynamo.serve.state.process_table import stat
from dynamo.status.deployment import chosen_runtime


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    return tmp_path


def write(directory: Path, namespace: str, alive: bool = True) -> None:
    """The statefile of a deployment whose arbiter is this process, or one that has exited."""
    me = stat(os.getpid())
    assert me is not None
    arbiter = {"pid": me.pid, "start_ticks": me.start_ticks if alive else 1, "host": host_id()}
    document = {
        "namespace": namespace,
        "circus_endpoint": "ipc:///x",
        "components": {},
        "environment": {},
        "arbiter": arbiter,
    }
    (directory / f"{namespace}.json").write_text(json.dumps(document))


def test_the_only_deployment_needs_no_name(directory: Path) -> None:
    assert chosen_runtime(None).namespace == "dynamo"
    write(directory, "box", alive=False)
    assert chosen_runtime(None).namespace == "box"
    assert chosen_runtime("other").namespace == "other"


def test_the_default_comes_before_others(directory: Path) -> None:
    write(directory, "box")
    write(directory, "dynamo", alive=False)
    assert chosen_runtime(None).namespace == "dynamo"


def test_a_variable_is_a_choice(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(directory, "box")
    monkeypatch.setenv("DYN_NAMESPACE", "other")
    assert chosen_runtime(None).namespace == "other"


def test_of_several_the_running_one(directory: Path) -> None:
    write(directory, "a", alive=False)
    write(directory, "b")
    assert chosen_runtime(None).namespace == "b"
    write(directory, "c")
    with pytest.raises(ConfigError, match=r"choose one with --namespace: b, c$"):
        chosen_runtime(None)


@pytest.mark.usefixtures("directory")
def test_a_path_is_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("../box", "a/b", ""):
        with pytest.raises(ConfigError, match="must be letters"):
            chosen_runtime(name)
    monkeypatch.setenv("DYN_NAMESPACE", "../box")
    with pytest.raises(ConfigError, match="must be letters"):
        chosen_runtime(None)
