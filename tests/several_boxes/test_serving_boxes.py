"""Frontends and workers over a real etcd, the request plane on tcp, events over NATS or ZMQ."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from boxes import Etcd, Nats, needs_etcd, needs_nats
from fleet_kit import Fleet

from dynamo.config.runtime import EtcdSettings
from dynamo.runtime.discovery.etcd.discovery import EtcdDiscovery

pytestmark = [needs_etcd, needs_nats]
TEXT = "It was the best of times, it was the worst of times. " * 12


@pytest.fixture(params=["nats", "zmq"])
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, etcd: Etcd, nats_server: Nats
) -> Iterator[Fleet]:
    """Two workers, two frontends."""
    nats = nats_server.url if request.param == "nats" else None
    made = Fleet(tmp_path, etcd.url, nats, lease_ttl_s=3)
    try:
        made.worker()
        made.worker()
        made.kv_frontend()
        made.wait_for_workers(2)
        made.kv_frontend()
        made.wait_for_workers(2)
        yield made
    finally:
        made.close()


def _holds(fleet: Fleet, port: int, worker_id: int) -> bool:
    return bool(fleet.held(TEXT, port).get(worker_id))


def test_two_frontends_see_the_same_caches_and_outlive_etcd(fleet: Fleet, etcd: Etcd) -> None:
    """One story, because starting five processes costs more than telling it."""
    first, second = fleet.ports
    status, home = fleet.ask(TEXT, first)
    assert status == 200 and home is not None
    for port in (first, second):
        fleet.until(partial(_holds, fleet, port, home), "blocks known")
        assert fleet.ask(TEXT, port) == (200, home), "it goes where it is cached"
    other = next(one for one in fleet.held(TEXT) if one != home)

    etcd.kill()
    for port in (first, second):
        assert fleet.ask(TEXT, port) == (200, home), "the last known instances serve"
    doomed = fleet.processes[0]
    doomed.kill()
    doomed.wait()
    survivors = set()
    for port in (first, second):
        answers = [fleet.ask(f"{port} {n} {TEXT}", port) for n in range(12)]
        failed = [status for status, _ in answers if status != 200]
        assert failed in ([], [503]), f"the dead one is shunned without etcd: {answers}"
        survivors |= {worker for status, worker in answers if status == 200}
    (survivor,) = survivors
    assert survivor in (home, other)

    etcd.start()
    fleet.port = first
    fleet.wait_for_workers(1)
    fleet.port = second
    fleet.wait_for_workers(1)
    assert fleet.ask(TEXT, first)[1] == fleet.ask(TEXT, second)[1] == survivor
    fleet.worker()
    for port in (first, second):
        fleet.port = port
        fleet.wait_for_workers(2)


async def test_a_worker_whose_lease_is_revoked_exits(
    tmp_path: Path, etcd: Etcd, nats_server: Nats
) -> None:
    fleet = Fleet(tmp_path, etcd.url, nats_server.url, lease_ttl_s=10)
    try:
        worker = fleet.worker()
        fleet.kv_frontend()
        fleet.wait_for_workers(1)
        planner = EtcdDiscovery(EtcdSettings(endpoints=etcd.url))
        (key,) = [key for key in await planner.list("v1/instances/") if "/generate/" in key]
        await planner.revoke(int(key.rpartition("/")[2], 16))
        await planner.close()
        assert worker.wait(10) == 0
        fleet.until(lambda: fleet.ask("x")[0] in (404, 503), "no worker is left")
    finally:
        fleet.close()


def test_what_is_missing_is_said_and_the_exit_status_is_1(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "127.0.0.1:1", "nats://127.0.0.1:1", lease_ttl_s=3)
    worker = fleet.mocker(DYN_ETCD_START_TIMEOUT="0.5")
    assert worker.wait(20) == 1
    text = fleet.tail()
    assert "cannot reach etcd at 127.0.0.1:1" in text and "Traceback" not in text
    assert worker.poll() != signal.SIGABRT
