"""When a lease counts as silent, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.leases import LeaseTable

TTL_S = 10.0
START_S = 1_000_000.0


class Clock:
    """The wall clock and the loop of a LeaseTable, with one timer."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.due_s = float("inf")
        self._callback: Callable[[], None] | None = None

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Clock:
        self.due_s, self._callback = when_s, callback
        return self

    def cancel(self) -> None:
        self._callback = None

    def move_to(self, seconds: float) -> None:
        """Run the timer if it falls due on the way."""
        while self._callback is not None and self.due_s <= START_S + seconds:
            self.now_s, callback = self.due_s, self._callback
            self._callback = None
            callback()
        self.now_s = START_S + seconds


class Listener:
    """Records what happened to the lease, and when."""

    def __init__(self, clock: Clock) -> None:
        self.events: list[tuple[str, float]] = []
        self._clock = clock

    def _record(self, event: str) -> None:
        self.events.append((event, round(self._clock.now_s - START_S, 3)))

    def lease_alive(self, lease_id: int) -> None:
        self._record("alive")

    def lease_silent(self, lease_id: int) -> None:
        self._record("silent")

    def lease_ended(self, lease_id: int) -> None:
        self._record("ended")

    def holder_died(self, lease_id: int) -> None:
        self._record("died")

    def no_file(self, path: Path) -> None:
        """Ignore a missing file: ``lease_ended`` reports it."""

    def bad_file(self, path: Path, problem: str) -> None:
        raise AssertionError(problem)


class Site:
    """A table over one lease file of another host."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.clock = clock
        self.listener = Listener(clock)
        self.path = directory / "7"
        self.path.write_bytes(msgspec.json.encode(LeaseRecord(7, 1, 1, TTL_S, "elsewhere")))
        self.table = LeaseTable(directory, cast(Any, self.listener), lambda: None)
        self.table._loop = clock  # type: ignore[assignment]
        self.touch()
        self.table.observe("7")

    def touch(self) -> None:
        now_ns = int(self.clock.now_s * 1e9)
        os.utime(self.path, ns=(now_ns, now_ns))


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock.time)
    await asyncio.sleep(0)
    return Site(tmp_path, clock)


async def test_a_hung_holder_is_silent_one_ttl_after_its_last_touch(site: Site) -> None:
    for seconds in (3.0, 6.0, 9.0):
        site.clock.move_to(seconds)
        site.touch()
        site.table.touched("7")
    site.clock.move_to(30)
    assert site.listener.events == [("alive", 0), ("silent", 19)]


async def test_a_touch_that_is_read_late_counts_from_when_it_was_made(site: Site) -> None:
    site.clock.move_to(3)
    site.touch()
    site.clock.move_to(8)
    site.table.touched("7")
    site.clock.move_to(30)
    assert site.listener.events == [("alive", 0), ("silent", 13)]


async def test_other_changes_of_the_file_do_not_count_as_touches(site: Site) -> None:
    site.clock.move_to(8)
    site.path.chmod(0o600)
    site.table.touched("7")
    site.clock.move_to(12)
    site.table.touched("7")
    assert site.listener.events == [("alive", 0), ("silent", 10)]
    site.touch()
    site.table.touched("7")
    site.clock.move_to(30)
    assert site.listener.events[2:] == [("alive", 12), ("silent", 22)]


async def test_a_touch_whose_event_was_lost_is_read_before_the_lease_is_silent(site: Site) -> None:
    site.clock.move_to(9)
    site.touch()
    site.clock.move_to(18)
    assert site.listener.events == [("alive", 0)]
    site.clock.move_to(30)
    assert site.listener.events == [("alive", 0), ("silent", 19)]
