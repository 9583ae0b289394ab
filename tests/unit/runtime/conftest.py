"""The planes run on uvloop; their tests also run on the loop of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dynamo.runtime.discovery import FileDiscovery

ON_BOTH = ("test_context", "test_request_", "test_events")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], Any]]:
    """The loops that an async test of this directory runs on."""
    factories: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name.startswith(ON_BOTH):
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a file store."""
    return tmp_path / "store"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[FileDiscovery]:
    """A started file discovery on ``root``."""
    discovery = FileDiscovery(root)
    await discovery.start()
    yield discovery
    await discovery.close()
