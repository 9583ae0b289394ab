"""The run directory: one owner, and recovery after a crash."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from serving_documents import document

from dynamo.errors import StatefileError
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.layout import encode_stored, ensure_directories, key_path, lease_path
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.serve.state.document import Arbiter, Document, RecordedProcess
from dynamo.serve.state.process_table import stat
from dynamo.serve.state.rundir import PLANNER_FILE, PLANNER_LOCK, RunDirectory
from dynamo.serve.state.statefile import FileLock, Statefile

KEY = "v1/instances/ns/backend/generate/a1"


@pytest.fixture
def home(tmp_path: Path) -> RunDirectory:
    path = tmp_path / "ns"
    path.mkdir()
    return RunDirectory(path, path / "store", Statefile(tmp_path, "ns"))


def sleeper(watcher: str = "ns_A") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sleep", "1000"], start_new_session=True, env={"DYN_WATCHER_NAME": watcher}
    )


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def crashed(home: RunDirectory, pid: int, ticks: int, host: str | None = None) -> None:
    """The statefile of a deployment whose arbiter is dead and whose worker was ``pid``."""
    made = document("ns")
    made.arbiter = Arbiter(pid=dead_pid(), start_ticks=1, host=host or host_id())
    made.components["ns_A"].processes = (RecordedProcess(pid, ticks),)
    home.statefile.create(made)


def lease(home: RunDirectory, lease_id: int, pid: int, ticks: int) -> None:
    home.store.mkdir(exist_ok=True)
    ensure_directories(home.store)
    record = LeaseRecord(lease_id, pid, ticks, 10.0, host_id())
    lease_path(home.store, lease_id).write_bytes(msgspec.json.encode(record))


def test_one_owner(home: RunDirectory) -> None:
    home.acquire()
    other = RunDirectory(home.path, home.store, home.statefile)
    text = f"served by process {os.getpid()} .* dynamo stop --namespace ns"
    with pytest.raises(StatefileError, match=text):
        other.acquire()
    home.release()
    other.acquire()
    other.release()
    assert not list(home.path.iterdir())


def test_recorded_processes_of_a_crash_are_killed(home: RunDirectory) -> None:
    with sleeper() as worker:
        found = stat(worker.pid)
        assert found is not None
        crashed(home, worker.pid, found.start_ticks)
        (told,) = home.reconcile()
        assert "killed 1 of its processes" in told
        assert worker.wait(5) == -9
    assert home.statefile.read() is None


@pytest.mark.parametrize("case", ["another start", "another boot", "another arbiter's file"])
def test_other_processes_are_spared(home: RunDirectory, case: str) -> None:
    with sleeper() as stranger:
        ticks = start_ticks(stranger.pid) or 0
        if case == "another start":
            crashed(home, stranger.pid, ticks - 1)
        elif case == "another boot":
            crashed(home, stranger.pid, ticks, host="another")
        else:
            made = document("ns")
            made.components["ns_A"].processes = (RecordedProcess(stranger.pid, ticks),)
            home.statefile.create(made)
        assert home.reconcile()
        assert stranger.poll() is None
        stranger.kill()
    assert not home.statefile.path.exists()


@pytest.mark.parametrize(
    ("changed", "since", "ends"),
    [
        ({}, 1, True),
        ({"DYN_WATCHER_NAME": "ns_B"}, 1, False),
        ({"DYN_NAMESPACE": "other"}, 1, False),
        ({"DYN_LOCAL_STATE_DIR": "/elsewhere"}, 1, False),
        ({}, 2**60, False),  # it started before the arbiter
        ({}, None, False),
    ],
)
def test_a_process_in_another_session(
    home: RunDirectory, changed: dict[str, str], since: int | None, ends: bool
) -> None:
    """A grandchild without a record is identified by the environment of its worker."""
    made = document("ns")
    made.arbiter = Arbiter(pid=dead_pid(), start_ticks=since or 0, host=host_id())
    home.statefile.create(made)
    inherited = {
        "DYN_WATCHER_NAME": "ns_A",
        "DYN_NAMESPACE": "ns",
        "DYN_LOCAL_STATE_DIR": str(home.statefile.path.parent),
    }
    words = ["sleep", "1000"]
    with subprocess.Popen(words, env=inherited | changed, start_new_session=True) as escaped:
        environment = Path(f"/proc/{escaped.pid}/environ")
        while not environment.read_bytes():  # the kernel sets it a moment after exec
            time.sleep(0.01)
        (told,) = home.reconcile()
        was_ended = escaped.poll() is not None
        escaped.kill()
    assert f"killed {int(ends)} of its processes" in told and was_ended is ends


@pytest.mark.parametrize(
    "processes", [None, [None], [{"pid": "1"}], [{"pid": 1, "start_ticks": 1}]]
)
def test_an_invalid_record_kills_nothing(home: RunDirectory, processes: object) -> None:
    made = document("ns")
    made.arbiter = Arbiter(pid=dead_pid(), start_ticks=1, host=host_id())
    components = {"ns_A": {"processes": processes}, "ns_B": 3}
    home.statefile.create(Document.of({**made.written(), "components": components}))
    (told,) = home.reconcile()
    assert "killed 0" in told


def test_a_living_arbiter_without_its_lock_is_an_error(home: RunDirectory) -> None:
    with sleeper() as arbiter:
        made = document("ns")
        ticks = start_ticks(arbiter.pid)
        made.arbiter = Arbiter(pid=arbiter.pid, start_ticks=ticks or 0, host=host_id())
        home.statefile.create(made)
        with pytest.raises(StatefileError, match=f"arbiter {arbiter.pid}"):
            home.reconcile()
        arbiter.kill()


def test_a_damaged_statefile_is_reported_and_replaced(home: RunDirectory) -> None:
    home.statefile.path.write_text("{")
    (told,) = home.reconcile()
    assert "replacing a bad statefile" in told and not home.statefile.path.exists()


def test_sockets_store_and_fallback_are_removed_logs_kept(
    home: RunDirectory, tmp_path: Path
) -> None:
    digest = hashlib.sha256(os.fsencode(home.path)).hexdigest()[:12]
    fallback = tmp_path / f"dynamo-{os.geteuid()}-{digest}"
    fallback.mkdir()
    (home.path / "sockets.path").write_text(f"{fallback}\n")
    home.logs.mkdir()
    (home.logs / "a.log").write_text("kept")
    (home.path / ".graph.yaml.123").touch()  # of a process that was killed while it wrote
    lease(home, 0xA1, dead_pid(), 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home.path / "w.sock"))
    home.clear()
    home.clear()
    assert [path.name for path in home.path.iterdir()] == ["logs"]
    assert not fallback.exists()


def test_a_start_keeps_what_a_process_may_be_opening(home: RunDirectory) -> None:
    """A worker, a frontend or a command may open the store of the deployment that has crashed."""
    crashed(home, dead_pid(), 1)
    lease(home, 0xA1, dead_pid(), 1)
    damaged, orphan = key_path(home.store, KEY), key_path(home.store, KEY[:-2] + "c3")
    damaged.write_bytes(b"?")
    orphan.write_bytes(encode_stored(0xC3, b"{}"))
    torn = home.store / "leases" / "d4"
    torn.touch()
    directories = {path for path in home.store.rglob("*") if path.is_dir()}
    home.reconcile()
    assert set(home.store.rglob("*")) == directories
    home.clear()
    assert not home.store.exists()


def test_files_of_a_killed_planner_are_removed(home: RunDirectory) -> None:
    """Those of a planner that lives stay: a person has started it."""
    report, lock = home.path / PLANNER_FILE, FileLock(home.path / PLANNER_LOCK)
    report.touch()
    assert lock.try_acquire()
    home.clear()
    assert report.exists() and lock.path.exists()
    lock.release()
    home.clear()
    assert not report.exists() and not lock.path.exists()


def test_only_dead_leases_are_removed_from_a_store_in_use(home: RunDirectory) -> None:
    """A manually started worker keeps its lease, its keys and its sockets."""
    lease(home, 0xA1, dead_pid(), 1)
    lease(home, 0xB2, os.getpid(), start_ticks(os.getpid()) or 0)
    for lease_id, key in ((0xA1, KEY), (0xB2, KEY[:-2] + "b2")):
        key_path(home.store, key).write_bytes(encode_stored(lease_id, b"{}"))
    (home.store / "leases" / "junk").write_text("?")
    (home.path / "b2.engine").mkdir()
    kept = {home.path / "b2.sock", home.path / "b2.0.events.sock", home.path / "b2.engine" / "x"}
    control = {home.path / name for name in ("circus.sock", "status.sock", "a1.sock")}
    for path in kept | control:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    far = LeaseRecord(0xC3, 1, 1, 10.0, "another host")  # not renewed for long
    lease_path(home.store, 0xC3).write_bytes(msgspec.json.encode(far))
    os.utime(lease_path(home.store, 0xC3), (0, 0))
    home.clear()
    assert not lease_path(home.store, 0xC3).exists()
    assert not lease_path(home.store, 0xA1).exists() and not key_path(home.store, KEY).exists()
    assert lease_path(home.store, 0xB2).exists()
    assert key_path(home.store, KEY[:-2] + "b2").exists()
    assert all(path.exists() for path in kept) and not any(path.exists() for path in control)
