"""The lifecycle of a worker process: signals, revoked leases, failures, clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.runtime import DistributedRuntime
from dynamo.worker.lifecycle import WorkerLifecycle, leaf_errors


class RuntimeFactory:
    """Creates runtimes in one state directory."""

    def __init__(self, path: Path) -> None:
        self.settings = RuntimeSettings(namespace="ns", state_dir=str(path / "s"))
        self.store = path / "s/ns/store"

    def create(self) -> DistributedRuntime:
        return DistributedRuntime(settings=self.settings, system=SystemSettings(grace_period_s=0))

    def files(self) -> list[Path]:
        return [path for path in self.store.rglob("*") if path.is_file()]


@pytest.fixture
def runtimes(tmp_path: Path) -> RuntimeFactory:
    return RuntimeFactory(tmp_path)


async def count(request: Any) -> AsyncIterator[int]:
    for number in range(3):
        yield number


async def test_a_signal_ends_all_workers(runtimes: RuntimeFactory) -> None:
    lifecycle = WorkerLifecycle()
    served = 0

    async def worker() -> None:
        nonlocal served
        async with lifecycle.runtime(runtimes.create()) as runtime:
            serving = await runtime.start_serving()
            served += 1
            if served == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            await runtime.endpoint("ns.comp.count").serve_endpoint(count)
            assert serving.stopped.is_set()

    async with asyncio.timeout(20):
        await lifecycle.run([worker, worker])
    assert served == 2 and runtimes.files() == []


async def test_a_signal_ends_a_wait(runtimes: RuntimeFactory) -> None:
    lifecycle = WorkerLifecycle()
    waited: list[bool] = []

    async def worker() -> None:
        waited.append(await lifecycle.wait(0))
        os.kill(os.getpid(), signal.SIGINT)
        waited.append(await lifecycle.wait(60))

    async with asyncio.timeout(20):
        await lifecycle.run([worker])
    assert waited == [True, False]


async def test_a_failure_ends_the_others_without_draining(runtimes: RuntimeFactory) -> None:
    lifecycle = WorkerLifecycle()
    started = asyncio.Event()
    caller = runtimes.create()

    async def hang(request: Any) -> AsyncIterator[int]:
        yield 1
        started.set()
        await asyncio.Event().wait()

    async def worker() -> None:
        async with lifecycle.runtime(runtimes.create()) as runtime:
            await runtime.endpoint("ns.comp.hang").serve_endpoint(hang)

    async def fails() -> None:
        client = await caller.endpoint("ns.comp.hang").client()
        await client.wait_for_instances()
        stream = await client.random({}, annotated=False)
        assert await anext(stream) == 1
        await started.wait()
        raise RuntimeError("the engine is broken")

    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as caught:
            await lifecycle.run([worker, fails])
    assert [str(error) for error in leaf_errors(caught.value)] == ["the engine is broken"]
    await caller.close()
    assert runtimes.files() == []
