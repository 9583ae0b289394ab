"""Runtimes as a worker of NVIDIA Dynamo makes them: file discovery, requests over TCP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo.runtime import Client, DistributedRuntime

MakeRuntime = Callable[[], DistributedRuntime]
Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of file discovery."""
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("DYN_FILE_KV", str(path))
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")
    monkeypatch.setenv("DYN_RUNTIME_INHIBITED_DURATION_SECS", "0.1")
    return path


@pytest_asyncio.fixture
async def make_runtime(store: Path) -> AsyncIterator[MakeRuntime]:
    """Make any number of runtimes."""
    made: list[DistributedRuntime] = []

    def make() -> DistributedRuntime:
        runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
        made.append(runtime)
        return runtime

    yield make
    for runtime in reversed(made):
        runtime.shutdown()
        if hasattr(runtime, "close"):
            await runtime.close()


@pytest_asyncio.fixture
async def serve(make_runtime: MakeRuntime) -> AsyncIterator[Serve]:
    """Serve a handler and return a client of its endpoint, both in one runtime."""
    tasks: list[asyncio.Future[None]] = []

    async def start(
        handler: Any,
        path: str = "ns.backend.generate",
        runtime: DistributedRuntime | None = None,
    ) -> Client:
        endpoint = (runtime or make_runtime()).endpoint(path)
        tasks.append(asyncio.ensure_future(endpoint.serve_endpoint(handler)))
        client = await endpoint.client()
        async with asyncio.timeout(20):
            await client.wait_for_instances()
        return client

    yield start
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
