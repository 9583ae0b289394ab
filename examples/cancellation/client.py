"""The client: reads a few items, then cancels.

python examples/cancellation/client.py --how stop
"""

from __future__ import annotations

import argparse
import os

import uvloop

from dynamo.runtime import Client, Context, DistributedRuntime, dynamo_worker
from dynamo.runtime.endpoints.responses import Responses

ITEMS = 1000


async def read(client: Client, how: str, after: int) -> None:
    """Request ``ITEMS`` items and cancel as soon as ``after`` of them have arrived."""
    context = Context()
    responses = await client.generate(ITEMS, annotated=False, context=context)
    received = await first(responses, after)
    if how == "stop":  # orderly: what the worker has sent before is still read
        context.stop_generating()
        received += [item async for item in responses]
    elif how == "kill":  # at once: the iteration would raise
        context.kill()
    else:  # leave: the reader goes away, as a client that disconnects
        await responses.aclose()
    print(f"client: {context.id()} cancelled ({how}) after {len(received)} items", flush=True)


async def first(responses: Responses, count: int) -> list[int]:
    """Return the first ``count`` items."""
    received: list[int] = []
    async for item in responses:
        received.append(item)
        if len(received) == count:
            break
    return received


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    """Send one request through the middle tier, or straight to a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=("stop", "kill", "leave"), default="stop")
    parser.add_argument("--after", type=int, default=5, help="cancel after this many items")
    parser.add_argument("--direct", action="store_true", help="without the middle tier")
    given = parser.parse_args()
    namespace = runtime.namespace(os.environ.get("DYN_NAMESPACE", "dynamo"))
    component = namespace.component("counter" if given.direct else "middle")
    client = await component.endpoint("generate").client()
    await client.wait_for_instances()
    await read(client, given.how, given.after)


if __name__ == "__main__":
    uvloop.run(main())
