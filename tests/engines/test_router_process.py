"""``python -m dynamo.router`` in front of a real mocker: routes, answers queries, exits."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from deployment import Deployment
from mocker_kit import caller

from dynamo.errors import InvalidArgument

PROMPT = list(range(20))


async def test_the_standalone_router(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "4", "--num-workers", "2")
    path = f"{deployment.namespace}.backend.generate"
    router = deployment.start("dynamo.router", "--endpoint", path, "--block-size", "4")
    async with caller(deployment, 2) as here:

        async def ask(name: str, request: Any) -> list[Any]:
            endpoint = here.runtime.endpoint(f"{deployment.namespace}.router.{name}")
            client = await endpoint.client()
            await client.wait_for_instances()
            return [item async for item in await client.random(request, annotated=False)]

        workers = set(here.client.instance_ids())
        async with asyncio.timeout(30):
            request = {"token_ids": PROMPT, "model": "m", "stop_conditions": {"max_tokens": 3}}
            items = await ask("generate", request)
            assert sum(len(item["token_ids"]) for item in items) == 3
            home = items[0]["routing_data"]["worker_id"]["decode_worker_id"]
            assert home in workers
            held: dict[int, int] = {}
            while held.get(home, 0) < 4:  # until its KV events have arrived
                (scores,) = await ask("get_overlap_scores", {"token_ids": PROMPT})
                held = {row["worker_id"]: row["device_blocks"] for row in scores["workers"]}
            assert set(held) == workers
            assert await ask("best_worker_id", PROMPT) == [home]
            (found,) = await ask("explain", PROMPT)
            assert [row["worker_id"] for row in found["candidates"] if row["chosen"]] == [home]
            with pytest.raises(InvalidArgument, match="list of token ids"):
                await ask("best_worker_id", {"nothing": 1})
            with pytest.raises(InvalidArgument, match="not a preprocessed request"):
                await ask("generate", {"token_ids": [1], "model": 5})
        router.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(router.wait, 20) == 0


def test_bad_arguments(deployment: Deployment) -> None:
    assert deployment.start("dynamo.router").wait(20) == 2
    assert deployment.start("dynamo.router", "--endpoint", "a.b").wait(20) == 2
