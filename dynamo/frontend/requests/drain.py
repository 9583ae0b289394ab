"""The gate before any work is done for a request: open, or draining."""

from __future__ import annotations

import asyncio

from dynamo.errors import Unavailable

__all__ = ["Admission"]


class Admission:
    """Counts the requests inside, refuses new ones while draining, knows when all have left.

    Their number is bounded by the connection cap: a connection has one request at a time.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    def check(self) -> None:
        """Unavailable while draining. Costs nothing, so it comes before the body is parsed."""
        if self.draining:
            raise Unavailable("Service is shutting down, please retry elsewhere")

    def enter(self) -> None:
        """One more request. Every enter needs one leave."""
        self.inside += 1
        if self.inside == 1:
            self._empty.clear()

    def leave(self) -> None:
        """A request has ended, however it did."""
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those inside; whether all left in time."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
