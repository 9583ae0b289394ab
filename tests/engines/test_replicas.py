"""Frontends that share their load: real processes, real mockers, a killed frontend."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from deployment import Deployment, free_port
from mocker_kit import caller

FLAGS = ("--router-mode", "kv", "--router-replica-sync")
LONG_TOKENS = 3000
JSON = {"content-type": "application/json"}
_ROW = re.compile(r"(\w+)\{([^}]*)\} (\S+)")


class Replica:
    """One frontend of a deployment."""

    def __init__(self, deployment: Deployment, *flags: str) -> None:
        self.port = free_port()
        self.deployment = deployment
        command = ("dynamo.frontend", "--http-port", str(self.port), *flags)
        self.process = deployment.start(*command)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, JSON)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, **more}
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return json.loads(answer)

    def metric(self, name: str) -> dict[str, float]:
        """Return the value by labels."""
        page = self.request("GET", "/metrics")[1].decode()
        return {labels: float(value) for one, labels, value in _ROW.findall(page) if one == name}

    def ready(self, workers: int = 2) -> bool:
        rows = self.metric("dynamo_frontend_worker_active_decode_blocks")
        return len(rows) == workers

    def loads(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return reserved prefill tokens and blocks by worker."""
        return (
            self.metric("dynamo_frontend_worker_active_prefill_tokens"),
            self.metric("dynamo_frontend_worker_active_decode_blocks"),
        )

    def others(self) -> float:
        """Return the running requests of other replicas."""
        return sum(self.metric("dynamo_component_router_replica_requests").values())

    def is_idle(self) -> bool:
        return not any(sum(row.values()) for row in self.loads())

    def explained(self, prompt: str) -> Any:
        status, answer = self.request("POST", "/v1/route", {"model": "tiny", "prompt": prompt})
        assert status == 200, answer
        return json.loads(answer)


class Streams:
    """Long completions that run at a replica until :meth:`hang_up`."""

    def __init__(self, replica: Replica, prompts: list[str]) -> None:
        self.connections = []
        for prompt in prompts:
            connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=60)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": LONG_TOKENS, "stream": True}
            body["ignore_eos"] = True
            connection.request("POST", "/v1/completions", json.dumps(body), JSON)
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.readline().startswith(b"data:")  # the first token
            self.connections.append((connection, answer))

    def hang_up(self) -> None:
        for connection, answer in self.connections:
            answer.close()
            connection.close()
        self.connections.clear()


@pytest.fixture
def pair(deployment: Deployment) -> Iterator[tuple[Replica, Replica]]:
    """Yield two replicas with two slow workers."""
    deployment.mocker("--speedup-ratio", "1", "--num-workers", "2", "--block-size", "16")
    made = Replica(deployment, *FLAGS), Replica(deployment, *FLAGS)
    for one in made:
        deployment.until(one.ready)
    yield made


def prompts(count: int) -> list[str]:
    """Return prompts of about 100 tokens that share their first half."""
    shared = "one two three four five six seven eight nine ten " * 5
    return [shared + f"{number} and so on and on " * 8 for number in range(count)]


def test_load_is_shared_and_ends_with_its_replica(
    deployment: Deployment, pair: tuple[Replica, Replica]
) -> None:
    first, second = pair
    streams = Streams(first, prompts(5))
    deployment.until(lambda: second.others() == 5)
    deployment.until(lambda: second.loads() == first.loads())
    assert sum(second.loads()[1].values()) > 0
    rows = second.explained(prompts(1)[0])["candidates"]
    assert sum(row["active_decode_blocks"] for row in rows) > 0, rows
    late = Replica(deployment, *FLAGS)
    deployment.until(lambda: late.ready() and late.others() == 5)
    deployment.until(lambda: late.loads() == first.loads())
    own = Streams(late, prompts(2))
    deployment.until(lambda: second.others() == 7 and second.loads() == late.loads())
    first.process.kill()
    first.process.wait()
    deployment.until(lambda: second.others() == 2 and late.others() == 0)
    deployment.until(lambda: second.loads() == late.loads())
    own.hang_up()
    deployment.until(lambda: second.is_idle() and late.is_idle())
    assert second.others() == 0
    streams.hang_up()


def test_load_returns_to_zero_after_traffic_at_both(
    deployment: Deployment, pair: tuple[Replica, Replica]
) -> None:
    texts = prompts(40)
    with ThreadPoolExecutor(16) as pool:
        work = [pool.submit(pair[i % 2].complete, text, 5) for i, text in enumerate(texts)]
        for one in work:
            one.result()
    deployment.until(lambda: all(one.is_idle() and not one.others() for one in pair))


def test_a_route_query_at_one_predicts_requests_at_the_other(
    deployment: Deployment, pair: tuple[Replica, Replica]
) -> None:
    first, second = pair
    text = prompts(1)[0]
    nvext = {"extra_fields": ["worker_id"]}
    home = first.complete(text, 2, nvext=nvext)["nvext"]["worker_id"]["decode_worker_id"]
    deployment.until(lambda: best_overlap(second, text) > 0)
    ask = {"annotations": ["query_instance_id:"]}
    for replica in pair:
        body = {"model": "tiny", "prompt": text, "stream": True, "nvext": ask}
        status, answer = replica.request("POST", "/v1/completions", body)
        chunk, done = answer.strip().split(b"\n\n")
        assert status == 200 and done == b"data: [DONE]"
        found = json.loads(chunk.removeprefix(b"data: "))["nvext"]
        assert found["worker_id"]["decode_worker_id"] == home
        assert len(found["token_ids"]) > 50
        assert replica.is_idle(), "asking books nothing"
    pin = {"backend_instance_id": home, **nvext}
    assert second.complete(text, 2, nvext=pin)["nvext"]["worker_id"]["decode_worker_id"] == home


async def test_a_standalone_router_counts_a_frontends_requests(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "1", "--block-size", "16")
    first = Replica(deployment, *FLAGS)
    path = f"{deployment.namespace}.backend.generate"
    flags = ("--endpoint", path, "--block-size", "16", "--router-replica-sync")
    deployment.start("dynamo.router", *flags)
    await asyncio.to_thread(deployment.until, lambda: first.ready(1))
    async with caller(deployment) as here, asyncio.timeout(30):
        explain = await here.runtime.endpoint(f"{deployment.namespace}.router.explain").client()
        await explain.wait_for_instances()

        async def requests() -> int:
            stream = await explain.random(list(range(40)), annotated=False)
            (found,) = [item async for item in stream]
            return sum(row["active_requests"] for row in found["candidates"])

        streams = await asyncio.to_thread(Streams, first, prompts(3))
        while await requests() != 3:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0.05)
        await asyncio.to_thread(streams.hang_up)
        while await requests() != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def best_overlap(replica: Replica, text: str) -> int:
    return max(int(row["overlap_blocks"]) for row in replica.explained(text)["candidates"])
