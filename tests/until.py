"""Waiting for a condition: a test waits for what happens, and a deadline only ends one that fails.

The deadline is far longer than the slowest busy machine needs.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 60.0
_INTERVAL_S = 0.005


async def until(condition: Callable[[], Any], interval_s: float = _INTERVAL_S) -> None:
    """Poll ``condition``, which may be async, for what has no event; 0: in each loop iteration."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(interval_s)


def poll(
    condition: Callable[[], Any],
    describe: Callable[[], str] = lambda: "",
    timeout_s: float = DEADLINE_S,
    interval_s: float = _INTERVAL_S,
) -> float:
    """Poll ``condition`` without a loop; return the seconds that it took, or fail with a text."""
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        assert waited_s < timeout_s, f"not after {waited_s:.0f} s: {describe()}"
        time.sleep(interval_s)
    return time.monotonic() - start_s


class Changes:
    """What callbacks report: a condition is checked again after each change, and only then."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def changed(self, *_: object) -> None:
        """Check the conditions of :meth:`until` again."""
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until ``condition`` holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
