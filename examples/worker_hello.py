"""A worker in fifty lines, written against Dynamo's Python API: it echoes every prompt.

python -m dynamo.frontend &
python examples/worker_hello.py examples/model
curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \
        -d '{"model": "hello", "messages": [{"role": "user", "content": "good morning"}]}'
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    compute_block_hash_for_seq,
    register_llm,
)
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

BLOCK_SIZE = 16


class EchoEngine:
    """The engine. Its cache evicts nothing, so it publishes each new block once."""

    def __init__(self, events: KvEventPublisher, load: WorkerMetricsPublisher) -> None:
        self.events = events
        self.load = load
        self.cached: set[int] = set()

    async def generate(
        self, request: dict[str, Any], context: Context
    ) -> AsyncIterator[dict[str, Any]]:
        """Stream the prompt's own tokens back."""
        prompt: list[int] = request["token_ids"]
        self.publish_block(prompt)
        for token in prompt[: request["stop_conditions"].get("max_tokens")]:
            if context.is_stopped():
                return
            yield {"token_ids": [token]}
        yield {"token_ids": [], "finish_reason": "stop"}

    def publish_block(self, prompt: list[int]) -> None:
        """Publish the first block of ``prompt`` if it is new; a real engine publishes all."""
        for block_hash in compute_block_hash_for_seq(prompt[:BLOCK_SIZE], BLOCK_SIZE):
            if block_hash not in self.cached:
                self.cached.add(block_hash)
                self.events.publish_stored(prompt[:BLOCK_SIZE], [BLOCK_SIZE], [block_hash])
        self.load.publish(0, len(self.cached))


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Register the model and serve until SIGTERM."""
    namespace = runtime.namespace(os.environ.get("DYN_NAMESPACE", "dynamo"))
    endpoint = namespace.component("hello").endpoint("generate")
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 1000
    await register_llm(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        sys.argv[1],
        "hello",
        kv_cache_block_size=BLOCK_SIZE,
        runtime_config=config,
    )
    load = WorkerMetricsPublisher()
    await load.create_endpoint(endpoint)
    engine = EchoEngine(KvEventPublisher(endpoint, kv_block_size=BLOCK_SIZE), load)
    await endpoint.serve_endpoint(engine.generate)


if __name__ == "__main__":
    uvloop.run(main())
