"""The planner scales workers of Dynamo's Python API by their forward-pass metrics.

The worker replaces the mock worker, as Dynamo's own worker packages replace those of this package.
"""

from __future__ import annotations

import json
import urllib.request

from deployment import MODEL, ROOT, free_port
from serving import Serving

ENGINE = '''
"""A worker whose engine is as busy as the file says: running, waiting, tokens of KV."""
import asyncio
import sys

import msgspec
import uvloop
import zmq

from dynamo.llm import (
    FpmEventRelay, ModelInput, ModelRuntimeConfig, ModelType, register_model,
)
from dynamo.runtime import dynamo_worker


async def generate(request):
    yield {"token_ids": [5], "finish_reason": "stop"}


async def run(endpoint, path):
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    FpmEventRelay(endpoint, f"tcp://127.0.0.1:{port}")
    number = 0
    while True:
        number += 1
        running, waiting, tokens = map(int, open(path).read().split())
        passed = {
            "version": 1, "worker_id": str(endpoint.connection_id()), "dp_rank": 0,
            "counter_id": number, "wall_time": 0.01,
            "scheduled_requests": {
                "num_decode_requests": running, "sum_decode_kv_tokens": tokens,
            },
            "queued_requests": {"num_prefill_requests": waiting},
        }
        payload = msgspec.msgpack.encode(passed)
        if tokens >= 0:
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
        await asyncio.sleep(0.05)


@dynamo_worker()
async def main(runtime):
    endpoint = runtime.endpoint("NAMESPACE.backend.generate")
    engine = asyncio.create_task(run(endpoint, "LOAD"))
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 100
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, "MODEL", "tiny",
        kv_cache_block_size=16, runtime_config=config,
    )
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main())
'''
GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
Worker:
  run: dynamo.mocker
  model-path: {model}
  ServiceArgs: {{resources: {{gpu: 1}}, envs: {{PYTHONPATH: {path!r}}}}}
Planner:
  run: dynamo.planner
  mode: load
  adjustment-interval: 1
  metric-pulling-interval: 0.1
  max-gpu-budget: 2
"""


def test_workers_follow_the_load_of_the_engine(serving: Serving) -> None:
    load = serving.tmp_path / "load"

    def report(text: str) -> None:
        whole = load.with_suffix(".new")  # engines never read a half of it
        whole.write_text(text)
        whole.rename(load)

    report("4 0 1520")
    source = ENGINE.replace("MODEL", str(MODEL)).replace("LOAD", str(load))
    package = serving.tmp_path / "workers/dynamo/mocker"  # as docs/dynamo-workers.md has it
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(source.replace("NAMESPACE", serving.namespace))
    path = f"{serving.tmp_path / 'workers'}:{ROOT}"
    port = free_port()
    text = GRAPH.format(port=port, path=path, model=MODEL)
    serving.start(serving.graph(text), "--gpus", "2", wait="ready: http://")

    def workers() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
            found = json.load(answer)["instances"]
        return sum(one["endpoint"] == "generate" for one in found)

    serving.until(lambda: workers() == 2, 60)  # 1520 of 1600 tokens
    report("0 0 -1")  # a full engine that reports nothing any more changes nothing
    serving.wait_for("no forward-pass metrics for")
    assert workers() == 2
    report("1 0 16")
    serving.until(lambda: workers() == 1, 60)
    assert serving.stop() == 0
    serving.assert_clean()
