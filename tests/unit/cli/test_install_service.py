"""`dynamo install-service`: the unit, where it is written, and what systemd says about it."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from deployment import MODEL

from dynamo.cli import main as cli
from dynamo.cli.install_service import SystemdUnit

GRAPH = f"""
namespace: installed
Frontend: {{run: dynamo.frontend, ServiceArgs: {{graceful_timeout: 40}}}}
Worker:
  run: dynamo.mocker
  model-path: {MODEL}
  ServiceArgs: {{graceful_timeout: 120, workers: 2}}
"""
# They hide the devices of GPUs, break just-in-time compilers, or hide models and sockets.
HARMFUL = (
    *("PrivateDevices", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute", "ProtectHome"),
    *("PrivateTmp", "PrivateNetwork", "SystemCallFilter"),
)


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DYN_LOCAL_STATE_DIR", "DYN_NAMESPACE", "HF_HOME", "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "my graph%.yaml"
    path.write_text(GRAPH)
    return path


def main(words: list[str]) -> int:
    return cli.main(["install-service", *words])


def settings_of(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--print"]) == 0
    return capsys.readouterr().out


def test_the_unit_supervises_a_deployment(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, str(graph))
    found = settings_of(text)
    assert found["KillMode"] == "mixed" and found["Restart"] == "on-failure"
    assert (
        found["RestartPreventExitStatus"] == "2" and found["User"] == pwd.getpwuid(os.getuid())[0]
    )
    assert int(found["TimeoutStopSec"]) == 40 + 120 + 30  # the frontends, then the workers
    assert found["LimitNOFILE"] == "1048576" and found["LimitMEMLOCK"] == "infinity"
    escaped = str(graph).replace("%", "%%")
    command = shlex.split(found["ExecStart"])
    assert Path(command[0]).name == "dynamo" and command[1:] == ["serve", escaped]
    assert shlex.split(found["ExecReload"])[1:] == ["reload", escaped]
    assert not [key for key in HARMFUL if key in found]


def test_a_user_without_a_home_gets_directories(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homeless = [one.pw_name for one in pwd.getpwall() if not Path(one.pw_dir).is_dir()]
    if not homeless:
        pytest.skip("every user has a home directory")
    text = printed(capsys, str(graph), "--run-as", homeless[0], "--name", "llm")
    assert settings_of(text)["StateDirectory"] == "llm"
    assert "Environment=DYN_LOCAL_STATE_DIR=/var/lib/llm\n" in text
    assert main([str(graph), "--run-as", "no-such-user", "--print"]) == 2
    assert "useradd --system no-such-user" in capsys.readouterr().err


@pytest.mark.usefixtures("other_users")
def test_a_user_who_may_not_read_the_graph_is_refused(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph.parent.chmod(0o700)
    other = pwd.getpwuid(1).pw_name  # of Debian's base system
    words = [str(graph), "--directory", str(tmp_path / "units"), "--run-as", other]
    assert main(words) == 2 and not (tmp_path / "units").exists()
    found = re.search("may not enter, run or read (.*), which", capsys.readouterr().err)
    assert found is not None
    assert not Path(found[1]).stat().st_mode & stat.S_IXOTH
    assert main([*words, "--print"]) == 0


def test_a_users_own_manager_gets_no_root_settings(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = settings_of(printed(capsys, str(graph), "--user"))
    assert found["WantedBy"] == "default.target"
    assert not {"User", "ProtectSystem", "NoNewPrivileges"} & found.keys()


def test_device_files_of_gpus_are_made_before_privileges_go() -> None:
    unit = SystemdUnit(
        name="x",
        command=("/bin/dynamo",),
        graph="/g.yaml",
        directory="/",
        stop_s=1,
        user="ada",
        gpu_setup=("/usr/bin/nvidia-modprobe", "-u"),
    )
    assert "ExecStartPre=-+/usr/bin/nvidia-modprobe -u\n" in unit.text()


def test_a_second_call_changes_nothing(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(graph), "--directory", str(tmp_path / "units"), "--name", "llm"]
    path = tmp_path / "units/llm.service"
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"wrote {path}\n") and "systemctl enable --now llm" in shown
    assert ("it runs as root" in shown) == (os.getuid() == 0)
    before = path.stat()
    assert main(words) == 0 and capsys.readouterr().out.startswith("unchanged: ")
    assert path.stat().st_ino == before.st_ino
    graph.write_text(GRAPH.replace("120", "60"))
    assert main(words) == 0 and capsys.readouterr().out.startswith("replaced ")
    assert "TimeoutStopSec=130" in path.read_text()
    assert [one.name for one in path.parent.iterdir()] == ["llm.service"]


def test_a_unit_of_someone_else_is_not_replaced(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dynamo.service"
    path.write_text("[Unit]\n")
    assert main([str(graph), "--directory", str(tmp_path)]) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert path.read_text() == "[Unit]\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--name", "../x"], "--name must be letters"),
        (["nowhere.yaml"], "cannot read"),
    ],
)
def test_wrong_arguments(
    words: list[str], problem: str, graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words if words[0].endswith(".yaml") else [str(graph), *words]
    assert main([*given, "--print"]) == 2
    assert problem in capsys.readouterr().err


def test_a_wrong_graph_gets_no_unit(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph.write_text(GRAPH + "  sped: 1\n")
    assert main([str(graph), "--print"]) == 2
    assert "sped is not an option" in capsys.readouterr().err


def test_where_nothing_can_be_written_the_remedy_is_named(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(graph), "--directory", str(tmp_path / "file/units")]) == 1
    assert "sudo" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is missing")
def test_systemd_accepts_the_unit(graph: Path, tmp_path: Path) -> None:
    assert main([str(graph), "--directory", str(tmp_path), "--name", "llm"]) == 0
    command = ["systemd-analyze", "verify", str(tmp_path / "llm.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if "llm.service" in line]
    assert done.returncode == 0 and complaints == [], done.stderr


def test_the_unit_of_another_graph_is_kept_unless_it_is_named(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--user", "--directory", str(tmp_path / "units")]
    assert main([str(graph), *target]) == 0
    other = tmp_path / "other.yaml"
    other.write_text(GRAPH.replace("installed", "elsewhere"))
    capsys.readouterr()
    assert main([str(other), *target]) == 2
    error = capsys.readouterr().err
    assert "serves another graph" in error and "choose another --name" in error
    assert str(other) not in (tmp_path / "units/dynamo.service").read_text()
    assert main([str(graph), *target]) == 0
    assert main([str(other), *target, "--name", "other"]) == 0
    assert str(other) in (tmp_path / "units/other.service").read_text()
