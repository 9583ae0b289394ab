"""The local connector against a real `dynamo serve`: workers added and removed, at each step."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import psutil
import pytest
from serving import QUICKSTART, ROOT, Serving

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.planner.connector import READY, ActionFailed
from dynamo.planner.local.connector import open_connector

SCHEMA = json.loads((ROOT / "statefiles/statefile.schema.json").read_text())
MODEL = QUICKSTART.parent / "model"
GRAPH = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT}}
Decode:
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: tiny
  ServiceArgs: {{resources: {{gpu: 1}}, graceful_timeout: 10, envs: {{SECRET: hidden}}}}
"""


def runtime(serving: Serving) -> RuntimeSettings:
    return RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))


def entries(serving: Serving) -> dict[str, Any]:
    """The entries of the decode workers, without the namespace in their names."""
    document = serving.document()
    jsonschema.validate(document, SCHEMA)
    cut = len(serving.namespace) + 1
    return {k[cut:]: v for k, v in document["components"].items() if "Decode" in k}


def test_one_two_one_none_one(serving: Serving, unused_tcp_port: int) -> None:
    """The steps of the seed: 1, 2, 1, 0 and 1 worker."""
    serving.start(GRAPH.replace("PORT", str(unused_tcp_port)), "--gpus", "3", wait="ready: ")
    base = f"{serving.namespace}_Decode"

    async def steps() -> None:
        async with open_connector(runtime(serving), PlannerSettings()) as connector:
            (worker,) = (await connector.services())["Decode"].workers
            assert (worker.name, worker.state, worker.gpus) == (base, READY, ("0",))
            first = entries(serving)["Decode"]
            assert await connector.add("Decode") == f"{base}_1"
            found = entries(serving)
            assert found["Decode"] == first
            assert found["Decode_1"]["resources"] == {"allocated_gpus": ["1"]}
            assert found["Decode_1"]["argv"] == first["argv"] and found["Decode_1"]["lease"]
            assert "reserved_by" not in found["Decode_1"] and "hidden" not in json.dumps(found)
            env = psutil.Process(found["Decode_1"]["processes"][0]["pid"]).environ()
            assert (env["CUDA_VISIBLE_DEVICES"], env["SECRET"]) == ("1", "hidden")
            service = (await connector.services())["Decode"]
            assert [one.state for one in service.workers] == [READY, READY]
            assert (service.model, service.pool, service.gpus_per_worker) == ("tiny", "decode", 1)
            assert await connector.remove("Decode") == f"{base}_1"
            assert entries(serving) == {"Decode": first}
            assert await connector.remove("Decode") == base
            left = entries(serving)["Decode"]
            assert (left["resources"], left["lease"], left["state"]) == ({}, None, "running")
            assert left["argv"] == first["argv"] and not left["processes"]
            assert (await connector.services())["Decode"].workers == ()
            with pytest.raises(ActionFailed, match="Decode: no worker to remove"):
                await connector.remove("Decode")
            assert await connector.add("Decode") == f"{base}_1"
            found = entries(serving)
            assert found["Decode_1"]["resources"] == {"allocated_gpus": ["0"]}
            assert found["Decode"]["resources"] == {}

    asyncio.run(steps())
    assert serving.stop() == 0
    assert "restarting it" not in serving.text()
    serving.assert_clean()
