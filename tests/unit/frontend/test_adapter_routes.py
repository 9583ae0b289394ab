"""Adapters at run time behind a frontend: 1,000 that come and go leave nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2 as httpx
import pytest
from until import until

from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.frontend.requests.recent import RequestFigures
from dynamo.frontend.service import Frontend
from dynamo.mocker.arguments import engine_shape
from dynamo.mocker.settings import MockerSettings
from dynamo.mocker.worker import MockerWorker, make_plan
from dynamo.runtime import DistributedRuntime

MODEL_DIR = Path(__file__).parents[3] / "examples" / "model"
ADAPTERS = 1000
AT_ONCE = 50
SETTLED_S = 3.0


class Left(NamedTuple):
    """What an adapter could leave in the processes of a frontend and of a worker."""

    objects: int
    rows: int
    tasks: int
    files: int


LEFT = Left(300, 0, 3, 8)
"""What connections and timers may add."""


class Site:
    """A frontend in kv mode and a simulated worker, each with its runtime."""

    def __init__(self, tmp_path: Path) -> None:
        settings = RuntimeSettings(state_dir=str(tmp_path / "state"), namespace="ns")
        self.runtime = DistributedRuntime(None, settings)
        self.frontend = Frontend(
            self.runtime, FrontendSettings(http_port=0, ui=False), RouterSettings(mode="kv")
        )
        mocker = MockerSettings(speedup_ratio=0)
        worker = WorkerSettings(model_path=str(MODEL_DIR), model_name="tiny")
        self.worker_runtime = DistributedRuntime(None, settings)
        plan = make_plan(settings, None, worker, mocker, engine_shape(mocker))
        self.worker = MockerWorker(plan, self.worker_runtime, 0)
        self.adapter = tmp_path / "adapter"
        self.adapter.mkdir()
        (self.adapter / "adapter_config.json").write_text('{"r": 8}')
        self.client: httpx.AsyncClient

    async def post(self, path: str, **body: object) -> None:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text

    async def load(self, name: str) -> None:
        await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(self.adapter))

    async def use(self, name: str) -> None:
        await self.post("/v1/completions", model=name, prompt="a b c d e f g h", max_tokens=2)

    async def unload(self, name: str) -> None:
        await self.post("/v1/unload_lora_adapter", lora_name=name)

    async def come_and_go(self, count: int, first: int) -> None:
        """Load, use and unload adapters, some at once, each with a name of its own."""
        for start in range(first, first + count, AT_ONCE):
            names = [f"adapter-{number}" for number in range(start, start + AT_ONCE)]
            for step in (self.load, self.use, self.unload):
                await asyncio.gather(*map(step, names))

    async def forgotten(self) -> None:
        models = self.frontend.models
        await until(lambda: [entry.name for entry in models.entries()] == ["tiny"])


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    await site.worker_runtime.start()
    serving = asyncio.ensure_future(site.worker.serve())
    host, port = await site.frontend.start()
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as site.client:
        await until(lambda: bool(site.frontend.models.listed()))
        yield site
    await site.frontend.close()
    await site.runtime.close()
    await site.worker_runtime.close()
    await serving


def left(site: Site) -> Left:
    # The last 1,000 requests, and the windows of the last models that are gone, stay by design.
    records = site.frontend._requests.metrics.recent.records
    assert all(type(record) is RequestFigures for record in records), "metrics of a model are kept"
    records.clear()
    site.frontend._status.windows._windows.clear()
    gc.collect()
    return Left(
        len(gc.get_objects()),
        len(site.runtime.metrics.exposition("")[0].decode().splitlines()),
        len(asyncio.all_tasks()),
        len(list(Path("/proc/self/fd").iterdir())),
    )


async def test_a_thousand_adapters_leave_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        # More than GONE_MODELS, whose counters stay.
        await site.come_and_go(2 * AT_ONCE, 0)
        await site.forgotten()
        await asyncio.sleep(SETTLED_S)
        left(site)  # the first page of metrics makes what later ones use
        before = left(site)
        await site.come_and_go(ADAPTERS, 2 * AT_ONCE)
        await site.forgotten()
        await asyncio.sleep(SETTLED_S)
        after = left(site)
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert all(more <= most for more, most in zip(grown, LEFT, strict=True)), (before, after)


async def test_bodies_and_files_that_are_wrong_are_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as site:
        (site.adapter / "adapter_config.json").write_text('{"r": "8"}')
        name = "n" * 257
        for path, body, text in (
            ("load", {"lora_name": name, "lora_path": "/a"}, "length <= 256 - at `$.lora_name`"),
            ("load", {"lora_name": "a", "lora_path": "/" * 4097}, "<= 4096 - at `$.lora_path`"),
            ("unload", {"lora_name": name}, "length <= 256 - at `$.lora_name`"),
            ("load", {"lora_name": "a", "lora_path": str(site.adapter)}, "'8' is no number"),
        ):
            answer = await site.client.post(f"/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == 400 and text in answer.json()["message"], answer.text
    # They are the client's errors.
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
