"""A blocked event loop shows in its metrics."""

from __future__ import annotations

import asyncio
import time

from dynamo._fast.histogram import Histogram
from dynamo.frontend.service import LoopDelay
from dynamo.observability.metrics import Counter


async def test_a_stall_is_counted_and_a_stop_ends_it() -> None:
    delays, stalls = Histogram((0.1, 1)), Counter()
    delay = LoopDelay(delays, stalls)
    delay.start()
    time.sleep(0.25)  # noqa: ASYNC251 - the stall
    async with asyncio.timeout(10):
        while not stalls.value:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    delay.stop()
    seen = stalls.value
    assert sum(delays.counts) >= seen
    time.sleep(0.25)  # noqa: ASYNC251
    await asyncio.sleep(0.01)
    assert stalls.value == seen
