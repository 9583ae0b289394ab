"""File discovery: real files, real processes; torn files, silence, races and lost events."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from until import Changes

from dynamo.errors import InvalidArgument, Unavailable, WorkerUnavailable
from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery import FileDiscovery, KeyEvent, file, layout, leases, store_watcher
from dynamo.runtime.discovery.leases import ProcessEnd
from dynamo.runtime.process import inotify, paths
from dynamo.runtime.process.os_process import host_id, is_running, start_ticks

KEY = "v1/instances/ns/comp/ep/1f"

HOLDER = """
import asyncio, sys
from pathlib import Path
from dynamo.runtime.discovery import FileDiscovery

async def main():
    store = FileDiscovery(Path(sys.argv[1]))
    lease = await store.grant(float(sys.argv[2]), int(sys.argv[3]))
    await store.put(f"v1/instances/ns/comp/ep/{lease.id:x}", b"here", lease.id)
    await store.put(f"v1/mdc/ns/comp/ep/{lease.id:x}", b"card", lease.id)
    print("up", flush=True)
    await lease.lost.wait()
    print("lost", flush=True)

asyncio.run(main())
"""


class Log:
    """Collects events and lets a test wait for the n-th."""

    def __init__(self) -> None:
        self.events: list[KeyEvent] = []
        self._changes = Changes()

    def __call__(self, event: KeyEvent) -> None:
        self.events.append(event)
        self._changes.changed()

    async def until(self, count: int) -> list[KeyEvent]:
        await self._changes.until(lambda: len(self.events) >= count)
        return self.events


@pytest.fixture
def holders(root: Path) -> Iterator["Holders"]:
    made = Holders(root)
    yield made
    made.end()


class Holders:
    """Real processes, each with a lease and two keys."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: list[subprocess.Popen[str]] = []

    async def start(self, lease_id: int, ttl_s: float = 10) -> subprocess.Popen[str]:
        process = self._spawn(str(ttl_s), str(lease_id))
        assert await self.says(process) == "up"
        return process

    def _spawn(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(self._root), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._made.append(process)
        return process

    async def says(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return (await asyncio.to_thread(process.stdout.readline)).strip()

    def end(self) -> None:
        for process in self._made:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def descriptors(root: Path) -> list[str]:
    """The files of the store that this process has open."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return sorted(one for one in found if one.startswith(str(root)))


async def test_everything_is_private_and_named_by_key(store: FileDiscovery, root: Path) -> None:
    lease = await store.grant(10, 0xAB)
    await store.put("v1/instances/n s/c%/.e/1f", b"x", lease.id)
    await store.put("v1/mdc/.hidden/é", b"y", lease.id)
    assert files(root) == {
        "leases/ab",
        "v1/instances/n%20s%2Fc%25%2F.e%2F1f",
        "v1/mdc/%2Ehidden%2F%C3%A9",
    }
    for path in (root, *(path for path in root.rglob("*") if path.is_dir())):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert set(await store.list("v1/")) == {"v1/instances/n s/c%/.e/1f", "v1/mdc/.hidden/é"}
    with pytest.raises(InvalidArgument, match="longer"):
        await store.put("v1/mdc/" + "x" * 256, b"", lease.id)
    record = msgspec.json.decode((root / "leases/ab").read_bytes(), type=LeaseRecord)
    assert (record.pid, record.host, record.ttl_s) == (os.getpid(), host_id(), 10)
    assert is_running(record.pid, record.pid_start)


async def test_a_killed_process_is_noticed_at_once_and_cleaned_up(
    store: FileDiscovery, root: Path, holders: Holders
) -> None:
    first = await holders.start(1)
    log = Log()
    await store.watch("v1/instances/", log).ready()
    second = await holders.start(2)
    await log.until(2)
    for process, count in ((first, 3), (second, 4)):
        process.kill()
        await log.until(count)
    assert [(event.kind, event.key[-1]) for event in log.events] == [
        ("put", "1"),
        ("put", "2"),
        ("delete", "1"),
        ("delete", "2"),
    ]
    await asyncio.sleep(0)
    assert await store.list("v1/") == {}
    assert files(root) == set()


async def test_what_died_before_we_looked_is_not_shown(root: Path, holders: Holders) -> None:
    process = await holders.start(1)
    process.kill()
    process.wait()
    assert len(files(root)) == 3
    late = FileDiscovery(root)
    assert await late.list("v1/") == {}
    assert files(root) == set()
    await late.close()


async def test_unlinking_the_lease_ends_the_owner(
    store: FileDiscovery, root: Path, holders: Holders
) -> None:
    process = await holders.start(7)
    log = Log()
    await store.watch("v1/", log).ready()
    (root / "leases/7").unlink()
    await log.until(4)
    assert await holders.says(process) == "lost"
    assert await asyncio.to_thread(process.wait) == 0
    assert [event.kind for event in log.events] == ["put", "put", "delete", "delete"]
    assert files(root) == set()


async def test_keys_of_a_stopped_process_are_hidden_until_it_continues(
    store: FileDiscovery, root: Path, holders: Holders
) -> None:
    process = await holders.start(7, ttl_s=0.9)
    log = Log()
    await store.watch("v1/instances/", log).ready()
    process.send_signal(signal.SIGSTOP)
    await log.until(2)
    assert await store.list("v1/") == {}
    assert len(files(root)) == 3
    process.send_signal(signal.SIGCONT)
    await log.until(3)
    assert [event.kind for event in log.events] == ["put", "delete", "put"]
    process.send_signal(signal.SIGSTOP)
    await log.until(4)
    process.kill()
    process.wait()
    async with asyncio.timeout(20):
        while files(root):
            await store.list("v1/")
            await asyncio.sleep(0.01)
    assert len(log.events) == 4


async def test_revoked_while_stopped_it_exits_when_it_wakes(
    store: FileDiscovery, root: Path, holders: Holders
) -> None:
    process = await holders.start(7, ttl_s=0.9)
    process.send_signal(signal.SIGSTOP)
    await store.revoke(7)
    assert files(root) == set()
    process.send_signal(signal.SIGCONT)
    assert await holders.says(process) == "lost"
    assert await asyncio.to_thread(process.wait) == 0
    assert files(root) == set()


def _foreign_lease(root: Path, lease_id: int, ttl_s: float) -> Path:
    record = LeaseRecord(lease_id, 1, 1, ttl_s, "another machine")
    path = layout.lease_path(root, lease_id)
    paths.write_atomic(path, msgspec.json.encode(record))
    paths.write_atomic(
        layout.key_path(root, f"v1/mdc/{lease_id:x}"), layout.encode_stored(lease_id, b"far")
    )
    return path


async def test_a_large_store_is_read_in_slices(
    store: FileDiscovery, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of leases must not hold the loop: not their files, not their deadlines."""
    monkeypatch.setattr(store_watcher, "SLICE_S", 0.0)
    await store.start()
    for number in range(1, 201):
        _foreign_lease(root, number, 10)
    deadlines = 0
    deadline = leases._TrackedLease.deadline

    def counted(lease: leases._TrackedLease) -> float | None:
        nonlocal deadlines
        deadlines += 1
        return deadline(lease)

    monkeypatch.setattr(leases._TrackedLease, "deadline", counted)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    log = Log()
    watch = store.watch("v1/", log)
    assert len(await store.list("v1/")) == 200
    await watch.ready()
    counting.cancel()
    assert len(log.events) == 200 and turns >= 400  # a turn for each lease and each key
    assert deadlines <= 400


@pytest.mark.usefixtures("needs_inotify")
async def test_a_foreign_host_lives_by_its_ttl(store: FileDiscovery, root: Path) -> None:
    path = _foreign_lease(root, 5, 0.6)
    log = Log()
    await store.watch("v1/", log).ready()
    assert log.events == [KeyEvent("put", "v1/mdc/5", b"far")]
    for _ in range(8):
        await asyncio.sleep(0.1)
        os.utime(path)
    assert len(log.events) == 1
    await log.until(2)
    os.utime(path)
    await log.until(3)
    assert [event.kind for event in log.events] == ["put", "delete", "put"]
    await log.until(4)
    async with asyncio.timeout(10):
        while path.exists():  # noqa: ASYNC110 - no event is left to wait for
            await asyncio.sleep(0.05)
    assert files(root) == set()
    assert len(log.events) == 4


async def test_a_long_silent_foreign_lease_is_removed_at_the_first_scan(
    store: FileDiscovery, root: Path
) -> None:
    path = _foreign_lease(root, 5, 1)
    os.utime(path, (1, 1))
    assert await store.list("v1/") == {}
    async with asyncio.timeout(20):
        while files(root):  # noqa: ASYNC110 - no event is left to wait for
            await asyncio.sleep(0.01)


async def test_a_clock_that_is_set_hides_no_lease_of_this_host(
    store: FileDiscovery, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await store.grant(10)
    await store.put("v1/instances/a", b"1", lease.id)
    path = layout.lease_path(root, lease.id)
    layout.read_file(path)
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    for is_read_by_another_program in (False, True):
        if is_read_by_another_program:  # reading may set its access time
            now_ns = time.time_ns()
            os.utime(path, ns=(now_ns, now_ns))
        reader = FileDiscovery(root)
        try:
            listed = await reader.list("v1/")
        finally:
            await reader.close()
        assert bool(listed) is not is_read_by_another_program


async def test_our_own_stall_does_not_make_others_silent(
    store: FileDiscovery, root: Path, holders: Holders
) -> None:
    await holders.start(7, ttl_s=0.6)
    log = Log()
    await store.watch("v1/instances/", log).ready()
    await asyncio.to_thread(lambda: None)
    time.sleep(1.5)  # noqa: ASYNC251 - the stall is the point
    await asyncio.sleep(0.1)
    assert [event.kind for event in log.events] == ["put"]


async def test_a_reused_pid_does_not_keep_a_lease_alive(store: FileDiscovery, root: Path) -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    record = LeaseRecord(9, os.getpid(), ticks - 1, 10, host_id())
    paths.write_atomic(layout.lease_path(root, 9), msgspec.json.encode(record))
    paths.write_atomic(layout.key_path(root, KEY), layout.encode_stored(9, b"x"))
    assert await store.list("v1/") == {}
    assert files(root) == set()
    with pytest.raises(ProcessLookupError):
        ProcessEnd(os.getpid(), ticks - 1, lambda: None)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("v1/mdc/a", b"", "no lease header"),
        ("v1/mdc/a", b"{}\n", "no lease header"),
        ("v1/mdc/a", b"1f 5\nabc", "3 bytes of 5"),
        ("v1/mdc/a b", b"1f 1\na", "not a key"),
        ("v1/mdc/%FF", b"1f 1\na", "not a key"),
        ("leases/1f", b'{"lease_id":31', "not a lease"),
        ("leases/1f", b'{"lease_id":30,"pid":1,"pid_start":1,"ttl_s":1,"host":""}', "its name"),
        ("leases/README", b"hello", "not a lease"),
    ],
)
async def test_a_torn_or_foreign_file_is_reported_once(
    store: FileDiscovery,
    root: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: bytes,
    problem: str,
) -> None:
    lease = await store.grant(10)
    await store.put(KEY, b"1", lease.id)
    assert len(await store.list("v1/")) == 1
    with caplog.at_level(logging.WARNING):
        (root / name).write_bytes(content)
        for _ in range(3):
            assert await store.list("v1/") == {KEY: b"1"}
        store._overflowed()
        assert await store.list("v1/") == {KEY: b"1"}
    reports = [record for record in caplog.records if "skipping" in record.message]
    assert len(reports) == 1
    assert problem in reports[0].message
    (root / name).unlink()
    assert await store.list("v1/") == {KEY: b"1"}


async def test_an_incomplete_key_is_hidden_until_it_is_complete(
    store: FileDiscovery, root: Path
) -> None:
    lease = await store.grant(10)
    await store.put(KEY, b"12345", lease.id)
    log = Log()
    await store.watch("v1/", log).ready()
    path = layout.key_path(root, KEY)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    await log.until(2)
    path.write_bytes(whole)
    await log.until(3)
    assert [event.kind for event in log.events] == ["put", "delete", "put"]


async def test_files_being_written_are_ignored(store: FileDiscovery, root: Path) -> None:
    log = Log()
    await store.watch("v1/", log).ready()
    (root / "v1/mdc/.half").write_bytes(b"1f 1\nx")
    (root / "leases/.half").write_bytes(b"x")
    assert await store.list("v1/") == {}
    assert log.events == []


async def test_old_half_written_files_are_swept(
    store: FileDiscovery, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "v1/mdc/.1.2").write_bytes(b"")
    (root / "leases/.1.3").write_bytes(b"")
    monkeypatch.setattr(layout, "_ABANDONED_AFTER_S", -1.0)
    await store.list("v1/")
    assert files(root) == set()


def test_removal_spares_a_newer_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_bytes(layout.encode_stored(2, b"new"))
    assert layout.remove_if_lease(path, 1) is False
    assert path.exists()
    assert layout.remove_if_lease(path, 2) is True
    assert layout.remove_if_lease(path, 2) is False

    path.write_bytes(layout.encode_stored(1, b"old"))
    real = Path.rename

    def put_in_between(self: Path, target: Path) -> Path:
        self.write_bytes(layout.encode_stored(2, b"new"))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", put_in_between)
    assert layout.remove_if_lease(path, 1) is False
    assert layout.decode_stored(path.read_bytes()) == (2, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


async def test_a_key_put_again_survives_the_end_of_its_old_lease(
    store: FileDiscovery, root: Path
) -> None:
    old, new = await store.grant(10), await store.grant(10)
    other = FileDiscovery(root)
    log = Log()
    await other.watch("v1/", log).ready()
    await store.put(KEY, b"old", old.id)
    await store.put(KEY, b"new", new.id)
    await old.revoke()
    assert await other.list("v1/") == {KEY: b"new"}
    assert "delete" not in [event.kind for event in log.events]
    assert layout.key_path(root, KEY).exists()
    await other.close()


async def test_a_put_that_races_a_revocation_leaves_nothing(
    store: FileDiscovery, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await store.grant(10)
    real = paths.write_atomic

    def revoked_meanwhile(path: Path, data: bytes) -> None:
        real(path, data)
        layout.lease_path(root, lease.id).unlink()

    monkeypatch.setattr("dynamo.runtime.discovery.file.write_atomic", revoked_meanwhile)
    with pytest.raises(WorkerUnavailable):
        await store.put(KEY, b"", lease.id)
    assert files(root) == set()


async def test_a_put_while_keys_are_revoked_leaves_nothing(
    store: FileDiscovery, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends before its keys are removed, or the new key would be left."""
    lease = await store.grant(10)
    await store.put(KEY, b"first", lease.id)
    remove, refused = layout.remove_if_lease, []

    def put_again(path: Path, lease_id: int) -> None:
        remove(path, lease_id)
        try:
            store.put(KEY, b"again", lease_id).send(None)
        except WorkerUnavailable:
            refused.append(path)
        except StopIteration:
            """It was written."""

    monkeypatch.setattr("dynamo.runtime.discovery.file.remove_if_lease", put_again)
    other = FileDiscovery(root)
    await other.revoke(lease.id)
    await other.close()
    assert refused and files(root) == set()


def pidfds() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return sum(link.startswith("anon_inode:[pidfd]") for link in links)


async def test_a_lease_that_has_ended_keeps_no_descriptor(store: FileDiscovery, root: Path) -> None:
    """Its process may live for long: frontends grant and revoke leases for each of their models."""
    watcher = FileDiscovery(root)
    log = Log()
    await watcher.watch("v1/", log).ready()
    before = pidfds()
    leases = [await store.grant(10) for _ in range(5)]
    for number, lease in enumerate(leases):
        await store.put(f"v1/instances/ns/comp/ep/{number}", b"", lease.id)
    await log.until(5)
    assert pidfds() > before
    for lease in leases:
        await lease.revoke()
    await log.until(10)
    assert pidfds() == before
    await watcher.close()


@pytest.mark.usefixtures("needs_inotify")
async def test_lost_events_are_made_good_by_reading_again(
    store: FileDiscovery, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, doomed = await store.grant(10), await store.grant(10)
    await store.put(KEY, b"1", lease.id)
    await store.put("v1/mdc/changes", b"1", lease.id)
    await store.put("v1/mdc/doomed", b"1", doomed.id)
    other = FileDiscovery(root)
    log = Log()
    await other.watch("v1/", log).ready()
    overflow = (-1).to_bytes(4, "little", signed=True) + (0x4000).to_bytes(4, "little")
    read, lost = os.read, []

    def lose(descriptor: int, size: int) -> bytes:
        """Read what the kernel has, and return what it reports when its queue was full."""
        data = read(descriptor, size)
        if Path(f"/proc/self/fd/{descriptor}").readlink().name != "anon_inode:inotify":
            return data
        lost.append(data)
        return overflow + bytes(8)

    monkeypatch.setattr(os, "read", lose)
    await store.delete(KEY)
    await store.put("v1/mdc/changes", b"2", lease.id)
    await store.put("v1/mdc/new", b"1", lease.id)
    await doomed.revoke()
    assert len(log.events) == 3 and not lost
    await log.until(7)  # a slice of the files in each iteration of the loop
    assert lost
    assert sorted((event.kind, event.key, event.value) for event in log.events[3:]) == [
        ("delete", KEY, None),
        ("delete", "v1/mdc/doomed", None),
        ("put", "v1/mdc/changes", b"2"),
        ("put", "v1/mdc/new", b"1"),
    ]
    await other.close()


async def test_a_removed_store_is_created_again(store: FileDiscovery, root: Path) -> None:
    lease = await store.grant(10)
    await store.put(KEY, b"1", lease.id)
    other = FileDiscovery(root)
    log = Log()
    await other.watch("v1/", log).ready()
    shutil.rmtree(root / "v1")
    shutil.rmtree(root / "leases")
    async with asyncio.timeout(20):
        await lease.lost.wait()
    await log.until(2)
    fresh = await store.grant(10)
    await store.put(KEY, b"2", fresh.id)
    await log.until(3)
    assert [event.kind for event in log.events] == ["put", "delete", "put"]
    await other.close()


@pytest.mark.parametrize("way", ["remove", "move", "remove again and again"])
async def test_a_store_that_vanishes_does_not_blind_its_watchers(
    store: FileDiscovery, root: Path, way: str
) -> None:
    log = Log()
    await store.watch("v1/", log).ready()
    if way == "move":
        root.rename(root.with_name("away"))
    else:
        for _ in range(20 if "again" in way else 1):
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
    worker = FileDiscovery(root)
    async with asyncio.timeout(10):
        while not log.events:  # a worker may come while the old store is still being removed
            with contextlib.suppress(OSError, WorkerUnavailable):
                lease = await worker.grant(10)
                await worker.put(KEY, b"1", lease.id)
            await asyncio.sleep(0.05)
    assert log.events[0] == KeyEvent("put", KEY, b"1")
    assert await store.list("v1/") == {KEY: b"1"}
    await worker.close()
    await asyncio.sleep(0)
    assert await store.list("v1/") == {}


async def test_a_store_that_is_removed_while_it_is_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that start while an earlier deployment is cleared register, and see each other."""
    removals = [
        lambda: shutil.rmtree(root / "v1"),
        lambda: shutil.rmtree(root / "leases"),
        lambda: shutil.rmtree(root),
    ]

    def removed_at(name: str, owner: object) -> None:
        """Remove more of the store before each call."""
        call = getattr(owner, name)

        def patched(*values: Any, **options: Any) -> Any:
            if removals:
                removals.pop()()
            return call(*values, **options)

        monkeypatch.setattr(owner, name, patched)

    frontend, worker = FileDiscovery(root), FileDiscovery(root)
    log = Log()
    removed_at("add", inotify.Inotify)
    await frontend.watch("v1/", log).ready()
    monkeypatch.undo()
    await worker.start()
    removals.append(lambda: shutil.rmtree(root))
    removed_at("write_atomic", file)
    lease = await worker.grant(10)
    monkeypatch.undo()
    await worker.put(KEY, b"1", lease.id)
    await log.until(1)
    assert await frontend.list("v1/") == {KEY: b"1"}
    assert not removals
    await worker.close()
    await frontend.close()


def test_directories_that_are_removed_while_they_are_made(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter(range(100))
    mkdir = Path.mkdir

    def patched(path: Path, *values: Any, **options: Any) -> None:
        mkdir(path, *values, **options)
        if next(made) in (0, 2, 5):
            shutil.rmtree(root)

    monkeypatch.setattr(Path, "mkdir", patched)
    layout.ensure_directories(root)
    assert all((root / "v1" / bucket).is_dir() for bucket in layout.BUCKETS)


@pytest.mark.usefixtures("needs_inotify")
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"1 5")])
async def test_a_damaged_record_is_written_again(
    store: FileDiscovery, root: Path, damage: Any
) -> None:
    lease, other = await store.grant(0.3), await store.grant(0.3)
    await store.put(KEY, b"1", lease.id)
    await store.put("v1/mdc/moved", b"1", lease.id)
    await store.put("v1/mdc/moved", b"2", other.id)
    log = Log()
    await store.watch(KEY, log).ready()
    for path in (layout.key_path(root, KEY), layout.key_path(root, "v1/mdc/moved")):
        damage(path)
    await log.until(3)
    assert [event.kind for event in log.events] == ["put", "delete", "put"]
    await store.delete(KEY)
    await log.until(4)
    touched = (root / f"leases/{lease.id:x}").stat().st_mtime_ns
    async with asyncio.timeout(20):
        while (root / f"leases/{lease.id:x}").stat().st_mtime_ns == touched:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while await store.list("v1/") != {"v1/mdc/moved": b"2"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await lease.revoke()
    await other.revoke()
    assert files(root) == set()


async def test_a_truncated_lease_is_written_again(store: FileDiscovery, root: Path) -> None:
    lease = await store.grant(0.3, 7)
    await store.put(KEY, b"1", lease.id)
    whole = (root / "leases/7").read_bytes()
    before = descriptors(root)
    os.truncate(root / "leases/7", 0)
    async with asyncio.timeout(20):
        while (root / "leases/7").read_bytes() != whole:  # noqa: ASYNC110 - any of its touches
            await asyncio.sleep(0.02)
    assert descriptors(root) == before
    late = FileDiscovery(root)
    assert await late.list("v1/") == {KEY: b"1"}
    assert not lease.lost.is_set()
    await late.close()


def watches() -> int:
    """The paths that the kernel watches for this process."""
    lines: list[str] = []
    for path in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            lines += path.read_text().splitlines()
    return sum(line.startswith("inotify ") for line in lines)


@pytest.mark.usefixtures("needs_inotify")
async def test_a_process_that_only_registers_watches_one_file(root: Path) -> None:
    before = watches()
    stores = [FileDiscovery(root) for _ in range(2)]
    for one in stores:
        await one.grant(10)
    assert watches() == before + 2, "one for each lease"
    for one in stores:
        await one.close()


async def test_without_descriptors_for_processes_the_ttl_decides(
    store: FileDiscovery,
    holders: Holders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def none_left(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    process = await holders.start(7, ttl_s=0.6)
    log = Log()
    await store.watch("v1/instances/", log).ready()
    assert len(log.events) == 1
    assert "relying on its ttl" in caplog.text
    process.kill()
    await log.until(2)
    assert log.events[1].kind == "delete"


@pytest.mark.usefixtures("needs_inotify")
async def test_a_process_has_one_inotify_instance(store: FileDiscovery, root: Path) -> None:
    """Each group of watches on a path gets its events until it is closed."""
    other, third = FileDiscovery(root), FileDiscovery(root)
    logs = [Log(), Log()]
    for discovery, log in zip((other, third), logs, strict=True):
        await discovery.watch("v1/", log).ready()
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert links.count("anon_inode:inotify") == 1
    lease = await store.grant(10)
    await store.put(KEY, b"1", lease.id)
    for log in logs:
        await log.until(1)
    await other.close()
    await lease.revoke()
    assert [event.kind for event in await logs[1].until(2)] == ["put", "delete"]
    assert len(logs[0].events) == 1
    await third.close()


@pytest.mark.usefixtures("needs_inotify")
@pytest.mark.parametrize(
    ("number", "name"), [(errno.EMFILE, "max_user_instances"), (errno.ENOSPC, "max_user_watches")]
)
async def test_without_inotify_the_store_is_read_again_and_again(
    store: FileDiscovery,
    root: Path,
    holders: Holders,
    number: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Exhausted(inotify.InotifyInstance):
        def __init__(self) -> None:
            if number == errno.EMFILE:
                raise OSError(number, "Too many open files")
            super().__init__()

        def add_watch(self, path: Any, mask: Any) -> Any:
            raise OSError(number, "No space left on device")

    monkeypatch.setattr(inotify, "InotifyInstance", Exhausted)
    monkeypatch.setattr(inotify, "_POLL_S", 0.02)
    monkeypatch.setattr(inotify, "_reported", set())
    log = Log()
    await store.watch("v1/", log).ready()
    lease = await store.grant(0.5)
    await store.put(KEY, b"1", lease.id)
    assert await store.list("v1/") == {KEY: b"1"}, "at once for those who ask"
    await holders.start(7)  # another process: its lease, its key
    assert [event.kind for event in await log.until(3)] == ["put"] * 3
    layout.lease_path(root, 7).unlink()
    assert [event.kind for event in (await log.until(5))[3:]] == ["delete"] * 2
    layout.lease_path(root, lease.id).unlink()
    async with asyncio.timeout(20):
        await lease.lost.wait()
    await log.until(6)
    shutil.rmtree(root)
    await holders.start(8)  # into a new directory
    await log.until(8)
    warnings = [one.getMessage() for one in caplog.records if "cannot watch files" in one.msg]
    assert len(warnings) == 1 and f"sysctl fs.inotify.{name}=" in warnings[0]


async def test_a_key_that_is_added_after_the_first_scan_is_removed_with_its_file(
    store: FileDiscovery, root: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inotify; the key is removed before the next scan, too."""

    def exhausted(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    scanned: set[Path] = set()

    def look(path: Path) -> Any:
        state = actual(path)
        if state is None or path in scanned:
            return state
        scanned.add(path)
        return dataclasses.replace(state, entries={})

    actual = inotify._look
    monkeypatch.setattr(inotify, "InotifyInstance", exhausted)
    monkeypatch.setattr(inotify, "_look", look)
    monkeypatch.setattr(inotify, "_POLL_S", 0.5)
    await holders.start(7)
    log = Log()
    await store.watch("v1/", log).ready()
    assert [event.kind for event in await log.until(2)] == ["put"] * 2
    for path in root.glob("v1/*/*"):
        path.unlink()  # its lease stays
    assert [event.kind for event in (await log.until(4))[2:]] == ["delete"] * 2


async def test_reading_the_store_again_survives_errors(
    store: FileDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its limit on open files gets EMFILE for a new inotify instance and a look."""

    def exhausted(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(inotify, "InotifyInstance", exhausted)
    monkeypatch.setattr(inotify, "_POLL_S", 0.01)
    looks, log = asyncio.Queue[Path](), Log()
    await store.watch("v1/", log).ready()
    lease = await store.grant(10)

    def failing(path: Path) -> None:
        looks.put_nowait(path)
        exhausted()

    with monkeypatch.context() as patched:
        patched.setattr(inotify, "_look", failing)
        await store.put(KEY, b"1", lease.id)
        async with asyncio.timeout(20):
            for _ in range(50):  # more than one look at each path
                await looks.get()
    assert [event.kind for event in await log.until(1)] == ["put"]


async def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts then exits with this text, and a later start of it succeeds."""
    store = FileDiscovery(tmp_path / "store")
    lease = await store.grant(10, 1)
    with monkeypatch.context() as patched:

        def full(*_: object, **options: object) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(paths, "open", full, raising=False)
        text = r"cannot register in .*store: No space left on device; check the space"
        with pytest.raises(Unavailable, match=text):
            await store.grant(10, 2)
        with pytest.raises(Unavailable, match=text):
            await store.put(KEY, b"here", lease.id)
    await store.put(KEY, b"here", lease.id)
    assert await store.list("") == {KEY: b"here"}
    await store.close()
