"""A worker whose engine ignores every cancellation; it prints how each request ended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.llm import ModelInput, ModelType, register_llm
from dynamo.runtime import DistributedRuntime, dynamo_worker

SILENT_S = 5.0


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Send a token at once, nothing for a while, then tokens to the end."""
    sent = 0
    try:
        yield {"token_ids": [300]}
        await asyncio.shield(asyncio.sleep(SILENT_S))
        for sent in range(100):  # noqa: B007 - printed below
            yield {"token_ids": [301]}
        yield {"token_ids": [302], "finish_reason": "stop"}
    finally:
        print(f"ended after {sent}", flush=True)


@dynamo_worker()
async def main(runtime: DistributedRuntime, model_path: str) -> None:
    """Serve the model ``tiny``."""
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    kinds = ModelType.Chat | ModelType.Completions
    await register_llm(ModelInput.Tokens, kinds, endpoint, model_path, "tiny")
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
