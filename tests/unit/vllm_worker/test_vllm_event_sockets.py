"""The sockets of an engine's KV events: vLLM's configuration, and what the worker connects to."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from test_vllm_preparation import vllm_modules
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.runtime import DistributedRuntime
from dynamo.vllm.engine import EngineInfo
from dynamo.vllm.worker import VllmWorker

__all__ = ["vllm_modules"]

RANKS = 2
END = b"\xff" * 8


async def test_each_rank_is_asked_at_its_own_replay_socket(tmp_path: Path) -> None:
    from dynamo.vllm.async_llm import _endpoints
    from dynamo.vllm.engine_args import _UNSET_ENDPOINT, set_event_socket

    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path / "state"))
    runtime = DistributedRuntime(settings=settings, system=SystemSettings(grace_period_s=0))
    events = SimpleNamespace(
        enable_kv_cache_events=True, endpoint=_UNSET_ENDPOINT, replay_endpoint=None
    )
    set_event_socket(SimpleNamespace(kv_events_config=events), settings, 0xAB)
    live, replay = (_endpoints(events, name, RANKS) for name in ("endpoint", "replay_endpoint"))
    assert len({*live.values(), *replay.values()}) == 2 * RANKS
    context = zmq.asyncio.Context.instance()
    sockets = []
    for rank in range(RANKS):
        for kind, address in ((zmq.PUB, live[rank]), (zmq.ROUTER, replay[rank])):
            Path(address.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True)
            sockets.append(context.socket(kind))
            sockets[-1].setsockopt(zmq.LINGER, 0)
            sockets[-1].bind(address)
    worker: Any = VllmWorker.__new__(VllmWorker)
    info = EngineInfo(
        driver="AsyncLLM",
        version="0.32",
        block_size=4,
        blocks=9,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        context_length=64,
        data_parallel_size=RANKS,
        event_endpoints=live,
        replay_endpoints=replay,
    )
    worker.engine, worker.endpoint = SimpleNamespace(info=info), runtime.endpoint("ns.c.generate")
    worker._relay_events()
    for rank in range(RANKS):
        router = sockets[2 * rank + 1]
        async with asyncio.timeout(20):
            client, empty, start = await router.recv_multipart()
        assert start == bytes(8)
        stored = ["BlockStored", [rank + 10], None, [1, 2, 3, 4], 4, None]
        payload = msgspec.msgpack.encode([time.time(), [stored], rank])
        await router.send_multipart([client, empty, b"", bytes(8), payload])
        await router.send_multipart([client, empty, b"", END, b""])
    await until(lambda: all(log.blocks() == 1 for log in logs(worker)))
    assert [log.dp_rank for log in logs(worker)] == [*range(RANKS)]
    await runtime.close()
    for socket in sockets:
        socket.close()


def logs(worker: Any) -> list[Any]:
    """Return the event log of each rank."""
    return [each._sender.event_log(each.dp_rank) for each in worker._publishers]
