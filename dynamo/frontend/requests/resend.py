"""Send the requests of a failed worker to others: spread over turns of the event loop, or on trial.

A worker may fail with a thousand requests; routing and sending them all at once would stall every
other stream for 100 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dynamo.frontend.requests.engine_request import EngineRequest

__all__ = ["RESEND_SLICE_S", "TRIAL_WAIT_S", "ResendQueue", "TrialQueue"]

RESEND_SLICE_S = 0.002
"""The time for waiting requests in one turn of the loop; at least one is sent."""

TRIAL_WAIT_S = 10.0
"""The longest time that a request waits for its turn on trial."""


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


class TrialQueue:
    """Engine requests whose worker was lost before their first token; one of them may be the cause.

    Each gets a worker without another of them until its first token, so that a second loss names
    the cause. The others wait, in order, up to ``TRIAL_WAIT_S``; ``send_late`` gets them then, many
    in one turn. ``has_room`` says whether a request has a worker to itself. Bounded by the number
    of running requests.
    """

    def __init__(
        self,
        send: Callable[[EngineRequest], None],
        has_room: Callable[[EngineRequest], bool],
        send_late: Callable[[EngineRequest], None],
    ) -> None:
        self._send = send
        self._send_late = send_late
        self._has_room = has_room
        self._waiting: dict[EngineRequest, None] = {}
        self._running: dict[EngineRequest, None] = {}
        self._sending = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def workers(self) -> set[int]:
        """The workers that have a request on trial."""
        return {one.decision.worker_id for one in self._running if one.decision is not None}

    def add(self, engine_request: EngineRequest) -> None:
        """Send the request when a worker has none on trial; until then it is pending."""
        self._running.pop(engine_request, None)
        self._waiting[engine_request] = None
        engine_request.pending = WaitingResend(self._waiting, engine_request)
        loop = asyncio.get_running_loop()
        loop.call_later(TRIAL_WAIT_S, self._overdue, engine_request)
        self._next()

    def over(self, engine_request: EngineRequest) -> None:
        """The request has its first token, or has ended. Idempotent."""
        if engine_request in self._running:
            del self._running[engine_request]
            self._next()

    def _next(self) -> None:
        if self._sending:
            return  # a request that ends while it is sent calls this again
        self._sending = True
        try:
            while self._waiting:
                engine_request = next(iter(self._waiting))
                # One without a worker is in a queue: it may get any of them.
                if any(one.decision is None for one in self._running):
                    break
                if self._running and not self._has_room(engine_request):
                    break
                self._start(engine_request, self._send)
        finally:
            self._sending = False

    def _start(self, engine_request: EngineRequest, send: Callable[[EngineRequest], None]) -> None:
        del self._waiting[engine_request]
        self._running[engine_request] = None
        engine_request.pending = None
        send(engine_request)

    def _overdue(self, engine_request: EngineRequest) -> None:
        if engine_request in self._waiting:
            self._start(engine_request, self._send_late)


class WaitingResend:
    """The place of an engine request in the queue."""

    __slots__ = ("_engine_request", "_waiting")

    def __init__(self, waiting: dict[EngineRequest, None], engine_request: EngineRequest) -> None:
        self._waiting = waiting
        self._engine_request = engine_request

    def cancel(self) -> None:
        """Leave the queue. Idempotent."""
        self._waiting.pop(self._engine_request, None)
