"""The frontend runs on uvloop; its server is also tried on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], Any]]:
    """The loops that an async test of this directory runs on."""
    factories: dict[str, Callable[[], Any]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_http_server.py":
        factories["asyncio"] = asyncio.new_event_loop
    return factories
