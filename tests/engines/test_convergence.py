"""The router's index converges with the workers' caches after lost, doubled and swapped messages,
pauses and restarts. Workers are processes; so is the router, unless the test reads its index."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment
from kv_events import held_after
from mocker_kit import Caller, caller
from relay_kit import relayed_router
from until import until

from dynamo._fast.hashing import block_hashes
from dynamo.errors import DynamoError
from dynamo.protocols.kv import KvQuery
from dynamo.router.connect import kv_router as upkeep
from dynamo.router.connect.kv_router import ConnectedKvRouter
from dynamo.router.modes.kv import KvPicker

BLOCK = 4
CACHE_BLOCKS = 60
Held = dict[int, tuple[int, ...]]
"""Block → its path of token hashes."""


def indexed(live: ConnectedKvRouter, worker_id: int) -> Held:
    """Return the blocks of the worker in the router's index."""
    assert isinstance(live.picker, KvPicker) and live.picker.index is not None
    held: Held = {}
    for owner, _, parent, blocks, local, *_ in live.picker.index.dump():
        if owner == worker_id:
            path = () if parent is None else held[parent]
            for block, tokens in zip(blocks, local, strict=True):
                path = (*path, tokens)
                held[block] = path
    return held


async def cached(here: Caller) -> Held:
    """Return the blocks in the worker's own index."""
    return held_after((await here.query(KvQuery(0))).events)


async def churn(here: Caller, seed: int, prompts: int) -> list[list[int]]:
    """Send prompts that share prefixes, many more than the cache holds; return them."""
    chance = random.Random(seed)
    heads = [[chance.randrange(1000) for _ in range(BLOCK * 4)] for _ in range(5)]
    sent = []
    for _ in range(prompts):
        tail = [chance.randrange(1000) for _ in range(chance.randrange(1, 30))]
        sent.append(chance.choice(heads) + tail)
    for at in range(0, prompts, 8):
        await asyncio.gather(*(here.answer(prompt, 2) for prompt in sent[at : at + 8]))
    return sent


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a directory whose sockets have short paths."""
    with tempfile.TemporaryDirectory(prefix="relay") as path:
        yield Path(path)


def worker(deployment: Deployment) -> None:
    deployment.mocker(
        *("--speedup-ratio", "0", "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_bad_channel(
    deployment: Deployment, short_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SWEEP_S", 0.2)
    worker(deployment)
    way = relayed_router(deployment, BLOCK, short_path, seed)
    async with caller(deployment) as here, way as (live, discovery):
        (worker_id,) = here.client.instance_ids()

        async def agree() -> bool:
            return indexed(live, worker_id) == await cached(here)

        await churn(here, seed, 120)
        await until(agree)
        (relay,) = discovery.relays.values()
        for more in range(50):  # a busy worker joins events: there are fewer messages
            if all(relay.faults.values()):
                break
            await churn(here, seed + 200 + more, 40)
            await until(agree)
        assert all(relay.faults.values()), relay.faults
        relay.calm = True
        await churn(here, seed + 100, 40)
        await until(agree)
        assert len(await cached(here)) > CACHE_BLOCKS // 2


class RouterProbe:
    """Queries the standalone router of a deployment for some prompts."""

    def __init__(self, here: Caller, prompts: list[list[int]]) -> None:
        self._here = here
        self._prompts = prompts

    async def overlaps(self) -> list[int]:
        """Return the blocks of each prompt that the router expects at the worker."""
        endpoint = self._here.runtime.endpoint(f"{self._here.namespace}.router.get_overlap_scores")
        client = await endpoint.client()
        try:
            found = []
            for prompt in self._prompts:
                await client.wait_for_instances()
                stream = await client.random({"token_ids": prompt}, annotated=False)
                (scores,) = [item async for item in stream]
                found.append(sum(row["device_blocks"] for row in scores["workers"]))
            return found
        finally:
            client.close()

    async def cached(self) -> list[int]:
        """Return the blocks of each prompt that the worker has."""
        paths = set((await cached(self._here)).values())
        return [_depth(prompt, paths) for prompt in self._prompts]

    async def converge(self) -> list[int]:
        """Wait until both agree."""
        found: list[int] = []

        async def agree() -> bool:
            nonlocal found
            found = await self.overlaps()
            return found == await self.cached()

        await until(agree)
        assert any(found)
        return found


def _depth(prompt: list[int], paths: set[tuple[int, ...]]) -> int:
    hashes = block_hashes(array("I", prompt), BLOCK)
    depth = 0
    while depth < len(hashes) and tuple(hashes[: depth + 1]) in paths:
        depth += 1
    return depth


def router(deployment: Deployment) -> subprocess.Popen[bytes]:
    path = f"{deployment.namespace}.backend.generate"
    return deployment.start("dynamo.router", "--endpoint", path, "--block-size", str(BLOCK))


async def test_a_restarted_router_has_the_same_overlaps(deployment: Deployment) -> None:
    worker(deployment)
    first = router(deployment)
    async with caller(deployment) as here:
        probe = RouterProbe(here, (await churn(here, 5, 60))[-12:])
        before = await probe.converge()
        first.kill()
        await asyncio.to_thread(first.wait)
        router(deployment)

        async def as_before() -> bool:
            try:
                return await probe.overlaps() == before
            except DynamoError:
                return False  # the request went to the killed router

        await until(as_before)


async def test_a_router_paused_during_many_events(deployment: Deployment) -> None:
    worker(deployment)
    process = router(deployment)
    async with caller(deployment) as here:
        probe = RouterProbe(here, (await churn(here, 6, 30))[-12:])
        await probe.converge()
        process.send_signal(signal.SIGSTOP)
        try:
            later = await churn(here, 7, 300)
        finally:
            process.send_signal(signal.SIGCONT)
        await RouterProbe(here, later[-12:]).converge()


async def test_a_restarted_worker_has_no_blocks(deployment: Deployment) -> None:
    worker(deployment)
    router(deployment)
    async with caller(deployment) as here:
        probe = RouterProbe(here, (await churn(here, 8, 30))[-12:])
        await probe.converge()
        deployment.processes[0].kill()
        await asyncio.to_thread(deployment.processes[0].wait)
        worker(deployment)
        await here.until(lambda: len(here.client.instance_ids()) == 1)

        async def empty() -> bool:
            return not any(await probe.overlaps())

        await until(empty)
        again = RouterProbe(here, (await churn(here, 9, 30))[-12:])
        await again.converge()
