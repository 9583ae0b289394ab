"""The circuit breaker of one worker address, and the outages of instances."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import Disconnected
from dynamo.observability.metrics import Registry
from dynamo.runtime.endpoints.instances import Availability
from dynamo.runtime.requests import client as requests_client
from dynamo.runtime.requests.client import OutageReason, Peer, RequestClient


class Clock:
    """The loop of a peer: the test fires its timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Any:
        self.timers.append((delay, callback, args))
        return asyncio.TimerHandle(0, callback, args, asyncio.get_running_loop())

    def fire(self) -> float:
        """Run the only timer; return its delay."""
        [(delay, callback, args)] = self.timers
        self.timers.clear()
        self.now += delay
        callback(*args)
        return delay


@pytest.fixture
async def clock() -> Clock:
    return Clock()


class Watched:
    """A peer whose probes fail until the test says otherwise."""

    def __init__(self, clock: Clock, longest_pause_s: float) -> None:
        self.probes = 0
        self.seen: list[tuple[OutageReason | None, str]] = []
        self.peer = Peer(self._probe, longest_pause_s)
        self.peer._loop = clock  # type: ignore[assignment]
        self.peer.listeners.append(lambda reason, text: self.seen.append((reason, text)))

    def _probe(self) -> None:
        self.probes += 1


async def test_the_pauses_between_probes_double_up_to_the_longest(clock: Clock) -> None:
    watched = Watched(clock, 0.1)
    pauses = []
    for _ in range(5):
        watched.peer.lost("refused")
        watched.peer.lost("refused by another stream")
        pauses.append(clock.fire())
    assert pauses == [0.02, 0.04, 0.08, 0.1, 0.1] and watched.probes == 5
    watched.peer.answered()
    assert watched.seen[0] == ("unreachable", "refused") and watched.seen[-1] == (None, "")


async def test_a_flapping_worker_keeps_its_long_pauses(clock: Clock) -> None:
    watched = Watched(clock, 5.0)
    for expected in (0.02, 0.04, 0.08):
        watched.peer.lost("cut")
        assert clock.fire() == expected
        watched.peer.answered()
    clock.now += 6
    watched.peer.lost("cut")
    assert clock.fire() == 0.02


async def test_silence_needs_no_probe_until_the_connection_is_lost(clock: Clock) -> None:
    watched = Watched(clock, 1.0)
    watched.peer.silent("no answer for 2 s")
    assert clock.timers == []
    watched.peer.lost("no answer for 10 s")
    clock.fire()
    assert watched.probes == 1 and watched.seen == [("silent", "no answer for 2 s")]
    watched.peer.answered()
    watched.peer.answered()
    assert watched.seen[1:] == [(None, "")]


async def test_a_probe_that_is_not_needed_any_more(clock: Clock) -> None:
    watched = Watched(clock, 1.0)
    watched.peer.lost("cut")
    watched.peer.answered()  # a request has connected again before
    clock.fire()
    assert watched.probes == 0


async def test_a_failing_listener_does_not_stop_the_next(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(clock, 1.0)

    def fail(reason: OutageReason | None, text: str) -> None:
        raise RuntimeError("listener")

    watched.peer.listeners.insert(0, fail)
    watched.peer.silent("x")
    assert watched.seen == [("silent", "x")] and "listener" in caplog.text


async def test_an_instance_is_out_while_it_has_an_outage_of_any_source() -> None:
    registry = Registry()
    found = Availability("ns/c/e", registry, 3600)
    events: list[tuple[int, bool]] = []
    found.listeners.append(lambda instance_id, out: events.append((instance_id, out)))
    found.begin(7, "record", "unhealthy", "no answer to a health check")
    found.begin(7, "connection", "silent", "no answer for 2 s")
    found.begin(7, "connection", "silent", "no answer for 3 s")
    found.begin(7, "answer", "unreachable", "a stream on that connection")
    assert 7 in found and len(found) == 1 and found.outages()[7].reason == "unhealthy"
    found.end(7, "connection")
    assert 7 in found and events == [(7, True)]
    found.end(7, "record")
    found.end(7, "record")
    assert 7 not in found and events == [(7, True), (7, False)]
    page = registry.exposition("")[0].decode()
    assert 'unavailable_workers{endpoint="ns/c/e"} 0' in page
    assert 'outages_total{endpoint="ns/c/e",reason="silent"} 1' in page
    assert 'outages_total{endpoint="ns/c/e",reason="unreachable"}' not in page


async def test_an_error_of_a_worker_that_is_unhealthy_is_the_same_outage() -> None:
    registry = Registry()
    found = Availability("ns/c/e", registry, 3600)
    found.begin(7, "record", "unhealthy", "no answer to a health check")
    found.begin(7, "answer", "unreachable", "a stream of that time")
    found.end(7, "record")
    assert 7 not in found
    assert 'reason="unreachable"' not in registry.exposition("")[0].decode()


async def test_an_outage_that_the_worker_reported_ends_by_itself() -> None:
    found = Availability("ns/c/e", Registry(), 0.0)
    over = asyncio.Event()
    found.listeners.append(lambda instance_id, out: None if out else over.set())
    found.begin(7, "answer", "shutting_down", "the engine shut down")
    async with asyncio.timeout(20):
        await over.wait()


async def test_a_forgotten_instance_and_a_close_leave_no_timer() -> None:
    found = Availability("ns/c/e", Registry(), 3600)
    for instance_id in (7, 8):
        found.begin(instance_id, "answer", "shutting_down", "the engine shut down")
    found.forget(8)
    assert [*found.outages()] == [7]
    found.close()
    assert len(found) == 0
    kept = weakref.ref(found)  # by a timer that would call it
    del found
    assert kept() is None


ADDRESS = "uds:/nowhere/worker.sock"


async def test_the_end_of_an_old_connection_leaves_the_new_one() -> None:
    """A closed transport reports its end later, when there may be another connection."""
    client = RequestClient(RequestPlaneSettings())
    old = client.connection(ADDRESS)
    old.lose(Disconnected("gone"))
    new = client.connection(ADDRESS)
    assert new is not old
    old.connection_lost(None)
    assert client.connection(ADDRESS) is new
    await client.close()


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_last_follower_ends_the_probes(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Later, or while it is notified of the outage."""
    monkeypatch.setattr(requests_client, "_FIRST_PAUSE_S", 0.0)
    client = RequestClient(RequestPlaneSettings(), longest_pause_s=0.0)
    probed: list[str] = []
    followed: list[str] = []

    def listener(reason: OutageReason | None, text: str) -> None:
        followed.append(text)
        if at_once:
            client.unfollow(ADDRESS, listener)

    client.follow(ADDRESS, listener)
    connection = client.connection(ADDRESS)
    monkeypatch.setattr(client, "connection", probed.append)
    connection.lose(Disconnected("gone"))
    assert followed == ["gone"]
    if not at_once:
        client.unfollow(ADDRESS, listener)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert probed == []
    await client.close()
