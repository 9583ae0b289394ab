"""One simulated worker on a real runtime: its card, and the errors of a broken engine."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import WorkerUnavailable
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.worker import MockerWorker, SimulatedEngine, WorkerPlan, make_plan
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard
from dynamo.protocols.engine import PreprocessedRequest, StopConditions
from dynamo.runtime import DistributedRuntime
from dynamo.worker.lifecycle import WorkerLifecycle

MODEL = Path(__file__).resolve().parents[3] / "examples/model"


def plan(settings: RuntimeSettings, **mocker: object) -> WorkerPlan:
    engine = MockerSettings(**mocker)  # type: ignore[arg-type]
    worker = WorkerSettings(model_path=str(MODEL))
    return make_plan(settings, "blue", worker, engine, engine_shape(engine))


def runtime(settings: RuntimeSettings) -> DistributedRuntime:
    return DistributedRuntime(settings=settings, system=SystemSettings(grace_period_s=0))


async def test_the_card_has_the_fields_that_routers_read(tmp_path: Path) -> None:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path / "s"))
    engine = {"num_gpu_blocks": 100, "block_size": 16, "speedup_ratio": 0.0}
    made = plan(settings, startup_time_s=2.5, **engine)
    pages: list[str] = []
    caller, lifecycle = runtime(settings), WorkerLifecycle()

    async def worker() -> None:
        async with lifecycle.runtime(runtime(settings)) as made_runtime:
            await MockerWorker(made, made_runtime, 0).serve()
            pages.append(made_runtime.metrics.render().decode())

    async def check_card() -> None:
        client = await caller.endpoint("ns-blue.backend.generate").client()
        await client.wait_for_instances()
        ((key, value),) = (await caller.discovery.list("v1/mdc/")).items()
        card = msgspec.json.decode(value, type=ModelCard)
        assert key.startswith("v1/mdc/ns-blue/backend/generate/")
        assert (card.display_name, card.kv_cache_block_size) == ("model", 16)
        assert card.context_length == 1600 and card.runtime_config.total_kv_blocks == 100
        assert (card.model_type, card.model_input) == ("Chat | Completions", "Tokens")
        await caller.discovery.revoke(card.instance_id)

    async with asyncio.timeout(20):
        await lifecycle.run([worker, check_card])
    await caller.close()
    (load_time,) = re.findall(r"\ndynamo_component_model_load_time_seconds\{.*\} (\S+)", pages[0])
    assert float(load_time) == 2.5


async def test_a_broken_engine_fails_requests_at_once(tmp_path: Path) -> None:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path / "s"))
    made = plan(settings)
    caller, lifecycle = runtime(settings), WorkerLifecycle()
    failures: list[Exception] = []

    async def worker() -> None:
        async with lifecycle.runtime(runtime(settings)) as made_runtime:
            mocker = MockerWorker(made, made_runtime, 0)
            mocker.ranks[0].scheduler.commit = broken  # type: ignore[method-assign]
            await mocker.serve()

    def broken(batch: object) -> None:
        raise RuntimeError("out of imaginary memory")

    async def call() -> None:
        client = await caller.endpoint("ns-blue.backend.generate").client()
        await client.wait_for_instances()
        request = PreprocessedRequest("model", codec.tokens([1, 2]), StopConditions(max_tokens=5))
        try:
            async for _ in await client.random(request):
                pass
        except WorkerUnavailable as error:
            failures.append(error)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        calling = group.create_task(call())
        with pytest.raises(ExceptionGroup):
            await lifecycle.run([worker])
        await calling
    assert len(failures) == 1
    await caller.close()
    assert not [p for p in (tmp_path / "s/ns/store").rglob("*") if p.is_file()]


async def test_a_simulated_engine_falls_asleep_when_its_requests_have_ended() -> None:
    rank: Any = SimpleNamespace(load=1, idle=asyncio.Event(), cleared=0)

    def clear_cache() -> None:
        rank.cleared += 1

    rank.clear_cache = clear_cache
    engine = SimulatedEngine([rank], 0.0)
    sleeping = asyncio.ensure_future(engine.sleep())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not await engine.is_sleeping() and rank.cleared == 0
    rank.idle.set()
    await sleeping
    assert await engine.is_sleeping() and rank.cleared == 1
