"""The planner in a running deployment: a step of the load, a kill, a reload."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
from deployment import MODEL, free_port
from forked_kit import run_verb
from load_kit import under_load
from serving import Serving

from dynamo.planner.live.decisions import DECISIONS_FILE, DecisionRecord
from dynamo.status.logs import EventReader

GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
Worker:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  block-size: 4
  num-gpu-blocks-override: 48
  ServiceArgs: {{resources: {{gpu: 1}}}}
Planner:
  run: dynamo.planner
  adjustment-interval: 1
  metric-pulling-interval: 0.1
  max-gpu-budget: 4
  decode-kv-scale-up-threshold: 0.7
  decode-kv-scale-down-threshold: 0.3
  log-dir: {logs}
"""
OWN_ENGINE = """
import asyncio, os, sys
import uvloop
from dynamo.llm import (
    ModelInput, ModelRuntimeConfig, ModelType, WorkerMetricsPublisher, register_llm
)
from dynamo.runtime import dynamo_worker

load = WorkerMetricsPublisher()
tokens = 0

async def generate(request, context):
    global tokens
    count = 0
    try:
        while count < request["stop_conditions"]["max_tokens"] and not context.is_stopped():
            await asyncio.sleep(0.02)
            count, tokens = count + 1, tokens + 1
            load.publish(kv_used_blocks=tokens // 4)
            yield {"token_ids": request["token_ids"][:1]}
        yield {"token_ids": [], "finish_reason": "length"}
    finally:
        tokens -= count
        load.publish(kv_used_blocks=tokens // 4)

@dynamo_worker()
async def main(runtime):
    component = runtime.namespace(os.environ["DYN_NAMESPACE"]).component("own")
    endpoint = component.endpoint("generate")
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 48
    await register_llm(
        ModelInput.Tokens, ModelType.Chat | ModelType.Completions, endpoint, sys.argv[2],
        sys.argv[4], kv_cache_block_size=4, runtime_config=config,
    )
    await load.create_endpoint(endpoint)
    await endpoint.serve_endpoint(generate)

uvloop.run(main())
"""
TOKENS = 96  # 24 blocks at the end of a request: ten clients fill the caches of two workers


def start(serving: Serving) -> int:
    port = free_port()
    text = GRAPH.format(port=port, model=MODEL, logs=serving.tmp_path / "tensorboard")
    serving.start(serving.graph(text), "--gpus", "4", wait="ready: http://")
    return port


def workers(serving: Serving) -> dict[str, list[int]]:
    """The GPUs of each worker in the statefile."""
    return {
        name: entry["resources"]["allocated_gpus"]
        for name, entry in serving.document()["components"].items()
        if "_Worker" in name and entry["resources"].get("allocated_gpus")
    }


def test_an_engine_of_ones_own_is_scaled(serving: Serving) -> None:
    """``max`` in its ServiceArgs says that it registers a model."""
    engine = serving.tmp_path / "engine.py"
    engine.write_text(OWN_ENGINE)
    port = free_port()
    graph = GRAPH.format(port=port, model=MODEL, logs=serving.tmp_path / "tensorboard")
    own = graph.replace("dynamo.mocker", json.dumps(["python", str(engine)]))
    own = own.replace("  block-size: 4\n  num-gpu-blocks-override: 48\n", "")
    own = own.replace("ServiceArgs: {", "ServiceArgs: {max: 2, ")
    serving.start(serving.graph(own), "--gpus", "4", wait="ready: http://.*model: tiny")
    with under_load(port, clients=1, tokens=TOKENS) as load:
        with under_load(port, clients=9, tokens=TOKENS) as more:
            serving.until(lambda: len(workers(serving)) == 2)
            serving.until(lambda: gpus_shown(serving) == [["0"], ["1"]])
        serving.until(lambda: len(workers(serving)) == 1)
    assert not load.failures and not more.failures
    assert workers(serving) == {f"{serving.namespace}_Worker": [0]}
    [model] = shown(serving)["models"]
    assert (model["model"], model["ready"]) == ("tiny", 1)
    assert serving.stop() == 0
    serving.assert_clean()


def shown(serving: Serving) -> Any:
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    return json.loads(run_verb("ps", "--json", env=env).stdout)


def gpus_shown(serving: Serving) -> list[list[str]]:
    """The GPUs of each worker that is listed: one whose GPU is reserved may not be yet."""
    return [worker["gpus"] for worker in shown(serving)["workers"]]


def changes(serving: Serving) -> list[DecisionRecord]:
    path = serving.state_dir / serving.namespace / DECISIONS_FILE
    lines = path.read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=DecisionRecord) for line in lines]
    return [record for record in records if record.changes]


def explain(serving: Serving) -> Any:
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    done = run_verb("planner", "explain", "--json", env=env, timeout=30)
    return json.loads(done.stdout)


def steps(records: list[DecisionRecord]) -> Iterator[int]:
    for record in records:
        (pool,) = record.pools
        yield pool.wanted - pool.before


def test_a_step_of_the_load_and_back(serving: Serving) -> None:
    port = start(serving)
    with under_load(port, clients=1, tokens=TOKENS):
        with under_load(port, clients=9, tokens=TOKENS):
            serving.until(lambda: len(workers(serving)) == 2)
            [planner] = serving.pids("Planner")
            subprocess.run(["kill", "-9", str(planner)], check=True)
            serving.wait_for_pids("Planner", unlike=planner)
            serving.until(lambda: len(workers(serving)) == 3, 30)
            report = explain(serving)
            assert report["running"]
            assert report["models"][0]["now"]["model"] == "tiny"
        serving.until(lambda: len(workers(serving)) == 1, 40)
    assert workers(serving) == {f"{serving.namespace}_Worker": [0]}
    directions = list(steps(changes(serving)))
    assert set(directions) == {1, -1}
    reversals = sum(a != b for a, b in itertools.pairwise(directions))
    assert reversals == 1, changes(serving)
    reader = EventReader(serving.state_dir / serving.namespace)
    scaled = [one for one in reader.all() if one.kind == "scaled"]
    reader.close()
    assert {(one.by, one.model) for one in scaled} == {("planner", "tiny")}
    # The planner was killed, perhaps before it had finished its first change.
    assert scaled[0].text.startswith(("decode 1 -> 2: ", "decode 2 -> 3: "))
    [planner] = serving.pids("Planner")
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    done = run_verb("reload", "--Planner.max-gpu-budget=3", env=env)
    assert "0 added, 1 restarted, 0 removed, 2 unchanged" in done.stdout, done
    assert serving.pids("Planner") != [planner]
    assert serving.stop() == 0
    serving.assert_clean()
    assert not explain(serving)["running"]
