"""Paths: private directories, socket paths that fit, namespaces that cannot escape."""

import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process import paths


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_directories_are_private_and_nested(tmp_path: Path) -> None:
    settings = RuntimeSettings(state_dir=str(tmp_path / "state"), namespace="ns")
    assert paths.state_dir(settings) == tmp_path / "state"
    assert paths.run_dir(settings) == tmp_path / "state" / "ns"
    assert paths.run_dir(settings, "other") == tmp_path / "state" / "other"
    assert paths.store_dir(settings) == tmp_path / "state" / "ns" / "store"
    for path in (tmp_path / "state", tmp_path / "state" / "ns", tmp_path / "state/ns/store"):
        assert _mode(path) == 0o700


def test_file_kv_wins_and_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    given = tmp_path / "kv"
    given.mkdir()
    given.chmod(0o755)
    settings = RuntimeSettings(state_dir=str(tmp_path), file_kv=str(given))
    assert paths.store_dir(settings) == given
    assert _mode(given) == 0o755


@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o707])
def test_a_directory_that_others_write_to_is_refused_untouched(tmp_path: Path, mode: int) -> None:
    """As the system's temporary directory: its mode belongs to everybody who uses it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    remedy = f"mode {mode:04o}.*subdirectory.*{shared}/dynamo"
    with pytest.raises(ConfigError, match=remedy):
        paths.state_dir(RuntimeSettings(state_dir=str(shared)))
    with pytest.raises(ConfigError, match=remedy):
        paths.store_dir(RuntimeSettings(state_dir=str(tmp_path), file_kv=str(shared)))
    assert _mode(shared) == mode and list(shared.iterdir()) == []
    assert _mode(paths.state_dir(RuntimeSettings(state_dir=str(shared / "dynamo")))) == 0o700
    assert _mode(shared) == mode


def test_missing_parents_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths.private_dir(tmp_path / "a" / "b" / "c")
        assert os.umask(0) == 0, "the umask is as before"
    finally:
        os.umask(before)
    for path in ("a", "a/b", "a/b/c"):
        assert _mode(tmp_path / path) == 0o700


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths.write_atomic(tmp_path / "state", b"a")
        paths.write_atomic(tmp_path / "state", b"b")
        with open(tmp_path / "log", "ab", opener=paths.open_private):
            pass
        paths.write_atomic(tmp_path / "graph", b"d", mode=0o666)
    finally:
        os.umask(before)
    modes = {path.name: _mode(path) for path in tmp_path.iterdir()}
    assert modes == {"state": 0o600, "log": 0o600, "graph": 0o666}


def test_default_is_under_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.state_dir(RuntimeSettings()) == tmp_path / ".dynamo" / "state"


def test_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user without an entry in /etc/passwd, and without HOME."""

    def none(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", none)
    with pytest.raises(ConfigError, match="set HOME, or DYN_LOCAL_STATE_DIR"):
        paths.state_path(RuntimeSettings())


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\0b", "a b", "-x", "x" * 129])
def test_a_namespace_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        RuntimeSettings(state_dir=str(tmp_path), namespace=name)
    with pytest.raises(ConfigError, match="namespace"):
        paths.run_dir(RuntimeSettings(state_dir=str(tmp_path)), name)


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        paths.state_dir(RuntimeSettings(state_dir=str(tmp_path / "state")))


@pytest.mark.usefixtures("other_users")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        paths.private_dir(theirs)


def test_short_socket_stays_in_the_run_directory() -> None:
    with tempfile.TemporaryDirectory(prefix="d") as root:
        settings = RuntimeSettings(state_dir=root)
        assert paths.socket_path(settings, "a.sock") == f"{root}/dynamo/a.sock"


def test_a_planned_path_is_the_one_that_is_made_and_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        for root in (Path(short) / "s", tmp_path / ("d" * 100)):
            settings = RuntimeSettings(state_dir=str(root))
            planned = paths.planned_socket_path(settings, "a.sock")
            store = paths.store_path(settings)
            assert not root.exists() and not Path(planned).parent.exists()
            assert paths.socket_path(settings, "a.sock") == planned
            assert paths.store_dir(settings) == store
            paths.release_sockets(settings)


def test_long_socket_falls_back_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def _fallback(settings: RuntimeSettings) -> Path:
    return Path(paths.planned_socket_path(settings, "a.sock")).parent


def test_a_planted_fallback_is_refused_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        settings = RuntimeSettings(state_dir=str(tmp_path / ("d" * 100)))
        victim = tmp_path / "victim"
        victim.mkdir()
        victim.chmod(0o755)
        planted = _fallback(settings)
        planted.symlink_to(victim)
        with pytest.raises(ConfigError, match=f"{planted}.*XDG_RUNTIME_DIR"):
            paths.socket_path(settings, "a.sock")
        paths.release_sockets(settings)
        assert _mode(victim) == 0o755 and planted.is_symlink()
        planted.unlink()
        planted.mkdir()
        planted.chmod(0o777)
        with pytest.raises(ConfigError, match="other users can write"):
            paths.socket_path(settings, "a.sock")
        assert _mode(planted) == 0o777
        paths.release_sockets(settings)


@pytest.mark.usefixtures("other_users")
def test_the_fallback_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        settings = RuntimeSettings(state_dir=str(tmp_path / ("d" * 100)))
        planted = _fallback(settings)
        planted.mkdir(mode=0o700)
        os.chown(planted, 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to user 12345"):
            paths.socket_path(settings, "a.sock")
        os.chown(planted, 0, 0)
        paths.release_sockets(settings)


@pytest.mark.parametrize("text", ["/", "/etc\n", "", "relative", "\0"])
def test_a_record_that_names_no_fallback_of_ours_is_ignored(tmp_path: Path, text: str) -> None:
    """Clean-up removes the directory that the record names."""
    (tmp_path / "sockets.path").write_text(text)
    assert paths.fallback_dir(tmp_path) is None


HOLDER = """
import sys
from dynamo.config.runtime import RuntimeSettings
from dynamo.runtime.process import paths
print(paths.socket_path(RuntimeSettings(state_dir=sys.argv[1]), "a.sock"), flush=True)
sys.stdin.readline()
"""


def test_the_fallback_directory_is_removed_with_its_last_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="x") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        deep = tmp_path / ("d" * 100)
        settings = RuntimeSettings(state_dir=str(deep))
        record = deep / "dynamo" / "sockets.path"
        path = Path(paths.socket_path(settings, "worker.sock"))
        path.touch()
        paths.release_sockets(settings)
        assert path.exists() and record.exists(), "the socket of another process"
        path.unlink()
        command = [sys.executable, "-c", HOLDER, str(deep)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline().decode().strip() == str(path.parent / "a.sock")
            paths.release_sockets(settings)
            assert path.parent.is_dir(), "another process is about to bind there"
            other.kill()
        paths.release_sockets(settings)
        assert list(Path(short).iterdir()) == [] and not record.exists()
        paths.release_sockets(settings)
        assert Path(paths.socket_path(settings, "worker.sock")) == path  # and it may come back
        assert path.parent.is_dir() and record.exists()
        paths.release_sockets(settings)
        assert list(Path(short).iterdir()) == []


async def test_a_runtime_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_new_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))  # as a disk with 4 bytes left
    try:
        with pytest.raises(OSError, match="No space left"):
            paths.write_new(path, b"namespace: x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not path.exists()
    paths.write_new(path, b"namespace: x", 0o600)
    assert path.read_bytes() == b"namespace: x" and _mode(path) == 0o600
    with pytest.raises(FileExistsError):
        paths.write_new(path, b"another")
    assert path.read_bytes() == b"namespace: x"
