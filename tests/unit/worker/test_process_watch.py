"""A stopped child is reported, and its return; a busy or an ended one is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from dynamo.errors import EngineFailure
from dynamo.worker.engine_control import ProcessWatch

POLL_S = 0.02


class Reports:
    """What the watch reported; the first report is refused if ``refuses``."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self.refuses = False

    async def __call__(self, problem: str, stalled: bool) -> None:
        if self.refuses:
            self.refuses = False
            raise EngineFailure("no discovery")
        self.queue.put_nowait((problem, stalled))

    async def next(self) -> tuple[str, bool]:
        async with asyncio.timeout(10):
            return await self.queue.get()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import threading; threading.Event().wait()"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
async def reports(child: subprocess.Popen[bytes]) -> AsyncIterator[Reports]:
    found = Reports()
    task = asyncio.get_running_loop().create_task(ProcessWatch(found, poll_s=POLL_S).run())
    yield found
    task.cancel()
    await asyncio.wait([task])


async def test_a_stopped_process_is_reported_until_it_continues(
    child: subprocess.Popen[bytes], reports: Reports
) -> None:
    reports.refuses = True
    await asyncio.sleep(5 * POLL_S)
    assert reports.queue.empty()
    for _ in range(2):
        os.kill(child.pid, signal.SIGSTOP)
        problem = f"the engine's process {child.pid} is stopped"
        assert await reports.next() == (problem, False)
        assert await reports.next() == (problem, True)  # now its requests may move
        os.kill(child.pid, signal.SIGCONT)
        assert await reports.next() == ("", False)


async def test_a_stopped_process_that_ends_is_no_problem(
    child: subprocess.Popen[bytes], reports: Reports
) -> None:
    """The engine's client reports the death."""
    await asyncio.sleep(2 * POLL_S)
    os.kill(child.pid, signal.SIGSTOP)
    assert (await reports.next())[0] != ""
    child.kill()
    while (found := await reports.next())[0] != "":
        pass
    assert found == ("", False)
