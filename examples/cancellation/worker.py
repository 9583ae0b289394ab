"""The last tier: an engine that counts, and looks at its context before each step.

python examples/cancellation/worker.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import uvloop

from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

STEP_S = 0.05


async def generate(request: int, context: Context) -> AsyncIterator[int]:
    """Yield 0, 1, 2, … up to ``request``, unless the request is cancelled before."""
    for number in range(request):
        if context.is_stopped():
            how = "killed" if context.is_killed() else "stopped"
            print(f"worker: {context.id()} {how} before {number}", flush=True)
            return
        yield number
        # One step of the engine. It ends early if the request is cancelled.
        await asyncio.wait([context.async_killed_or_stopped()], timeout=STEP_S)
    print(f"worker: {context.id()} finished", flush=True)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve until SIGTERM."""
    namespace = runtime.namespace(os.environ.get("DYN_NAMESPACE", "dynamo"))
    print("worker: ready", flush=True)
    await namespace.component("counter").endpoint("generate").serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main())
