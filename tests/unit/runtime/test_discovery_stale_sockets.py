"""Sockets of killed processes: every process that sees the death removes them, and only them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from until import Changes

from dynamo.config.runtime import RuntimeSettings
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.sockets import (
    StaleSockets,
    engine_directory_name,
    event_socket_name,
    request_socket_name,
)

WORKER = """
import asyncio
from dynamo.runtime import DistributedRuntime, dynamo_worker

async def echo(request):
    yield request

@dynamo_worker()
async def main(runtime: DistributedRuntime):
    for topic in ("one", "two"):
        await runtime.publisher("ns", "comp", topic)
    print("up", flush=True)
    await runtime.endpoint("ns.comp.gen").serve_endpoint(echo)

asyncio.run(main())
"""


def bound(path: Path, listening: bool = False, age_s: float = 3600) -> socket.socket:
    """A socket file at ``path``."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    if listening:
        made.listen()
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return made


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


def test_only_the_sockets_of_the_dead_are_removed(
    tmp_path: Path, sockets: list[socket.socket]
) -> None:
    gone = {request_socket_name(0xAB), event_socket_name(0xAB, 0), event_socket_name(0xAB, 11)}
    kept = {"abc.sock", "ab.sock.old", "circus.sock", "ab.x.events.sock", "0ab.0.events"}
    sockets += [bound(tmp_path / name) for name in gone | kept]
    (tmp_path / "b.sock").write_text("a file with the name of a socket")
    StaleSockets(lambda: [tmp_path, tmp_path / "missing"]).remove(0xAB)
    assert names(tmp_path) == kept | {"b.sock"}
    StaleSockets(lambda: [tmp_path]).remove(0xB)
    assert "b.sock" in names(tmp_path)


def test_a_sweep_removes_old_sockets_without_lease_or_listener(
    tmp_path: Path, sockets: list[socket.socket]
) -> None:
    sockets += [
        bound(tmp_path / "a1.sock"),
        bound(tmp_path / "a1.0.events.sock"),
        bound(tmp_path / "a2.sock", listening=True),
        bound(tmp_path / "a3.sock", age_s=1),
        bound(tmp_path / "a4.sock"),
        bound(tmp_path / "circus.sock"),
    ]
    StaleSockets(lambda: [tmp_path]).sweep(lambda lease_id: lease_id == 0xA4)
    assert names(tmp_path) == {"a2.sock", "a3.sock", "a4.sock", "circus.sock"}


def test_the_directory_of_an_engine_is_removed_with_its_sockets(
    tmp_path: Path, sockets: list[socket.socket]
) -> None:
    """But not one with a listener, and no other files."""
    for number in range(0xA1, 0xA5):
        (tmp_path / engine_directory_name(number)).mkdir()
    sockets += [
        bound(tmp_path / "a1.engine" / "x"),
        bound(tmp_path / "a2.engine" / "x", listening=True),
        bound(tmp_path / "a3.engine" / "x", age_s=1),
    ]
    (tmp_path / "a4.engine" / "notes").write_text("not ours")
    (tmp_path / "a5.engine").symlink_to(tmp_path / "a2.engine")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    StaleSockets(lambda: [tmp_path]).sweep(lambda lease_id: False)
    assert names(tmp_path) == {"a2.engine", "a3.engine", "a4.engine", "a5.engine"}
    for number in (0xA2, 0xA4, 0xA5):
        StaleSockets(lambda: [tmp_path]).remove(number)
    assert names(tmp_path) == {"a3.engine", "a4.engine", "a5.engine"}
    assert names(tmp_path / "a4.engine") == {"notes"}


class Fleet:
    """Workers that are killed, in one state directory that may have a very long name."""

    def __init__(self, state_dir: Path, short: Path) -> None:
        self._roots = (state_dir, short)
        self.settings = RuntimeSettings(state_dir=str(state_dir))
        self.environment = {**os.environ, "DYN_LOCAL_STATE_DIR": str(state_dir)}
        self.running: list[subprocess.Popen[str]] = []

    async def start(self) -> subprocess.Popen[str]:
        return await asyncio.to_thread(self._start)

    def sockets(self) -> int:
        """How many socket files there are."""
        return sum(len(list(root.rglob("*.sock"))) for root in self._roots)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)
        self.running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        return process

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(params=["here", "l" * 90])
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        made = Fleet(tmp_path / request.param, Path(short))
        yield made
        made.close()


async def test_kills_in_a_row_leave_no_socket(fleet: Fleet) -> None:
    watching = DistributedRuntime(None, fleet.settings)
    client = await watching.endpoint("ns.comp.gen").client()
    changes = Changes()
    client.on_change(changes.changed)

    async def until(count: int) -> None:
        await changes.until(lambda: len(client.instance_ids()) == count)

    survivor = await fleet.start()
    for _ in range(3):
        victim = await fleet.start()
        await until(2)
        assert fleet.sockets() == 6
        victim.send_signal(signal.SIGKILL)
        await until(1)
    assert fleet.sockets() == 3
    assert [item async for item in await client.random("x", annotated=False)] == ["x"]

    await watching.close()
    survivor.kill()
    await asyncio.to_thread(survivor.wait)
    assert fleet.sockets() == 3
    late = DistributedRuntime(None, fleet.settings)
    await late.endpoint("ns.comp.gen").client()
    assert fleet.sockets() == 0
    await late.close()


async def test_a_revoked_but_running_process_keeps_its_sockets(fleet: Fleet) -> None:
    watching = DistributedRuntime(None, fleet.settings)
    client = await watching.endpoint("ns.comp.gen").client()
    process = await fleet.start()
    async with asyncio.timeout(20):
        (instance_id,) = await client.wait_for_instances()
    # Its answer proves that it has registered: registration fails without the lease.
    assert [item async for item in await client.random("x", annotated=False)] == ["x"]
    process.send_signal(signal.SIGSTOP)
    await watching.discovery.revoke(instance_id)
    assert await watching.discovery.list("v1/instances/") == {}
    assert fleet.sockets() == 3
    process.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert fleet.sockets() == 0
    await watching.close()
