"""Tasks: every task ends with its parent and no failure is lost."""

import asyncio
import logging

import pytest

from dynamo.runtime.process.tasks import Tasks, raise_if_cancelled


async def test_a_finished_task_leaves_and_gives_its_result() -> None:
    tasks = Tasks("t")

    async def work() -> int:
        return 7

    assert await tasks.spawn(work()) == 7
    await asyncio.sleep(0)
    assert len(tasks) == 0
    await tasks.close()


async def test_close_cancels_and_waits_for_clean_up() -> None:
    tasks = Tasks("t")
    started, cleaned = asyncio.Event(), []

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    tasks.spawn(work())
    await started.wait()
    await tasks.close()
    assert cleaned == [True]
    with pytest.raises(RuntimeError, match="t is closed"):
        tasks.spawn(work())
    await tasks.close()


async def test_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks("owner")

    async def work() -> None:
        raise ValueError("boom")

    task = tasks.spawn(work(), name="w")
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert "owner: task w failed" in caplog.text
    assert "boom" in caplog.text


async def test_a_task_may_close_its_parent() -> None:
    tasks = Tasks("t")
    other = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            other.set()

    async def closer() -> None:
        await asyncio.sleep(0)
        await tasks.close()

    tasks.spawn(forever())
    await tasks.spawn(closer())
    assert other.is_set()


async def test_a_loop_ends_although_a_library_swallows_its_cancellation() -> None:
    tasks = Tasks("t")
    started = asyncio.Event()

    async def swallow() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError("the call was cancelled") from None

    async def work() -> None:
        while True:
            try:
                await swallow()
            except OSError:
                raise_if_cancelled()

    task = tasks.spawn(work())
    await started.wait()
    async with asyncio.timeout(20):
        await tasks.close()
    assert task.cancelled()
