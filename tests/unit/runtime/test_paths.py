"""Paths: private directories, socket paths that fit, namespaces that cannot escape."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.runtime import DistributedRuntime, paths


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_are_private_and_nested(tmp_path: Path):
    settings = RuntimeSettings(state_dir=str(tmp_path / "state"), namespace="ns")
    assert paths.state_dir(settings) == tmp_path / "state"
    assert paths.run_dir(settings) == tmp_path / "state" / "ns"
    assert paths.run_dir(settings, "other") == tmp_path / "state" / "other"
    assert paths.store_dir(settings) == tmp_path / "state" / "ns" / "store"
    for path in (tmp_path / "state", tmp_path / "state" / "ns", tmp_path / "state/ns/store"):
        assert _mode(path) == 0o700


def test_file_kv_wins_and_loose_modes_are_tightened(tmp_path: Path):
    loose = tmp_path / "kv"
    loose.mkdir(mode=0o755)
    loose.chmod(0o755)
    settings = RuntimeSettings(state_dir=str(tmp_path), file_kv=str(loose))
    assert paths.store_dir(settings) == loose
    assert _mode(loose) == 0o700


def test_default_is_under_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.state_dir(RuntimeSettings()) == tmp_path / ".dynamo" / "state"


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "a b", "-x", "x" * 129])
def test_a_namespace_cannot_leave_its_directory(tmp_path: Path, name: str):
    settings = RuntimeSettings(state_dir=str(tmp_path), namespace=name)
    with pytest.raises(ConfigError, match="namespace"):
        paths.run_dir(settings)


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path):
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        paths.state_dir(RuntimeSettings(state_dir=str(tmp_path / "state")))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a directory of another user")
def test_another_users_directory_is_refused(tmp_path: Path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        paths.private_dir(theirs)


def test_short_socket_stays_in_the_run_directory():
    with tempfile.TemporaryDirectory(prefix="d") as root:
        settings = RuntimeSettings(state_dir=root)
        assert paths.socket_path(settings, "a.sock") == f"{root}/dynamo/a.sock"


def test_a_planned_path_is_the_one_that_is_made_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        for root in (Path(short) / "s", tmp_path / ("d" * 100)):
            settings = RuntimeSettings(state_dir=str(root))
            planned = paths.planned_socket_path(settings, "a.sock")
            store = paths.store_path(settings)
            assert not root.exists() and not Path(planned).parent.exists()
            assert paths.socket_path(settings, "a.sock") == planned
            assert paths.store_dir(settings) == store
            paths.leave_sockets(settings)


def test_long_socket_falls_back_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        deep = tmp_path / ("d" * 100)
        settings = RuntimeSettings(state_dir=str(deep))
        path = Path(paths.socket_path(settings, "worker.sock"))
        assert path.parent.parent == Path(short)
        assert len(os.fsencode(path)) <= paths.SOCKET_PATH_MAX_BYTES
        assert _mode(path.parent) == 0o700
        assert (deep / "dynamo" / "sockets.path").read_text() == f"{path.parent}\n"
        assert paths.socket_path(settings, "worker.sock") == str(path)
        other = RuntimeSettings(state_dir=str(deep), namespace="other")
        assert Path(paths.socket_path(other, "worker.sock")).parent != path.parent
        with pytest.raises(ConfigError, match="longer than 107"):
            paths.socket_path(settings, "n" * 108)


HOLDER = """
import sys
from dynamo.config.runtime import RuntimeSettings
from dynamo.runtime import paths
print(paths.socket_path(RuntimeSettings(state_dir=sys.argv[1]), "a.sock"), flush=True)
sys.stdin.readline()
"""


def test_the_directory_of_short_sockets_goes_with_its_last_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        deep = tmp_path / ("d" * 100)
        settings = RuntimeSettings(state_dir=str(deep))
        record = deep / "dynamo" / "sockets.path"
        path = Path(paths.socket_path(settings, "worker.sock"))
        path.touch()
        paths.leave_sockets(settings)
        assert path.exists() and record.exists(), "somebody's socket is there"
        path.unlink()
        command = [sys.executable, "-c", HOLDER, str(deep)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline().decode().strip() == str(path.parent / "a.sock")
            paths.leave_sockets(settings)
            assert path.parent.is_dir(), "another process is about to bind there"
            other.kill()
        paths.leave_sockets(settings)
        assert list(Path(short).iterdir()) == [] and not record.exists()
        paths.leave_sockets(settings)
        assert Path(paths.socket_path(settings, "worker.sock")) == path  # and it may come back
        assert path.parent.is_dir() and record.exists()
        paths.leave_sockets(settings)
        assert list(Path(short).iterdir()) == []


async def test_a_runtime_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        settings = RuntimeSettings(state_dir=str(tmp_path / ("d" * 100)))
        first, second = DistributedRuntime(None, settings), DistributedRuntime(None, settings)
        for runtime in (first, second):
            await runtime.publisher("dynamo", "backend", "topic")
        assert len(list(Path(short).iterdir())) == 1
        await first.close()
        assert len(list(Path(short).iterdir())) == 1
        await second.close()
        assert list(Path(short).iterdir()) == []
