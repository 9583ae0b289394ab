"""Calls the endpoints of the planner of a deployment: explain, pause."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.protocols.control import PLANNER, PLANNER_PAUSE, PlannerPause, PlannerState
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import store_path

__all__ = ["ask_planner", "call_planner"]

_ANSWER_S = 5.0


async def call_planner(
    settings: RuntimeSettings, endpoint: str, request: object, timeout_s: float = _ANSWER_S
) -> Any:
    """Return the answer of the planner in the namespace of ``settings``; None without a planner.

    Raises DynamoError if it does not answer.
    """
    if settings.discovery_backend == "file" and not store_path(settings).exists():
        return None  # and nothing is created for a namespace that does not exist
    runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
    try:
        async with asyncio.timeout(timeout_s):
            path = f"{settings.namespace}.{PLANNER}.{endpoint}"
            client = await runtime.endpoint(path).client()
            if not client.instance_ids():
                return None
            async for item in await client.random(request):
                return item.data()
    except TimeoutError:
        raise DynamoError(f"the planner did not answer in {timeout_s:g} s") from None
    finally:
        await runtime.close()
    return None


async def ask_planner(settings: RuntimeSettings, paused: bool | None = None) -> PlannerState | None:
    """Pause or resume the planner, or only ask it; return its state, None without a planner.

    Raises DynamoError.
    """
    request = msgspec.to_builtins(PlannerPause(paused=paused))
    answer = await call_planner(settings, PLANNER_PAUSE, request)
    try:
        return None if answer is None else msgspec.convert(answer, PlannerState)
    except msgspec.ValidationError as error:
        raise DynamoError(f"the planner's answer cannot be read: {error}") from None
