"""A router's view of caches converges again: lost, doubled and swapped messages, pauses,
restarts. Real workers; the router, too, is a process wherever it need not be looked into."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import tempfile
from array import array
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from deployment import Deployment
from kv_events import held_after
from mocker_kit import Caller, caller
from relay_kit import detoured

from dynamo._fast.hashing import block_hashes
from dynamo.errors import DynamoError
from dynamo.protocols.kv import KvQuery
from dynamo.router.discovery import maintenance as upkeep
from dynamo.router.discovery.kv_router import ConnectedKvRouter
from dynamo.router.kv import KvPicker

BLOCK = 4
CACHE_BLOCKS = 60
DEADLINE_S = 30
Held = dict[int, tuple[int, ...]]
"""Block → its path of token hashes."""


def believed(live: ConnectedKvRouter, worker_id: int) -> Held:
    """What the router's index has for the worker."""
    assert isinstance(live.picker, KvPicker) and live.picker.index is not None
    held: Held = {}
    for owner, _, parent, blocks, local, *_ in live.picker.index.dump():
        if owner == worker_id:
            path = () if parent is None else held[parent]
            for block, tokens in zip(blocks, local, strict=True):
                path = (*path, tokens)
                held[block] = path
    return held


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Until ``condition``, which asks the processes, holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the index has no change event
            await asyncio.sleep(0.05)


async def truth(here: Caller) -> Held:
    """What the worker itself says."""
    return held_after((await here.query(KvQuery(0))).events)


async def churn(here: Caller, seed: int, prompts: int) -> list[list[int]]:
    """Prompts that share beginnings, many more than the cache holds; what was sent."""
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
    """A directory whose sockets have short paths."""
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
    way = detoured(deployment, BLOCK, short_path, seed)
    async with caller(deployment) as here, way as (live, detour):
        (worker_id,) = here.client.instance_ids()

        async def agree() -> bool:
            return believed(live, worker_id) == await truth(here)

        await churn(here, seed, 120)
        await until(agree)
        (relay,) = detour.relays.values()
        assert all(relay.faults.values()), relay.faults
        relay.calm = True
        await churn(here, seed + 100, 40)
        await until(agree)
        assert len(await truth(here)) > CACHE_BLOCKS // 2


class Asked:
    """The standalone router of a deployment, as a program sees it."""

    def __init__(self, here: Caller, prompts: list[list[int]]) -> None:
        self._here = here
        self._prompts = prompts

    async def overlaps(self) -> list[int]:
        """Return the blocks of each prompt that the index assigns to the worker."""
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

    async def truth(self) -> list[int]:
        """Blocks that the worker holds of each."""
        paths = set((await truth(self._here)).values())
        return [_depth(prompt, paths) for prompt in self._prompts]

    async def settle(self) -> list[int]:
        """Until both are the same."""
        found: list[int] = []

        async def agree() -> bool:
            nonlocal found
            found = await self.overlaps()
            return found == await self.truth()

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


async def test_a_restarted_router_restores_its_index(deployment: Deployment) -> None:
    worker(deployment)
    first = router(deployment)
    async with caller(deployment) as here:
        asked = Asked(here, (await churn(here, 5, 60))[-12:])
        before = await asked.settle()
        first.kill()
        await asyncio.to_thread(first.wait)
        router(deployment)

        async def as_before() -> bool:
            try:
                return await asked.overlaps() == before
            except DynamoError:
                return False  # the dead one was asked

        await until(as_before)


async def test_a_router_that_was_paused_in_a_storm(deployment: Deployment) -> None:
    worker(deployment)
    process = router(deployment)
    async with caller(deployment) as here:
        asked = Asked(here, (await churn(here, 6, 30))[-12:])
        await asked.settle()
        process.send_signal(signal.SIGSTOP)
        try:
            later = await churn(here, 7, 300)
        finally:
            process.send_signal(signal.SIGCONT)
        await Asked(here, later[-12:]).settle()


async def test_a_restarted_worker_has_no_blocks_in_the_index(deployment: Deployment) -> None:
    worker(deployment)
    router(deployment)
    async with caller(deployment) as here:
        asked = Asked(here, (await churn(here, 8, 30))[-12:])
        await asked.settle()
        deployment.processes[0].kill()
        await asyncio.to_thread(deployment.processes[0].wait)
        worker(deployment)
        await here.until(lambda: len(here.client.instance_ids()) == 1)

        async def empty() -> bool:
            return not any(await asked.overlaps())

        await until(empty)
        again = Asked(here, (await churn(here, 9, 30))[-12:])
        await again.settle()
