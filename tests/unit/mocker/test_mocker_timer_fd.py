"""The timer expires on time, on every loop, also after a cancelled sleep."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import uvloop

from dynamo.mocker.engine import TimerFd

LOOPS = pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
def test_it_never_expires_early(factory: object) -> None:
    async def sleep() -> list[float]:
        early = []
        with TimerFd() as timer:
            for delay_s in (0.0, 0.0003, 0.0021, 0.012):
                when = time.monotonic() + delay_s
                await timer.sleep_until(when)
                early.append(max(0.0, when - time.monotonic()))
        return early

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        assert runner.run(sleep()) == [0.0] * 4


@LOOPS
def test_a_cancelled_sleep_does_not_end_the_next(factory: object) -> None:
    async def sleep() -> float:
        with TimerFd() as timer:
            async with asyncio.TaskGroup() as group:
                cancelled = group.create_task(timer.sleep_until(time.monotonic() + 0.002))
                await asyncio.sleep(0)
                cancelled.cancel()
            time.sleep(0.004)  # noqa: ASYNC251 - the timer expires unread
            when = time.monotonic() + 0.02
            await timer.sleep_until(when)
            return time.monotonic() - when

    with asyncio.Runner(loop_factory=factory) as runner:  # type: ignore[arg-type]
        assert runner.run(sleep()) >= 0.0


def test_the_descriptor_is_closed() -> None:
    async def use() -> int:
        with TimerFd() as timer:
            await timer.sleep_until(time.monotonic() + 0.001)
        return timer._fd

    descriptor = asyncio.run(use())
    with pytest.raises(OSError):
        os.fstat(descriptor)
