"""The middle tier: passes each request on, with the context that it came with.

python examples/cancellation/middle.py
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import uvloop

from dynamo.runtime import Client, Context, DistributedRuntime, dynamo_worker


class Middle:
    """Forwards requests to the workers behind ``client``."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def generate(self, request: int, context: Context) -> AsyncIterator[int]:
        """Yield what a worker yields. ``context=`` is all that cancellation needs."""
        async for item in await self.client.generate(request, context=context):
            yield item.data()
        if context.is_stopped():
            print(f"middle: {context.id()} was cancelled", flush=True)


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Serve until SIGTERM."""
    namespace = runtime.namespace(os.environ.get("DYN_NAMESPACE", "dynamo"))
    client = await namespace.component("counter").endpoint("generate").client()
    await client.wait_for_instances()
    print("middle: ready", flush=True)
    endpoint = namespace.component("middle").endpoint("generate")
    await endpoint.serve_endpoint(Middle(client).generate)


if __name__ == "__main__":
    uvloop.run(main())
