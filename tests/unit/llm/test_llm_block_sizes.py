"""A worker logs an error if the block sizes of its card and its KV events differ."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.llm import KvEventPublisher, ModelInput, ModelType, register_model
from dynamo.runtime import DistributedRuntime, Endpoint

MODEL = str(Path(__file__).resolve().parents[3] / "examples/model")


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    settings = RuntimeSettings(namespace="ns", state_dir=str(tmp_path))
    made = DistributedRuntime(settings=settings, system=SystemSettings())
    yield made.endpoint("ns.comp.generate")
    await made.close()


async def register(endpoint: Endpoint, size: int) -> None:
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, MODEL, "m", kv_cache_block_size=size
    )


@pytest.mark.parametrize("card_first", [True, False])
async def test_two_sizes(
    endpoint: Endpoint, card_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if card_first:
        await register(endpoint, 16)
    KvEventPublisher(endpoint, kv_block_size=32)
    if not card_first:
        assert not caplog.records
        await register(endpoint, 16)
    errors = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(errors) == 1
    text = errors[0].getMessage()
    assert "register_model 16" in text and "KvEventPublisher 32" in text


async def test_one_size(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    await register(endpoint, 16)
    KvEventPublisher(endpoint, kv_block_size=16)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
