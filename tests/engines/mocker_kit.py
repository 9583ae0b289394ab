"""A client for mocker processes, which calls them as a frontend does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from deployment import Deployment
from until import Changes

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.protocols import codec
from dynamo.protocols.engine import PreprocessedRequest, Routing, StopConditions
from dynamo.protocols.kv import KvEventBatch, KvMetrics, KvQuery, KvQueryAnswer
from dynamo.runtime import Client, Context, DistributedRuntime

_BATCH = codec.decoder(KvEventBatch).decode
_LOADS = codec.decoder(list[KvMetrics]).decode
_ANSWER = codec.decoder(KvQueryAnswer).decode


class Caller:
    """A runtime with a client of the workers' generate endpoint."""

    def __init__(self, runtime: DistributedRuntime, namespace: str, component: str) -> None:
        self.runtime = runtime
        self.namespace = namespace
        self.component = component
        self.events: dict[tuple[int, int], list[Any]] = {}
        self.loads: dict[tuple[int, int], KvMetrics] = {}
        self._changes = Changes()
        runtime.subscribe(namespace, component, "kv-events", self._on_events)
        runtime.subscribe(namespace, component, "kv_metrics", self._on_loads)
        self.client: Client

    async def connect(self, workers: int) -> None:
        """Wait until ``workers`` instances serve generate."""
        endpoint = self.runtime.endpoint(f"{self.namespace}.{self.component}.generate")
        self.client = await endpoint.client()
        self.client.on_change(self._changes.changed)
        await self.until(lambda: len(self.client.instance_ids()) == workers)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``; check it after every event, load report and instance change."""
        await self._changes.until(condition)

    def changed(self) -> None:
        """Check the conditions of :meth:`until` again."""
        self._changes.changed()

    def used_blocks(self, instance: int) -> int | None:
        """Return the used blocks that rank 0 of the worker reported last."""
        load = self.loads.get((instance, 0))
        return None if load is None else load.kv_used_blocks

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        instance: int | None = None,
        rank: int | None = None,
        context: Context | None = None,
    ) -> Any:
        """Return the items of a response, an async iterator."""
        routing = None if rank is None else Routing(dp_rank=rank)
        request = PreprocessedRequest(
            "tiny", codec.tokens(prompt), StopConditions(max_tokens=max_tokens), routing=routing
        )
        one = self.client.instance_ids()[0] if instance is None else instance
        return await self.client.direct(request, one, False, context)

    async def answer(self, *args: Any, **more: Any) -> list[dict[str, Any]]:
        """Return all items of a response."""
        return [item async for item in await self.generate(*args, **more)]

    async def query(self, query: KvQuery) -> KvQueryAnswer:
        """Query the worker's event log."""
        endpoint = self.runtime.endpoint(f"{self.namespace}.{self.component}.kv_query")
        client = await endpoint.client()
        await client.wait_for_instances()
        stream = await client.direct(query, client.instance_ids()[0], annotated=False)
        (item,) = [item async for item in stream]
        return _ANSWER(codec.encode(item))

    def _on_events(self, publisher: int, sequence: int, payload: bytes) -> None:
        batch = _BATCH(payload)
        for event in batch.events:
            self.events.setdefault((batch.worker_id, event.dp_rank), []).append(event)
        self._changes.changed()

    def _on_loads(self, publisher: int, sequence: int, payload: bytes) -> None:
        for load in _LOADS(payload):
            self.loads[load.worker_id, load.dp_rank] = load
        self._changes.changed()


@asynccontextmanager
async def caller(
    deployment: Deployment, workers: int = 1, component: str = "backend"
) -> AsyncIterator[Caller]:
    """Yield a caller that is connected to ``workers`` workers."""
    settings = RuntimeSettings(namespace=deployment.namespace, state_dir=str(deployment.state_dir))
    runtime = DistributedRuntime(settings=settings, system=SystemSettings())
    await runtime.start()
    made = Caller(runtime, deployment.namespace, component)
    try:
        await made.connect(workers)
        yield made
    finally:
        await runtime.close()


def leftovers(state_dir: Path) -> list[str]:
    """Return all files of a deployment, sockets in fallback directories included."""
    places = [state_dir]
    for note in state_dir.glob("*/sockets.path"):
        places.append(Path(note.read_text().strip()))
        note.unlink()
    return sorted(str(p) for place in places for p in place.rglob("*") if not p.is_dir())
