"""A router in the test process whose KV events pass relays that lose, double and swap them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from deployment import Deployment

from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.protocols.control import EventChannelRecord
from dynamo.router.connect.kv_router import ConnectedKvRouter, connect
from dynamo.router.connect.router import RoutedWorkers
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import Discovery, FileDiscovery, KeyEvent
from dynamo.runtime.process.paths import store_dir

__all__ = ["Relay", "RelayedDiscovery", "relayed_router"]

FATES = ["passes"] * 6 + ["lost", "lost", "doubled", "swapped"]


class Relay:
    """A proxy between a publisher and its subscribers.

    By a seeded schedule it forwards each message, drops it, doubles it or swaps it with the next;
    ``calm`` ends that.
    """

    def __init__(self, address: str, listen: Path, seed: int) -> None:
        context = zmq.asyncio.Context.instance()
        self._in, self._out = context.socket(zmq.SUB), context.socket(zmq.PUB)
        for socket in (self._in, self._out):
            socket.setsockopt(zmq.LINGER, 0)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._in.connect(address)
        self.address = f"ipc://{listen}"
        self._out.bind(self.address)
        self._random = random.Random(seed)
        self.calm = False
        self.faults = {"lost": 0, "doubled": 0, "swapped": 0}
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self._in.close()
        self._out.close()

    async def _run(self) -> None:
        kept: list[bytes] | None = None
        while True:
            message = await self._in.recv_multipart()
            fate = "passes" if self.calm else self._random.choice(FATES)
            if fate in self.faults:
                self.faults[fate] += 1
            if fate == "swapped" and kept is None:
                kept = message
                continue
            if fate != "lost":
                await self._out.send_multipart(message)
            if fate == "doubled":
                await self._out.send_multipart(message)
            if kept is not None:
                await self._out.send_multipart(kept)
                kept = None


class RelayedDiscovery:
    """A discovery that replaces the addresses of KV event publishers by those of relays."""

    def __init__(self, discovery: Discovery, directory: Path, seed: int) -> None:
        self._discovery = discovery
        self._directory = directory
        self._seed = seed
        self.relays: dict[str, Relay] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._discovery, name)

    def watch(self, prefix: str, callback: Any) -> Any:
        def redirected(event: KeyEvent) -> None:
            if event.value is not None:
                record = msgspec.json.decode(event.value, type=EventChannelRecord)
                record.transport["endpoint"] = self._relay(record.transport["endpoint"]).address
                event = event._replace(value=msgspec.json.encode(record))
            callback(event)

        kv_events = prefix.endswith("/topic/kv-events/")
        return self._discovery.watch(prefix, redirected if kv_events else callback)

    def _relay(self, address: str) -> Relay:
        if address not in self.relays:
            name = self._directory / f"{len(self.relays)}"
            self.relays[address] = Relay(address, name, self._seed)
        return self.relays[address]


@asynccontextmanager
async def relayed_router(
    deployment: Deployment, block_size: int, directory: Path, seed: int
) -> AsyncIterator[tuple[ConnectedKvRouter, RelayedDiscovery]]:
    """Yield a router in this process whose KV events pass relays."""
    settings = RuntimeSettings(namespace=deployment.namespace, state_dir=str(deployment.state_dir))
    detour = RelayedDiscovery(FileDiscovery(store_dir(settings)), directory, seed)
    runtime = DistributedRuntime(settings=settings, system=SystemSettings(), discovery=detour)
    await runtime.start()
    path = deployment.namespace, "backend", "generate"
    live = await connect(runtime, RoutedWorkers(*path, block_size), RouterSettings(mode="kv"))
    assert isinstance(live, ConnectedKvRouter)
    await live.start()
    try:
        yield live, detour
    finally:
        await live.close()
        await runtime.close()
        for relay in detour.relays.values():
            await relay.close()
