"""The delay of the event loop, which shows whether anything blocks it."""

from __future__ import annotations

import asyncio
import time

from dynamo.observability.metrics import Counter, Histogram

__all__ = ["LoopDelay"]

_PERIOD_S = 0.1
_STALL_S = 0.1


class LoopDelay:
    """Measures ten times a second how late a timer fires; each takes a few µs."""

    def __init__(self, delays: Histogram, stalls: Counter) -> None:
        self._delays = delays
        self._stalls = stalls
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running loop."""
        self._due = time.monotonic() + _PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._measure)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _measure(self) -> None:
        # The timers of the loop have a resolution of a millisecond and may fire early.
        late_s = max(0.0, time.monotonic() - self._due - 0.001)
        self._delays.observe(late_s)
        if late_s >= _STALL_S:
            self._stalls.value += 1
        self.start()
