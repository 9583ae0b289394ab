"""A worker of the simulation, written against the public API: `dynamo.llm`, `dynamo.runtime`.

It serves a model of each kind that the mock engine is not: text in and text out, embeddings of
tokens and of texts, a function as a model, adapters that come and go, and a model that asks
another one. :mod:`api_calls` has the right answers.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import fake_os
import msgspec
import uvloop
from api_calls import SPOKEN_TOKENS
from api_tokens import MODEL, encoded
from engine_sockets import EnginePublisher
from written_models import serve_written

from dynamo.llm import (
    FpmDirectPublisher,
    FpmEventSubscriber,
    HttpError,
    KvEventPublisher,
    KvRouter,
    LLMUnaryClient,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    UnaryChatModel,
    WorkerMetricsPublisher,
    compute_block_hash_for_seq,
    register_model,
    unregister_model,
    update_model_taints,
)
from dynamo.llm.exceptions import EngineShutdown
from dynamo.runtime import Context, DistributedRuntime, dynamo_endpoint, dynamo_worker

__all__ = ["ADAPTERS", "main", "reply_of", "vector_of"]

BLOCK_SIZE = 16

ADAPTERS = ("tuned", "late")
"""The second one comes and goes."""
_LOADED_S, _AWAY_S = 2.0, 5.0
_CACHED_BLOCKS = 24
_LONGEST_REPLY = 64
_BEAT_S = 3.0
_ENGINE_ENDPOINT = "tcp://127.0.0.1:5557"
Generate = Callable[..., AsyncIterator[Any]]


def reply_of(tokens: Sequence[int], adapter: str = "") -> str:
    """Return what the model that counts says of a prompt."""
    by = f" by {adapter}" if adapter else ""
    return f"{len(tokens)} tokens from {tokens[0]} to {tokens[-1]}{by}"


def continuation_of(tokens: Sequence[int], adapter: str = "") -> Sequence[int]:
    """Return the tokens that follow a prompt, or a prompt and the answer so far."""
    for length in range(1, min(len(tokens), _LONGEST_REPLY)):
        reply = encoded(reply_of(tokens[:-length], adapter))
        if list(reply[:length]) == list(tokens[-length:]):
            return reply[length:]
    return encoded(reply_of(tokens, adapter))


def vector_of(tokens: Sequence[int]) -> list[float]:
    """Return the embedding of an input; its numbers are exact in 32 bits."""
    return [float(len(tokens)), float(tokens[0]), tokens[-1] / 2]


class Cache:
    """The KV blocks of the engine: chains, of which the oldest leaf goes when it is full.

    ``hashes`` and ``host_hashes`` are for the checks, as those of a mock engine's pool.
    """

    def __init__(self, publisher: KvEventPublisher, load: WorkerMetricsPublisher) -> None:
        self._publisher = publisher
        self._load = load
        self._parents: dict[int, int | None] = {}

    def hashes(self) -> set[int]:
        return set(self._parents)

    def host_hashes(self) -> set[int]:
        return set()

    def add(self, tokens: Sequence[int], adapter: str | None) -> None:
        """Publish the blocks of a prompt that are new, and those that they replace."""
        parent: int | None = None
        for number, local in enumerate(
            compute_block_hash_for_seq(tokens, BLOCK_SIZE, lora_name=adapter)
        ):
            block = hash((parent, local)) & 0x7FFF_FFFF_FFFF_FFFF
            part = list(tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
            if block not in self._parents:
                self._stored(block, parent, part, adapter)
                self._parents[block] = parent
            parent = block
        while len(self._parents) > _CACHED_BLOCKS:
            parents = set(self._parents.values())
            leaf = next(one for one in self._parents if one not in parents)
            del self._parents[leaf]
            self._removed(leaf)
        self._load.publish(0, 0, len(self._parents))

    def clear(self) -> None:
        """Remove all blocks."""
        self._parents.clear()
        self._cleared()
        self._load.publish(0, 0, 0)

    def _stored(
        self, block: int, parent: int | None, tokens: list[int], adapter: str | None
    ) -> None:
        event = {
            "type": "stored",
            "token_ids": tokens,
            "num_block_tokens": [BLOCK_SIZE],
            "block_hashes": [block],
            "parent_hash": parent,
            "lora_name": adapter,
        }
        self._publisher.publish_batch([event])

    def _removed(self, block: int) -> None:
        self._publisher.publish_removed([block])

    def _cleared(self) -> None:
        self._publisher.publish_all_cleared()


class EngineCache(Cache):
    """A cache whose engine publishes by itself, as vLLM does: its worker relays the events."""

    def __init__(self, publisher: KvEventPublisher, load: WorkerMetricsPublisher) -> None:
        super().__init__(publisher, load)
        self._socket = EnginePublisher(_ENGINE_ENDPOINT)
        self._number = 0

    def _stored(
        self, block: int, parent: int | None, tokens: list[int], adapter: str | None
    ) -> None:
        self._send("BlockStored", [block], parent, tokens, BLOCK_SIZE, None, "GPU")

    def _removed(self, block: int) -> None:
        self._send("BlockRemoved", [block], "GPU")

    def _cleared(self) -> None:
        self._send("AllBlocksCleared")

    def _send(self, *event: Any) -> None:
        payload = msgspec.msgpack.encode((time.time(), [event], None))
        self._socket.send([b"", struct.pack(">Q", self._number), payload])
        self._number += 1


class CountingEngine:
    """Says how many tokens a prompt has, in tokens of its own."""

    def __init__(self, cache: Cache, passes: FpmDirectPublisher) -> None:
        self._cache = cache
        self._passes = passes

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        prompt, routing = request["token_ids"], request.get("routing") or {}
        adapter = routing.get("lora_name")
        if len(prompt) == 1:
            self._cache.clear()
        self._cache.add(prompt, adapter)
        self._report(len(prompt))
        child = context.detached("a child")
        context.link_child(child)
        if context.id() == child.id() or context.is_stopped() != child.is_stopped():
            _wrong(f"the context {context.id()} and its child differ")
        tokens = continuation_of(prompt, adapter or "")
        most = request["stop_conditions"].get("max_tokens") or len(tokens)
        for token in tokens[:most]:
            if context.is_stopped() != child.is_stopped():
                _wrong("a child goes on when its request is stopped")
            if context.is_stopped():
                return
            yield {"token_ids": [token]}
            await asyncio.sleep(0.01)
        reason = "length" if len(tokens) > most else "stop"
        yield {"token_ids": [], "finish_reason": reason}

    def _report(self, tokens: int) -> None:
        self._passes.publish(
            dp_rank=0,
            scheduled_num_prefill_requests=1,
            scheduled_sum_prefill_tokens=tokens,
            scheduled_sum_prefill_kv_tokens=0,
            scheduled_num_decode_requests=0,
            scheduled_sum_decode_kv_tokens=0,
            queued_num_prefill_requests=0,
            queued_sum_prefill_tokens=0,
            queued_num_decode_requests=0,
            queued_sum_decode_kv_tokens=0,
            wall_time_secs=0.01,
        )


async def _spoken(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    """Yield chunks of OpenAI's: the last message in capitals, word by word, or a call."""
    if "input" in request:
        given = request["input"]
        texts = [given] if isinstance(given, str) else given
        rows = [
            {"object": "embedding", "index": number, "embedding": [float(len(text)), 0.5]}
            for number, text in enumerate(texts)
        ]
        yield {"object": "list", "data": rows, "model": request["model"]}
        return
    chat = "messages" in request
    words = (request["messages"][-1]["content"] if chat else request["prompt"]).split()
    if words[0] == "teapot":
        raise HttpError(418, "short and stout")
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"id": "t1", "object": kind, "created": 1, "model": request["model"]}

    def chunk(text: str, reason: str | None, **more: Any) -> dict[str, Any]:
        part: dict[str, Any] = {"text": text} if not chat else {"delta": {"content": text, **more}}
        return {**head, "choices": [{"index": 0, **part, "finish_reason": reason}]}

    if words[0] == "weather":
        for text in ('{"city": ', '"Paris"}'):
            begin = {"id": "call_1", "type": "function"} if text[0] == "{" else {}
            named = {"name": "get_weather"} if begin else {}
            call = {"index": 0, **begin, "function": {**named, "arguments": text}}
            yield chunk("", None, tool_calls=[call])
        yield chunk("", "tool_calls")
    else:
        for number, word in enumerate(words):
            if context.is_stopped():
                return
            yield chunk(word.upper() + " ", None, **({} if number else {"role": "assistant"}))
            await asyncio.sleep(0.01)
        yield chunk("", "stop")
    most = {"prompt_tokens": SPOKEN_TOKENS, "completion_tokens": len(words)}
    usage = {**most, "total_tokens": SPOKEN_TOKENS + len(words)}
    yield {**head, "choices": [], "usage": usage}


@dynamo_endpoint(str, str)
async def _vectors(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    inputs = request["token_ids"]
    found = [vector_of(tokens) for tokens in inputs]
    yield {"embeddings": found, "prompt_tokens": sum(map(len, inputs))}


async def _whole(request: dict[str, Any], *, context: Context) -> dict[str, Any]:
    return {"token_ids": list(encoded(reply_of(request["token_ids"]))), "finish_reason": "stop"}


class Asking:
    """A model that asks the one that counts, by each way of a client in turn."""

    def __init__(self, client: Any, router: KvRouter, passes: FpmEventSubscriber) -> None:
        self._passes = passes
        self._begun_s = time.monotonic()
        self._client = client
        self._router = router
        self._unary = LLMUnaryClient(client)
        self._turn = 0

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        self._turn += 1
        ways = (self._called, self._routed, self._whole)
        async for item in ways[self._turn % len(ways)](request, context):
            yield item

    async def _called(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        client = self._client
        ways = (client.generate, client.random, client.round_robin, client.device_aware_weighted)
        way = ways[self._turn // 3 % len(ways)]
        if self._turn % 2:
            stream = await way(request, annotated=False, context=context)
        else:
            worker = client.instance_ids()[0]
            stream = await client.direct(request, worker, annotated=False, context=context)
        async for item in stream:
            yield item

    async def _routed(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """Ask the router what it knows, and send the request through it."""
        router, tokens = self._router, request["token_ids"]
        worker, rank, blocks = await router.best_worker(tokens, request_id=context.id())
        loads = await router.get_potential_loads(tokens)
        await router.mark_prefill_complete(context.id())
        await router.free(context.id())
        scores = await router.get_overlap_scores(tokens)
        reported = (str(worker), 0) in self._passes.get_recent_stats()
        if not reported and time.monotonic() - self._begun_s > _BEAT_S:
            _wrong(f"no forward pass of {worker:x} arrived")
        if str(worker) not in self._passes.get_model_cards():
            _wrong(f"no card of {worker:x} is known")
        known = worker in self._client.instance_ids() and len(loads) == 1 and bool(scores)
        if not known or rank or blocks > len(tokens) // BLOCK_SIZE:
            _wrong(f"a router chose {worker:x}, rank {rank}, {blocks} blocks; loads {loads}")
        stream = await router.generate(tokens, request["model"], request["stop_conditions"])
        async for item in stream:
            yield {key: value for key, value in item.items() if value is not None}

    async def _whole(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        whole = await self._unary.complete(request, context=context)
        yield {key: value for key, value in whole.items() if value is not None}


def _wrong(what: str) -> None:
    fake_os.machine().failures.append(f"api worker: {what}")


async def _serve(
    runtime: DistributedRuntime, name: str, generate: Generate, given: ModelInput, kind: ModelType
) -> None:
    endpoint = runtime.namespace("box").component(name).endpoint("generate")
    config = ModelRuntimeConfig()
    config.kv_event_publishing_enabled = False
    await register_model(given, kind, endpoint, str(MODEL), name, runtime_config=config)
    await endpoint.serve_endpoint(generate)


async def _serve_counted(runtime: DistributedRuntime, name: str = "counted") -> None:
    endpoint = runtime.endpoint(f"box.{name}.generate")
    config = ModelRuntimeConfig()
    config.total_kv_blocks = _CACHED_BLOCKS
    kinds = ModelType.Chat | ModelType.Completions
    register = functools.partial(
        register_model, ModelInput.Tokens, kinds, endpoint, kv_cache_block_size=BLOCK_SIZE
    )
    load = WorkerMetricsPublisher()
    await load.create_endpoint(endpoint)
    is_engine = name == "engine"
    publisher = KvEventPublisher(
        endpoint, kv_block_size=BLOCK_SIZE, zmq_endpoint=_ENGINE_ENDPOINT if is_engine else None
    )
    cache = (EngineCache if is_engine else Cache)(publisher, load)
    passes = FpmDirectPublisher(endpoint, str(endpoint.connection_id()))
    engine = CountingEngine(cache, passes)
    process = fake_os.machine().current
    assert process is not None
    process.parts.append(  # as the checks find the caches of mock engines
        SimpleNamespace(
            publishes_events=True, endpoint=endpoint, ranks=[SimpleNamespace(pool=cache, load=0)]
        )
    )
    await register(str(MODEL), name, runtime_config=config)
    if is_engine:
        await endpoint.serve_endpoint(engine.generate)
        return
    await update_model_taints(endpoint, {"pool=api"})
    adapter = functools.partial(register, str(MODEL), base_model_path=str(MODEL))
    await adapter(lora_name=ADAPTERS[0])
    runtime.tasks.spawn(_come_and_go(endpoint, adapter), name="adapter")
    await endpoint.serve_endpoint(engine.generate)


async def _come_and_go(endpoint: Any, adapter: Callable[..., Awaitable[None]]) -> None:
    """Load and unload the second adapter; the machine keeps when."""
    changes = fake_os.machine().adapter_changes
    with suppress(EngineShutdown):  # the process may end at any moment
        while True:
            await adapter(lora_name=ADAPTERS[1])
            changes.append((fake_os.machine().now_s, True))
            await asyncio.sleep(_LOADED_S)
            changes.append((fake_os.machine().now_s, False))
            await unregister_model(endpoint, ADAPTERS[1])
            await asyncio.sleep(_AWAY_S)


async def _serve_asking(runtime: DistributedRuntime) -> None:
    counted = runtime.endpoint("box.counted.generate")
    client = await counted.client()
    await client.wait_for_instances()
    passes = FpmEventSubscriber(counted)
    passes.start_tracking()
    asking = Asking(client, KvRouter(counted, BLOCK_SIZE), passes)
    await _serve(runtime, "asking", asking.generate, ModelInput.Tokens, ModelType.Completions)


@dynamo_worker()
async def _main(runtime: DistributedRuntime, written: Sequence[str]) -> None:
    text = ModelType.Chat | ModelType.Completions | ModelType.Embedding
    async with asyncio.TaskGroup() as group:
        for work in (
            _serve_counted(runtime),
            _serve_counted(runtime, "engine"),
            _serve(runtime, "spoken", _spoken, ModelInput.Text, text),
            _serve(runtime, "vectors", _vectors, ModelInput.Tokens, ModelType.Embedding),
            UnaryChatModel(str(MODEL), "box", "whole").serve(runtime, _whole),
            _serve_asking(runtime),
            *(serve_written(runtime, name) for name in written),
        ):
            group.create_task(work)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM; ``--written`` has names of :mod:`written_models`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--written", default="")
    names = parser.parse_args(argv).written
    uvloop.run(_main(names.split(",") if names else ()))


if __name__ == "__main__":
    main(sys.argv[1:])
