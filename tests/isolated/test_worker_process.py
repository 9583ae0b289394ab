"""Worker scripts in real processes: calls, cancellation, every kind of exit."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import interrupt_again

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import Cancelled, Disconnected
from dynamo.protocols.control import EndpointRecord
from dynamo.runtime import Client, Context, DistributedRuntime
from dynamo.runtime.process.stop_order import write_stop_stage

WORKER = """
import asyncio, sys
from dynamo.runtime import DistributedRuntime, dynamo_worker

def say(*words):
    print(*words, flush=True)

class Handler:
    async def generate(self, request, context):
        say("request", context.id(), context.metadata.get("user"))
        try:
            if request.get("fail"):
                raise ValueError(request["fail"])
            for number in range(request["count"]):
                if context.is_stopped() and request.get("polite"):
                    break
                yield {"number": number}
                await asyncio.sleep(request.get("pause", 0))
        finally:
            say("ended", context.is_stopped(), context.is_killed())

@dynamo_worker()
async def worker(runtime: DistributedRuntime):
    endpoint = runtime.namespace("hello").component("backend").endpoint("generate")
    say("serving", endpoint.connection_id())
    await endpoint.serve_endpoint(Handler().generate)
    say("returned")

if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        import uvloop
        uvloop.install()
    asyncio.run(worker())
    say("bye")
"""

CLIENT = """
import asyncio
from dynamo.runtime import DistributedRuntime, dynamo_worker

@dynamo_worker()
async def main(runtime: DistributedRuntime):
    client = await runtime.endpoint("dyn://hello.backend.generate").client()
    await client.wait_for_instances()
    async for item in await client.generate({"count": 3}):
        print(item.data(), flush=True)
    print("waiting", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
print("bye", flush=True)
"""


class Scripts:
    """Scripts in separate processes with one state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "DYN_LOCAL_STATE_DIR": str(root / "state"),
            "DYN_DISCOVERY_BACKEND": "file",
            "ETCD_LEASE_TTL": "2",
        }
        self._running: list[subprocess.Popen[str]] = []

    def start(self, text: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        path = self.root / f"script{len(self._running)}.py"
        path.write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**self.environment, **environment},
        )
        self._running.append(process)
        return process

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


async def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def ended(process: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(process.wait, 20)


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    made = Scripts(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def runtime(scripts: Scripts) -> Any:
    made = DistributedRuntime(None, RuntimeSettings(state_dir=str(scripts.root / "state")))
    yield made
    await made.close()


async def connect(runtime: DistributedRuntime) -> Client:
    client = await runtime.endpoint("hello.backend.generate").client()
    async with asyncio.timeout(20):
        await client.wait_for_instances()
    return client


@pytest.mark.parametrize("plane", ["uds", "tcp"])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_a_worker_and_a_client_script(scripts: Scripts, loop: str, plane: str) -> None:
    worker = scripts.start(WORKER, loop, DYN_REQUEST_PLANE=plane)
    assert (await line(worker)).startswith("serving ")
    client = scripts.start(CLIENT, DYN_REQUEST_PLANE=plane)
    assert [await line(client) for _ in range(4)] == [
        "{'number': 0}",
        "{'number': 1}",
        "{'number': 2}",
        "waiting",
    ]
    assert (await line(worker)).startswith("request ")
    assert await line(worker) == "ended False False"
    client.send_signal(signal.SIGINT)
    assert await line(client) == "bye"
    assert await ended(client) == 0
    worker.send_signal(signal.SIGTERM)
    assert [await line(worker), await line(worker)] == ["returned", "bye"]
    assert await ended(worker) == 0
    left = [path for path in (scripts.root / "state").rglob("*") if path.is_file()]
    assert left == []
    assert list((scripts.root / "state").rglob("*.sock")) == []


async def test_context_errors_and_cancellation_between_processes(
    scripts: Scripts, runtime: DistributedRuntime
) -> None:
    worker = scripts.start(WORKER, "uvloop")
    client = await connect(runtime)
    await line(worker)

    with pytest.raises(ValueError, match=r"^InvalidRequest: ValueError: boom$"):
        async for _ in await client.random({"fail": "boom"}, context=Context("r1", {"user": "u"})):
            pass
    assert [await line(worker), await line(worker)] == ["request r1 u", "ended False False"]

    context = Context("r2")
    stream = await client.random({"count": 10**6, "polite": True}, context=context)
    await stream.__anext__()
    context.stop_generating()
    async for _ in stream:
        pass
    assert [await line(worker), await line(worker)] == ["request r2 None", "ended True False"]

    context = Context("r3")
    stream = await client.random({"count": 10**6}, context=context)
    await stream.__anext__()
    context.kill()
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass
    assert [await line(worker), await line(worker)] == ["request r3 None", "ended True True"]

    stream = await client.random({"count": 10**6}, context=Context("r4"))
    await stream.__anext__()
    del stream
    assert [await line(worker), await line(worker)] == ["request r4 None", "ended True True"]


@pytest.mark.parametrize("end", ["SIGTERM", "unlink"])
async def test_a_draining_worker_finishes_its_streams(
    scripts: Scripts, runtime: DistributedRuntime, end: str
) -> None:
    worker = scripts.start(WORKER, "uvloop")
    client = await connect(runtime)
    gone = asyncio.Event()
    client.on_change(lambda added, removed: gone.set() if removed else None)
    stream = await client.random({"count": 20, "pause": 0.05}, annotated=False)
    assert await stream.__anext__() == {"number": 0}
    if end == "SIGTERM":
        worker.send_signal(signal.SIGTERM)
    else:
        lease = client.records()[0].lease_id
        (scripts.root / f"state/dynamo/store/leases/{lease:x}").unlink()
    async with asyncio.timeout(20):
        await gone.wait()
    assert client.instance_ids() == []
    assert [item["number"] async for item in stream] == list(range(1, 20))
    assert await ended(worker) == 0


async def test_a_supervised_worker_serves_until_the_frontends_have_finished(
    scripts: Scripts, runtime: DistributedRuntime
) -> None:
    worker = scripts.start(WORKER, "uvloop", DYN_WATCHER_NAME="dynamo_Worker")
    client = await connect(runtime)
    write_stop_stage(scripts.root / "state/dynamo", workers=False)
    worker.send_signal(signal.SIGTERM)
    for _ in range(8):  # longer than the wait for a stage that is never written
        await asyncio.sleep(0.1)
        stream = await client.random({"count": 1}, annotated=False)
        assert [item async for item in stream] == [{"number": 0}]
    write_stop_stage(scripts.root / "state/dynamo", workers=True)
    assert await ended(worker) == 0


async def test_a_second_signal_ends_the_streams(
    scripts: Scripts, runtime: DistributedRuntime
) -> None:
    worker = scripts.start(WORKER, "uvloop")
    client = await connect(runtime)
    gone = asyncio.Event()
    client.on_change(lambda added, removed: gone.set() if removed else None)
    stream = await client.random({"count": 10**6, "pause": 0.01}, annotated=False)
    await stream.__anext__()
    worker.send_signal(signal.SIGINT)
    await gone.wait()
    await asyncio.to_thread(interrupt_again, worker)
    assert await ended(worker) == 0
    with pytest.raises(Exception) as found:
        async for _ in stream:
            pass
    assert getattr(found.value, "retryable", False)


async def test_a_killed_worker_is_removed_at_once(
    scripts: Scripts, runtime: DistributedRuntime
) -> None:
    workers = [scripts.start(WORKER, "uvloop", ETCD_LEASE_TTL="60") for _ in range(3)]
    ids = {int((await line(worker)).split()[1]): worker for worker in workers}
    client = await connect(runtime)
    removed_at: dict[int, float] = {}
    changed = asyncio.Event()

    def on_change(added: list[EndpointRecord], removed: list[int]) -> None:
        removed_at.update({one: time.perf_counter() for one in removed})
        changed.set()

    client.on_change(on_change)
    async with asyncio.timeout(10):
        while len(client.instance_ids()) < 3:
            changed.clear()
            await changed.wait()
    victim = next(iter(ids))
    stream = await client.direct({"count": 10**6, "pause": 0.01}, victim, annotated=False)
    await stream.__anext__()
    killed_at = time.perf_counter()
    ids[victim].kill()
    with pytest.raises(Disconnected):
        async for _ in stream:
            pass
    async with asyncio.timeout(20):
        while victim not in removed_at:
            changed.clear()
            await changed.wait()
    assert removed_at[victim] - killed_at < 40, "before its lease expires"
    assert set(client.instance_ids()) == set(ids) - {victim}
    for _ in range(20):
        assert len([item async for item in await client.random({"count": 2})]) == 2


@pytest.mark.parametrize(
    ("port", "problem"),
    [
        ("eighty", "DYN_SYSTEM_PORT must be an integer, got 'eighty'"),
        ("70000", "DYN_SYSTEM_PORT must be between -1 and 65535, got 70000"),
        ("taken", "cannot listen on 127.0.0.1"),
    ],
)
async def test_a_bad_status_port_is_one_clear_line(
    scripts: Scripts, port: str, problem: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if port == "taken":
            port = str(taken.getsockname()[1])
        path = scripts.root / "worker.py"
        path.write_text(WORKER)
        environment = {"DYN_SYSTEM_PORT": port, "DYN_SYSTEM_HOST": "127.0.0.1"}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, str(path), "uvloop"],
            env={**scripts.environment, **environment},
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert done.returncode == 1
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
