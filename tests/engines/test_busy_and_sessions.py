"""Rejection under load and session affinity, through a real frontend and real mockers."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from capacity_kit import OpenRequest, chat
from deployment import Deployment
from http_bench import error_json
from mocker_kit import Caller, caller


def complete(deployment: Deployment, max_tokens: int, **headers: str) -> tuple[int, Any]:
    """Return status and body of one completion."""
    body = {
        "model": "tiny",
        "prompt": "a b c d e f g h " * 20,
        "max_tokens": max_tokens,
        "nvext": {"extra_fields": ["worker_id"]},
    }
    status, _, answer = deployment.request("POST", "/v1/completions", body, headers)
    return status, json.loads(answer)


async def test_busy_workers_are_rejected_until_they_are_idle(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "1", "--num-gpu-blocks-override", "1000")
    deployment.frontend(
        *("--router-mode", "round-robin", "--admission-control", "token-capacity"),
        *("--active-decode-blocks-threshold", "0.001"),
    )
    await asyncio.to_thread(deployment.wait_for_workers, 1)
    with ThreadPoolExecutor() as pool:
        async with caller(deployment) as here:
            long = pool.submit(complete, deployment, 600)
            (instance,) = here.client.instance_ids()
            await here.until(lambda: (here.used_blocks(instance) or 0) > 1)
            deadline = time.monotonic() + 10
            status = 200
            while status == 200 and time.monotonic() < deadline:
                status, body = await asyncio.to_thread(complete, deployment, 1)
            assert (status, body) == (
                503,
                error_json(
                    "Service temporarily unavailable: All workers are busy, please retry later",
                    "service_unavailable",
                    503,
                    ("server_error", None, "overloaded"),
                ),
            )
            assert (await asyncio.to_thread(long.result))[0] == 200
            while status == 503 and time.monotonic() < deadline + 10:
                status, _ = await asyncio.to_thread(complete, deployment, 1)
            assert status == 200


def occupy(deployment: Deployment, rank: int) -> OpenRequest:
    """Send a long request, again while the report of an earlier one still makes the rank busy."""
    while True:
        headers = {"x-dp-rank": str(rank)}
        request = OpenRequest(deployment, chat(8000, stream=True), **headers)
        if b" 200 OK" in request.read():
            return request
        request.drop()


@pytest.mark.parametrize("mode", ["random", "kv"])
async def test_a_worker_is_busy_when_all_its_ranks_are(deployment: Deployment, mode: str) -> None:
    deployment.mocker("--data-parallel-size", "2", "--num-gpu-blocks-override", "1000")
    deployment.frontend(
        *("--router-mode", mode, "--admission-control", "token-capacity"),
        *("--active-decode-blocks-threshold", "0.001"),
    )
    await asyncio.to_thread(deployment.wait_for_workers, 1)
    clients = []

    def ask() -> int:
        return complete(deployment, 1)[0]

    async with caller(deployment) as here:
        (instance,) = here.client.instance_ids()
        for rank in (0, 1):
            clients.append(await asyncio.to_thread(occupy, deployment, rank))
            await here.until(partial(over, here, instance, rank))
            if rank == 0:
                assert await asyncio.to_thread(ask) == 200
    deployment.until(lambda: ask() == 503, "both ranks are busy")
    clients.pop().drop()
    deployment.until(lambda: ask() == 200, "rank 1 is idle")
    clients.pop().drop()


def over(here: Caller, instance: int, rank: int) -> bool:
    """Whether the rank has reported more blocks than the threshold allows."""
    load = here.loads.get((instance, rank))
    return load is not None and (load.kv_used_blocks or 0) > 1


@pytest.mark.parametrize("mode", ["round-robin", "kv", "attached"])
def test_a_session_stays_with_its_worker(deployment: Deployment, mode: str) -> None:
    if mode == "attached":
        mode, server = "kv", deployment.openai_server()
        for _ in range(3):
            deployment.attached(server)
    else:
        deployment.mocker("--speedup-ratio", "0", "--num-workers", "3")
    flags = ("--router-session-affinity-ttl-secs", "60", "--router-kv-overlap-score-weight", "0")
    deployment.frontend("--router-mode", mode, *flags)
    deployment.wait_for_workers(3)

    def home(session: str) -> str:
        body = {"model": "tiny", "prompt": "a b c d e f g h " * 20, "max_tokens": 1}
        asked = {"X-Dynamo-Session-ID": session, "X-Dynamo-Route": "1"}
        status, headers, _ = deployment.request("POST", "/v1/completions", body, asked)
        assert status == 200
        return str(json.loads(headers["x-dynamo-route"])["worker"])

    homes = {session: home(session) for session in "abcdefghi"}
    assert len(set(homes.values())) > 1
    for _ in range(3):
        assert {session: home(session) for session in homes} == homes
