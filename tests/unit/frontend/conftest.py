"""The frontend runs on uvloop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], Any]]:
    """The loop that an async test of this directory runs on."""
    return {"uvloop": uvloop.new_event_loop}
