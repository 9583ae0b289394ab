"""One pretended worker on a real runtime: its card, and what a broken engine does to callers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from dynamo.config.mocker import MockerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import WorkerUnavailable
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.worker import MockerWorker, WorkerPlan, make_plan
from dynamo.protocols import codec
from dynamo.protocols.card import ModelCard
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


async def test_the_card_tells_what_the_router_needs(tmp_path: Path) -> None:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path / "s"))
    made = plan(settings, num_gpu_blocks=100, block_size=16, speedup_ratio=0.0)
    caller, life = runtime(settings), WorkerLifecycle()

    async def worker() -> None:
        async with life.runtime(runtime(settings)) as own:
            await MockerWorker(made, own, 0).serve()

    async def look() -> None:
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
        await life.run([worker, look])
    await caller.close()


async def test_a_broken_engine_fails_its_callers_at_once(tmp_path: Path) -> None:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path / "s"))
    made = plan(settings)
    caller, life = runtime(settings), WorkerLifecycle()
    failures: list[Exception] = []

    async def worker() -> None:
        async with life.runtime(runtime(settings)) as own:
            mocker = MockerWorker(made, own, 0)
            mocker.ranks[0].scheduler.commit = broken  # type: ignore[method-assign]
            await mocker.serve()

    def broken(batch: object) -> None:
        raise RuntimeError("out of imaginary memory")

    async def ask() -> None:
        client = await caller.endpoint("ns-blue.backend.generate").client()
        await client.wait_for_instances()
        request = PreprocessedRequest("model", codec.tokens([1, 2]), StopConditions(max_tokens=5))
        try:
            async for _ in await client.random(request):
                pass
        except WorkerUnavailable as error:
            failures.append(error)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        asked = group.create_task(ask())
        with pytest.raises(ExceptionGroup):
            await life.run([worker])
        await asked
    assert len(failures) == 1
    await caller.close()
    assert not [p for p in (tmp_path / "s/ns/store").rglob("*") if p.is_file()]
