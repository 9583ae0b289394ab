"""Workers of a deployment stop after its frontends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo.runtime.process import stop_order
from dynamo.runtime.process.stop_order import (
    STOP_STAGE,
    is_supervised,
    wait_for_frontends,
    write_stop_stage,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of the namespace in the environment."""
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_NAMESPACE", "ns")
    (tmp_path / "ns").mkdir()
    return tmp_path / "ns"


async def test_at_once_when_it_is_the_workers_turn(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_order, "_NOTICE_S", 1000)
    write_stop_stage(run, workers=True)
    async with asyncio.timeout(10):
        await wait_for_frontends(1000)


async def test_after_the_frontends(run: Path) -> None:
    waiting = asyncio.create_task(wait_for_frontends(60))
    await asyncio.sleep(0)
    write_stop_stage(run, workers=False)  # the worker's copy of the signal came first
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.8):
            await asyncio.shield(waiting)
    write_stop_stage(run, workers=True)
    async with asyncio.timeout(10):
        await waiting


@pytest.mark.parametrize("stage", [None, b"frontends", b"nonsense"])
async def test_the_wait_has_an_end(run: Path, stage: bytes | None) -> None:
    if stage is not None:
        (run / STOP_STAGE).write_bytes(stage)
    async with asyncio.timeout(10):
        await wait_for_frontends(0.1)


def test_a_stage_that_cannot_be_written_is_reported(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_stop_stage(run / "missing", workers=True)
    assert "workers may stop before the frontends" in caplog.text


def test_only_processes_of_dynamo_serve_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_WATCHER_NAME", raising=False)
    assert not is_supervised()
    monkeypatch.setenv("DYN_WATCHER_NAME", "dynamo_Worker")
    assert is_supervised()
