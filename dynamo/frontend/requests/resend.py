"""Spread the requests of a failed worker over the turns of the event loop.

A worker may fail with a thousand requests; routing and sending them all at once would stall every
other stream for 100 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dynamo.frontend.requests.engine_request import EngineRequest

__all__ = ["RESEND_SLICE_S", "ResendQueue"]

RESEND_SLICE_S = 0.002
"""The time for waiting requests in one turn of the loop; at least one is sent."""


class ResendQueue:
    """Engine requests that ``send`` is called for: the first at once, others in later turns.

    Bounded by the number of running requests.
    """

    def __init__(self, send: Callable[[EngineRequest], None]) -> None:
        self._send = send
        self._waiting: dict[EngineRequest, None] = {}
        self._turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, engine_request: EngineRequest) -> None:
        """Send the request now or later; until then it is pending."""
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._drain)
            self._send(engine_request)
        else:
            self._waiting[engine_request] = None
            engine_request.pending = WaitingResend(self._waiting, engine_request)

    def _drain(self) -> None:
        self._turn = None
        end_s = time.perf_counter() + RESEND_SLICE_S
        while self._waiting:
            engine_request = next(iter(self._waiting))
            del self._waiting[engine_request]
            engine_request.pending = None
            self._send(engine_request)
            if time.perf_counter() > end_s:
                break
        if self._waiting:
            self._turn = asyncio.get_running_loop().call_soon(self._drain)


class WaitingResend:
    """The place of an engine request in the queue."""

    __slots__ = ("_engine_request", "_waiting")

    def __init__(self, waiting: dict[EngineRequest, None], engine_request: EngineRequest) -> None:
        self._waiting = waiting
        self._engine_request = engine_request

    def cancel(self) -> None:
        """Leave the queue. Idempotent."""
        self._waiting.pop(self._engine_request, None)
