"""A worker in each of two network namespaces serves one frontend; a cable is cut for 20 s."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from boxes import Etcd, Nats, needs_etcd, needs_nats
from fleet_kit import Fleet
from network_kit import ADDRESSES, Network, why_not

CUT_S = 20.0
NOTICED_S = 12.0
CLIENTS = 4
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 12
_WHY_NOT = why_not()
pytestmark = [needs_etcd, needs_nats, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]


class Answer(NamedTuple):
    """What came of a request; times in seconds of the monotonic clock."""

    sent_at_s: float
    took_s: float
    status: int
    worker: int | None


class Load:
    """Clients in the hub that ask without pause, each prompt a new one, until stopped."""

    def __init__(self, network: Network, fleet: Fleet) -> None:
        self.answers: list[Answer] = []
        self._network = network
        self._fleet = fleet
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the last answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def since(self, moment_s: float) -> list[Answer]:
        """The answers to requests sent after ``moment_s``."""
        return [answer for answer in self.answers if answer.sent_at_s > moment_s]

    def _run(self) -> None:
        with self._network.inside("hub"):
            while not self._stop.wait(0.1):
                sent_at_s = time.monotonic()
                status, worker = self._fleet.ask(f"{next(self._numbers)} {TEXT}")
                took_s = time.monotonic() - sent_at_s
                self.answers.append(Answer(sent_at_s, took_s, status, worker))


@contextmanager
def switched() -> Iterator[Network]:
    """Three places on a switch."""
    made = Network()
    try:
        yield made
    finally:
        made.close()


def test_a_cable_is_cut_for_20_s(tmp_path: Path) -> None:
    """Two kinds of cut at once, each in its own network, because most of the test waits."""
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(cut_and_heal, tmp_path / how, how, plane)
            for how, plane in (("down", "nats"), ("silent", "zmq"))
        ]
    for one in both:
        one.result()


def cut_and_heal(tmp_path: Path, how: str, plane: str) -> None:
    tmp_path.mkdir()
    with switched() as network:
        serve_across(network, tmp_path, how, plane)


def serve_across(network: Network, tmp_path: Path, how: str, plane: str) -> None:
    hub = ADDRESSES["hub"]
    etcd, nats = Etcd(tmp_path, hub), Nats(tmp_path, hub)
    fleet = Fleet(tmp_path, etcd.url, nats.url if plane == "nats" else None, lease_ttl_s=10)
    load = None
    try:
        with network.inside("hub"):
            etcd.start()
            nats.start()
            fleet.kv_frontend()
        workers: dict[str, Any] = {}
        for place in ("a", "b"):
            with network.inside(place):
                fleet.worker()
            with network.inside("hub"):
                fleet.wait_for_workers(len(workers) + 1)
                (workers[place],) = set(fleet.held(TEXT)) - set(workers.values())
        with network.inside("hub"):
            load = Load(network, fleet)
            follow(network, fleet, load, workers, how)
    finally:
        if load is not None:
            load.stop()
        try:
            fleet.close()
        finally:
            nats.kill()
            etcd.kill()


def follow(network: Network, fleet: Fleet, load: Load, workers: dict[str, int], how: str) -> None:
    """Before the cut, during it, and after it has healed."""
    gone, stays = workers["a"], workers["b"]
    fleet.until(lambda: {one.worker for one in load.answers} >= {gone, stays}, "both serve")
    pinned = {"backend_instance_id": gone}
    assert fleet.ask("kept " + TEXT, **pinned) == (200, gone)
    fleet.until(lambda: fleet.held("kept " + TEXT).get(gone), "its cache is known")
    known = fleet.held("kept " + TEXT)[gone]
    assert {one.status for one in load.answers} == {200}

    cut_at_s = time.monotonic()
    network.cut("a", how)
    gone_after_s = fleet.until(lambda: set(fleet.held(TEXT)) == {stays}, "out of routing")
    time.sleep(cut_at_s + CUT_S - time.monotonic())
    network.heal("a")
    healed_at_s = time.monotonic()
    back_after_s = fleet.until(lambda: gone in fleet.held(TEXT), "in routing again")
    fleet.until(lambda: fleet.held("kept " + TEXT).get(gone, 0) >= known, "its cache is known")
    learned_after_s = time.monotonic() - healed_at_s
    fleet.until(
        lambda: any(one.worker == gone for one in load.since(healed_at_s)), "it is asked again"
    )
    assert fleet.ask("new " + TEXT, **pinned) == (200, gone)
    fleet.until(lambda: fleet.held("new " + TEXT).get(gone), "its new events arrive")
    load.stop()

    during = [one for one in load.answers if cut_at_s < one.sent_at_s < healed_at_s]
    failed = [one for one in load.since(cut_at_s) if one.status != 200]
    slowest_s = max(one.took_s for one in load.answers)
    noticed_after_s = max((one.sent_at_s + one.took_s - cut_at_s for one in failed), default=0.0)
    print(
        f"{how}: {len(during)} requests during the cut, {len(failed)} failed, the last of them "
        f"{noticed_after_s:.1f} s after it, slowest {slowest_s:.1f} s; out of routing after "
        f"{gone_after_s:.1f} s; back {back_after_s:.1f} s after healing, its cache "
        f"{learned_after_s:.1f} s"
    )
    assert {one.status for one in failed} <= {503}, "those under way to it, as retryable"
    assert noticed_after_s < NOTICED_S and slowest_s < NOTICED_S
    assert len(failed) <= 2 * CLIENTS
    for second in range(int(NOTICED_S), int(CUT_S)):
        window = [one for one in during if second <= one.sent_at_s - cut_at_s < second + 1]
        assert window and {(one.status, one.worker) for one in window} == {(200, stays)}
