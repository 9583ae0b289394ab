"""Threads beside the event loop: what is stuck in the default pool stops nothing of ours."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from dynamo.llm import fetch_model
from dynamo.runtime.process.threads import in_daemon_thread, in_file_thread

MODEL = str(Path(__file__).parents[3] / "examples/model")


async def test_users_code_in_the_default_pool_holds_up_nothing() -> None:
    end = threading.Event()
    loop = asyncio.get_running_loop()
    stuck = [loop.run_in_executor(None, end.wait, 60) for _ in range(64)]
    try:
        async with asyncio.timeout(30):
            assert await in_file_thread(int, "7") == 7
            assert await in_daemon_thread(int, "7", base=8) == 7
            assert await fetch_model(MODEL)
    finally:
        end.set()
        await asyncio.wait(stuck)


async def test_both_raise_what_the_function_raises() -> None:
    for in_thread in (in_file_thread, in_daemon_thread):
        with pytest.raises(ValueError, match="invalid literal"):
            await in_thread(int, "x")
