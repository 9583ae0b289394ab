"""The events of a deployment: crashed writers, rotation, several writers, filters."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.protocols.status import BAD_EVENTS, EVENT_KINDS, BoxEvent
from dynamo.serve.state import events as module
from dynamo.serve.state.events import BoxEventLog, ProcessEvents, actor
from dynamo.serve.state.registered import Leases
from dynamo.status.logs import EventFilter, EventReader, parse_since


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def names(run_directory: Path) -> list[str]:
    reader = EventReader(run_directory)
    found = [one.name for one in reader.all()]
    reader.close()
    return found


def test_events_are_read_as_they_are_written(run_directory: Path) -> None:
    log, reader = BoxEventLog(run_directory), EventReader(run_directory)
    assert reader.all() == [] and list(reader.read()) == []
    log.add("died", "ns_W", "was\nkilled", model="m", by="root (pid 1)")
    (event,) = reader.read()
    assert abs(event.at_s - time.time()) < 60
    assert msgspec.structs.replace(event, at_s=0) == BoxEvent(
        kind="died", at_s=0, name="ns_W", model="m", text="was killed", by="root (pid 1)"
    )
    assert log.path.stat().st_mode & 0o777 == 0o600
    log.add("x" * 50, "n" * 1000, "t" * 5000, by="b" * 1000)
    assert log.path.stat().st_size < 2000
    assert len(list(reader.read())) == 1
    reader.close()


@settings(deadline=None)
@given(share=st.floats(0, 1))
def test_a_crash_at_any_byte_costs_the_last_line_at_most(
    share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_directory = tmp_path_factory.mktemp("run")
    (run_directory / "logs").mkdir()
    log = BoxEventLog(run_directory)
    for name in "abc":
        log.add("started", name)
    content = log.path.read_bytes()
    cut = int(share * len(content))
    log.path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    log.add("started", "next")
    expected = [*"abc"[:whole], "next"]
    complete = content[:cut].rpartition(b"\n")[2]  # a whole line without its line end is read
    if complete and complete + b"\n" in content:
        expected.insert(-1, "abc"[whole])
    assert names(run_directory) == expected


def test_its_size_has_a_bound(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 2000)
    log, reader = BoxEventLog(run_directory), EventReader(run_directory)
    reader.all()
    seen = []
    for number in range(200):
        log.add("started", f"w{number}")
        seen += [one.name for one in reader.read()]
        size = sum(path.stat().st_size for path in (run_directory / "logs").iterdir())
        assert size < 2 * 2200
    assert seen == [f"w{number}" for number in range(200)]  # across all rotations
    kept = names(run_directory)
    assert kept == [f"w{number}" for number in range(200 - len(kept), 200)] and len(kept) > 20
    reader.close()


def _write(run_directory: Path, who: str, count: int) -> None:
    log = BoxEventLog(run_directory)
    for number in range(count):
        log.add("started", f"{who}{number}")


def test_several_processes_write_whole_lines(run_directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write, args=(run_directory, who, 200)) for who in ("a", "b", "c")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = names(run_directory)
    assert len(found) == 600
    for who in "abc":
        own = [one for one in found if one.startswith(who)]
        assert own == [f"{who}{number}" for number in range(200)]


def test_a_writer_that_is_killed_or_stopped_blocks_nobody(run_directory: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write, args=(run_directory, "killed", 10**6))
    writer.start()
    deadline_s = time.monotonic() + 60
    log = BoxEventLog(run_directory)
    while not log.path.exists() or log.path.stat().st_size < 10_000:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    before = len(names(run_directory))
    log.add("started", "after")
    assert names(run_directory)[-1] == "after" and len(names(run_directory)) <= before + 2
    with log.path.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        log.add("started", "beside")
    assert names(run_directory)[-1] == "beside"


def test_what_several_frontends_see_is_written_once(run_directory: Path) -> None:
    logs = [BoxEventLog(run_directory) for _ in range(3)]
    for log in logs:
        log.add("keys", "keys", "added bob", once=True)
    logs[0].add("keys", "keys", "removed bob", once=True)
    logs[0].add("keys", "keys", "added bob", once=True)
    reader = EventReader(run_directory)
    assert [one.text for one in reader.all()] == ["added bob", "removed bob", "added bob"]
    reader.close()


def test_a_failure_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = BoxEventLog(tmp_path)
    log.add("started", "a")
    assert not caplog.text  # without `dynamo serve` nothing is kept
    log.path.mkdir(parents=True)
    log.add("started", "a")
    log.add("started", "b")
    assert caplog.text.count("cannot write events") == 1


def test_events_are_chosen_by_time_model_and_name() -> None:
    event = BoxEvent(kind="died", at_s=100.0, name="ns_Worker_1", model="m")
    for chosen in (
        EventFilter("ns"),
        EventFilter("ns", 100.0),
        EventFilter("ns", model="m"),
        EventFilter("ns", name="Worker"),
        EventFilter("ns", name="Worker_1"),
        EventFilter("ns", name="ns_Worker_1"),
    ):
        assert chosen.takes(event), chosen
    for chosen in (
        EventFilter("ns", 100.1),
        EventFilter("ns", model="n"),
        EventFilter("ns", name="Work"),
        EventFilter("ns", name="ns_Worker_3"),
    ):
        assert not chosen.takes(event), chosen
    for name in ("Worker", "Worker_1", "ns_Worker_1"):
        assert EventFilter("ns", name="ns_Worker_1").takes(
            BoxEvent(kind="drain", at_s=1, name=name)
        )
    assert not EventFilter("ns", name="Worker_1").takes(
        BoxEvent(kind="died", at_s=1, name="ns_Worker")
    )
    assert EventFilter("ns", model="m").takes(BoxEvent(kind="load", at_s=1, name="m"))
    assert parse_since("90s", 1000) == 910 and parse_since("1.5h", 10_000) == 4600
    assert parse_since("2026-05-04T13:00+00:00") == 1_777_899_600
    for text in ("", "x", "5", "-1h", "2026-13-01", "1e999d"):
        with pytest.raises(InvalidArgument, match="give a time such as 30m"):
            parse_since(text)


def test_the_kinds_and_the_actor_are_known() -> None:
    assert set(EVENT_KINDS) >= BAD_EVENTS
    assert actor().endswith(f"(pid {os.getpid()})")


def test_nothing_is_kept_of_workers_that_the_arbiter_did_not_start(run_directory: Path) -> None:
    happened = ProcessEvents(BoxEventLog(run_directory))
    for pid in range(1, 100):
        leases = SimpleNamespace(served={pid}, model_of=lambda pid=pid: {pid: "m"})
        happened.served(cast(Leases, leases))
    assert all(len(kept) <= 1 for kept in vars(happened).values() if isinstance(kept, dict | set))
    assert not (run_directory / "logs/events.log").exists()


def test_a_process_with_the_number_of_one_that_ended_is_a_new_one(run_directory: Path) -> None:
    happened = ProcessEvents(BoxEventLog(run_directory))
    for name in ("ns_A", "ns_B"):
        happened.started(name, 7)
        leases = SimpleNamespace(served={7}, model_of=lambda: {7: "m"})
        for _ in range(2):
            happened.served(cast(Leases, leases))
        happened.exited(7)
    reader = EventReader(run_directory)
    found = [(one.kind, one.name) for one in reader.all()]
    reader.close()
    assert found == [(kind, name) for name in ("ns_A", "ns_B") for kind in ("started", "serving")]
