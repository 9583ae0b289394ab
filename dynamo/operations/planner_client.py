"""Calls of the planner of a deployment: explain, pause, change; and the error without one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from dynamo.config.programs import PLANNER as PLANNER_PROGRAM
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import (
    DeadlineExceeded,
    DynamoError,
    InvalidArgument,
    StatefileError,
    Unavailable,
    WorkerUnavailable,
    shorten,
)
from dynamo.protocols.control import PLANNER, PLANNER_PAUSE, PlannerChange, PlannerState
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import state_path, store_path
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.state.document import Document
from dynamo.serve.state.statefile import Statefile

_ANSWER_S = 5.0
MOST_GPUS = 1_000_000
"""The most GPUs or workers that a change of the planner may name."""
_MOST_MS = 1_000_000


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
        return await call_planner_of(runtime, endpoint, request, timeout_s)
    finally:
        await runtime.close()


async def call_planner_of(
    runtime: DistributedRuntime, endpoint: str, request: object, timeout_s: float = _ANSWER_S
) -> Any:
    """Return the answer of the planner in the namespace of ``runtime``; None without a planner.

    Raises DynamoError if it does not answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            path = f"{runtime.settings.namespace}.{PLANNER}.{endpoint}"
            client = await runtime.endpoint(path).client()
            if not client.instance_ids():
                return None
            async for item in await client.random(request):
                return item.data()
    except (TimeoutError, DeadlineExceeded, WorkerUnavailable):
        raise (await in_file_thread(no_planner, runtime.settings)) from None
    return None


def no_planner(settings: RuntimeSettings) -> DynamoError:
    """Return the error that no planner answers in the namespace of ``settings``. Blocks.

    One of the graph may be starting, or hang.
    """
    try:
        document = Statefile(state_path(settings), settings.namespace).read() or Document()
    except StatefileError:
        document = Document()
    entries = document.components.values()
    name = next((entry.name for entry in entries if entry.program == PLANNER_PROGRAM), "")
    if name:
        return Unavailable(
            f"{name} does not answer: it is starting, hangs, or was stopped; "
            f"see dynamo ps, or replace it with: dynamo restart {name}"
        )
    return InvalidArgument(
        f"no planner runs in namespace {settings.namespace!r}; add a service with "
        f"run: {PLANNER_PROGRAM} to the graph, or start one with: dynamo planner"
    )


def check_change(change: PlannerChange) -> None:
    """Raise InvalidArgument for a number that no planner takes; the wire has 64 bits."""
    counts = {"max_gpu_budget": change.max_gpu_budget, "min_gpu_budget": change.min_gpu_budget}
    counts |= {f"minima: {shorten(name)}": count for name, count in (change.minima or {}).items()}
    for name, count in counts.items():
        if count is not None and not 0 <= count <= MOST_GPUS:
            # str() refuses numbers of more than 4,300 digits.
            number = shorten(count) if abs(count) < 1 << 256 else "a longer number"
            raise InvalidArgument(f"{name} must be between 0 and {MOST_GPUS}, got {number}")
    for name, target in (("ttft_ms", change.ttft_ms), ("itl_ms", change.itl_ms)):
        if target is not None and not 0 < target <= _MOST_MS:
            raise InvalidArgument(f"{name} must be above 0 and at most {_MOST_MS}, got {target:g}")


async def ask_planner(
    settings: RuntimeSettings, change: PlannerChange | None = None
) -> PlannerState | None:
    """Change the planner, or only ask it; return its state, None without a planner.

    Raises DynamoError.
    """
    check_change(change or PlannerChange())
    request = msgspec.to_builtins(change or PlannerChange())
    answer = await call_planner(settings, PLANNER_PAUSE, request)
    try:
        return None if answer is None else msgspec.convert(answer, PlannerState)
    except msgspec.ValidationError as error:
        raise DynamoError(f"the planner's answer cannot be read: {error}") from None
