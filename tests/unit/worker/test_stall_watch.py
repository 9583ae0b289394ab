"""An engine that waits for ever is found; one that computes, answers or has no requests is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo.worker.engine_control import StallWatch

POLL_S = 0.1
POLLS = 8
STOPPED = "the engine has stopped computing; requests in it: 2"


class FakeEngine:
    """An engine whose main loop is the test's."""

    def __init__(self) -> None:
        self.requests = 2
        self.messages = 7
        self.answers = asyncio.Event()

    def progress(self) -> tuple[int, int]:
        return self.requests, self.messages

    async def is_sleeping(self) -> bool:
        await self.answers.wait()
        return False


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def watch(engine: FakeEngine) -> AsyncIterator[StallWatch]:
    made = StallWatch(engine.progress, engine.is_sleeping)
    yield made
    await made.close()


@pytest.fixture
def busy_child() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


async def found(watch: StallWatch) -> str:
    """What the watch says after some polls."""
    for _ in range(POLLS):
        if problem := await watch.check():
            return problem
        await asyncio.sleep(POLL_S)
    return ""


async def test_an_engine_that_waits_for_ever_has_stopped(
    engine: FakeEngine, watch: StallWatch
) -> None:
    assert await found(watch) == STOPPED
    engine.requests = 0  # clients moved them
    assert await watch.check() == STOPPED
    engine.answers.set()
    await asyncio.sleep(POLL_S)
    assert await watch.check() == ""
    engine.answers.clear()
    engine.requests = 2
    assert await found(watch) == STOPPED
    engine.messages += 1
    assert await watch.check() == ""


@pytest.mark.usefixtures("busy_child")
async def test_a_long_step_is_no_stop(watch: StallWatch) -> None:
    assert await found(watch) == ""


async def test_an_engine_that_answers_has_not_stopped(
    engine: FakeEngine, watch: StallWatch
) -> None:
    """Its requests are prepared in this process: images, grammars."""
    engine.answers.set()
    assert await found(watch) == ""


async def test_an_idle_engine_has_not_stopped(engine: FakeEngine, watch: StallWatch) -> None:
    engine.requests = 0
    assert await found(watch) == ""
