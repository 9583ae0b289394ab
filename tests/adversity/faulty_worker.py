"""A worker process that does as its requests say: answer, wait, block, hang, die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

engine_runs = asyncio.Event()
engine_runs.set()
dropped = asyncio.Semaphore(0)


async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    how = request.get("how", "answer")
    if how == "hang":  # the engine, until a request recovers it; the process lives
        engine_runs.clear()
    if how == "recover":
        engine_runs.set()
    await engine_runs.wait()
    if how == "dropped":
        for _ in range(request["streams"]):
            await dropped.acquire()
    if how == "block":
        time.sleep(request["seconds"])  # noqa: ASYNC251 - it must block the loop
    if how == "prefill":
        await asyncio.sleep(request["seconds"])
    end_process(how, request)
    yield {"pid": os.getpid(), "worker": "alive"}
    if how == "tokens":
        async for item in tokens(request, context):
            yield item


def end_process(how: str, request: dict[str, Any]) -> None:
    if how == "die":
        os.kill(os.getpid(), request["signal"])
    if how == "exit":
        os._exit(request["status"])


async def tokens(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    for number in range(request["tokens"]):
        await asyncio.sleep(0.01)
        if context.is_killed():
            dropped.release()
            return
        yield {"token": number}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    endpoint = runtime.endpoint("faults.worker.generate")
    await endpoint.serve_endpoint(generate, health_check_payload={"how": "answer"})


if __name__ == "__main__":
    asyncio.run(main())
