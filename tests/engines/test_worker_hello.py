"""The example worker, written against Dynamo's API, as a real process."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

from deployment import MODEL, ROOT, Deployment
from kv_events import held_after
from mocker_kit import caller, leftovers

from dynamo.protocols.kv import KvQuery


def start(deployment: Deployment) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "examples/worker_hello.py"), str(MODEL)]
    with (deployment.logs / "hello.log").open("wb") as log:
        process = subprocess.Popen(command, env=deployment.env, stdout=log, stderr=log)
    deployment.processes.append(process)
    return process


async def test_a_worker_written_for_dynamo_runs_unchanged(deployment: Deployment) -> None:
    process = start(deployment)
    async with caller(deployment, component="hello") as here:
        (instance,) = here.client.instance_ids()
        items = await here.answer(list(range(40)), 20)
        assert [item["token_ids"] for item in items[:-1]] == [[token] for token in range(20)]
        assert items[-1]["finish_reason"] == "stop"
        (card,) = (await here.runtime.discovery.list("v1/mdc/")).values()
        registered = json.loads(card)
        assert (registered["display_name"], registered["kv_cache_block_size"]) == ("hello", 16)
        assert registered["runtime_config"] == {"total_kv_blocks": 1000}
        await here.until(lambda: (instance, 0) in here.loads)
        dump = await here.query(KvQuery())
        assert len(held_after(dump.events)) == 1
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0, deployment.tail()
    assert leftovers(deployment.state_dir) == []
