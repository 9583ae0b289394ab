"""A worker of ``ModelInput.Text``, written against Dynamo's Python API: it echoes the last message.

``python worker_text.py MODEL_DIRECTORY``
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.llm import HttpError, ModelInput, ModelType, register_llm
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker


async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    """Yield chunks of a chat, or one embedding."""
    if "input" in request:
        row = {"object": "embedding", "index": 0, "embedding": [float(len(request["input"]))]}
        yield {"object": "list", "data": [row], "model": request["model"]}
        return
    words = request["messages"][-1]["content"].split()
    if words[0] == "teapot":
        raise HttpError(418, "short and stout")
    head = {"id": "t1", "object": "chat.completion.chunk", "created": 1, "model": request["model"]}
    for number, word in enumerate(words):
        if context.is_stopped():
            return
        delta = {"content": word + " "} | ({} if number else {"role": "assistant"})
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
    yield {**head, "choices": [], "usage": usage}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Register the model and serve until SIGTERM."""
    namespace = runtime.namespace(os.environ.get("DYN_NAMESPACE", "dynamo"))
    endpoint = namespace.component("text").endpoint("generate")
    kinds = ModelType.Chat | ModelType.Embedding
    await register_llm(ModelInput.Text, kinds, endpoint, sys.argv[1], "text")
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main())
