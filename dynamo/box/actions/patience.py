"""Waiting for a deployment: commands repeated while circus is busy, conditions with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dynamo.operations.steps.ports import CircusBusy, Registrations

__all__ = ["retried", "wait_until"]

T = TypeVar("T")
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
_RECHECK_S = 1.0  # for what causes no event, such as a watcher that is given up


async def retried(command: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """Return the result of ``command``, repeated while circus is busy.

    Raises CircusBusy at ``deadline_s`` on the loop's clock, and every other CircusError at once.
    """
    loop = asyncio.get_running_loop()
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            return await command()
        except CircusBusy:
            if loop.time() + delay_s > deadline_s:
                raise
        await asyncio.sleep(delay_s)  # circus sends no event when a command ends
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


async def wait_until(
    condition: Callable[[], Awaitable[bool]], registrations: Registrations, deadline_s: float
) -> bool:
    """Wait until ``condition()`` holds; False if it does not at ``deadline_s`` on the loop's clock.

    Checks again at each change of the registrations, and every second.
    """
    loop = asyncio.get_running_loop()
    while True:
        change = registrations.next_change()  # before the check: a change during it counts
        if await condition():
            return True
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            return False
        try:
            async with asyncio.timeout(min(left_s, _RECHECK_S)):
                await change.wait()
        except TimeoutError:
            continue
