"""Tests with sockets run on uvloop, as the frontend does, and on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

SOCKETS = ("test_http_server.py", "test_http_tls.py", "test_http_access.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], Any]]:
    """The loops that an async test of this directory runs on."""
    factories: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in SOCKETS:
        factories["uvloop"] = uvloop.new_event_loop
    return factories
