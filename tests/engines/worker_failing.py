"""A worker whose requests fail; the first prompt token selects how."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.llm import HttpError, ModelInput, ModelType, register_llm
from dynamo.llm.exceptions import EngineShutdown
from dynamo.runtime import DistributedRuntime, dynamo_worker


class Unprintable(Exception):
    """An exception whose own text asks to end the process."""

    @property
    def status(self) -> int:
        raise SystemExit("secret")

    def __str__(self) -> str:
        raise SystemExit("secret")


WAYS: dict[int, BaseException] = {
    1: ValueError("n is odd"),
    2: HttpError(418, "short and stout"),
    3: HttpError(503, "secret"),
    4: HttpError(500, "secret"),
    5: RuntimeError("secret"),
    6: asyncio.CancelledError(),
    7: EngineShutdown("secret"),
    9: SystemExit("secret"),
    10: GeneratorExit("secret"),
    11: KeyboardInterrupt("secret"),
    12: RecursionError("secret"),
    13: MemoryError("secret"),
    14: Unprintable(),
}


async def end(body: Any) -> Any:
    """Fail as a request does, in an engine route."""
    raise WAYS[body["way"]]


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Fail, or answer with one token."""
    first = request["token_ids"][0]
    if first in WAYS:
        raise WAYS[first]
    yield {"token_ids": [300], "finish_reason": "stop"}


@dynamo_worker()
async def main(runtime: DistributedRuntime, model_path: str) -> None:
    """Serve the model ``tiny``."""
    endpoint = runtime.namespace("dynamo").component("backend").endpoint("generate")
    runtime.register_engine_route("end", end)
    kinds = ModelType.Chat | ModelType.Completions
    await register_llm(ModelInput.Tokens, kinds, endpoint, model_path, "tiny")
    await endpoint.serve_endpoint(generate, metrics_labels=[("model", "tiny")])


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
