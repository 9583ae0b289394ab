"""Scripted workers, and routers over real discovery, request plane and event plane."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
from until import until

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard, RuntimeConfig, instance_key
from dynamo.protocols.kv import (
    KV_EVENTS,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    KvQuery,
    KvQueryAnswer,
)
from dynamo.router.connect.kv_router import ConnectedKvRouter, connect
from dynamo.router.connect.router import ConnectedRouter, RoutedWorkers
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.requests import ServerStream

__all__ = ["BLOCK", "CHAINED", "PROMPT", "Box", "Worker", "stored"]

BLOCK = 4
WORKERS = RoutedWorkers("ns", "backend", "generate", BLOCK, "tiny")
PROMPT = array("I", range(16))
LOCAL = block_hashes(PROMPT, BLOCK)
CHAINED = sequence_hashes(LOCAL)


def stored(event_id: int, first: int, last: int, rank: int = 0) -> KvEvent:
    """Blocks first..last-1 of the prompt."""
    parent = CHAINED[first - 1] if first else None
    blocks = CHAINED[first:last].tobytes(), LOCAL[first:last].tobytes()
    return KvEvent(event_id, BlocksStored(*blocks, parent), rank)


class Worker:
    """A worker with a scripted local indexer."""

    kind = "Aggregated"

    def __init__(self, settings: RuntimeSettings) -> None:
        self.runtime = DistributedRuntime(None, settings)
        self.answers: list[KvQueryAnswer] = [KvQueryAnswer("tree_dump")]
        self.queries: list[KvQuery] = []
        self.asked = asyncio.Event()
        self.block_size = BLOCK
        self._serving: list[asyncio.Task[None]] = []

    @property
    def id(self) -> int:
        return self.runtime.instance_id

    async def start(self, config: RuntimeConfig | None = None, answers: bool = True) -> None:
        """Serve generate and, if it answers, kv_query; publish the card when given."""
        tasks = self.runtime.tasks
        self.publisher = await self.runtime.publisher("ns", "backend", KV_EVENTS)
        if config is not None:
            await self._publish_card(config)
        endpoints = {"generate": self._generate}
        if answers:
            endpoints["kv_query"] = self._answer
        for name, handler in endpoints.items():
            endpoint = self.runtime.endpoint(f"ns.backend.{name}")
            self._serving.append(tasks.spawn(endpoint.serve_push(handler), name=name))

    def publish(self, *events: KvEvent) -> None:
        self.publisher.publish(codec.encode(KvEventBatch(self.id, list(events))))

    async def _publish_card(self, config: RuntimeConfig) -> None:
        card = ModelCard("m", "m", "/m", "ns", "backend", "generate", self.id)
        card.kv_cache_block_size = self.block_size
        card.runtime_config = config
        card.worker_type = self.kind
        lease = await self.runtime.granted()
        key = "v1/mdc/" + instance_key("ns", "backend", "generate", self.id)
        await self.runtime.discovery.put(key, msgspec.json.encode(card), lease.id)

    def _generate(self, stream: ServerStream, payload: bytes) -> None:
        stream.end()

    def _answer(self, stream: ServerStream, payload: bytes) -> None:
        self.queries.append(codec.decoder(KvQuery).decode(payload))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        stream.send(codec.encode(answer))
        stream.end()
        self.asked.set()


class Box:
    """Workers and one live router that share a discovery.

    ``checks_s``: when the router asks a new publisher for lost events; by default never, because
    most tests script the answer to each query.
    """

    checks_s: tuple[float, ...] = ()

    def __init__(self, settings: RuntimeSettings) -> None:
        self.settings = settings
        self.runtime = DistributedRuntime(None, settings)
        self.workers: list[Worker] = []
        self.live: ConnectedRouter | None = None

    async def worker(self, config: RuntimeConfig | None = None, answers: bool = True) -> Worker:
        worker = Worker(self.settings)
        self.workers.append(worker)
        await worker.start(config, answers)
        await self._hear(worker)
        return worker

    async def route(self, **settings: object) -> ConnectedKvRouter:
        chosen = RouterSettings(**{"mode": "kv", **settings})  # type: ignore[arg-type]
        live = self.live = await connect(self.runtime, WORKERS, chosen)
        assert isinstance(live, ConnectedKvRouter)
        if live.events is not None:
            live.events.checks_s = self.checks_s
        await live.start()
        for worker in self.workers:
            await self._hear(worker)
        return live

    async def _hear(self, worker: Worker) -> None:
        """Let the worker publish batches without events until the router receives one.

        What is published before the router has connected is lost.
        """
        feed = self.live.events if isinstance(self.live, ConnectedKvRouter) else None
        if feed is None or feed._subscription is None:
            return
        subscribers = feed._subscription._subscribers

        def received() -> int:
            if feed.threads is not None:
                feed.threads.flush()
            return sum(one.received for one in subscribers.values())

        before = received()

        def heard() -> bool:
            worker.publish()
            return received() > before

        await until(heard)

    async def route_by_mode(self, **settings: object) -> ConnectedRouter:
        """A router of any mode; closed with the box."""
        chosen = RouterSettings(**settings)  # type: ignore[arg-type]
        self.live = await connect(self.runtime, WORKERS, chosen)
        await self.live.start()
        return self.live

    async def close(self) -> None:
        if self.live is not None:
            await self.live.close()
            await self.live.close()
        await self.runtime.close()
        for worker in self.workers:
            await worker.runtime.close()
