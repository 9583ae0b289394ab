"""A worker in Dynamo's Python API that says of how many tokens the images of a prompt consist."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    images = request["extra_args"]["mm_hashes"]
    yield {"token_ids": [5], "extra_args": {"mm_expansions": [[7] * 7 for _ in images]}}
    yield {"token_ids": [6], "finish_reason": "stop"}


@dynamo_worker()
async def main(runtime: DistributedRuntime, model_path: str) -> None:
    """Serve the model ``eyes``."""
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, model_path, "eyes")
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
