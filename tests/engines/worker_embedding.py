"""A worker of an embedding model in Dynamo's Python API: the vector of an input is its length."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker


async def embed(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    inputs = request["token_ids"]
    size = request.get("dimensions") or 2
    vectors = [[float(len(ids)), *[0.5] * (size - 1)] for ids in inputs]
    tokens = sum(map(len, inputs))
    if tokens == 13:
        vectors.pop()  # one too few
    yield {"embeddings": vectors, "prompt_tokens": tokens, "total_tokens": tokens}


@dynamo_worker()
async def main(runtime: DistributedRuntime, model_path: str) -> None:
    """Serve the model ``vectors``."""
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    await register_model(ModelInput.Tokens, ModelType.Embedding, endpoint, model_path, "vectors")
    await endpoint.serve_endpoint(embed)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
