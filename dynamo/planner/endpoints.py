"""The endpoints of a running planner: what it would decide, and its pause."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from dynamo.planner.live.loop import ScalingLoop
from dynamo.planner.reports.explain import EXPLAIN, model_reports
from dynamo.planner.reports.state_file import StateFile
from dynamo.protocols.control import PLANNER, PLANNER_PAUSE, PlannerPause, PlannerState
from dynamo.runtime import DistributedRuntime

__all__ = ["serve_explain", "serve_pause"]


async def serve_explain(runtime: DistributedRuntime, loop: ScalingLoop) -> None:
    """Serve the endpoint of ``dynamo planner explain``; return when the lease is revoked."""

    async def explain(request: object) -> AsyncIterator[object]:
        yield msgspec.to_builtins(await model_reports(loop))

    endpoint = runtime.endpoint(".".join((runtime.settings.namespace, *EXPLAIN)))
    await endpoint.serve_endpoint(explain)


async def serve_pause(
    runtime: DistributedRuntime, loop: ScalingLoop, state_file: StateFile
) -> None:
    """Serve the endpoint that pauses and resumes ``loop``; return when the lease is revoked."""

    async def pause(request: object) -> AsyncIterator[object]:
        wanted = msgspec.convert(request, PlannerPause).paused
        if wanted is not None:
            (loop.pause if wanted else loop.resume)()
            state_file.paused(wanted)
        state = PlannerState(
            paused=loop.paused,
            acts=state_file.acts,
            models=loop.models(),
            on_demand=loop.on_demand(),
        )
        yield msgspec.to_builtins(state)

    path = (runtime.settings.namespace, PLANNER, PLANNER_PAUSE)
    await runtime.endpoint(".".join(path)).serve_endpoint(pause)
