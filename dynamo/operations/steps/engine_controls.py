"""Calls the engines of workers that can sleep, through their endpoint ``engine_control``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError, WorkerUnavailable
from dynamo.protocols.control import (
    ENGINE_CONTROL,
    INSTANCES,
    EndpointRecord,
    EngineCommand,
    record_decoder,
)
from dynamo.runtime import DistributedRuntime

_ANSWER_S = 10.0
_SLEEP_LEVEL = 1  # the weights stay in CPU memory
_decode = record_decoder(EndpointRecord)


@contextlib.asynccontextmanager
async def open_engines(settings: RuntimeSettings) -> AsyncIterator[RemoteEngines]:
    """Open the engines in the namespace of ``settings`` for the block."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
    try:
        await runtime.start()
        yield RemoteEngines(runtime, runtime.system.shutdown_timeout_s)
    finally:
        await runtime.close()


class RemoteEngines:
    """The engines of workers that can sleep: keep their process, but free their GPU memory.

    ``drain_s`` bounds the way to sleep.
    """

    def __init__(self, runtime: DistributedRuntime, drain_s: float) -> None:
        self._runtime = runtime
        self._drain_s = drain_s

    async def can_sleep(self, lease: int) -> bool:
        """Whether the worker under ``lease`` has an engine with a sleep mode."""
        return await self._record(lease) is not None

    async def is_sleeping(self, lease: int) -> bool | None:
        """Whether its engine sleeps; None if it cannot, or does not answer."""
        if await self._record(lease) is None:
            return None
        try:
            answer = await self._call(lease, EngineCommand("is_sleeping"), _ANSWER_S)
        except DynamoError:
            return None
        return bool(answer.get("is_sleeping"))

    async def sleep(self, lease: int) -> None:
        """Let its requests finish, and free its memory. Raises DynamoError."""
        command = EngineCommand("sleep", {"level": _SLEEP_LEVEL})
        await self._call(lease, command, self._drain_s)

    async def wake(self, lease: int, timeout_s: float) -> None:
        """Restore its memory; return when it serves. Raises DynamoError."""
        await self._call(lease, EngineCommand("wake_up"), timeout_s)

    async def _record(self, lease: int) -> EndpointRecord | None:
        prefix = f"{INSTANCES}{self._runtime.settings.namespace}/"
        for value in (await self._runtime.discovery.list(prefix)).values():
            try:
                record = _decode(value)
            except ValueError:
                continue  # reported by the processes that call it
            if record.endpoint == ENGINE_CONTROL and record.lease_id == lease:
                return record
        return None

    async def _call(self, lease: int, command: EngineCommand, timeout_s: float) -> dict[str, Any]:
        record = await self._record(lease)
        if record is None:
            raise WorkerUnavailable(f"the worker with lease {lease:x} has no {ENGINE_CONTROL}")
        path = f"{record.namespace}.{record.component}.{record.endpoint}"
        client = await self._runtime.endpoint(path).client()
        try:
            async with asyncio.timeout(timeout_s):
                await client.wait_for_instances()
                stream = await client.direct(command, record.instance_id, annotated=False)
                answers = [one async for one in stream]
        except TimeoutError:
            raise WorkerUnavailable(
                f"worker {record.instance_id:x}: {command.route} took more than {timeout_s:g} s"
            ) from None
        finally:
            client.close()
        return answers[-1] if answers and isinstance(answers[-1], dict) else {}
