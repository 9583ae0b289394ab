"""A loop that is held up is seen."""

from __future__ import annotations

import asyncio
import time

from dynamo.observability.loop_delay import LoopDelay
from dynamo.observability.metrics import Registry
from dynamo.observability.names import FrontendNames, counter, histogram


async def test_a_stall_is_counted_and_a_stop_ends_it() -> None:
    registry = Registry()
    delays = histogram(registry, FrontendNames.LOOP_DELAY).labels()
    stalls = counter(registry, FrontendNames.LOOP_STALLS).labels()
    delay = LoopDelay(delays, stalls)
    delay.start()
    time.sleep(0.25)  # noqa: ASYNC251 - the stall
    async with asyncio.timeout(10):
        while not stalls.value:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    delay.stop()
    seen = stalls.value
    assert "event_loop_delay_seconds_count" in registry.render().decode()
    time.sleep(0.25)  # noqa: ASYNC251
    await asyncio.sleep(0.01)
    assert stalls.value == seen
