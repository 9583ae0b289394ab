"""``python -m dynamo.router`` queues requests; a client that disconnects leaves the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from deployment import Deployment
from mocker_kit import caller

from dynamo.errors import Cancelled, RouterQueueLimitExceeded
from dynamo.runtime import Context


async def test_requests_are_queued_and_can_be_cancelled(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0.05", "--block-size", "4")
    path = f"{deployment.namespace}.backend.generate"
    knobs = ("--router-queue-threshold", "0.001")
    flags = ("--endpoint", path, "--block-size", "4", *knobs)
    deployment.start("dynamo.router", *flags, DYN_ROUTER_QUEUE_LIMIT="3")
    async with caller(deployment) as here:
        endpoint = here.runtime.endpoint(f"{deployment.namespace}.router.generate")
        client = await endpoint.client()
        await client.wait_for_instances()
        ended: list[str] = []
        began: dict[str, asyncio.Event] = {}

        async def generate(name: str, first: int, context: Context, strict: int = 0) -> None:
            request: dict[str, Any] = {
                "token_ids": list(range(first, first + 40)),
                "model": "m",
                "stop_conditions": {"max_tokens": 1},
                "routing": {"strict_priority": strict},
            }
            items = await client.random(request, annotated=False, context=context)
            began[name].set()
            assert [item async for item in items]
            ended.append(name)

        async def start(name: str, group: asyncio.TaskGroup | None) -> asyncio.Task[None]:
            """Start a request and return when it is sent, before any later one."""
            began[name] = asyncio.Event()
            work = generate(name, 100 * len(began), contexts[name], int(name == "strict"))
            task = asyncio.create_task(work) if group is None else group.create_task(work)
            await began[name].wait()
            return task

        contexts = {name: Context(name) for name in ("a", "b", "left", "strict", "over", "late")}
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for name in ("a", "b"):
                await start(name, group)
            left = await start("left", None)
            await start("strict", group)
            with pytest.raises(RouterQueueLimitExceeded, match=r"current=3, limit=3"):
                await (await start("over", None))
            contexts["left"].kill()
            with pytest.raises(Cancelled):
                await left
            await start("late", group)  # below the threshold: the router has received its end
        assert ended == ["a", "strict", "b", "late"]
